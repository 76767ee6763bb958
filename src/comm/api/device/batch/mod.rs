//! Operations on buffers of a device that are enqueued as one.

mod blocks;

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use smallvec::SmallVec;

use super::backend::Core;
use super::element::{DeviceElement, ElementType};
use super::type_mapping::DeviceReduction;
use crate::api::group::Group;
use crate::api::group::work::Work;
use crate::api::reduction::Reduction;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::ReduceOp;
use crate::error::CommError;
use crate::nccl::{Address, NcclCall};

/// Operations that a stream carries out as one, from [`OnStream::batch`](super::OnStream::batch). NCCL gets
/// them as one group call, so sends and receives run concurrently. Without [`Self::enqueue`] nothing happens.
///
/// Each method has the meaning and arguments of the method of that name of [`Group`]; buffers are on the
/// group's device. A buffer that the operation ignores on this rank, such as `recv` of a gather on other
/// ranks than the root, may have any length.
///
/// A program that implements cudarc's `DevicePtr` or `DevicePtrMut` for its own type must return the address
/// of `len` elements that live until the stream has executed the batch. The compiler does not check this.
/// [`RawBuffer`](super::RawBuffer) states the same in its `unsafe` constructor; prefer it.
#[must_use = "without `enqueue` nothing happens"]
pub struct DeviceBatch<'a> {
    group: &'a Group,
    core: Arc<Core>,
    stream: &'a CudaStream,
    steps: SmallVec<[NcclCall<ElementType, DeviceReduction>; 2]>,
    /// Guards of cudarc's buffers. Dropping them after the batch is enqueued makes other streams wait for it.
    guards: SmallVec<[SyncOnDrop<'a>; 2]>,
    call: Option<Call>,
    /// Set if there are messages: then the batches of ranks may differ, so their calls are not compared.
    messages: bool,
}

impl<'a> DeviceBatch<'a> {
    pub(super) fn new(group: &'a Group, core: Arc<Core>, stream: &'a CudaStream) -> Self {
        Self {
            group,
            core,
            stream,
            steps: SmallVec::new(),
            guards: SmallVec::new(),
            call: None,
            messages: false,
        }
    }

    /// As [`Group::all_reduce`].
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the buffer is on another device or the reduction is not defined for
    /// the type.
    pub fn all_reduce<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<&mut Self, CommError> {
        let (count, op) = (buf.len(), device_reduction(&op.into())?);
        let at = self.output(buf)?;
        let step = NcclCall::AllReduce { send: at, recv: at, count, datatype: T::ELEMENT_TYPE, op };
        Ok(self.add::<T>(CallKind::AllReduce, Some(op.op), 0, count, [step]))
    }

    /// As [`Group::all_reduce_into`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if `send` and `recv` are not equally long.
    pub fn all_reduce_into<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<&mut Self, CommError> {
        let (count, op) = (send.len(), device_reduction(&op.into())?);
        check("recv", recv.len(), count)?;
        let (send, recv) = (self.input(send)?, self.output(recv)?);
        let step = NcclCall::AllReduce { send, recv, count, datatype: T::ELEMENT_TYPE, op };
        Ok(self.add::<T>(CallKind::AllReduce, Some(op.op), 0, count, [step]))
    }

    /// As [`Group::broadcast`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if there is no rank `root`, `to` or `from`.
    pub fn broadcast<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let count = buf.len();
        let at = self.output(buf)?;
        let step = NcclCall::Broadcast { send: at, recv: at, count, datatype: T::ELEMENT_TYPE, root };
        Ok(self.add::<T>(CallKind::Broadcast, None, root, count, [step]))
    }

    /// As [`Group::reduce`].
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn reduce<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (count, op) = (buf.len(), device_reduction(&op.into())?);
        let at = self.output(buf)?;
        let step = NcclCall::Reduce { send: at, recv: at, count, datatype: T::ELEMENT_TYPE, op, root };
        Ok(self.add::<T>(CallKind::Reduce, Some(op.op), root, count, [step]))
    }

    /// As [`Group::reduce_into`].
    ///
    /// # Errors
    /// As [`Self::broadcast`]; also if on the root `send` and `recv` are not equally long.
    pub fn reduce_into<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (count, op, datatype) = (send.len(), device_reduction(&op.into())?, T::ELEMENT_TYPE);
        let is_root = self.group.rank() == root;
        check("recv", if is_root { recv.len() } else { count }, count)?;
        let send = self.input(send)?;
        let recv = if is_root { self.output(recv)? } else { send };
        Ok(self.add::<T>(
            CallKind::Reduce,
            Some(op.op),
            root,
            count,
            [NcclCall::Reduce { send, recv, count, datatype, op, root }],
        ))
    }

    /// As [`Group::all_gather`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if `recv` is not as long as all blocks together.
    pub fn all_gather<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
    ) -> Result<&mut Self, CommError> {
        let count = send.len();
        check("recv", recv.len(), count.saturating_mul(self.group.size()))?;
        let (send, recv) = (self.input(send)?, self.output(recv)?);
        let step = NcclCall::AllGather { send, recv, count, datatype: T::ELEMENT_TYPE };
        Ok(self.add::<T>(CallKind::AllGather, None, 0, count, [step]))
    }

    /// As [`Group::reduce_scatter`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if `send` is not as long as all blocks together.
    pub fn reduce_scatter<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<&mut Self, CommError> {
        let (count, op) = (recv.len(), device_reduction(&op.into())?);
        check("send", send.len(), count.saturating_mul(self.group.size()))?;
        let (send, recv) = (self.input(send)?, self.output(recv)?);
        let step = NcclCall::ReduceScatter { send, recv, count, datatype: T::ELEMENT_TYPE, op };
        Ok(self.add::<T>(CallKind::ReduceScatter, Some(op.op), 0, count, [step]))
    }

    /// Sends `buf` to rank `to`, which must receive as many elements on its device. There are no tags:
    /// messages between two ranks arrive in the order in which they were enqueued. Two ranks that send to
    /// each other must each put their send and receive into one batch.
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn send<T: DeviceElement>(
        &mut self,
        buf: &'a impl DevicePtr<T>,
        to: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(to, "send to")?;
        let count = buf.len();
        let step = NcclCall::Send { send: self.input(buf)?, count, datatype: T::ELEMENT_TYPE, to };
        Ok(self.add::<T>(CallKind::PointToPoint, None, 0, count, [step]))
    }

    /// Receives from rank `from` as many elements as `buf` has.
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn recv<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        from: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(from, "receive from")?;
        let count = buf.len();
        let step = NcclCall::Recv { recv: self.output(buf)?, count, datatype: T::ELEMENT_TYPE, from };
        Ok(self.add::<T>(CallKind::PointToPoint, None, 0, count, [step]))
    }

    /// Enqueues the batch after the earlier work of the stream. The [`Work`] is done when the stream has
    /// executed the batch; later work on this stream need not wait for the `Work`.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] if NCCL lacks an operation for its element type; nothing is enqueued.
    /// [`CommError::Device`] if the device or NCCL failed. Otherwise the error that ended the group.
    pub fn enqueue(self) -> Result<Work<()>, CommError> {
        let Some(call) = self.call else { return Ok(Work::on_device(self.group.clone(), None)) };
        if self.core.options.checked && !self.messages {
            self.group.compare_on_host(call, self.core.calls())?;
        }
        // SAFETY: the stream is of this device (`OnStream`), and so is the memory (`input`, `output`). For
        // cudarc's buffers and `RawBuffer` the memory is as long as its count. cudarc's buffers live long
        // enough: they are freed behind the events that their guards, dropped below, record. The maker of a
        // `RawBuffer` promises it. `DevicePtr` is a safe trait of cudarc, so another implementation can give
        // any address; then it breaks this proof as it breaks cudarc's own (see `DeviceBatch`).
        #[allow(unsafe_code)]
        let operation = unsafe {
            self.core.enqueue(call, (&self.steps, self.guards.len()), self.stream, self.group.limit())
        }?;
        drop(self.guards);
        Ok(Work::on_device(self.group.clone(), operation.map(|operation| operation as _)))
    }

    pub(super) fn add<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        op: Option<ReduceOp>,
        root: usize,
        count: usize,
        steps: impl IntoIterator<Item = NcclCall<ElementType, DeviceReduction>>,
    ) -> &mut Self {
        let call = Call::new(kind, T::ELEMENT_TYPE.dtype, op, root as u32, count as u64);
        self.call.get_or_insert(call);
        self.messages |= kind == CallKind::PointToPoint;
        self.steps.extend(steps);
        self
    }

    fn input<T>(&mut self, buf: &'a impl DevicePtr<T>) -> Result<Address, CommError> {
        self.check_device(buf)?;
        let (at, guard) = buf.device_ptr(self.stream);
        self.guards.push(guard);
        Ok(at)
    }

    fn output<T>(&mut self, buf: &'a mut impl DevicePtrMut<T>) -> Result<Address, CommError> {
        self.check_device(buf)?;
        let (at, guard) = buf.device_ptr_mut(self.stream);
        self.guards.push(guard);
        Ok(at)
    }

    fn check_device<T>(&self, buf: &impl DeviceSlice<T>) -> Result<(), CommError> {
        check_context("a buffer", buf.stream().context(), &self.core.context)
    }

    fn check_rank(&self, rank: usize, what: &str) -> Result<(), CommError> {
        self.group.check_rank(rank, what)
    }
}

impl fmt::Debug for DeviceBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatch").field("steps", &self.steps).finish_non_exhaustive()
    }
}

/// Converts a reduction for a device; the error says why a device cannot carry it out.
fn device_reduction<T: DeviceElement>(op: &Reduction<T>) -> Result<DeviceReduction, CommError> {
    let (by, dtype) = (DeviceReduction { op: op.op(), factor: op.factor() }, T::ELEMENT_TYPE.dtype);
    match by.op {
        ReduceOp::Custom => Err(CommError::Unsupported(
            "a reduction function on a device, because the function runs on the host".to_owned(),
        )),
        ReduceOp::PremulSum if by.factor.is_none() => {
            Err(CommError::InvalidArgument("premul_sum needs its factor: Reduction::premul_sum".to_owned()))
        }
        op if T::ELEMENT_TYPE.float8.is_none() && !op.accepts(dtype) => {
            Err(CommError::InvalidArgument(format!("{op} of {dtype} has no meaning")))
        }
        _ => Ok(by),
    }
}

/// Checks that a stream or buffer, named `what`, belongs to the context of the group's device. Two contexts
/// that cudarc made separately for one device do not match, since each orders only its own streams.
pub(super) fn check_context(
    what: &str,
    theirs: &Arc<CudaContext>,
    ours: &Arc<CudaContext>,
) -> Result<(), CommError> {
    if Arc::ptr_eq(theirs, ours) {
        return Ok(());
    }
    Err(CommError::InvalidArgument(match (theirs.ordinal(), ours.ordinal()) {
        (theirs, ours) if theirs == ours => format!(
            "{what} belongs to another CudaContext of device {ours} than the group: create one, and share \
             it as an Arc"
        ),
        (theirs, ours) => format!("{what} is on device {theirs}; the group is on device {ours}"),
    }))
}

fn check(what: &str, len: usize, expected: usize) -> Result<(), CommError> {
    if len == expected {
        return Ok(());
    }
    Err(CommError::InvalidArgument(format!("{what} has {len} elements, not {expected}")))
}
