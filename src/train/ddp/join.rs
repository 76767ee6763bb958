//! Ranks that have fewer batches than others.

use convoke_comm::ReduceOp;

use super::{Ddp, Gradient, TrainError};

/// What the ranks have agreed on for the passes to come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Joined {
    /// Ranks that have a batch.
    pub(super) with_batch: usize,
    /// Whether this is one.
    pub(super) has_batch: bool,
}

impl<T: Gradient> Ddp<T> {
    /// Goes on to the next batch together, also if some ranks have none left: uneven inputs.
    ///
    /// All ranks call it before each pass. `None` as soon as no rank has a batch; until then every rank does a pass, and
    /// one without a batch adds nothing in it: it helps the others to their averages, and takes the same step with its
    /// parameters. Averages are over the ranks that have a batch (see [`DdpOptions::divide_by_world`]).
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
    /// An `all_reduce` of 4 bytes.
    ///
    /// The twin of torch's `Join`; there parameters of ranks that had finished earlier are brought up to date in the end.
    ///
    /// [`DdpOptions::divide_by_world`]: crate::DdpOptions::divide_by_world
    pub fn join<B>(&mut self, batch: Option<B>) -> Result<Option<Option<B>>, TrainError> {
        let has_batch = batch.is_some();
        let mut with_batch = [u32::from(has_batch)];
        self.group.all_reduce(&mut with_batch, ReduceOp::Sum)?;
        let with_batch = with_batch[0] as usize;
        self.joined = (with_batch > 0).then_some(Joined { with_batch, has_batch });
        Ok(self.joined.map(|_| batch))
    }
}
