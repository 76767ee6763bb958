//! Gradients on GPUs, averaged over all ranks in buckets while the next ones are computed.

mod add;
mod pass;

use std::fmt;
use std::sync::Arc;

use convoke_comm::device::DeviceError;
use convoke_comm::device::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits,
};
use convoke_comm::{CommError, Group, Work};

use crate::bucket::{Layout, Place, Sizes};
use crate::ddp::{DdpOptions, Gradient, Share, compare};
use crate::error::TrainError;
use add::Adder;
pub use pass::DevicePass;

/// The gradients of a network on a GPU, and what makes them the average over all ranks: [`Ddp`](crate::Ddp) for a group with
/// a [side on a device](Group::with_device).
///
/// In a [pass](Self::pass) the program hands over each gradient as soon as the stream that computes it has been told to; a bucket that is
/// complete is averaged on a stream of its own, behind what it needs. Streams wait for each other by events, and the host
/// for nothing: [`DevicePass::finish`] returns when all is enqueued, and what the computing stream does later finds the
/// averages.
///
/// What goes wrong on the way is told by the next call: of the pass, or of the group.
pub struct DeviceDdp<T: Gradient + DeviceRepr + ValidAsZeroBits = f32> {
    group: Group,
    layout: Layout,
    buckets: Vec<Bucket<T>>,
    shares: Vec<Share>,
    /// For operations of the group.
    stream: Arc<CudaStream>,
    /// From when it was first needed.
    adder: Option<Adder>,
    options: DdpOptions,
}

/// Gradients that are reduced together.
struct Bucket<T> {
    memory: CudaSlice<T>,
    /// Parameters whose gradients are not ready in this pass.
    missing: usize,
    work: Option<Work<()>>,
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> DeviceDdp<T> {
    /// As [`Ddp::with_options`](crate::Ddp::with_options), on the device of `group`, whose context this is. Parameters may not
    /// be left out.
    ///
    /// # Errors
    /// As there; [`CommError::Device`] if the group has no device, or that has no memory.
    pub fn new<N: Into<String>>(
        group: &Group,
        context: &Arc<CudaContext>,
        parameters: impl IntoIterator<Item = (N, usize)>,
        options: DdpOptions,
    ) -> Result<Self, TrainError> {
        let parameters: Vec<_> = parameters.into_iter().map(|(name, count)| (name.into(), count)).collect();
        let (dtype, bytes) = (T::DTYPE.to_string(), T::DTYPE.size_bytes());
        let layout =
            Layout::new(parameters, &dtype, bytes, options.sizes()).with_settings(&options.compared());
        compare(group, &layout)?;
        if layout.len() == 0 {
            return Err(TrainError::InvalidArgument("a network without parameters".to_owned()));
        }
        if options.unused_parameters {
            let what = "on a device all parameters need a gradient in each pass: unused ones would cost a wait of the host";
            return Err(TrainError::InvalidArgument(what.to_owned()));
        }
        let stream = context.new_stream().map_err(device("a stream cannot be made"))?;
        group.on(&stream)?;
        let buckets = layout.buckets().iter().enumerate().map(|(index, parameters)| {
            // One element at least: CUDA has no empty memory.
            let memory = stream.alloc_zeros(layout.bucket_len(index).max(1));
            let memory = memory.map_err(device("there is no memory on the device"))?;
            Ok(Bucket { memory, missing: parameters.len(), work: None })
        });
        let buckets = buckets.collect::<Result<_, CommError>>()?;
        // Once: a context may have been told not to order streams by itself.
        stream.synchronize().map_err(device("a stream failed"))?;
        Ok(Self {
            group: group.clone(),
            buckets,
            shares: vec![Share::Average; layout.len()],
            stream,
            adder: None,
            layout,
            options,
        })
    }

    /// Begins a backward pass whose gradients `compute` computes. All ranks of the group do.
    pub fn pass<'a>(&'a mut self, compute: &'a Arc<CudaStream>) -> DevicePass<'a, T> {
        DevicePass::new(self, compute, true)
    }

    /// Begins a backward pass whose gradients are only added up here: gradient accumulation. Nothing is sent.
    #[doc(alias = "no_sync")]
    pub fn pass_no_sync<'a>(&'a mut self, compute: &'a Arc<CudaStream>) -> DevicePass<'a, T> {
        DevicePass::new(self, compute, false)
    }

    /// The gradient of a parameter, for streams that come behind a finished pass: the average over all ranks.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn average(&self, parameter: usize) -> CudaView<'_, T> {
        let Place { bucket, range } = self.layout.place(parameter);
        self.buckets[*bucket].memory.slice(range.clone())
    }

    /// As [`Self::average`], to change it, such as to clip it. All ranks change theirs alike.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn average_mut(&mut self, parameter: usize) -> CudaViewMut<'_, T> {
        let Place { bucket, range } = self.layout.place(parameter);
        self.buckets[*bucket].memory.slice_mut(range.clone())
    }

    /// Forgets what passes without sending have added up on this rank: to skip a step.
    pub fn discard(&mut self) {
        self.shares.fill(Share::Average);
    }

    /// Number of parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.layout.len()
    }

    /// The parameters of each bucket, in the order in which buckets are sent.
    #[must_use]
    pub fn buckets(&self) -> &[Vec<usize>] {
        self.layout.buckets()
    }

    /// The group whose ranks train together.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }
}

impl DdpOptions {
    fn sizes(&self) -> Sizes {
        Sizes { first: self.first_bucket_bytes, others: self.bucket_bytes }
    }
}

/// An error of the driver, in words.
fn device(what: &'static str) -> impl FnOnce(convoke_comm::device::cudarc::driver::DriverError) -> CommError {
    move |error| CommError::Device(DeviceError::driver(what)(error))
}

impl<T: Gradient + DeviceRepr + ValidAsZeroBits> fmt::Debug for DeviceDdp<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceDdp").field("layout", &self.layout).finish_non_exhaustive()
    }
}
