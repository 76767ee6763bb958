//! A backward pass on a device.

use std::fmt;
use std::sync::Arc;

use convoke_comm::device::cudarc::driver::{CudaStream, CudaViewMut, DevicePtr, DeviceRepr, ValidAsZeroBits};
use convoke_comm::{ReduceOp, op};

use super::add::Adder;
use super::{DeviceDdp, Gradient, GradientState, TrainError, device};
use crate::bucket::Location;
use crate::ddp::MAX_NAMES;

/// A backward pass on a device: the program hands over gradients, and complete buckets are sent.
///
/// Dropping a sending pass before it is [finished](Self::finish) aborts the group and names the dropped pass
/// as the reason, because the other ranks wait for this pass.
#[must_use = "a pass that is not finished ends the group"]
pub struct DevicePass<'a, T: Gradient + DeviceRepr + ValidAsZeroBits> {
    ddp: &'a mut DeviceDdp<T>,
    compute: &'a Arc<CudaStream>,
    /// True if the pass sends its buckets; false if it only accumulates gradients on this rank.
    sync: bool,
    /// Number of buckets sent so far. All ranks send buckets in the same order.
    sent: usize,
    finished: bool,
}

impl<'a, T: Gradient + DeviceRepr + ValidAsZeroBits> DevicePass<'a, T> {
    pub(super) fn new(ddp: &'a mut DeviceDdp<T>, compute: &'a Arc<CudaStream>, sync: bool) -> Self {
        Self { ddp, compute, sync, sent: 0, finished: false }
    }

    /// Enqueues, on the computing CUDA stream, the addition of `gradient` to the sum for `parameter`, and
    /// calls [`Self::ready`]. If there is no sum yet, it enqueues a copy instead.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, if the lengths differ, if it is ready,
    /// or if a stream is on another device. Otherwise the errors of [`Self::ready`].
    pub fn add(&mut self, parameter: usize, gradient: &impl DevicePtr<T>) -> Result<(), TrainError> {
        self.check(parameter)?;
        let Location { bucket, range } = self.ddp.layout.location(parameter).clone();
        let name = || self.ddp.layout.name(parameter).to_owned();
        if range.len() != gradient.len() {
            let (ours, theirs) = (range.len(), gradient.len());
            let what = format!("a gradient of {theirs} elements for {}, which has {ours}", name());
            return Err(TrainError::InvalidArgument(what));
        }
        self.check_context("a gradient", gradient.stream())?;
        let DeviceDdp { buckets, adder, states, .. } = &mut *self.ddp;
        let mut into = buckets[bucket].memory.slice_mut(range);
        if states[parameter] == GradientState::Own {
            let adder = match adder {
                Some(adder) => adder,
                None => {
                    let made = Adder::new::<T>(self.compute.context());
                    adder.insert(made.map_err(device("cannot load the kernel that adds gradients"))?)
                }
            };
            let added = adder.add(self.compute, &mut into, gradient);
            added.map_err(device("a kernel on the device failed"))?;
        } else {
            let copied = self.compute.memcpy_dtod(gradient, &mut into);
            copied.map_err(device("a copy on the device failed"))?;
        }
        self.ddp.states[parameter] = GradientState::Own;
        self.ready(parameter)
    }

    /// Returns the memory of a parameter's gradient, for kernels on the computing stream to write or add to.
    /// The memory holds zeros, or the sum of passes without sending.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, or if it is ready.
    /// [`CommError::Device`](convoke_comm::CommError::Device) if the memory cannot be cleared.
    pub fn gradient(&mut self, parameter: usize) -> Result<CudaViewMut<'_, T>, TrainError> {
        self.check(parameter)?;
        let Location { bucket, range } = self.ddp.layout.location(parameter).clone();
        let mut place = self.ddp.buckets[bucket].memory.slice_mut(range);
        if self.ddp.states[parameter] == GradientState::Average {
            self.compute.memset_zeros(&mut place).map_err(device("cannot clear memory of the device"))?;
            self.ddp.states[parameter] = GradientState::Own;
        }
        Ok(place)
    }

    /// Declares that the computing stream has no further work for the gradient of this parameter in this
    /// pass. The averaging of the parameter's bucket is enqueued once all gradients in the bucket are ready
    /// and all earlier buckets are enqueued.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, or if it is ready. Otherwise the error
    /// that ended the group.
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

    /// Enqueues the remaining buckets and makes the computing stream wait for all averages. The host does not
    /// wait. A pass without sending enqueues nothing.
    ///
    /// # Errors
    /// [`TrainError::Unused`] if parameters have no gradient; this aborts the group. Otherwise the error that
    /// ended the group.
    pub fn finish(mut self) -> Result<(), TrainError> {
        if self.sync {
            self.check_all()?;
            self.send_complete()?;
            for bucket in &mut self.ddp.buckets {
                if let Some(work) = bucket.work.take() {
                    work.wait_on(self.compute)?;
                }
            }
            self.ddp.reset();
        }
        self.finished = true;
        Ok(())
    }

    /// Returns an error if there is no such parameter, if the parameter is ready, or if the computing stream
    /// belongs to another CUDA context.
    fn check(&self, parameter: usize) -> Result<(), TrainError> {
        self.check_context("the computing stream", self.compute)?;
        let layout = &self.ddp.layout;
        let what = match self.ddp.states.get(parameter) {
            None => format!("no parameter {parameter}: there are {}", layout.len()),
            Some(GradientState::Ready) => {
                format!("{} already has its gradient in this pass", layout.name(parameter))
            }
            Some(GradientState::Average | GradientState::Own) => return Ok(()),
        };
        Err(TrainError::InvalidArgument(what))
    }

    /// Returns an error if the stream's context is not the context of the buckets.
    fn check_context(&self, what: &str, stream: &CudaStream) -> Result<(), TrainError> {
        if Arc::ptr_eq(stream.context(), self.ddp.stream.context()) {
            return Ok(());
        }
        let what =
            format!("{what} is on another device than the group, or belongs to another CudaContext of it");
        Err(TrainError::InvalidArgument(what))
    }

    fn check_all(&mut self) -> Result<(), TrainError> {
        let DeviceDdp { group, layout, states, .. } = &*self.ddp;
        let unused = (0..states.len()).filter(|&parameter| states[parameter] == GradientState::Average);
        let unused: Vec<usize> = unused.collect();
        if !unused.is_empty() {
            let names = unused.iter().take(MAX_NAMES).map(|&parameter| layout.name(parameter).to_owned());
            let more = unused.len().saturating_sub(MAX_NAMES);
            let error = TrainError::Unused { rank: group.rank(), names: names.collect(), more };
            self.abort_group(&error.to_string());
            return Err(error);
        }
        // Gradients that passes without sending have left become ready here.
        for parameter in 0..self.ddp.states.len() {
            if self.ddp.states[parameter] != GradientState::Ready {
                self.ready(parameter)?;
            }
        }
        Ok(())
    }

    /// Enqueues buckets in order, up to the first that is incomplete.
    fn send_complete(&mut self) -> Result<(), TrainError> {
        while self.ddp.buckets.get(self.sent).is_some_and(|bucket| bucket.missing == 0) {
            let DeviceDdp { group, layout, buckets, stream, options, .. } = &mut *self.ddp;
            let bucket = &mut buckets[self.sent];
            stream.join(self.compute).map_err(device("cannot make a CUDA stream wait"))?;
            let work = group.on(stream)?.enqueue(op::all_reduce(&mut bucket.memory, ReduceOp::Avg))?;
            if let Some(trace) = &options.trace {
                let names = layout.buckets()[self.sent].iter().map(|&parameter| layout.name(parameter));
                let done = trace.bucket(self.sent, bucket.memory.num_bytes(), names);
                work.on_complete(move || done.end());
            }
            bucket.work = Some(work);
            self.sent += 1;
        }
        Ok(())
    }

    /// Aborts the group with `reason`, because the other ranks wait for this pass.
    fn abort_group(&mut self, reason: &str) {
        self.finished = true;
        self.ddp.group.abort(reason);
        self.ddp.buckets.iter_mut().for_each(|bucket| bucket.work = None);
        self.ddp.reset();
    }
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> DeviceDdp<T> {
    /// Marks all gradients as averages, so that the next gradients overwrite them.
    fn reset(&mut self) {
        self.states.fill(GradientState::Average);
        for (bucket, parameters) in self.buckets.iter_mut().zip(self.layout.buckets()) {
            bucket.missing = parameters.len();
        }
    }
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> Drop for DevicePass<'_, T> {
    fn drop(&mut self) {
        if !self.finished && self.sync {
            let rank = self.ddp.group.rank();
            self.abort_group(&format!("rank {rank} gave up in the middle of a backward pass"));
        }
    }
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> fmt::Debug for DevicePass<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePass")
            .field("ddp", &*self.ddp)
            .field("sent", &self.sent)
            .finish_non_exhaustive()
    }
}
