//! Averages gradients on GPUs over all ranks in buckets, while the program computes the next gradients.

mod add;
mod pass;

use std::fmt;
use std::sync::Arc;

use convoke_comm::device::DeviceError;
use convoke_comm::device::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits,
};
use convoke_comm::{CommError, Group, Work};

use crate::bucket::Location;
use crate::ddp::{DdpOptions, Gradient, agree, shared_methods};
use crate::error::TrainError;
use crate::progress::{ParameterId, Progress};
use add::Adder;
pub use pass::DevicePass;

/// Distributed data parallel training on a GPU: [`Ddp`](crate::Ddp) for a group that has [a
/// device](Group::with_device).
///
/// In a [pass](Self::pass) the program hands over each gradient as soon as its computation is enqueued on a
/// CUDA stream. A complete bucket is averaged on a separate CUDA stream, after the work that computes it.
/// CUDA streams wait for each other by CUDA events; the host does not wait. [`DevicePass::finish`] returns
/// when everything is enqueued. Work that is enqueued later on the computing stream sees the averages.
///
/// Errors of enqueued operations are returned by the next method called on the pass or on the group.
pub struct DeviceDdp<T: Gradient + DeviceRepr + ValidAsZeroBits = f32> {
    group: Group,
    progress: Progress<Bucket<T>>,
    /// The CUDA stream on which the group's operations run.
    stream: Arc<CudaStream>,
    /// The kernel that adds gradients, loaded when it is first needed.
    adder: Option<Adder>,
    options: DdpOptions,
}

/// The gradients of some parameters, which one collective reduces together.
struct Bucket<T> {
    memory: CudaSlice<T>,
    work: Option<Work<()>>,
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> DeviceDdp<T> {
    /// Does what [`Ddp::with_options`](crate::Ddp::with_options) does, on the device of `group`. `context` is
    /// the context of that device. Unused parameters are not supported.
    ///
    /// # Errors
    /// Returns the errors of [`Ddp::with_options`](crate::Ddp::with_options). [`CommError::Device`] if the
    /// group has no device, or if the device has too little memory.
    pub fn new<N: Into<String>>(
        group: &Group,
        context: &Arc<CudaContext>,
        parameters: impl IntoIterator<Item = (N, usize)>,
        options: DdpOptions,
    ) -> Result<(Self, Vec<ParameterId>), TrainError> {
        let layout = agree::<T, _>(group, parameters, &options)?;
        if options.unused_parameters {
            let what = "unused_parameters is not available on a device: all parameters need a gradient in \
                        each pass";
            return Err(TrainError::InvalidArgument(what.to_owned()));
        }
        let stream = context.new_stream().map_err(device("cannot create a CUDA stream"))?;
        group.on(&stream)?;
        let buckets = (0..layout.buckets.len()).map(|index| {
            // Each bucket has at least one element, because CUDA cannot allocate empty memory.
            let memory = stream.alloc_zeros(layout.bucket_len(index).max(1));
            let memory = memory.map_err(device("cannot allocate memory on the device"))?;
            Ok(Bucket { memory, work: None })
        });
        let buckets = buckets.collect::<Result<_, CommError>>()?;
        // One synchronization is needed, because the CUDA context may have cudarc's automatic ordering of
        // streams disabled.
        stream.synchronize().map_err(device("a stream failed"))?;
        let progress = Progress::new(layout, buckets);
        let parameters = progress.parameters();
        Ok((Self { group: group.clone(), progress, stream, adder: None, options }, parameters))
    }

    /// Begins a backward pass whose gradients are computed on the CUDA stream `compute`. All ranks of the
    /// group call this function.
    pub fn pass<'a>(&'a mut self, compute: &'a Arc<CudaStream>) -> DevicePass<'a, T> {
        DevicePass::new(self, compute, true)
    }

    /// Begins a backward pass that only accumulates gradients on this rank. Nothing is sent.
    #[doc(alias = "no_sync")]
    pub fn pass_no_sync<'a>(&'a mut self, compute: &'a Arc<CudaStream>) -> DevicePass<'a, T> {
        DevicePass::new(self, compute, false)
    }

    /// The average of a parameter's gradient over all ranks, for work that is enqueued on CUDA streams after
    /// a finished pass.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn average(&self, parameter: ParameterId) -> CudaView<'_, T> {
        let Location { bucket, range } = &self.progress.layout.locations[parameter.0];
        self.progress.buckets[*bucket].memory.slice(range.clone())
    }

    /// Mutable access to [`Self::average`], for example to clip it. All ranks must make equal changes.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn average_mut(&mut self, parameter: ParameterId) -> CudaViewMut<'_, T> {
        let Location { bucket, range } = &self.progress.layout.locations[parameter.0];
        self.progress.buckets[*bucket].memory.slice_mut(range.clone())
    }

    shared_methods!();
}

/// Converts a driver error to a [`CommError`] that describes what failed.
fn device(what: &'static str) -> impl FnOnce(convoke_comm::device::cudarc::driver::DriverError) -> CommError {
    move |error| CommError::Device(DeviceError::driver(what)(error))
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> fmt::Debug for DeviceDdp<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceDdp").field("layout", &self.progress.layout).finish_non_exhaustive()
    }
}
