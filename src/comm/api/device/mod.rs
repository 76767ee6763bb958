//! Groups whose buffers are on GPUs: ordinary groups with a device backend.
//!
//! ```text
//! driver ─► join ─► backend ◄─ stream ─► batch ─► enqueue ─► type_mapping, staged, call_wait
//!            │         └─► watchdog ─► pending       └─► operation
//!            └► capabilities   └─► teardown
//! ```
//!
//! `driver` opens CUDA without panics. `join` sets up the devices if the capabilities that ranks exchange
//! allow it (`capabilities`, pure). `backend` holds the communicator and the unfinished operations of a rank.
//! `stream` takes operations, `batch` makes NCCL's calls of them (`memory`: their buffers), and `enqueue` puts them on a stream. `type_mapping` (pure) maps
//! types and operations to NCCL's; `staged` does without NCCL, through host memory. `call_wait` bounds how
//! long a call may block, and `operation` waits for operations. `watchdog` checks progress by the rules of
//! `pending` (pure); `teardown` handles failure and shutdown, `process_exit` the end of the process.
//!
//! If the host side learns of a failure, such as the death of a rank, operations on GPUs end as well. A
//! failure of the device also ends the host side. Host side and device report the same cause.

mod backend;
mod backoff;
mod batch;
mod buffer;
mod call_wait;
mod capabilities;
mod core;
mod driver;
mod element;
mod enqueue;
mod events;
mod failure;
mod join;
mod memory;
mod operation;
mod options;
mod pending;
mod process_exit;
mod raw;
mod registered;
mod staged;
mod stream;
mod teardown;
mod transport;
mod type_mapping;
mod watchdog;

pub use crate::error::DeviceError;
pub use batch::DeviceOperation;
pub use buffer::{DeviceBuffer, DevicePrefix};
pub use cudarc;
pub use driver::{count, open, open_for_rank};
pub use element::{DeviceElement, F8E4M3, F8E5M2};
pub use memory::{DeviceSource, DeviceTarget};
pub use options::DeviceOptions;
pub use raw::RawBuffer;
pub use registered::{Registration, Unregistered};
pub use stream::OnStream;
pub use type_mapping::accepts;
