//! Bytes between two ranks: message headers, and connections over TCP or shared memory.

pub(crate) mod frame;
pub(crate) mod links;
