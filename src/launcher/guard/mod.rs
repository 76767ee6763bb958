//! The guard process runs between launcher and workers, so that no process outlives the launcher or the
//! guard.
//!
//! ```text
//! launcher (subreaper) ── socket ── guard (subreaper, own session) ── worker 0, worker 1, ...
//! ```
//!
//! If the launcher dies, the guard sees its socket close and kills all its descendants. If the guard dies,
//! the kernel kills the workers (PDEATHSIG). The workers' descendants become children of the launcher, which
//! kills them. Only if launcher and guard die in the same instant may a process that left its worker's
//! process group survive.

mod link;
mod memory;
mod process;
mod procfs;
mod protocol;
mod sweep;

pub(crate) use link::GuardProcess;
pub(crate) use process::run;
pub(crate) use protocol::{FromGuard, Orphan, SpawnRequest, ToGuard, WorkerId};
pub(crate) use sweep::{kill_all, reap};
