//! Key-value stores through which the processes of a job find each other.
//!
//! [`Store`] is what the rest of convoke uses; behind it stand the c10d TCPStore protocol of
//! torch.distributed ([`StoreServer`], [`TcpStore`]), a file on a shared file system
//! ([`FileStore`]), a map in memory ([`MemoryStore`]), and prefixes over any of them
//! ([`PrefixStore`]).
//!
//! `wire`, `state` and `answer` decide and are pure; `server`, `client` and `file` do the I/O.

#[cfg(not(target_os = "linux"))]
compile_error!("convoke runs on Linux only");

mod answer;
mod client;
mod close_watch;
mod error;
mod file;
mod hub;
mod keys;
mod memory;
mod prefix;
mod server;
mod state;
mod store;
mod wire;

pub use client::{KeyWatch, LastWill, TcpOptions, TcpStore};
pub use error::StoreError;
pub use file::FileStore;
pub use keys::KeyStyle;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use server::{ServeError, StoreServer, listen, raise_descriptor_limit};
pub use store::Store;
pub use wire::{MAX_KEY_BYTES, MAX_KEY_COUNT, MAX_VALUE_BYTES};
