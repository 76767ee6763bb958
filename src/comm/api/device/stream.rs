//! Enqueues the operations of a group on buffers of its device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::backend::DeviceBackend;
use super::batch::{DeviceBatch, DeviceOperation};
use super::core::Core;
use crate::api::group::Group;
use crate::api::group::work::Work;
use crate::error::CommError;

/// `CU_STREAM_PER_THREAD`, the handle of the per-thread default stream.
const PER_THREAD: usize = 2;

/// A group and the stream on which it enqueues operations; from [`Group::on`].
#[derive(Debug)]
pub struct OnStream<'a> {
    group: &'a Group,
    core: Arc<Core>,
    stream: &'a Arc<CudaStream>,
}

impl Group {
    /// The operations of this group on buffers of its device, on `stream`.
    ///
    /// # Errors
    /// [`CommError::Device`] if the group has no device ([`Self::with_device`]).
    /// [`CommError::InvalidArgument`] if the stream is of another context, or is the per-thread default
    /// stream.
    pub fn on<'a>(&'a self, stream: &'a Arc<CudaStream>) -> Result<OnStream<'a>, CommError> {
        let core = Arc::clone(&DeviceBackend::of(self)?.core);
        core.check_context("a stream", stream.context())?;
        // NCCL enqueues from its own threads, in which this handle means another stream.
        if stream.cu_stream() as usize == PER_THREAD {
            let what = "the per-thread default stream (CudaContext::per_thread_stream) is another stream in \
                        NCCL's threads: use a stream from CudaContext::new_stream";
            return Err(CommError::InvalidArgument(what.to_owned()));
        }
        Ok(OnStream { group: self, core, stream })
    }
}

impl OnStream<'_> {
    /// Enqueues an [operation](crate::op) on device buffers after the earlier work of the stream, and returns
    /// at once. Later work on the stream runs after the operation without further waits.
    ///
    /// [`Work::wait_on`] makes another stream wait for the operation; cudarc's buffers do that by themselves.
    /// The host waits with [`Work::wait`]. Ranks enqueue the same operations in the same order, also from
    /// several threads and streams.
    ///
    /// A tuple, array or vector of operations is one NCCL group call, so its sends and receives run
    /// concurrently. Two ranks that send to each other must each enqueue their send and receive together.
    ///
    /// A message must be as long as the buffer that receives it. There are no tags: messages between two
    /// ranks arrive in the order in which they were enqueued. A buffer that an operation ignores on this
    /// rank, such as `recv` of a gather on other ranks than the root, may have any length.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if a buffer is on another device, a length or rank does not fit, a
    /// message has a tag, or the reduction is not defined for the type. [`CommError::Unsupported`] if NCCL
    /// lacks the operation for that type. In both cases nothing was enqueued. [`CommError::Device`] if the
    /// device or NCCL failed, otherwise the error that ended the group.
    pub fn enqueue<O: DeviceOperation>(&self, operations: O) -> Result<Work<()>, CommError> {
        let mut barrier_buffer = O::HAS_BARRIER.then(|| self.core.barrier_buffer());
        let mut batch = DeviceBatch::new(self.group, &self.core, self.stream, barrier_buffer.as_deref_mut());
        operations.add(&mut batch)?;
        batch.enqueue()
    }
}
