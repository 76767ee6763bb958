//! Operations on device buffers that are enqueued as one.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, SyncOnDrop};
use smallvec::SmallVec;

use super::backend::Core;
use super::element::sealed::Sealed as _;
use super::element::{DeviceElement, ElementType};
use super::memory::{DeviceSource, DeviceTarget};
use super::type_mapping::DeviceReduction;
use crate::api::group::Group;
use crate::api::group::work::Work;
use crate::api::op::{
    self, AllGather, AllReduce, AllReduceInto, Barrier, Broadcast, Recv, Reduce, ReduceInto, ReduceScatter,
    Send,
};
use crate::api::reduction::Reduction;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::ReduceOp;
use crate::error::CommError;
use crate::nccl::{Address, NcclCall};

/// Implements [`DeviceOperation`] for an operation: adds it, as `$operation`, to a batch.
macro_rules! device_operations {
    ($([$($generics:tt)*] $Type:ty, |$operation:ident, $batch:ident| $add:block)*) => {$(
        impl<$($generics)*> sealed::Enqueue for $Type {
            fn add<'a>(self, $batch: &mut DeviceBatch<'a>) -> Result<(), CommError>
            where
                Self: 'a,
            {
                let $operation = self;
                $add
                Ok(())
            }
        }
    )*};
}

mod blocks;
mod lists;

pub(in crate::api::device) mod sealed {
    use super::{CommError, DeviceBatch};

    pub trait Enqueue {
        /// The operation may be a barrier, or contain one.
        const HAS_BARRIER: bool = false;

        /// Adds the operation to a batch.
        fn add<'a>(self, batch: &mut DeviceBatch<'a>) -> Result<(), CommError>
        where
            Self: 'a;
    }
}

/// An operation of the module [`op`](crate::op) on device buffers, or a tuple, array or vector of such
/// operations or of lists of them.
///
/// The trait is sealed.
pub trait DeviceOperation: sealed::Enqueue {}

impl<O: sealed::Enqueue> DeviceOperation for O {}

/// Operations that a stream carries out as one. NCCL gets them as one group call.
pub struct DeviceBatch<'a> {
    group: &'a Group,
    core: &'a Arc<Core>,
    stream: &'a CudaStream,
    steps: SmallVec<[NcclCall<ElementType, DeviceReduction>; 2]>,
    /// Guards of cudarc's buffers. Dropping them after the batch is enqueued makes other streams wait for it.
    guards: SmallVec<[SyncOnDrop<'a>; 2]>,
    call: Option<Call>,
    /// Set if there are messages: then the batches of ranks may differ, so their calls are not compared.
    messages: bool,
    /// The byte that a barrier reduces, until one is added.
    barrier_buffer: Option<&'a mut CudaSlice<u8>>,
}

impl<'a> DeviceBatch<'a> {
    pub(super) fn new(
        group: &'a Group,
        core: &'a Arc<Core>,
        stream: &'a CudaStream,
        barrier_buffer: Option<&'a mut CudaSlice<u8>>,
    ) -> Self {
        let (steps, guards) = (SmallVec::new(), SmallVec::new());
        Self { group, core, stream, steps, guards, call: None, messages: false, barrier_buffer }
    }

    /// Enqueues the batch after the earlier work of the stream.
    pub(super) fn enqueue(self) -> Result<Work<()>, CommError> {
        let Some(call) = self.call else { return Ok(Work::on_device(self.group.clone(), None)) };
        if self.core.options.checked && !self.messages {
            self.group.compare_on_host(call, self.core.calls())?;
        }
        // SAFETY: the stream is of this device (`OnStream`), and so is the memory (`input`, `output`). For
        // cudarc's buffers and `RawBuffer` the memory is as long as its count. cudarc's buffers live long
        // enough: they are freed behind the events that their guards, dropped below, record. The maker of a
        // `RawBuffer` promises it. Other types do not implement `Source` and `Target`.
        #[allow(unsafe_code)]
        let operation = unsafe {
            self.core.enqueue(call, (&self.steps, self.guards.len()), self.stream, self.group.limit())
        }?;
        drop(self.guards);
        Ok(Work::on_device(self.group.clone(), operation.map(|operation| operation as _)))
    }

    fn add(&mut self, call: Call, steps: impl IntoIterator<Item = NcclCall<ElementType, DeviceReduction>>) {
        self.call.get_or_insert(call);
        self.messages |= call.kind == CallKind::PointToPoint;
        self.steps.extend(steps);
    }

    fn input(&mut self, buf: impl DeviceSource + 'a) -> Result<Address, CommError> {
        check_context("a buffer", buf.context(), &self.core.context)?;
        let (at, guard) = buf.read(self.stream);
        self.guards.push(guard);
        Ok(at)
    }

    fn output(&mut self, buf: impl DeviceTarget + 'a) -> Result<Address, CommError> {
        check_context("a buffer", buf.context(), &self.core.context)?;
        let (at, guard) = buf.write(self.stream);
        self.guards.push(guard);
        Ok(at)
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

device_operations! {
    [B: DeviceTarget] AllReduce<B>, |operation, batch| {
        let (buf, op) = (operation.buffers, device_reduction(&operation.op)?);
        let (count, datatype) = (buf.count(), datatype::<B>());
        let at = batch.output(buf)?;
        let call = call::<B>(CallKind::AllReduce, Some(op.op), 0, count);
        batch.add(call, [NcclCall::AllReduce { send: at, recv: at, count, datatype, op }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllReduceInto<S, R>, |operation, batch| {
        let ((send, recv), op) = (operation.buffers, device_reduction(&operation.op)?);
        let (count, datatype) = (send.count(), datatype::<S>());
        check("recv", recv.count(), count)?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let call = call::<S>(CallKind::AllReduce, Some(op.op), 0, count);
        batch.add(call, [NcclCall::AllReduce { send, recv, count, datatype, op }]);
    }

    [B: DeviceTarget] Broadcast<B>, |operation, batch| {
        let (buf, root) = (operation.buffers, operation.root);
        batch.check_rank(root, "root")?;
        let (count, datatype) = (buf.count(), datatype::<B>());
        let at = batch.output(buf)?;
        let call = call::<B>(CallKind::Broadcast, None, root, count);
        batch.add(call, [NcclCall::Broadcast { send: at, recv: at, count, datatype, root }]);
    }

    [B: DeviceTarget] Reduce<B>, |operation, batch| {
        let (buf, root) = (operation.buffers, operation.root);
        batch.check_rank(root, "root")?;
        let (count, datatype, op) = (buf.count(), datatype::<B>(), device_reduction(&operation.op)?);
        let at = batch.output(buf)?;
        let call = call::<B>(CallKind::Reduce, Some(op.op), root, count);
        batch.add(call, [NcclCall::Reduce { send: at, recv: at, count, datatype, op, root }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceInto<S, R>, |operation, batch| {
        let ((send, recv), root) = (operation.buffers, operation.root);
        batch.check_rank(root, "root")?;
        let (count, datatype, op) = (send.count(), datatype::<S>(), device_reduction(&operation.op)?);
        let is_root = batch.group.rank() == root;
        check("recv", if is_root { recv.count() } else { count }, count)?;
        let send = batch.input(send)?;
        let recv = if is_root { batch.output(recv)? } else { send };
        let call = call::<S>(CallKind::Reduce, Some(op.op), root, count);
        batch.add(call, [NcclCall::Reduce { send, recv, count, datatype, op, root }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllGather<S, R>, |operation, batch| {
        let (send, recv) = operation.buffers;
        let (count, datatype) = (send.count(), datatype::<S>());
        check("recv", recv.count(), count.saturating_mul(batch.group.size()))?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let call = call::<S>(CallKind::AllGather, None, 0, count);
        batch.add(call, [NcclCall::AllGather { send, recv, count, datatype }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceScatter<S, R>, |operation, batch| {
        let ((send, recv), op) = (operation.buffers, device_reduction(&operation.op)?);
        let (count, datatype) = (recv.count(), datatype::<S>());
        check("send", send.count(), count.saturating_mul(batch.group.size()))?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let call = call::<S>(CallKind::ReduceScatter, Some(op.op), 0, count);
        batch.add(call, [NcclCall::ReduceScatter { send, recv, count, datatype, op }]);
    }

    [B: DeviceSource] Send<B>, |operation, batch| {
        let Send { buffer, to, tag } = operation;
        batch.check_rank(to, "send to")?;
        check_tag(tag)?;
        let (count, datatype) = (buffer.count(), datatype::<B>());
        let step = NcclCall::Send { send: batch.input(buffer)?, count, datatype, to };
        batch.add(call::<B>(CallKind::PointToPoint, None, 0, count), [step]);
    }

    [B: DeviceTarget] Recv<B>, |operation, batch| {
        let Recv { buffer, from, tag } = operation;
        let from = from.ok_or_else(|| {
            CommError::Unsupported("a receive from any rank on a device: NCCL receives from a named rank".to_owned())
        })?;
        batch.check_rank(from, "receive from")?;
        check_tag(tag)?;
        let (count, datatype) = (buffer.count(), datatype::<B>());
        let step = NcclCall::Recv { recv: batch.output(buffer)?, count, datatype, from };
        batch.add(call::<B>(CallKind::PointToPoint, None, 0, count), [step]);
    }
}

impl sealed::Enqueue for Barrier {
    const HAS_BARRIER: bool = true;

    fn add<'a>(self, batch: &mut DeviceBatch<'a>) -> Result<(), CommError>
    where
        Self: 'a,
    {
        // A second barrier of a batch would wait for nothing more.
        match batch.barrier_buffer.take() {
            Some(buffer) => op::all_reduce(buffer, ReduceOp::Max).add(batch),
            None => Ok(()),
        }
    }
}

fn datatype<B: DeviceSource>() -> ElementType {
    B::Element::ELEMENT_TYPE
}

/// Returns the descriptor of a call on buffers like `B`.
fn call<B: DeviceSource>(kind: CallKind, op: Option<ReduceOp>, root: usize, count: usize) -> Call {
    Call::new(kind, datatype::<B>().dtype, op, root as u32, count as u64)
}

fn check_tag(tag: u32) -> Result<(), CommError> {
    if tag == 0 {
        return Ok(());
    }
    Err(CommError::InvalidArgument(format!("a message on a device with tag {tag}: NCCL has no tags")))
}

/// Converts a reduction for a device; the error says why a device cannot carry it out.
fn device_reduction<T: DeviceElement>(op: &Reduction<T>) -> Result<DeviceReduction, CommError> {
    let (by, dtype) = (DeviceReduction { op: op.op(), factor: op.untyped.factor() }, T::ELEMENT_TYPE.dtype);
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
