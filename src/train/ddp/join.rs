//! Ranks that have fewer batches than others.

use convoke_comm::ReduceOp;

use super::{Ddp, Gradient, Share, TrainError};

/// What the ranks have agreed on for the next pass that is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Joined {
    /// Ranks that have gradients to give.
    pub(super) giving: usize,
    /// Whether this one has a batch.
    pub(super) has_batch: bool,
}

impl<T: Gradient> Ddp<T> {
    /// Goes on to the next batch together, also if some ranks have none left: uneven inputs.
    ///
    /// All ranks call it once before each pass that is [sent](Ddp::pass); a batch may be several, for passes
    /// [without](Ddp::pass_no_sync) before it. `None` as soon as no rank has a batch; until then every rank does a pass,
    /// and one without a batch adds nothing in it: it helps the others to their averages, and takes the same step with
    /// its parameters. Averages are over the ranks that have gradients (see [`DdpOptions::divide_by_world`]).
    ///
    /// ```
    /// # use convoke_train::{Ddp, TrainError};
    /// # fn main() -> Result<(), TrainError> {
    /// # let world = convoke_comm::init()?;
    /// # let mut ddp = Ddp::new(&world, [("weights", 2)])?;
    /// let mut batches = vec![[1.0_f32, 2.0]; 3 + world.rank()].into_iter();
    /// while let Some(batch) = ddp.join(batches.next())? {
    ///     let mut pass = ddp.pass();
    ///     if let Some(gradient) = batch {
    ///         pass.add(0, &gradient)?;
    ///     }
    ///     pass.finish()?;
    ///     // ... the step of the optimizer, on all ranks ...
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Group::all_reduce`](convoke_comm::Group::all_reduce).
    ///
    /// # Cost
    /// An `all_reduce` of 8 bytes.
    ///
    /// The twin of torch's `Join`; there parameters of ranks that had finished earlier are brought up to date in the end.
    ///
    /// [`DdpOptions::divide_by_world`]: crate::DdpOptions::divide_by_world
    pub fn join<B>(&mut self, batch: Option<B>) -> Result<Option<Option<B>>, TrainError> {
        let has_batch = batch.is_some();
        // What was added up before counts as well.
        let gives = has_batch || self.shares.contains(&Share::Own);
        let mut ranks = [u32::from(has_batch), u32::from(gives)];
        self.group.all_reduce(&mut ranks, ReduceOp::Sum)?;
        let [with_batch, giving] = ranks;
        self.joined = (with_batch > 0).then_some(Joined { giving: giving as usize, has_batch });
        Ok(self.joined.map(|_| batch))
    }
}
