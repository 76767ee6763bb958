//! Process groups and collectives for distributed programs.
//!
//! ```
//! use convoke_comm::ReduceOp;
//!
//! # fn main() -> Result<(), convoke_comm::CommError> {
//! let world = convoke_comm::init()?; // the launcher's job; without a launcher, a world of one rank
//! let mut gradients = vec![world.rank() as f32; 1000];
//! world.all_reduce(&mut gradients, ReduceOp::Avg)?;
//! if world.rank() == 0 {
//!     println!("{} ranks, average {}", world.size(), gradients[0]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - [`init`] and [`Session`] create the [`World`] from the variables of a launcher, a URL or a store.
//! - [`spawn()`] starts ranks without a launcher, as processes of this program.
//! - [`Group`] has the collectives and messages; [`Group::new`] needs a store and no environment.
//! - [`Mesh`] arranges a group's ranks along named axes, to combine tensor, data and other parallelism.
//! - [`Element`], [`ReduceOp`] and [`Reduction`] define element types and reductions.
//! - [`CommError`] names the rank, the cause, and how far the call came; all ranks get the same cause.
//!
//! - [`Nonblocking`] and [`Work`] are the nonblocking operations: in scopes, as futures, with callbacks.
//!
//! A thread that waits for an operation carries out its transfers. The first nonblocking operation starts a
//! background thread; nothing runs while no operation is in progress. `docs/internals/collectives.md`
//! describes the internals.
//!
//! Each layer depends only on those before it. The modules of one layer do not depend on each other:
//!
//! - `dtype` (element types), `json`, `frame` (message headers), `options`, `limits`, `fault`, `nccl` (the
//!   library)
//! - `call` (descriptors of calls), `kernels` (arithmetic), `links` (bytes between two ranks)
//! - `plan` (schedules of transfers), `error`
//! - `buffer` (memory of an operation), `reduction`, `cause` (why a group ends), `logger` (log messages)
//! - `shm` (memory that the ranks of a host share), `flight` (flight recorder)
//! - `engine` (runs operations, detects failures)
//! - `bootstrap` (from a store to connected ranks)
//! - `group` (the operations of a group of ranks)
//! - `device` (operations on GPUs), `backend`, `mesh`, `session` (joins a job), `spawn`
//!
//! `docs/reference/joining.md` describes `session` and `spawn`.

mod backend;
mod bootstrap;
mod buffer;
mod call;
mod cause;
#[cfg(feature = "nccl")]
pub mod device;
mod dtype;
mod engine;
mod error;
mod fault;
mod flight;
mod frame;
mod group;
mod json;
mod kernels;
mod limits;
mod links;
mod logger;
mod mesh;
#[cfg(feature = "nccl")]
pub mod nccl;
mod options;
mod plan;
#[cfg(all(test, not(loom)))]
mod programs;
mod reduction;
mod session;
mod shm;
mod spawn;

pub use backend::{Backend, is_available};
pub use call::{Call, CallKind, Envelope};
pub use convoke_env::{Generation, Token};
pub use convoke_store::Store;
pub use dtype::{Dtype, Element, ReduceOp};
pub use error::{CallContext, CommError, LossReason};
#[cfg(feature = "fault-points")]
#[doc(hidden)]
pub use fault::{FaultPoint, on_fault_point};
#[cfg(feature = "bench")]
#[doc(hidden)]
pub use flight::cost::flight_costs;
pub use group::Group;
pub use group::alloc::SharedBuffer;
pub use group::buffers::{AnySource, Buffer, BufferMut, List, Lists, OperationBuffers};
pub use group::messages::Batch;
pub use group::nonblocking::Nonblocking;
pub use group::work::{Work, wait_all, wait_any};
pub use half::{bf16, f16};
pub use mesh::Mesh;
pub use num_complex::Complex;
pub use options::{GroupOptions, Listen};
pub use reduction::Reduction;
pub use session::{Session, World, init, is_elastic, is_initialized};
pub use spawn::{Spawn, SpawnError, spawn};

/// Counts allocations, so that tests can bound the memory of decoders.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: convoke_testkit::memory::CountingAllocator = convoke_testkit::memory::CountingAllocator;
