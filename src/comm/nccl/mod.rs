//! NCCL, found and loaded where a program runs: nothing of it or of CUDA is there when it is built.
//!
//! ```text
//! places ─► library ─► functions, types, error
//!              └► communicator
//! ```
//!
//! `places` (pure) says where it may be, `library` opens the first that is there, is new enough and has all it needs.
//! `types` (pure) is what of the header is needed, `communicator` makes the calls. Nothing here knows of groups.

mod communicator;
mod error;
mod functions;
mod library;
mod places;
#[cfg(test)]
mod tests;
mod types;

#[allow(unused)]
pub(crate) use communicator::{Communicator, Progress, Registered, Splitting};
pub use error::{NcclError, Version};
pub use library::Library;
#[allow(unused)]
pub(crate) use types::{Address, Op, Step, Type, UniqueId};
