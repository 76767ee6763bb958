//! NCCL, found and loaded where a program runs: nothing of it or of CUDA is there when it is built.
//!
//! ```text
//! places ─► library ─► error
//! ```
//!
//! `places` (pure) says where it may be, `library` opens the first that is there, is new enough and has all it needs.

mod error;
mod library;
mod places;
#[cfg(test)]
mod tests;

pub use error::{NcclError, Version};
pub use library::Library;
