//! Process groups and collectives for distributed programs.

mod bootstrap;
mod call;
mod cause;
mod dtype;
mod engine;
mod error;
mod frame;
mod group;
mod kernels;
mod links;
mod options;
mod plan;
mod session;
#[cfg(test)]
mod testing;

pub use call::{Call, CallKind};
pub use dtype::{Dtype, Element, ReduceOp};
pub use error::{CommError, Loss, Place};
pub use group::Group;
pub use options::{GroupOptions, Listen};
pub use session::{Session, World, init};
