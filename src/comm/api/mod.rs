//! The public interface: groups of ranks and their operations (as methods and as values, `op`), meshes, GPUs,
//! and the ways to join a job.

pub(crate) mod backend;
#[cfg(feature = "nccl")]
pub mod device;
pub(crate) mod group;
mod logger;
pub(crate) mod mesh;
pub mod op;
pub mod raw;
pub(crate) mod reduction;
pub(crate) mod session;
pub(crate) mod spawn;
