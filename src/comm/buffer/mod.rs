//! The elements of an operation while it runs, seen as bytes.
//!
//! [`BorrowedBuffer`] is the memory of the caller, and [`SendRecvBuffers`] a simple case of it. [`PlanBuffer`] is what a plan works on: that memory, or a
//! copy of it with wider elements. Collectives use both types, over connections and in shared memory. A
//! [`Slice`] or [`SliceMut`] is a part of the caller's memory, of any element type.

mod borrowed;
mod plan_buffer;
mod send_recv;
mod slice;

pub(crate) use borrowed::{BorrowedBuffer, BytesMut};
pub(crate) use plan_buffer::{Fragment, PlanBuffer};
pub(crate) use send_recv::{CollectiveBuffers, SendRecvBuffers};
pub(crate) use slice::{Scratch, Slice, SliceMut, ValueType};
