//! The elements of an operation while it runs, seen as bytes.
//!
//! [`BorrowedBuffer`] is the memory of the caller. [`PlanBuffer`] is what a plan works on: that memory, or a
//! copy of it with wider elements. Collectives use both types, over connections and in shared memory.

mod borrowed;
mod plan_buffer;

pub(crate) use borrowed::{BorrowedBuffer, BytesMut};
pub(crate) use plan_buffer::{Fragment, PlanBuffer};
