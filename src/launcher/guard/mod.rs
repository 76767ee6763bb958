//! The guard stands between launcher and workers, so that nothing outlives either.
//!
//! ```text
//! launcher (subreaper) ── socket ── guard (subreaper, own session) ── worker 0, worker 1, ...
//! ```
//!
//! If the launcher dies, the guard sees its socket close and kills all that descends from it. If the
//! guard dies, the kernel kills the workers (PDEATHSIG), their descendants fall to the launcher, and it
//! kills those. Only if both are killed in the same instant may a process that left its worker's group
//! survive.

mod link;
mod memory;
mod process;
mod procfs;
mod protocol;
mod sweep;

pub(crate) use link::GuardLink;
pub(crate) use process::run;
pub(crate) use procfs::signal_set;
pub(crate) use protocol::{FromGuard, Leftover, SpawnRequest, ToGuard, WorkerId};
pub(crate) use sweep::{kill_all, reap};
