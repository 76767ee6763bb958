//! The layout of a recording: words of 8 bytes, little endian. Pure.
//!
//! ```text
//! header          HEADER_LEN
//! groups          GROUPS × GROUP_LEN
//! calls           ENTRIES × ENTRY_LEN     a ring: call number n is in slot n % ENTRIES
//! ```
//!
//! Lengths and indexes are in words. The first word of a group record and of a call record is its lock
//! (a seqlock): twice the number of the group or call, plus 1 while a thread writes the record. A
//! process that was killed during a write leaves an odd lock, and readers skip that record.

mod calls;
mod groups;
mod process;
mod words;

pub use calls::{Entry, Operation, State, tags};
pub use groups::{Cause, CauseKind, Group, GroupState};
pub use process::{Exit, Header, Process};
pub use words::pair;

/// The first word of a recording: `cvkflght`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"cvkflght");
/// Version of the layout. It is the second word of a recording.
pub const VERSION: u64 = 1;

/// Length of the header, in words.
pub const HEADER_LEN: usize = 256;
/// Number of group records. A new group overwrites the record of one that has ended.
pub const GROUPS: usize = 64;
/// Length of a group record, in words.
pub const GROUP_LEN: usize = 64;
/// Number of call records. A recording keeps only the last calls.
pub const ENTRIES: usize = 1024;
/// Length of a call record, in words.
pub const ENTRY_LEN: usize = 16;
/// Length of a recording, in words.
pub const FILE_LEN: usize = HEADER_LEN + GROUPS * GROUP_LEN + ENTRIES * ENTRY_LEN;
/// Length of a recording, in bytes.
pub const FILE_BYTES: usize = 8 * FILE_LEN;

/// Maximum number of ranks of a group whose world ranks are recorded.
pub const LISTED_RANKS: usize = 64;
/// A call record lists at most this many of the ranks for which the call waits.
pub const LISTED_PEERS: usize = 6;

/// Indexes of the words of the header that change.
pub mod header {
    /// The number of calls so far, which is also the number of the last call.
    pub const CALL_COUNT: usize = 2;
    /// Number of calls that were not recorded because another thread was writing to their slot.
    pub const LOST: usize = 3;
    /// First of the two words of [`super::Exit`], which the launcher writes when the process has ended.
    pub const EXIT: usize = 15;
}

/// Indexes of the words of a call record that change, relative to its first word.
pub mod entry {
    /// The lock word, see [`super::lock`].
    pub const LOCK: usize = 0;
    /// Group, state, operation and algorithm, see [`super::tags`].
    pub const TAGS: usize = 1;
    /// The sequence number of the call in its group.
    pub const SEQ: usize = 2;
    /// Time at which the call started to transfer data.
    pub const STARTED: usize = 6;
    /// Time at which the call ended.
    pub const ENDED: usize = 7;
    /// Bytes received so far. The next word has the bytes sent so far.
    pub const RECEIVED: usize = 8;
    /// A [`pair`](super::pair) of thread and number of awaited ranks. The ranks follow, two in a word.
    pub const WAITING: usize = 12;
}

/// Returns the index of the first word of the group record in `slot`.
#[must_use]
pub const fn group_at(slot: usize) -> usize {
    HEADER_LEN + (slot % GROUPS) * GROUP_LEN
}

/// Returns the index of the first word of the record of call `number`.
#[inline]
#[must_use]
pub const fn entry_at(number: u64) -> usize {
    HEADER_LEN + GROUPS * GROUP_LEN + (number % ENTRIES as u64) as usize * ENTRY_LEN
}

/// Returns the index of the first word and the length of every group record and call record.
pub fn slots() -> impl Iterator<Item = (usize, usize)> {
    let groups = (0..GROUPS).map(|slot| (group_at(slot), GROUP_LEN));
    groups.chain((0..ENTRIES as u64).map(|slot| (entry_at(slot), ENTRY_LEN)))
}

/// Returns the lock word of the record with this number while no thread writes to the record (the
/// lowest bit is 0).
#[inline]
#[must_use]
pub const fn lock(number: u64) -> u64 {
    number << 1
}
