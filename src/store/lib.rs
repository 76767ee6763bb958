//! Key-value stores through which the processes of a job find each other.
//!
//! [`Store`] is what the rest of convoke uses; behind it stand the c10d TCPStore protocol of
//! torch.distributed (client and server), a file on a shared file system, a map in memory, and
//! prefixes over any of them.

mod error;
mod store;

pub use error::StoreError;
pub use store::Store;
