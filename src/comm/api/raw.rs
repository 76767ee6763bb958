//! Untyped calls: operations on memory that the program describes by address, length and element type.
//!
//! Bindings to other languages and frameworks use them. A program in Rust uses the methods of [`Group`] and
//! the module [`op`](crate::op).
//!
//! An [`Operation`] names a call and its buffers. A group carries it out as any other operation:
//! [`Group::run`] waits for it, and [`Group::start`] returns a [`Work`](crate::Work), with which the caller
//! waits, polls a descriptor, or registers a callback. A [`Buffer`] can own whatever keeps its memory alive.
//!
//! Memory of [`Group::alloc`] is recognised by its address, so an all-reduce of it copies nothing here
//! either. [`Group::adopt`] lets the group access memory that the program has already.
//!
//! [`set_interrupt_check`] ends waits of a program that was interrupted.
//!
//! ```
//! use convoke_comm::raw::{Buffer, Call, Operation};
//! use convoke_comm::{Dtype, ReduceOp};
//!
//! # fn main() -> Result<(), convoke_comm::CommError> {
//! let world = convoke_comm::init()?;
//! let mut values = vec![1.0_f32; 1000];
//! // SAFETY: the memory has 1000 initialised values, and nothing else uses it until `run` has returned.
//! let buffer = unsafe { Buffer::new(values.as_mut_ptr().cast(), 1000, Dtype::F32) };
//! world.run(Operation::new(Call::AllReduce { op: ReduceOp::Sum.into() }).recv(buffer))?;
//! assert_eq!(values[0], world.size() as f32);
//! # Ok(())
//! # }
//! ```

// The methods of sealed traits name types of the engine.
#![allow(private_interfaces)]

use std::any::Any;
use std::fmt;

pub use convoke_store::interrupt::{interrupt_interval, is_interrupted, set_interrupt_check};

pub use crate::api::group::adopt::Adopted;
use crate::api::group::{Group, IntoPrepared, Prepared, SendRecv};
use crate::api::op::OperationOutput;
use crate::api::op::buffers::sealed::Sealed;
use crate::api::op::sealed::HostOperation;
pub use crate::api::reduction::UntypedReduction as Reduction;
use crate::buffer::{Slice, SliceMut, ValueType};
use crate::collectives::call::Status;
use crate::collectives::dtype::Dtype;
use crate::error::{CommError, require};

/// Elements of one type at an address.
pub struct Buffer {
    address: *mut u8,
    count: usize,
    dtype: Dtype,
    /// Dropped when the operation no longer uses the memory.
    _owner: Option<Box<dyn Any + Send>>,
}

// SAFETY: the maker of a buffer promises that nothing else uses its memory while an operation does, on
// whatever thread. The owner is `Send`.
#[allow(unsafe_code)]
unsafe impl Send for Buffer {}

#[allow(unsafe_code)]
impl Buffer {
    /// Describes `count` elements of type `dtype` at `address`.
    ///
    /// # Safety
    /// From the call that gets this buffer until the operation is done:
    ///
    /// - `address` is aligned for the type, and `count` initialised elements are there, which are valid
    ///   values
    ///   of the type: 0 or 1 for `bool`. If `count` is 0, `address` may be anything.
    /// - As [receive buffer](Operation::recv): nothing else accesses the elements. As
    ///   [send buffer](Operation::send): nothing writes to them.
    ///
    /// An operation is done when [`Group::run`] returns or the [`Work`](crate::Work) is completed, whatever
    /// its result. If the handle is dropped, it is done when the [owner](Self::owned_by) is dropped.
    #[must_use]
    pub unsafe fn new(address: *mut u8, count: usize, dtype: Dtype) -> Self {
        Self { address, count, dtype, _owner: None }
    }

    /// Lets the buffer own `owner`, which keeps its memory valid. The owner is dropped when the operation is
    /// done, on any thread; [`Work::wait`](crate::Work::wait) returns it within the buffer.
    #[must_use]
    pub fn owned_by(self, owner: impl Any + Send) -> Self {
        Self { _owner: Some(Box::new(owner)), ..self }
    }

    /// Returns the address for a slice: any aligned one if there are no elements.
    fn start(&self) -> *mut u8 {
        if self.count == 0 { std::ptr::without_provenance_mut(align_of::<u128>()) } else { self.address }
    }

    fn as_slice(&self) -> Slice<'_> {
        // SAFETY: `new` promises it for as long as an operation borrows this buffer.
        unsafe { Slice::from_raw_parts(self.start(), self.count, ValueType::element(self.dtype)) }
    }

    fn as_slice_mut(&mut self) -> SliceMut<'_> {
        // SAFETY: `new` promises it for as long as an operation borrows this buffer.
        unsafe { SliceMut::from_raw_parts(self.start(), self.count, ValueType::element(self.dtype)) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, count, dtype, .. } = self;
        f.debug_struct("Buffer")
            .field("address", address)
            .field("count", count)
            .field("dtype", dtype)
            .finish_non_exhaustive()
    }
}

/// A call and its arguments, with the meaning of the method of [`Group`] of that name. Calls in place, and
/// those of one buffer, use the receive buffer only. `Recv` is from any rank if `from` is `None`.
#[derive(Debug, Clone)]
#[non_exhaustive]
#[allow(missing_docs)] // documented at the methods of `Group`
pub enum Call {
    AllReduce { op: Reduction },
    AllReduceInto { op: Reduction },
    Broadcast { root: usize },
    Reduce { op: Reduction, root: usize },
    ReduceInto { op: Reduction, root: usize },
    Scan { op: Reduction },
    ExclusiveScan { op: Reduction },
    AllGather,
    AllGatherInPlace,
    ReduceScatter { op: Reduction },
    ReduceScatterInPlace { op: Reduction },
    Gather { root: usize },
    Scatter { root: usize },
    AllToAll,
    AllToAllInPlace,
    AllGatherV { lens: Vec<usize> },
    ReduceScatterV { lens: Vec<usize>, op: Reduction },
    GatherV { lens: Vec<usize>, root: usize },
    ScatterV { lens: Vec<usize>, root: usize },
    AllToAllV { send_lens: Vec<usize>, recv_lens: Vec<usize> },
    Barrier,
    Send { to: usize, tag: u32 },
    Recv { from: Option<usize>, tag: u32 },
}

/// A call with its buffers.
#[derive(Debug)]
#[must_use = "an operation does nothing until a group carries it out"]
pub struct Operation {
    call: Call,
    buffers: Buffers,
}

/// The buffers of an operation, and the status of the message if it is a receive.
#[derive(Debug)]
pub struct Buffers {
    /// The buffer that was read.
    pub send: Option<Buffer>,
    /// The buffer that was filled or changed.
    pub recv: Option<Buffer>,
    /// The status of the received message.
    pub status: Option<Status>,
}

impl Operation {
    /// Makes an operation without buffers.
    pub fn new(call: Call) -> Self {
        Self { call, buffers: Buffers { send: None, recv: None, status: None } }
    }

    /// Sets the buffer that the operation reads.
    pub fn send(mut self, buffer: Buffer) -> Self {
        self.buffers.send = Some(buffer);
        self
    }

    /// Sets the buffer that the operation fills or changes.
    pub fn recv(mut self, buffer: Buffer) -> Self {
        self.buffers.recv = Some(buffer);
        self
    }
}

impl Sealed for Buffers {}

impl OperationOutput for Buffers {
    fn set_status(&mut self, status: Status) {
        self.status = Some(status);
    }
}

impl HostOperation for Operation {
    type Output = Buffers;
    type Arguments = Call;

    fn into_parts(self) -> (Buffers, Call) {
        (self.buffers, self.call)
    }

    fn prepare<'a>(group: &Group, buffers: &'a mut Buffers, call: &Call) -> Prepared<'a> {
        let Buffers { send, recv, .. } = buffers;
        match call {
            Call::Barrier => group.prepare_barrier().into_prepared(group),
            Call::Send { to, tag } => group.prepare_send(given(send)?, *to, *tag),
            Call::Recv { from, tag } => group.prepare_recv(changed(recv)?, *from, *tag),
            Call::AllReduce { op } => group.prepare_all_reduce(changed(recv)?, op).into_prepared(group),
            Call::Broadcast { root } => group.prepare_broadcast(changed(recv)?, *root).into_prepared(group),
            Call::Reduce { op, root } => group.prepare_reduce(changed(recv)?, op, *root).into_prepared(group),
            Call::Scan { op } => group.prepare_scan(changed(recv)?, op),
            Call::ExclusiveScan { op } => group.prepare_exclusive_scan(changed(recv)?, op),
            Call::AllGatherInPlace => group.prepare_all_gather_in_place(changed(recv)?).into_prepared(group),
            Call::ReduceScatterInPlace { op } => {
                group.prepare_reduce_scatter_in_place(changed(recv)?, op).into_prepared(group)
            }
            Call::AllToAllInPlace => group.prepare_all_to_all_in_place(changed(recv)?).into_prepared(group),
            Call::AllReduceInto { op } => {
                group.prepare_all_reduce_into(both(send, recv)?, op).into_prepared(group)
            }
            Call::AllGather => group.prepare_all_gather(both(send, recv)?).into_prepared(group),
            Call::ReduceScatter { op } => {
                group.prepare_reduce_scatter(both(send, recv)?, op).into_prepared(group)
            }
            Call::AllToAll => group.prepare_all_to_all(both(send, recv)?).into_prepared(group),
            Call::AllGatherV { lens } => group.prepare_all_gather_v(both(send, recv)?, lens),
            Call::ReduceScatterV { lens, op } => group.prepare_reduce_scatter_v(both(send, recv)?, lens, op),
            Call::AllToAllV { send_lens, recv_lens } => {
                group.prepare_all_to_all_v(both(send, recv)?, send_lens, recv_lens)
            }
            Call::ReduceInto { op, root } => {
                group.prepare_reduce_into(any(send, recv)?, op, *root).into_prepared(group)
            }
            Call::Gather { root } => group.prepare_gather(any(send, recv)?, *root).into_prepared(group),
            Call::Scatter { root } => group.prepare_scatter(any(send, recv)?, *root).into_prepared(group),
            Call::GatherV { lens, root } => group.prepare_gather_v(any(send, recv)?, lens, *root),
            Call::ScatterV { lens, root } => group.prepare_scatter_v(any(send, recv)?, lens, *root),
        }
    }
}

fn both<'a>(send: &'a mut Option<Buffer>, recv: &'a mut Option<Buffer>) -> Result<SendRecv<'a>, CommError> {
    match (&*send, &*recv) {
        (None, _) => Err(missing("send")),
        (_, None) => Err(missing("receive")),
        (Some(_), Some(_)) => any(send, recv),
    }
}

/// Returns both buffers of a call that needs only one of them on ranks other than the root. An absent buffer
/// is empty.
fn any<'a>(send: &'a mut Option<Buffer>, recv: &'a mut Option<Buffer>) -> Result<SendRecv<'a>, CommError> {
    let dtypes = [&*send, &*recv].map(|buffer| buffer.as_ref().map(|buffer| buffer.dtype));
    if let [Some(sent), Some(received)] = dtypes {
        require(sent == received, || {
            format!("the send buffer has elements of {sent}, and the receive buffer of {received}")
        })?;
    }
    let Some(dtype) = dtypes[0].or(dtypes[1]) else {
        return Err(CommError::InvalidArgument("the call needs a send or a receive buffer".to_owned()));
    };
    let (send, recv) = (send.get_or_insert_with(|| empty(dtype)), recv.get_or_insert_with(|| empty(dtype)));
    Ok((send.as_slice(), recv.as_slice_mut()))
}

#[allow(unsafe_code)]
fn empty(dtype: Dtype) -> Buffer {
    // SAFETY: there are no elements.
    unsafe { Buffer::new(std::ptr::null_mut(), 0, dtype) }
}

fn given(send: &Option<Buffer>) -> Result<Slice<'_>, CommError> {
    send.as_ref().map(Buffer::as_slice).ok_or_else(|| missing("send"))
}

fn changed(recv: &mut Option<Buffer>) -> Result<SliceMut<'_>, CommError> {
    recv.as_mut().map(Buffer::as_slice_mut).ok_or_else(|| missing("receive"))
}

fn missing(what: &str) -> CommError {
    CommError::InvalidArgument(format!("the call needs a {what} buffer"))
}
