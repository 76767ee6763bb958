//! NCCL, found and loaded at run time: the build needs neither NCCL nor CUDA.
//!
//! ```text
//! candidates ─► library ─► functions, types, error
//!              └► communicator ─► free
//! ```
//!
//! `candidates` (pure) lists where the library may be. `library` opens the first that exists, is new enough
//! and has all functions. `types` (pure) has the needed part of the header. `communicator` makes the calls,
//! `free` frees a communicator. Nothing here depends on groups.

mod candidates;
mod communicator;
mod error;
mod free;
mod functions;
mod library;
#[cfg(test)]
mod tests;
mod types;

#[allow(unused)]
pub(crate) use communicator::{Communicator, Progress, RegistrationHandle};
pub use error::{NcclError, Version};
#[allow(unused)]
pub(crate) use free::{FREE_TIMEOUT, SetDevice, is_freeing};
pub use library::Library;
#[allow(unused)]
pub(crate) use types::{Address, DataType, NcclCall, NcclFunction, RedOp, UniqueId};
