//! The operations of a group on buffers of its device.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use super::backend::{Core, DeviceBackend};
use super::batch::{DeviceBatch, check_context};
use super::element::DeviceElement;
use crate::api::group::Group;
use crate::api::group::work::Work;
use crate::api::reduction::Reduction;
use crate::error::CommError;

/// `CU_STREAM_PER_THREAD`, the handle of the per-thread default stream.
const PER_THREAD: usize = 2;

/// The operations of a group on buffers of its device, on one stream; from [`Group::on`].
///
/// Each method has the meaning and arguments of the method of that name of [`Group`]. It enqueues the
/// operation after the earlier work of the stream and returns at once. Later work on the stream runs after
/// the operation without further waits. [`Work::wait_on`] makes another stream wait for the operation;
/// cudarc's buffers do that by themselves. The host waits with [`Work::wait`]. Ranks enqueue the same
/// operations in the same order, also from several threads and streams.
///
/// # Errors
///
/// All methods return [`CommError::InvalidArgument`] if a buffer is on another device, a length or rank does
/// not fit, or the reduction is not defined for the type. They return [`CommError::Unsupported`] if NCCL
/// lacks the operation for that type. In both cases nothing was enqueued. [`CommError::Device`] if the device
/// or NCCL failed, otherwise the error that ended the group.
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
        check_context("a stream", stream.context(), &core.context)?;
        // NCCL enqueues from its own threads, in which this handle means another stream.
        if stream.cu_stream() as usize == PER_THREAD {
            let what = "the per-thread default stream (CudaContext::per_thread_stream) is another stream in \
                        NCCL's threads: use a stream from CudaContext::new_stream";
            return Err(CommError::InvalidArgument(what.to_owned()));
        }
        Ok(OnStream { group: self, core, stream })
    }
}

#[allow(clippy::missing_errors_doc)] // documented at the type
impl OnStream<'_> {
    /// Returns an empty batch of operations, which are enqueued as one.
    pub fn batch(&self) -> DeviceBatch<'_> {
        DeviceBatch::new(self.group, Arc::clone(&self.core), self.stream)
    }

    /// Replaces `buf` on every rank by the elementwise `op` over all ranks' `buf`.
    pub fn all_reduce<T: DeviceElement>(
        &self,
        buf: &mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.all_reduce(buf, op)?;
        batch.enqueue()
    }

    /// As [`Self::all_reduce`], from `send`, which stays as it is, into `recv`.
    pub fn all_reduce_into<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.all_reduce_into(send, recv, op)?;
        batch.enqueue()
    }

    /// Replaces `buf` on every rank by the `buf` of rank `root`.
    pub fn broadcast<T: DeviceElement>(
        &self,
        buf: &mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.broadcast(buf, root)?;
        batch.enqueue()
    }

    /// Replaces `buf` on rank `root` by the elementwise `op` over all ranks' `buf`.
    pub fn reduce<T: DeviceElement>(
        &self,
        buf: &mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.reduce(buf, op, root)?;
        batch.enqueue()
    }

    /// As [`Self::reduce`], from `send`, which stays as it is, into `recv` of the root.
    pub fn reduce_into<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.reduce_into(send, recv, op, root)?;
        batch.enqueue()
    }

    /// Gathers every rank's `send` in `recv` on every rank, in rank order.
    pub fn all_gather<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.all_gather(send, recv)?;
        batch.enqueue()
    }

    /// Reduces all ranks' `send` elementwise by `op`, and gives each rank its block of the result.
    pub fn reduce_scatter<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.reduce_scatter(send, recv, op)?;
        batch.enqueue()
    }

    /// Gathers every rank's `send` in `recv` of rank `root`, in rank order.
    pub fn gather<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.gather(send, recv, root)?;
        batch.enqueue()
    }

    /// Gives each rank its block of the `send` of rank `root`.
    pub fn scatter<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.scatter(send, recv, root)?;
        batch.enqueue()
    }

    /// Gives each rank the blocks for that rank from the `send` of all ranks.
    pub fn all_to_all<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.all_to_all(send, recv)?;
        batch.enqueue()
    }

    /// As [`Self::all_gather`], with blocks of different lengths, which all ranks know.
    pub fn all_gather_v<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        lens: &[usize],
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.all_gather_v(send, recv, lens)?;
        batch.enqueue()
    }

    /// As [`Self::reduce_scatter`], with blocks of different lengths, which all ranks know.
    pub fn reduce_scatter_v<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        lens: &[usize],
        op: impl Into<Reduction<T>>,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.reduce_scatter_v(send, recv, lens, op)?;
        batch.enqueue()
    }

    /// As [`Self::gather`], with blocks of different lengths, which the root knows.
    pub fn gather_v<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.gather_v(send, recv, lens, root)?;
        batch.enqueue()
    }

    /// As [`Self::scatter`], with blocks of different lengths, which the root knows.
    pub fn scatter_v<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.scatter_v(send, recv, lens, root)?;
        batch.enqueue()
    }

    /// As [`Self::all_to_all`], with blocks of different lengths.
    pub fn all_to_all_v<T: DeviceElement>(
        &self,
        send: &impl DevicePtr<T>,
        send_lens: &[usize],
        recv: &mut impl DevicePtrMut<T>,
        recv_lens: &[usize],
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.all_to_all_v(send, send_lens, recv, recv_lens)?;
        batch.enqueue()
    }

    /// Sends to rank `to`; as [`DeviceBatch::send`].
    pub fn send<T: DeviceElement>(&self, buf: &impl DevicePtr<T>, to: usize) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.send(buf, to)?;
        batch.enqueue()
    }

    /// Receives from rank `from`; as [`DeviceBatch::recv`].
    pub fn recv<T: DeviceElement>(
        &self,
        buf: &mut impl DevicePtrMut<T>,
        from: usize,
    ) -> Result<Work<()>, CommError> {
        let mut batch = self.batch();
        batch.recv(buf, from)?;
        batch.enqueue()
    }

    /// Makes the stream wait until the streams of all ranks have reached their barriers.
    pub fn barrier(&self) -> Result<Work<()>, CommError> {
        let mut barrier_buffer = self.core.barrier_buffer();
        let mut batch = self.batch();
        batch.all_reduce(&mut *barrier_buffer, crate::collectives::dtype::ReduceOp::Max)?;
        batch.enqueue()
    }
}
