//! Groups whose buffers are on GPUs: the same groups, with a side on a device.
//!
//! ```text
//! driver ─► join ─► side ◄─ stream ─► batch ─► enqueue ─► words, staged, patience
//!            └► told └─► watchdog ─► watch        └─► begun
//!                            └─► ending
//! ```
//!
//! `driver` opens CUDA so that nothing panics, `join` has the ranks find together if what they tell each other allows it
//! (`told`, pure), `side` is what a rank then has: the communicator and the operations that are not done. `stream` and
//! `batch` are the operations, `enqueue` puts them on a stream; `words` (pure) says what NCCL calls them, `staged` is the
//! way without NCCL, through host memory. `patience` is how long a call may be kept on the way, `begun` what can be waited
//! for then. `watchdog` looks after it, by the rules of `watch` (pure), and `ending` is why and how it ends.
//!
//! What the host's side of a group learns, such as the death of a rank, ends the operations on GPUs as well, and the
//! other way round: one cause for all.

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
