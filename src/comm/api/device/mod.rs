//! Groups whose buffers are on GPUs: ordinary groups with a device backend.
//!
//! Each file uses only files of lower lines:
//!
//! ```text
//! stream                           a program's operations on a CUDA stream
//! batch                            NCCL's calls for a list of operations
//! memory                           the buffers of operations
//! registered                       buffers that NCCL accesses directly
//! backend                          setup, subgroups and end of a group's device backend
//! join, enqueue, watchdog          connects devices; puts calls on a stream; checks progress
//! call_wait, teardown              bounds how long a call may block; aborts or shuts down NCCL
//! operation                        finds the operations that are done, and waits for them
//! failure                          the reason why the backend has ended
//! core                             the state of the backend and of its operations
//! events, transport, process_exit  CUDA events; NCCL or host memory; threads at the end of the process
//! staged                           operations without NCCL, through host memory
//! type_mapping                     maps types and reductions to NCCL's (pure)
//! element, buffer, raw             types of elements; buffers of convoke and of other libraries
//! driver, backoff                  opens CUDA without panics; pauses between polls
//! capabilities, pending, options   comparison of all ranks' devices; unfinished operations (both pure)
//! ```
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
