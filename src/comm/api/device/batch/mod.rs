//! Operations on device buffers that are enqueued as one.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, SyncOnDrop};
use smallvec::SmallVec;

use super::core::Core;
use super::element::{DeviceElement, ElementType, HasElementType as _};
use super::memory::{DeviceSource, DeviceTarget};
use super::type_mapping::{DeviceReduction, Step};
use crate::api::group::Group;
use crate::api::group::work::Work;
use crate::api::reduction::Reduction;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::ReduceOp;
use crate::error::CommError;
use crate::nccl::{Address, NcclFunction};

/// Implements [`Enqueue`] for a type: adds a value of it, as `$operation`, to a batch.
macro_rules! device_operations {
    ($([$($generics:tt)*] $Type:ty $(, HAS_BARRIER = $has_barrier:expr)?, |$operation:ident, $batch:ident| $add:block)*) => {$(
        impl<$($generics)*> Enqueue for $Type {
            $(const HAS_BARRIER: bool = $has_barrier;)?

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
mod operations;

/// An operation of the module [`op`](crate::op) on device buffers, or a tuple, array or vector of such
/// operations or of lists of them.
///
/// The trait is sealed.
pub trait DeviceOperation: Enqueue {}

impl<O: Enqueue> DeviceOperation for O {}

/// Seals [`DeviceOperation`]: this module is private.
pub trait Enqueue {
    /// The operation may be a barrier, or contain one.
    const HAS_BARRIER: bool = false;

    /// Adds the operation to a batch.
    fn add<'a>(self, batch: &mut DeviceBatch<'a>) -> Result<(), CommError>
    where
        Self: 'a;
}

/// Operations that a stream carries out as one. NCCL gets them as one group call.
pub struct DeviceBatch<'a> {
    group: &'a Group,
    core: &'a Arc<Core>,
    stream: &'a CudaStream,
    steps: SmallVec<[Step; 2]>,
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
        // `RawBuffer` promises it. Other types do not implement `Readable` and `Writable`.
        #[allow(unsafe_code)]
        let operation = unsafe {
            self.core.enqueue(call, (&self.steps, self.guards.len()), self.stream, self.group.limit())
        }?;
        drop(self.guards);
        Ok(Work::on_device(self.group.clone(), operation.map(|operation| operation as _)))
    }

    /// Makes room for a list of operations, so that it is allocated once.
    fn reserve(&mut self, operations: usize) {
        self.steps.reserve(operations);
        self.guards.reserve(2 * operations);
    }

    fn add(&mut self, call: Call, steps: impl IntoIterator<Item = Step>) {
        self.call.get_or_insert(call);
        self.messages |= call.kind == CallKind::PointToPoint;
        self.steps.extend(steps);
    }

    /// Adds a call that is one step on `count` elements like those of `B`, from and to these addresses.
    fn add_step<B: DeviceSource>(
        &mut self,
        kind: CallKind,
        function: NcclFunction<DeviceReduction>,
        (send, recv): (Address, Address),
        count: usize,
    ) {
        let root = match function {
            NcclFunction::Broadcast { root } | NcclFunction::Reduce { root, .. } => root,
            _ => 0,
        };
        let call = call::<B>(kind, function.reduction().map(|by| by.op), root, count);
        self.add(call, [Step { function, send, recv, count, datatype: datatype::<B>() }]);
    }

    fn input(&mut self, buf: impl DeviceSource + 'a) -> Result<Address, CommError> {
        self.core.check_context("a buffer", buf.context())?;
        let (at, guard) = buf.read(self.stream);
        self.guards.push(guard);
        Ok(at)
    }

    fn output(&mut self, buf: impl DeviceTarget + 'a) -> Result<Address, CommError> {
        self.core.check_context("a buffer", buf.context())?;
        let (at, guard) = buf.write(self.stream);
        self.guards.push(guard);
        Ok(at)
    }
}

impl fmt::Debug for DeviceBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatch").field("steps", &self.steps).finish_non_exhaustive()
    }
}

fn datatype<B: DeviceSource>() -> ElementType {
    B::Element::ELEMENT_TYPE
}

/// Returns the descriptor of a call on buffers like `B`.
fn call<B: DeviceSource>(kind: CallKind, op: Option<ReduceOp>, root: usize, count: usize) -> Call {
    Call::new(kind, datatype::<B>().dtype, op, root as u32, count as u64)
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
