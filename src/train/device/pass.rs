//! A backward pass on a device.

use std::fmt;
use std::sync::Arc;

use convoke_comm::device::cudarc::driver::{CudaStream, CudaViewMut, DevicePtr, DeviceRepr, ValidAsZeroBits};
use convoke_comm::{ReduceOp, op};

use super::add::Adder;
use super::{DeviceDdp, Gradient, TrainError, device};
use crate::progress::{GradientState, ParameterId};

/// A backward pass on a device: the program hands over gradients, and complete buckets are sent.
///
/// Dropping a sending pass before it is [finished](Self::finish) aborts the group and names the dropped pass
/// as the reason, because the other ranks wait for this pass.
#[must_use = "a pass that is not finished ends the group"]
pub struct DevicePass<'a, T: Gradient + DeviceRepr + ValidAsZeroBits> {
    ddp: &'a mut DeviceDdp<T>,
    compute: &'a Arc<CudaStream>,
    finished: bool,
}

impl<'a, T: Gradient + DeviceRepr + ValidAsZeroBits> DevicePass<'a, T> {
    pub(super) fn new(ddp: &'a mut DeviceDdp<T>, compute: &'a Arc<CudaStream>, sync: bool) -> Self {
        ddp.progress.begin(sync);
        Self { ddp, compute, finished: false }
    }

    /// Enqueues, on the computing CUDA stream, the addition of `gradient` to the sum for `parameter`, and
    /// calls [`Self::ready`]. If there is no sum yet, it enqueues a copy instead.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, if the lengths differ, if it is ready,
    /// or if a stream is on another device. Otherwise the errors of [`Self::ready`].
    pub fn add(&mut self, parameter: ParameterId, gradient: &impl DevicePtr<T>) -> Result<(), TrainError> {
        self.check_context("the computing stream", self.compute)?;
        self.ddp.progress.gradient(parameter, Some(gradient.len()))?;
        self.check_context("a gradient", gradient.stream())?;
        let DeviceDdp { progress, adder, .. } = &mut *self.ddp;
        let (bucket, range, state) = progress.gradient(parameter, None)?;
        let mut into = bucket.memory.slice_mut(range);
        if *state == GradientState::Own {
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
        *state = GradientState::Own;
        self.ready(parameter)
    }

    /// Returns the memory of a parameter's gradient, for kernels on the computing stream to write or add to.
    /// The memory holds zeros, or the sum of passes without sending.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if there is no such parameter, or if it is ready.
    /// [`CommError::Device`](convoke_comm::CommError::Device) if the memory cannot be cleared.
    pub fn gradient(&mut self, parameter: ParameterId) -> Result<CudaViewMut<'_, T>, TrainError> {
        self.check_context("the computing stream", self.compute)?;
        let (bucket, range, state) = self.ddp.progress.gradient(parameter, None)?;
        let mut place = bucket.memory.slice_mut(range);
        if *state == GradientState::Average {
            self.compute.memset_zeros(&mut place).map_err(device("cannot clear memory of the device"))?;
            *state = GradientState::Own;
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
    pub fn ready(&mut self, parameter: ParameterId) -> Result<(), TrainError> {
        self.gradient(parameter)?;
        self.ddp.progress.mark_ready(parameter);
        if self.ddp.options.overlap { self.send_complete() } else { Ok(()) }
    }

    /// Enqueues the remaining buckets and makes the computing stream wait for all averages. The host does not
    /// wait. A pass without sending enqueues nothing.
    ///
    /// # Errors
    /// [`TrainError::Unused`] if parameters have no gradient; this aborts the group. Otherwise the error that
    /// ended the group.
    pub fn finish(mut self) -> Result<(), TrainError> {
        if self.ddp.progress.sync {
            let DeviceDdp { group, progress, .. } = &*self.ddp;
            if let Some(error) = progress.unused(group.rank()) {
                self.abort_group(&error.to_string());
                return Err(error);
            }
            // Gradients that passes without sending have left become ready here.
            progress.not_ready().into_iter().try_for_each(|parameter| self.ready(parameter))?;
            self.send_complete()?;
            for bucket in &mut self.ddp.progress.buckets {
                if let Some(work) = bucket.work.take() {
                    work.wait_on(self.compute)?;
                }
            }
            self.ddp.progress.reset();
        }
        self.finished = true;
        Ok(())
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

    /// Enqueues buckets in order, up to the first that is incomplete.
    fn send_complete(&mut self) -> Result<(), TrainError> {
        while let Some(index) = self.ddp.progress.next_complete() {
            let DeviceDdp { group, progress, stream, options, .. } = &mut *self.ddp;
            stream.join(self.compute).map_err(device("cannot make a CUDA stream wait"))?;
            let memory = &mut progress.buckets[index].memory;
            let bytes = memory.num_bytes();
            let work = group.on(stream)?.enqueue(op::all_reduce(memory, ReduceOp::Avg))?;
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
        self.ddp.progress.buckets.iter_mut().for_each(|bucket| bucket.work = None);
        self.ddp.progress.reset();
    }
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> Drop for DevicePass<'_, T> {
    fn drop(&mut self) {
        if !self.finished && self.ddp.progress.sync {
            let rank = self.ddp.group.rank();
            self.abort_group(&format!("rank {rank} gave up in the middle of a backward pass"));
        }
    }
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> fmt::Debug for DevicePass<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePass").field("ddp", &*self.ddp).finish_non_exhaustive()
    }
}
