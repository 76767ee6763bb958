//! Groups whose buffers are on GPUs: ordinary groups with a device side.
//!
//! ```text
//! driver ─► join ─► side ◄─ stream ─► batch ─► enqueue ─► words, staged, patience
//!            └► told └─► watchdog ─► watch        └─► begun
//!                            └─► ending
//! ```
//!
//! `driver` opens CUDA without panics. `join` sets up the devices if the capabilities that ranks exchange
//! allow it (`told`, pure). `side` holds the communicator and the unfinished operations of a rank. `stream`
//! and `batch` are the operations, and `enqueue` puts them on a stream. `words` (pure) maps types and
//! operations to NCCL's; `staged` does without NCCL, through host memory. `patience` bounds how long a call
//! may block, and `begun` waits for operations. `watchdog` checks progress by the rules of `watch` (pure);
//! `ending` is failure and shutdown.
//!
//! If the host side learns of a failure, such as the death of a rank, operations on GPUs end as well. A
//! failure of the device also ends the host side. Both report one cause.

mod batch;
pub(crate) mod begun;
mod buffer;
mod driver;
mod element;
mod ending;
mod enqueue;
mod error;
mod events;
mod join;
mod options;
mod patience;
mod raw;
mod registered;
pub(crate) mod side;
mod staged;
mod stream;
mod told;
mod watch;
mod watchdog;
mod words;

pub use batch::DeviceBatch;
pub use buffer::{DeviceBuffer, FirstOf};
pub use cudarc;
pub use driver::{count, of_rank, open};
pub use element::{DeviceElement, F8E4M3, F8E5M2};
pub use error::DeviceError;
pub use options::DeviceOptions;
pub use raw::RawBuffer;
pub use registered::{Registration, Unregistered};
pub use stream::OnStream;
pub use words::accepts;
