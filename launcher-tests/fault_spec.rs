//! Data that the fault matrix exchanges with its workers: the configuration as an
//! argument, reports as JSON files in the job's folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Instructions for every rank of a job; the argument of `test-worker-faults fault`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FaultTestConfig {
    /// The folder of the report files.
    pub folder: PathBuf,
    /// The operation that one call performs.
    pub operation: Operation,
    /// Number of calls.
    pub calls: u64,
    /// Pause after each call.
    pub pause: Duration,
    /// Timeout of one call.
    pub timeout: Duration,
    /// Timeout of the group's initialization.
    pub init_timeout: Duration,
    /// Time limit for detecting a dead host or path.
    pub peer_timeout: Duration,
    /// True if ranks of one host share memory.
    pub shared_memory: bool,
    /// True if ranks of one host read long data in the memory of each other, if they share memory.
    pub single_copy: bool,
    /// A rank that leaves the group early, and the number of calls that it makes before.
    pub early_leave: Option<(usize, u64)>,
    /// Faults to inject; at most one for each rank.
    pub faults: Vec<Fault>,
}

/// The operation that one call performs, on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// All-reduce of one number, by recursive doubling.
    SmallAllReduce,
    /// All-reduce of 64 KiB, by direct exchange.
    DirectAllReduce,
    /// All-reduce of 8 MiB, by a ring.
    RingAllReduce,
    /// Broadcast of 4 MiB along a chain; the root changes with each call.
    Broadcast,
    /// Barrier, without data.
    Barrier,
    /// All-to-all with 256 KiB from each rank to each other rank.
    AllToAll,
    /// A 1 MiB message passed from rank to rank around the ring; one rank holds it while the others wait.
    MessageRing,
    /// A receive from the next rank, which never sends: no data moves.
    UnmatchedRecv,
}

impl Operation {
    /// All variants except [`Self::UnmatchedRecv`].
    pub const ALL: [Self; 7] = [
        Self::SmallAllReduce,
        Self::RingAllReduce,
        Self::MessageRing,
        Self::DirectAllReduce,
        Self::Broadcast,
        Self::Barrier,
        Self::AllToAll,
    ];
}

/// A fault to inject at a fault point of the runtime (`src/comm/fault.rs`) or of the worker (`computing`).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fault {
    /// The rank that suffers the fault.
    pub rank: usize,
    /// Name of the fault point.
    pub point: String,
    /// Sequence number of the first collective or message in which the fault may occur.
    pub seq: u64,
    /// Minimum number of bytes moved before the fault occurs.
    pub bytes: usize,
    /// The kind of fault.
    pub kind: FaultKind,
}

/// The kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// SIGKILL.
    Kill,
    /// Exit with code 3, without a leave message to the peers.
    Exit,
    /// The process closes all its sockets, then stays alive and does nothing.
    CloseSockets,
    /// SIGKILL, after a fork whose child stays alive.
    DieLeavingChild,
    /// SIGKILL, after a fork whose child stays alive and holds copies of all sockets. The runtime does not
    /// know of these copies.
    DieHoldingSockets,
    /// SIGSTOP.
    Stop,
    /// Sleep for the given time.
    Sleep(Duration),
    /// From now on the process cannot open further file descriptors.
    ExhaustDescriptors,
}

/// The result of one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The rank that reports.
    pub rank: usize,
    /// Number of calls that succeeded.
    pub calls: u64,
    /// Time at which the last call, or the creation of the group, returned; see [`now`].
    pub returned_at: u64,
    /// Time at which the group was dropped.
    pub left_at: u64,
    /// The error that ended the rank early.
    pub error: Option<ReportedError>,
}

/// An error of the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedError {
    /// Name of the `CommError` variant.
    pub kind: String,
    /// Name of the `LossReason` variant, if the error has one.
    pub loss_reason: Option<String>,
    /// The primary suspect of the error.
    pub suspect: Option<usize>,
    /// All ranks that the error names as the cause.
    pub named_ranks: Vec<usize>,
    /// The rank that detected the cause.
    pub detected_by: Option<usize>,
    /// True if the ranks agreed on the cause through the store.
    pub confirmed: bool,
    /// The error message.
    pub text: String,
}

/// Returns nanoseconds of a clock that all processes of the machine share, simulated hosts included.
///
/// # Panics
/// Panics if the system has no monotonic clock.
#[must_use]
pub fn now() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC");
    time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned()
}

/// Writes `value` to `folder/name.rank` atomically.
///
/// # Errors
/// Returns the error of the file system.
pub fn write_json(folder: &Path, name: &str, rank: usize, value: &impl Serialize) -> io::Result<()> {
    let hidden = folder.join(format!(".{name}.{rank}"));
    fs::write(&hidden, serde_json::to_vec(value)?)?;
    fs::rename(hidden, folder.join(format!("{name}.{rank}")))
}

/// Reads a value that [`write_json`] wrote; `None` if there is no such file.
#[must_use]
pub fn read_json<T: DeserializeOwned>(folder: &Path, name: &str, rank: usize) -> Option<T> {
    serde_json::from_slice(&fs::read(folder.join(format!("{name}.{rank}"))).ok()?).ok()
}
