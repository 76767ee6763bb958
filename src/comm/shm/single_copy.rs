//! Single copy: a rank copies long data straight from the memory of another rank, instead of from shared memory into which the
//! other rank has copied it.
//!
//! The rank that has the data *exposes* it: it publishes the address. It keeps the data until the readers have told that they are
//! done. A reader checks after each copy that the group has not failed, because after a failure the data may have changed.

use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::errno::Errno;

use super::doorbells::HostProcesses;
use super::layout::Layout;
use super::segment::Segment;
use super::write::IS_INTEL;
use crate::collectives::call::CallKind;

/// When ranks of one host copy long data once, straight from the memory of another rank.
///
/// Without single copy, one rank copies data into shared memory, and the other rank copies it from there. Both copy at the same
/// time, so this is usually faster. Linux lets a rank read the memory of another one (`process_vm_readv`) if both belong to one
/// user, in one pid namespace, and neither Yama (`kernel.yama.ptrace_scope`) nor seccomp forbids it. The ranks try this when
/// the first group forms. If one of them cannot read, none does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SingleCopy {
    /// Never. The ranks do not try to read the memory of each other.
    Never,
    /// For the operations that take less time on this processor.
    #[default]
    Auto,
    /// For all operations for which it is implemented: messages of more than 256 KiB, and `all_to_all` and `scatter` of several
    /// rounds. For tests and measurements.
    Always,
}

impl FromStr for SingleCopy {
    type Err = String;

    /// Parses `never`, `auto` or `always`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "never" => Ok(Self::Never),
            "auto" => Ok(Self::Auto),
            "always" => Ok(Self::Always),
            _ => Err(format!("{text:?} is not never, auto or always")),
        }
    }
}

/// The conditions by which a rank decides whether to expose data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SingleCopyPolicy {
    pub(crate) setting: SingleCopy,
    /// There are more ranks than cores.
    pub(crate) is_oversubscribed: bool,
}

impl SingleCopyPolicy {
    /// Returns whether this rank may read the memory of other ranks.
    pub(super) fn reads(self) -> bool {
        self.setting != SingleCopy::Never
    }

    /// Returns whether a message of `bytes` bytes, or a collective with blocks of this size, is copied once among `ranks` ranks
    /// of the host.
    fn copies_once(self, kind: CallKind, bytes: usize, ranks: usize) -> bool {
        match self.setting {
            SingleCopy::Never => false,
            SingleCopy::Auto => *IS_INTEL && self.gains(kind, bytes, ranks),
            SingleCopy::Always => true,
        }
    }

    /// Returns whether a single copy takes less time, as measured on two cores of a Xeon (Emerald Rapids). The kernel copies more
    /// slowly than a program does. One copy gains if both ranks send and receive at the same time, or if ranks wait for a core.
    fn gains(self, kind: CallKind, bytes: usize, ranks: usize) -> bool {
        let bytes = bytes >> 10;
        match (kind, self.is_oversubscribed) {
            (CallKind::AllToAll, false) => ranks == 2 && (2 << 10..=8 << 10).contains(&bytes),
            (CallKind::Scatter, true) => bytes >= 512,
            (CallKind::PointToPoint, true) => (1 << 10..16 << 10).contains(&bytes),
            _ => false,
        }
    }
}

/// Reads the memory of the other ranks of a group, and decides when they should read that of this rank.
#[derive(Debug)]
pub(crate) struct PeerReader {
    processes: HostProcesses,
    /// The memory of the group, which has its failure flag.
    segment: Arc<Segment>,
    policy: SingleCopyPolicy,
}

impl PeerReader {
    pub(super) fn new(processes: HostProcesses, segment: Arc<Segment>, policy: SingleCopyPolicy) -> Self {
        Self { processes, segment, policy }
    }

    /// Returns whether other ranks should read the data of this rank, of `bytes` bytes for each, if they can read it.
    pub(super) fn exposes(&self, kind: CallKind, bytes: usize) -> bool {
        let HostProcesses { memory, of_rank, .. } = &self.processes;
        self.policy.copies_once(kind, bytes, of_rank.len())
            && of_rank.iter().all(|&process| memory.can_read(process))
    }

    /// Returns whether other ranks can read the `bytes` bytes at `address` of this rank.
    pub(super) fn is_readable(&self, address: usize, bytes: usize) -> bool {
        self.processes.memory.is_readable(address, bytes)
    }

    /// Copies bytes at `address` of the rank `from` of the host to `into`. Returns false if the rank has ended or the group has
    /// failed, so that `into` is not valid; other ranks or the kernel report this. Fails if the kernel refuses the copy.
    pub(super) fn read(&self, from: usize, address: u64, into: &mut [u8]) -> io::Result<bool> {
        let process = self.processes.of_rank[from];
        match self.processes.memory.read(process, address, into) {
            Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => Ok(false),
            Err(error) => Err(error),
            Ok(()) => Ok(self.segment.word(Layout::FAILURE_FLAG).load(Ordering::Acquire) == 0),
        }
    }
}
