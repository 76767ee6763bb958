//! NCCL, found and loaded where a program runs: nothing of it or of CUDA is there when it is built.
//!
//! ```text
//! places ─► library ─► functions, types, error
//!              └► communicator ─► split, free
//! ```
//!
//! `places` (pure) says where it may be, `library` opens the first that is there, is new enough and has all it needs.
//! `types` (pure) is what of the header is needed, `communicator` makes the calls, `split` that which cuts it and `free` the last one. Nothing here knows of groups.

mod communicator;
mod error;
mod free;
mod functions;
mod library;
mod places;
mod split;
#[cfg(test)]
mod tests;
mod types;

#[allow(unused)]
pub(crate) use communicator::{Communicator, Progress, Registered};
pub use error::{NcclError, Version};
#[allow(unused)]
pub(crate) use free::{Enter, LET_GO};
pub use library::Library;
#[allow(unused)]
pub(crate) use types::{Address, Op, Step, Type, UniqueId};
