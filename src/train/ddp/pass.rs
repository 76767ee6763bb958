//! A backward pass.

use convoke_comm::{ReduceOp, op};

use super::{Bucket, Ddp, Gradient, LEAKED, TrainError};
use crate::progress::{GradientState, ParameterId};

/// A backward pass: the program hands over gradients, and complete buckets are sent.
///
/// Dropping a sending pass before it is [finished](Self::finish) aborts the group and names the dropped pass
/// as the reason, because the other ranks wait for this pass. An error returned by `?` or a panic therefore
/// leaves no rank waiting.
#[derive(Debug)]
#[must_use = "a pass that is not finished ends the group"]
pub struct Pass<'a, T: Gradient> {
    ddp: &'a mut Ddp<T>,
    finished: bool,
}

impl<'a, T: Gradient> Pass<'a, T> {
    pub(super) fn new(ddp: &'a mut Ddp<T>, sync: bool) -> Self {
        ddp.progress.begin(sync);
        Self { ddp, finished: false }
    }

    /// Adds `gradient` to the sum for `parameter` and calls [`Self::ready`]: this pass can add nothing more
    /// to that sum.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, if the lengths differ, or if a sending
    /// pass already has this gradient. Otherwise the errors of
    /// [`Group::all_reduce`](convoke_comm::Group::all_reduce).
    pub fn add(&mut self, parameter: ParameterId, gradient: &[T]) -> Result<(), TrainError> {
        let (bucket, range, state) = self.ddp.progress.gradient(parameter, Some(gradient.len()))?;
        let sum = &mut bucket.memory.as_mut().expect(LEAKED)[range];
        if *state == GradientState::Average {
            sum.copy_from_slice(gradient);
        } else {
            sum.iter_mut().zip(gradient).for_each(|(sum, &gradient)| *sum += gradient);
        }
        *state = GradientState::Own;
        self.ready(parameter)
    }

    /// Returns the memory of a parameter's gradient, so that the program can add to it. The memory holds
    /// zeros, or the sum of passes without sending.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, or if it is ready.
    ///
    /// # Panics
    /// If an earlier pass was leaked (`mem::forget`) and its gradients were [discarded](Ddp::discard).
    pub fn gradient(&mut self, parameter: ParameterId) -> Result<&mut [T], TrainError> {
        let (bucket, range, state) = self.ddp.progress.gradient(parameter, None)?;
        let gradient = &mut bucket.memory.as_mut().expect(LEAKED)[range];
        if *state == GradientState::Average {
            gradient.fill(T::ZERO);
        }
        *state = GradientState::Own;
        Ok(gradient)
    }

    /// Declares that this pass adds nothing more to the gradient of this parameter. The parameter's bucket is
    /// sent once all gradients in the bucket are ready and all earlier buckets are sent. Returns without
    /// waiting.
    ///
    /// # Errors
    /// Returns the errors of [`Self::add`].
    pub fn ready(&mut self, parameter: ParameterId) -> Result<(), TrainError> {
        self.gradient(parameter)?;
        self.ddp.progress.mark_ready(parameter);
        if self.ddp.options.overlap { self.send_complete() } else { Ok(()) }
    }

    /// Sends the remaining buckets and waits for all averages. A pass without sending sends nothing and does
    /// not wait.
    ///
    /// # Errors
    /// [`TrainError::Unused`] if parameters have no gradient; this aborts the group. It is not an error if
    /// [unused parameters are allowed](crate::DdpOptions::unused_parameters), or if this rank [has no
    /// batch](Ddp::join). Otherwise the errors of [`Group::all_reduce`](convoke_comm::Group::all_reduce);
    /// gradients are then lost.
    ///
    /// # Cost
    /// One `all_reduce` for each bucket.
    pub fn finish(mut self) -> Result<(), TrainError> {
        if self.ddp.progress.sync {
            let Ddp { group, progress, joined, options, .. } = &*self.ddp;
            let allowed = options.unused_parameters || joined.is_some_and(|joined| !joined.has_batch);
            if let Some(error) = progress.unused(group.rank()).filter(|_| !allowed) {
                self.abort_group(&error.to_string());
                return Err(error);
            }
            let used = progress.used();
            for parameter in progress.not_ready() {
                self.gradient(parameter)?;
                self.ddp.progress.mark_ready(parameter);
            }
            self.send_complete()?;
            for bucket in &mut self.ddp.progress.buckets {
                if let Some(work) = bucket.work.take() {
                    bucket.memory = Some(work.wait()?);
                }
            }
            self.ddp.progress.reset();
            self.ddp.joined = None;
            if self.ddp.options.unused_parameters {
                self.ddp.used = used;
                self.ddp.group.all_reduce(&mut self.ddp.used, ReduceOp::Bor)?;
            }
        }
        self.finished = true;
        Ok(())
    }

    /// Sends buckets in order, up to the first that is incomplete.
    fn send_complete(&mut self) -> Result<(), TrainError> {
        while let Some(index) = self.ddp.progress.next_complete() {
            let reduction = self.ddp.reduction();
            let Ddp { group, progress, options, .. } = &mut *self.ddp;
            let memory = progress.buckets[index].memory.take().expect(LEAKED);
            let bytes = size_of_val(&memory[..]);
            let work = match group.start(op::all_reduce(memory, reduction)) {
                Ok(work) => work,
                Err(error) => {
                    // The operation has kept the bucket's memory. The program may continue with the pass, so
                    // the bucket gets new memory.
                    let len = progress.layout.bucket_len(index);
                    progress.buckets[index].memory = Some(vec![T::ZERO; len].into());
                    return Err(error.into());
                }
            };
            if let Some(trace) = &options.trace {
                let done = trace.bucket(index, bytes, progress.names(index));
                work.on_complete(move || done.end());
            }
            progress.buckets[index].work = Some(work);
            progress.mark_sent();
        }
        Ok(())
    }

    /// Aborts the group with `reason`, because the other ranks wait for this pass.
    fn abort_group(&mut self, reason: &str) {
        self.finished = true;
        self.ddp.group.abort(reason);
        // The abort ends operations in flight at once; their data is lost.
        let progress = &mut self.ddp.progress;
        for (index, bucket) in progress.buckets.iter_mut().enumerate() {
            let Bucket { memory, work } = bucket;
            if let Some(work) = work.take() {
                // After an error the operation has not returned its memory.
                *memory = work.wait().ok();
            }
            memory.get_or_insert_with(|| vec![T::ZERO; progress.layout.bucket_len(index)].into());
        }
        progress.reset();
    }
}

impl<T: Gradient> Drop for Pass<'_, T> {
    fn drop(&mut self) {
        if !self.finished && self.ddp.progress.sync {
            let rank = self.ddp.group.rank();
            self.abort_group(&format!("rank {rank} gave up in the middle of a backward pass"));
        }
    }
}
