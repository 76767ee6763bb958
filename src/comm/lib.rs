//! Process groups and collectives for distributed programs.

mod dtype;
mod kernels;
mod plan;

pub use dtype::{Dtype, Element, ReduceOp};
