//! Uneven inputs: training when some ranks have fewer batches than others.

use convoke_comm::ReduceOp;

use super::{Ddp, Gradient, TrainError};

/// What the ranks have agreed for the next sending pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct JoinState {
    /// Number of ranks that contribute gradients.
    pub(super) contributing: usize,
    /// True if this rank has a batch.
    pub(super) has_batch: bool,
}

/// What a rank does next, from [`Ddp::join`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joined<B> {
    /// The rank runs a pass with its batch.
    Batch(B),
    /// The rank has no batch left. It runs a pass without gradients, because other ranks have batches.
    Help,
    /// No rank has a batch left.
    Done,
}

impl<T: Gradient> Ddp<T> {
    /// Moves all ranks to the next batch, even if some ranks have none left (uneven inputs).
    ///
    /// All ranks call `join` once before each pass that is [sent](Ddp::pass). `batch` may stand for several
    /// batches, if passes [without sending](Ddp::pass_no_sync) come first.
    ///
    /// Returns [`Joined::Done`] as soon as no rank has a batch. Until then every rank runs each pass. A rank
    /// without a batch adds no gradients, but takes part in the averages and updates its parameters by the
    /// same step.
    /// Averages are taken over the ranks that have gradients (see [`DdpOptions::divide_by_world`]).
    ///
    /// ```
    /// # use convoke_train::{Ddp, Joined, TrainError};
    /// # fn main() -> Result<(), TrainError> {
    /// # let world = convoke_comm::init()?;
    /// # let (mut ddp, parameters) = Ddp::new(&world, [("weights", 2)])?;
    /// let mut batches = vec![[1.0_f32, 2.0]; 3 + world.rank()].into_iter();
    /// loop {
    ///     let gradient = match ddp.join(batches.next())? {
    ///         Joined::Batch(batch) => Some(batch),
    ///         Joined::Help => None,
    ///         Joined::Done => break,
    ///     };
    ///     let mut pass = ddp.pass();
    ///     if let Some(gradient) = gradient {
    ///         pass.add(parameters[0], &gradient)?;
    ///     }
    ///     pass.finish()?;
    ///     // ... the step of the optimizer, on all ranks ...
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Group::all_reduce`](convoke_comm::Group::all_reduce).
    ///
    /// # Cost
    /// An `all_reduce` of 8 bytes.
    ///
    /// `join` corresponds to torch's `Join`, which updates the parameters of finished ranks at the end.
    ///
    /// [`DdpOptions::divide_by_world`]: crate::DdpOptions::divide_by_world
    pub fn join<B>(&mut self, batch: Option<B>) -> Result<Joined<B>, TrainError> {
        let has_batch = batch.is_some();
        // A rank without a batch contributes too if earlier passes without sending have left it gradients.
        let gives = has_batch || self.progress.has_sums();
        let mut ranks = [u32::from(has_batch), u32::from(gives)];
        self.group.all_reduce(&mut ranks, ReduceOp::Sum)?;
        let [with_batch, contributing] = ranks;
        self.joined =
            (with_batch > 0).then_some(JoinState { contributing: contributing as usize, has_batch });
        Ok(match batch {
            Some(batch) => Joined::Batch(batch),
            None if with_batch > 0 => Joined::Help,
            None => Joined::Done,
        })
    }
}
