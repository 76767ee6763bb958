//! Collectives as arithmetic: descriptors of calls, element types, the sums of elements, and the plans that
//! say which rank sends which data when. Nothing here does I/O.

pub(crate) mod call;
pub(crate) mod dtype;
pub(crate) mod kernels;
mod named_enum;
pub(crate) mod plan;
