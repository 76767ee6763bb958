//! A backward pass.

use convoke_comm::{ReduceOp, op};

use super::{Ddp, Gradient, GradientState, LEAKED, MAX_NAMES, TrainError};
use crate::bucket::Location;

/// A backward pass: the program hands over gradients, and complete buckets are sent.
///
/// Dropping a sending pass before it is [finished](Self::finish) aborts the group and names the dropped pass
/// as the reason, because the other ranks wait for this pass. An error returned by `?` or a panic therefore
/// leaves no rank waiting.
#[derive(Debug)]
#[must_use = "a pass that is not finished ends the group"]
pub struct Pass<'a, T: Gradient> {
    ddp: &'a mut Ddp<T>,
    /// True if the pass sends its buckets; false if it only accumulates gradients on this rank.
    sync: bool,
    /// Number of buckets sent so far. All ranks send buckets in the same order.
    sent: usize,
    finished: bool,
}

impl<'a, T: Gradient> Pass<'a, T> {
    pub(super) fn new(ddp: &'a mut Ddp<T>, sync: bool) -> Self {
        Self { ddp, sync, sent: 0, finished: false }
    }

    /// Adds `gradient` to the sum for `parameter` and calls [`Self::ready`]: this pass can add nothing more
    /// to that sum.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, if the lengths differ, or if a sending
    /// pass already has this gradient. Otherwise the errors of
    /// [`Group::all_reduce`](convoke_comm::Group::all_reduce).
    pub fn add(&mut self, parameter: usize, gradient: &[T]) -> Result<(), TrainError> {
        let (sum, state) = self.gradient_and_state(parameter)?;
        if sum.len() != gradient.len() {
            let (ours, theirs) = (sum.len(), gradient.len());
            let name = self.ddp.layout.name(parameter);
            let what = format!("a gradient of {theirs} elements for {name}, which has {ours}");
            return Err(TrainError::InvalidArgument(what));
        }
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
    pub fn gradient(&mut self, parameter: usize) -> Result<&mut [T], TrainError> {
        let (gradient, state) = self.gradient_and_state(parameter)?;
        if *state == GradientState::Average {
            gradient.fill(T::ZERO);
        }
        *state = GradientState::Own;
        Ok(gradient)
    }

    /// Returns the memory of a parameter's gradient and its state; an error if the parameter is ready.
    fn gradient_and_state(&mut self, parameter: usize) -> Result<(&mut [T], &mut GradientState), TrainError> {
        let Ddp { layout, buckets, states, .. } = &mut *self.ddp;
        let Some(state) = states.get_mut(parameter) else {
            let what = format!("no parameter {parameter}: there are {}", layout.len());
            return Err(TrainError::InvalidArgument(what));
        };
        let Location { bucket, range } = layout.location(parameter).clone();
        if *state == GradientState::Ready {
            let what = format!("{} already has its gradient in this pass", layout.name(parameter));
            return Err(TrainError::InvalidArgument(what));
        }
        Ok((&mut buckets[bucket].memory.as_mut().expect(LEAKED)[range], state))
    }

    /// Declares that this pass adds nothing more to the gradient of this parameter. The parameter's bucket is
    /// sent once all gradients in the bucket are ready and all earlier buckets are sent. Returns without
    /// waiting.
    ///
    /// # Errors
    /// Returns the errors of [`Self::add`].
    pub fn ready(&mut self, parameter: usize) -> Result<(), TrainError> {
        self.gradient(parameter)?;
        if self.sync {
            self.ddp.states[parameter] = GradientState::Ready;
            self.ddp.buckets[self.ddp.layout.location(parameter).bucket].missing -= 1;
            if self.ddp.options.overlap {
                self.send_complete()?;
            }
        }
        Ok(())
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
        if self.sync {
            let used = self.mark_all_ready()?;
            self.send_complete()?;
            self.receive()?;
            self.ddp.joined = None;
            if self.ddp.options.unused_parameters {
                self.ddp.used = used;
                self.ddp.group.all_reduce(&mut self.ddp.used, ReduceOp::Bor)?;
            }
        }
        self.finished = true;
        Ok(())
    }

    /// Makes all parameters ready. Returns for each parameter whether it had a gradient.
    fn mark_all_ready(&mut self) -> Result<Vec<bool>, TrainError> {
        let Ddp { group, layout, states, joined, options, .. } = &*self.ddp;
        let used: Vec<bool> = states.iter().map(|state| *state != GradientState::Average).collect();
        let allowed = options.unused_parameters || joined.is_some_and(|joined| !joined.has_batch);
        let unused: Vec<usize> = (0..used.len()).filter(|&parameter| !used[parameter]).collect();
        if !unused.is_empty() && !allowed {
            let names =
                unused.iter().take(MAX_NAMES).map(|&parameter| layout.name(parameter).to_owned()).collect();
            let more = unused.len().saturating_sub(MAX_NAMES);
            let error = TrainError::Unused { rank: group.rank(), names, more };
            self.abort_group(&error.to_string());
            return Err(error);
        }
        for parameter in 0..used.len() {
            if self.ddp.states[parameter] != GradientState::Ready {
                self.gradient(parameter)?;
                self.ddp.states[parameter] = GradientState::Ready;
                self.ddp.buckets[self.ddp.layout.location(parameter).bucket].missing -= 1;
            }
        }
        Ok(used)
    }

    /// Sends buckets in order, up to the first that is incomplete.
    fn send_complete(&mut self) -> Result<(), TrainError> {
        while self.ddp.buckets.get(self.sent).is_some_and(|bucket| bucket.missing == 0) {
            let reduction = self.ddp.reduction();
            let Ddp { group, layout, buckets, options, .. } = &mut *self.ddp;
            let bucket = &mut buckets[self.sent];
            let memory = bucket.memory.take().expect(LEAKED);
            let bytes = size_of_val(&memory[..]);
            let work = match group.start(op::all_reduce(memory, reduction)) {
                Ok(work) => work,
                Err(error) => {
                    // The operation has kept the bucket's memory. The program may continue with the pass, so
                    // the bucket gets new memory.
                    bucket.memory = Some(vec![T::ZERO; layout.bucket_len(self.sent)].into());
                    return Err(error.into());
                }
            };
            if let Some(trace) = &options.trace {
                let names = layout.buckets()[self.sent].iter().map(|&parameter| layout.name(parameter));
                let done = trace.bucket(self.sent, bytes, names);
                work.on_complete(move || done.end());
            }
            bucket.work = Some(work);
            self.sent += 1;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<(), TrainError> {
        for bucket in &mut self.ddp.buckets {
            if let Some(work) = bucket.work.take() {
                bucket.memory = Some(work.wait()?);
            }
        }
        self.ddp.reset();
        Ok(())
    }
}

impl<T: Gradient> Ddp<T> {
    /// Marks all gradients as averages, so that the next gradients overwrite them.
    fn reset(&mut self) {
        self.states.fill(GradientState::Average);
        for (bucket, parameters) in self.buckets.iter_mut().zip(self.layout.buckets()) {
            bucket.missing = parameters.len();
        }
    }
}

impl<T: Gradient> Pass<'_, T> {
    /// Aborts the group with `reason`, because the other ranks wait for this pass.
    fn abort_group(&mut self, reason: &str) {
        self.finished = true;
        self.ddp.group.abort(reason);
        // The abort ends operations in flight at once; their data is lost.
        for index in 0..self.ddp.buckets.len() {
            let len = self.ddp.layout.bucket_len(index);
            let bucket = &mut self.ddp.buckets[index];
            if let Some(work) = bucket.work.take() {
                // After an error the operation has not returned its memory.
                bucket.memory = work.wait().ok();
            }
            bucket.memory.get_or_insert_with(|| vec![T::ZERO; len].into());
        }
        self.ddp.reset();
    }
}

impl<T: Gradient> Drop for Pass<'_, T> {
    fn drop(&mut self) {
        if !self.finished && self.sync {
            let rank = self.ddp.group.rank();
            self.abort_group(&format!("rank {rank} gave up in the middle of a backward pass"));
        }
    }
}
