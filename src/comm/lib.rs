//! Process groups and collectives for distributed programs.

mod call;
mod cause;
mod dtype;
mod engine;
mod error;
mod frame;
mod kernels;
mod links;
mod plan;
#[cfg(test)]
mod testing;

pub use call::{Call, CallKind};
pub use dtype::{Dtype, Element, ReduceOp};
pub use error::{CommError, Loss, Place};
