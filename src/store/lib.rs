//! Key-value stores through which the processes of a job exchange addresses and other small data.
//!
//! [`Store`] is the interface. It has these implementations:
//! - [`TcpStore`]: a client of a server with the c10d TCPStore protocol of torch.distributed;
//!   [`StoreServer`] is such a server.
//! - [`FileStore`]: a file on a shared file system.
//! - [`MemoryStore`]: a map in the memory of one process.
//! - [`PrefixStore`]: a prefix for all keys of another store.
//!
//! The modules `wire`, `state` and `answer` are pure. `server`, `client` and `file` do the I/O.

#[cfg(not(target_os = "linux"))]
compile_error!("convoke runs on Linux only");

mod answer;
mod call;
mod client;
mod error;
mod file;
pub mod interrupt;
mod keepalive;
mod keys;
mod memory;
mod prefix;
mod server;
mod shared_store;
mod state;
mod store;
mod wire;

pub use client::{KeyWatch, LastWill, TcpStore};
pub use error::StoreError;
pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use server::{ServeError, StoreServer, listen, raise_descriptor_limit};
pub use store::Store;
pub use wire::{MAX_KEY_BYTES, MAX_KEY_COUNT, MAX_VALUE_BYTES};
