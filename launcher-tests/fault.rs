//! What the fault matrix orders its workers to do, and what they report: files of JSON in the job's folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What every rank of a job does; the argument of `test-worker-faults fault`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Orders {
    /// Where the files are.
    pub folder: PathBuf,
    /// What one call is.
    pub work: Work,
    /// Number of calls.
    pub calls: u64,
    /// Time between two calls.
    pub pause: Duration,
    /// Timeout of a call.
    pub timeout: Duration,
    /// How long the ranks may take to find together.
    pub init_timeout: Duration,
    /// Bound for noticing a dead host or path.
    pub peer_timeout: Duration,
    /// Whether ranks of one host share memory.
    pub shared_memory: bool,
    /// A rank that makes only so many calls, then takes its leave.
    pub early: Option<(usize, u64)>,
    /// What goes wrong; at most one thing on a rank.
    pub faults: Vec<Fault>,
}

/// What one call is, on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// Sum of one number: recursive doubling.
    Small,
    /// Sum of 64 KiB: direct exchange.
    Direct,
    /// Sum of 8 MiB: a ring.
    Ring,
    /// 4 MiB from a root that changes: a chain.
    Broadcast,
    /// No data at all.
    Barrier,
    /// 256 KiB from each rank to each other.
    AllToAll,
    /// A message of 1 MiB around all ranks: one has it, the others wait for it.
    Messages,
    /// Each rank waits for a message from the next that is never sent: nothing moves.
    Idle,
}

impl Work {
    /// All but [`Self::Idle`].
    pub const ALL: [Self; 7] = [
        Self::Small,
        Self::Ring,
        Self::Messages,
        Self::Direct,
        Self::Broadcast,
        Self::Barrier,
        Self::AllToAll,
    ];
}

/// Something goes wrong at a moment that the runtime (`src/comm/fault.rs`) or the worker (`computing`) comes to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fault {
    /// Where it happens.
    pub rank: usize,
    /// Name of the moment.
    pub point: String,
    /// The first collective or message in which it happens.
    pub seq: u64,
    /// Bytes that have moved by then, at least.
    pub bytes: usize,
    /// What happens.
    pub act: Act,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Act {
    /// SIGKILL.
    Kill,
    /// Exit with code 3, without a farewell.
    Exit,
    /// All sockets are closed; the process lives on and does nothing.
    Close,
    /// SIGKILL, after a fork whose child lives on.
    ForkAndDie,
    /// The same, and the child keeps copies of all sockets, made behind the runtime's back.
    HoldAndDie,
    /// SIGSTOP.
    Stop,
    /// Nothing for a while.
    Sleep(Duration),
    /// From now on the process may open no more descriptors.
    NoDescriptors,
}

/// How a rank has fared.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Who.
    pub rank: usize,
    /// Calls that succeeded.
    pub calls: u64,
    /// When the last call returned (or the making of the group), see [`now`].
    pub returned: u64,
    /// When the group was dropped.
    pub left: u64,
    /// Why it ended early.
    pub failed: Option<Failed>,
}

/// An error of the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// Variant of `CommError`.
    pub kind: String,
    /// Variant of `Loss`, if it has one.
    pub how: Option<String>,
    /// The rank to look at first.
    pub blamed: Option<usize>,
    /// All ranks that it names as the cause.
    pub named: Vec<usize>,
    /// Who found the cause.
    pub by: Option<usize>,
    /// Whether the ranks agreed on it through the store.
    pub confirmed: bool,
    /// In words.
    pub text: String,
}

/// Nanoseconds of a clock that all processes of the machine share, simulated hosts included.
///
/// # Panics
/// If the system has no such clock.
#[must_use]
pub fn now() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC");
    time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned()
}

/// Writes `value` to `folder/name.rank`, in one piece.
///
/// # Errors
/// Whatever the file system says.
pub fn note(folder: &Path, name: &str, rank: usize, value: &impl Serialize) -> io::Result<()> {
    let hidden = folder.join(format!(".{name}.{rank}"));
    fs::write(&hidden, serde_json::to_vec(value)?)?;
    fs::rename(hidden, folder.join(format!("{name}.{rank}")))
}

/// What was noted, if it was.
#[must_use]
pub fn noted<T: DeserializeOwned>(folder: &Path, name: &str, rank: usize) -> Option<T> {
    serde_json::from_slice(&fs::read(folder.join(format!("{name}.{rank}"))).ok()?).ok()
}
