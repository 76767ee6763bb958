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
//! - [`Transfer`] and [`Element`] are the types that can be moved and reduced, [`ReduceOp`] and [`Reduction`]
//!   the reductions.
//! - [`CommError`] names the rank, the cause, and how far the call came; all ranks get the same cause.
//!
//! - [`op`] has the operations as values: begun, in scopes, several at once, on GPUs. [`Work`] waits for one.
//! - [`raw`] has untyped calls, for bindings to other languages.
//!
//! # Types of other crates
//!
//! A type of another crate in a public signature ties this crate's version to that crate's. So only these may
//! occur. This crate re-exports those that a program names, so that it uses the right version:
//!
//! - [`struct@f16`] and [`bf16`] of `half`, [`Complex`] of `num-complex`: element types, which programs have
//!   as these types already.
//! - [`bytemuck::Pod`], in the bound of [`TransferType::plain`]: the proof that a type is plain data.
//! - The traits `Serialize` and `DeserializeOwned` of `serde`, in the bounds of operations on objects.
//! - [`Store`], [`Generation`], [`Token`] and errors in [`CommError`], of crates of this project with equal
//!   versions.
//! - With the feature `nccl` only: streams, contexts and buffers of `cudarc` (`device::cudarc`), and 8-bit
//!   floats of `float8`. A new version of these crates may change the interface of this feature.
//!
//! # How it works
//!
//! A thread that waits for an operation carries out its transfers. The first nonblocking operation starts a
//! background thread; nothing runs while no operation is in progress. `docs/internals/collectives.md`
//! describes the internals.
//!
//! Each layer depends only on those before it. The modules of one layer do not depend on each other:
//!
//! - `json`, `limits`, `fault`, `fence`, `nccl` (the library)
//! - `collectives` (descriptors of calls, element types, sums, plans of transfers)
//! - `transport` (bytes between two ranks)
//! - `error` (errors, and why a group ends)
//! - `buffer` (memory of an operation)
//! - `shm` (memory that the ranks of a host share), `flight` (flight recorder)
//! - `engine` (runs operations, detects failures)
//! - `bootstrap` (from a store to connected ranks; options of a group)
//! - `api` (what users call: groups, meshes, devices, sessions, spawn)
//!
//! `docs/reference/joining.md` describes `session` and `spawn`.

mod api;
mod bootstrap;
mod buffer;
mod collectives;
mod engine;
mod error;
mod fault;
mod fence;
mod flight;
mod json;
mod limits;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(all(test, not(loom)))]
mod programs;
mod shm;
mod transport;

pub use api::backend::{Backend, is_available};
#[cfg(feature = "nccl")]
pub use api::device;
pub use api::group::Group;
pub use api::group::alloc::SharedBuffer;
pub use api::group::work::{Work, wait_all, wait_any};
pub use api::mesh::Mesh;
pub use api::op;
pub use api::raw;
pub mod algorithms {
    //! The algorithms of collectives, to measure one against another.
    pub use crate::collectives::plan::algorithms::{
        Algorithms, AllGather, AllReduce, Broadcast, ParseAlgorithmsError, Reduce, ReduceScatter,
    };
}
pub use api::reduction::Reduction;
pub use api::session::{Session, World, init, is_elastic, is_initialized};
pub use api::spawn::{Spawn, SpawnError, spawn};
pub use bootstrap::options::{GroupOptions, Listen, ThreadMigration};
pub use bytemuck;
pub use collectives::call::{Call, CallKind, Status};
pub use collectives::dtype::{Dtype, Element, ReduceOp, Transfer, TransferType};
pub use convoke_env::{Generation, Token};
pub use convoke_store::Store;
pub use error::{CallContext, CommError, LossReason};
#[cfg(feature = "fault-points")]
#[doc(hidden)]
pub use fault::{FaultPoint, on_fault_point};
#[cfg(feature = "bench")]
#[doc(hidden)]
pub use flight::cost::flight_costs;
pub use half::{bf16, f16};
pub use num_complex::Complex;
pub use shm::single_copy::SingleCopy;

/// Counts allocations, so that tests can bound the memory of decoders.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: convoke_testkit::memory::CountingAllocator = convoke_testkit::memory::CountingAllocator;
