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

use convoke_env::{ExitCause, Generation};
use serde::Serialize;

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
/// Largest number of a call. Calls are numbered from 1.
pub const LAST_NUMBER: u64 = u64::MAX >> 1;

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
    /// Thread and number of awaited ranks, see [`super::waiting`]. The ranks follow, two in a word.
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

/// The header of a recording: the process that made it, and the start of the recording.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Header {
    /// Value of RANK, if it was set.
    pub rank: Option<u32>,
    /// Value of WORLD_SIZE, if it was set.
    pub world_size: Option<u32>,
    /// Value of LOCAL_RANK, if it was set.
    pub local_rank: Option<u32>,
    /// Value of TORCHELASTIC_RESTART_COUNT; 0 if it was not set.
    pub restart_count: u32,
    /// The process that made the recording.
    pub process: Process,
    /// The generation that the launcher set; `None` under another launcher.
    pub generation: Option<Generation>,
    /// Start of the recording, in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// Start of the recording, in nanoseconds of CLOCK_MONOTONIC, which all processes of a boot share.
    /// The times of groups and calls use this clock.
    pub started_ns: u64,
    /// Value of TORCHELASTIC_RUN_ID, cut to 120 bytes.
    pub run_id: String,
    /// Name of the host, cut to 120 bytes.
    pub host: String,
    /// The names of operations and element types that the writer uses, see [`crate::names`].
    pub names: String,
}

/// The identity of a process. It is unique across hosts, boots and reused pids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Process {
    /// Pid in the namespace of the process.
    pub pid: u32,
    /// Start time, in clock ticks since the boot; 0 if it is not known.
    pub start_ticks: u64,
    /// Inode of the pid namespace; 0 if it is not known.
    pub pid_namespace: u64,
    /// Boot id of the kernel; 0 if it is not known.
    pub boot_id: u128,
}

/// When and how the process ended, as reported by its launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Time of the end, in nanoseconds since 1970.
    pub unix_ns: u64,
    /// Exit code or signal.
    pub cause: ExitCause,
    /// True if the launcher had stopped the process, because of another failure or at the user's
    /// request.
    pub stopped: bool,
}

/// A group of which the process was a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Number of the group in this recording, from 1.
    pub number: u32,
    /// State of the group.
    pub state: GroupState,
    /// Cause of the group's failure, as far as this rank knows it; `None` without a failure.
    pub cause: Option<Cause>,
    /// Rank of this process in the group.
    pub rank: u32,
    /// Number of ranks of the group.
    pub size: u32,
    /// Id of the group in the headers of frames between ranks. It is unique within a generation.
    pub id: u64,
    /// Generation of the job; `None` until it is known.
    pub generation: Option<Generation>,
    /// Time at which this rank started to form the group, see [`Header::started_ns`].
    pub created_ns: u64,
    /// Time at which the group ended; 0 before that.
    pub ended_ns: u64,
    /// Name of the group, cut to 152 bytes.
    pub name: String,
    /// World ranks of the group's ranks, at most [`LISTED_RANKS`]; `None` if the ranks in the group
    /// and in the world are equal.
    pub world_ranks: Option<Vec<u32>>,
}

/// The state of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupState {
    /// The ranks are connecting to each other.
    Forming,
    /// The ranks are connected.
    Formed,
    /// The ranks could not connect to each other.
    Unformed,
    /// The group has failed.
    Failed,
    /// This rank has left the group without a failure.
    Left,
}

/// The cause of a group's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// Kind of the failure.
    pub kind: CauseKind,
    /// The rank that probably caused the failure, if there is one.
    pub suspect: Option<u32>,
    /// The rank that detected the failure.
    pub reported_by: u32,
}

/// The kind of a group's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CauseKind {
    /// A rank died or its connection was lost.
    Lost,
    /// A call timed out.
    Timeout,
    /// Two ranks made different calls at the same place in the sequence of calls.
    Mismatch,
    /// The program aborted the group.
    Aborted,
    /// The group failed for another reason.
    Other,
}

/// One call of the recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Number of the call in this recording, from 1.
    pub number: u64,
    /// Number of the call's group in this recording.
    pub group: u32,
    /// State of the call.
    pub state: State,
    /// Kind of the call.
    pub operation: Operation,
    /// Index of the call's algorithm in the writer's names, plus 1; 0 if there is only one algorithm.
    pub algorithm: u8,
    /// Sequence number, from 0. Collectives are counted per group, sent messages per receiver.
    pub seq: u64,
    /// The call itself: operation, element type, reduction, 0, root or tag (4 bytes), count (8 bytes).
    pub call: [u8; 16],
    /// Time at which the call was queued, see [`Header::started_ns`].
    pub enqueued_ns: u64,
    /// Time at which the call started; 0 before that.
    pub started_ns: u64,
    /// Time at which the call ended; 0 before that.
    pub ended_ns: u64,
    /// Bytes received so far.
    pub received_bytes: u64,
    /// Bytes sent so far.
    pub sent_bytes: u64,
    /// Total bytes to receive.
    pub to_receive_bytes: u64,
    /// Total bytes to send.
    pub to_send_bytes: u64,
    /// Kernel id of the thread that made the call.
    pub thread: u32,
    /// Number of ranks for which the call waits; 0 if it has not had to wait.
    pub waits_for: u32,
    /// The first [`LISTED_PEERS`] of the ranks for which the call waits, as ranks of the group. For a
    /// message: the other rank.
    pub peers: [u32; LISTED_PEERS],
}

/// The state of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The call waits until earlier calls have ended.
    Queued,
    /// The call is running.
    Running,
    /// The call has succeeded.
    Done,
    /// The call has failed.
    Failed,
}

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// A call that all ranks of the group make.
    Collective,
    /// Sends a message to a rank.
    Send,
    /// Receives a message from a rank, or from any rank.
    Recv,
    /// Waits for a message without receiving it. Only the tag of the call has a meaning.
    Probe,
}

/// Returns the word of a call record with its group, state, operation and algorithm.
#[inline]
#[must_use]
pub fn tags(group: u32, state: State, operation: Operation, algorithm: u8) -> u64 {
    u64::from(group) | (state as u64) << 32 | (operation as u64) << 40 | u64::from(algorithm) << 48
}

/// Returns the word of a call record with its thread and the number of awaited ranks.
#[inline]
#[must_use]
pub fn waiting(thread: u32, ranks: u32) -> u64 {
    pair(thread, ranks)
}

/// Returns the 64-bit word with these lower and higher 32 bits.
#[inline]
#[must_use]
pub fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

fn byte(word: u64, at: usize) -> u8 {
    word.to_le_bytes()[at]
}

/// Stands for `None` in an optional number.
const NONE: u32 = u32::MAX;

fn optional(number: u32) -> Option<u32> {
    (number != NONE).then_some(number)
}

/// Writes a text into `words`: the length in bytes into the first word, the bytes into the next words.
/// A text that is too long is cut at a character boundary.
fn put_text(words: &mut [u64], text: &str) {
    let end = text.floor_char_boundary(8 * (words.len() - 1));
    words[0] = end as u64;
    for (word, bytes) in words[1..].iter_mut().zip(text.as_bytes()[..end].chunks(8)) {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(eight);
    }
}

/// Reads a text that [`put_text`] has written. A length beyond the available words is cut.
fn get_text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let length = usize::try_from(words[0]).unwrap_or(usize::MAX).min(bytes.len());
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

/// Reads a text that will be shown, and replaces its control characters, which could change the state
/// of a terminal.
fn get_line(words: &[u64]) -> String {
    get_text(words).replace(char::is_control, "\u{fffd}")
}

fn generation(low: u64, high: u64) -> Option<Generation> {
    let number = u128::from(low) | u128::from(high) << 64;
    (number != 0).then(|| Generation::from_bytes(number.to_le_bytes()))
}

/// Returns the two words of a number of 128 bits, the lower one first.
fn halves(number: u128) -> [u64; 2] {
    [number as u64, (number >> 64) as u64]
}

fn encode_generation(generation: Option<Generation>) -> [u64; 2] {
    halves(generation.map_or(0, |generation| u128::from_le_bytes(generation.to_bytes())))
}

impl Header {
    /// Encodes the header of a recording that has no groups and calls yet.
    #[must_use]
    pub fn encode(&self) -> Box<[u64; HEADER_LEN]> {
        let mut words = Box::new([0; HEADER_LEN]);
        let number = |number: Option<u32>| number.unwrap_or(NONE);
        words[0] = MAGIC;
        words[1] = VERSION;
        words[4] = pair(number(self.rank), number(self.world_size));
        words[5] = pair(number(self.local_rank), self.restart_count);
        words[6] = u64::from(self.process.pid);
        words[7] = self.process.start_ticks;
        words[8] = self.process.pid_namespace;
        words[9..11].copy_from_slice(&halves(self.process.boot_id));
        words[11..13].copy_from_slice(&encode_generation(self.generation));
        words[13] = self.started_unix_ns;
        words[14] = self.started_ns;
        put_text(&mut words[17..33], &self.run_id);
        put_text(&mut words[33..49], &self.host);
        put_text(&mut words[49..], &self.names);
        words
    }

    /// Decodes a header. The caller must have checked the first two words, see [`MAGIC`].
    #[must_use]
    pub fn decode(words: &[u64; HEADER_LEN]) -> Self {
        Self {
            rank: optional(low(words[4])),
            world_size: optional(high(words[4])),
            local_rank: optional(low(words[5])),
            restart_count: high(words[5]),
            process: Process {
                pid: low(words[6]),
                start_ticks: words[7],
                pid_namespace: words[8],
                boot_id: u128::from(words[9]) | u128::from(words[10]) << 64,
            },
            generation: generation(words[11], words[12]),
            started_unix_ns: words[13],
            started_ns: words[14],
            run_id: get_line(&words[17..33]),
            host: get_line(&words[33..49]),
            names: get_text(&words[49..]),
        }
    }
}

impl Exit {
    /// Encodes when and how the process ended, as the words at [`header::EXIT`].
    #[must_use]
    pub fn encode(&self) -> [u64; 2] {
        let (kind, number) = match self.cause {
            ExitCause::Code(code) => (1, code),
            ExitCause::Signal(signal) => (2, signal),
        };
        [self.unix_ns, pair(number.cast_unsigned(), kind | u32::from(self.stopped) << 8)]
    }

    /// Decodes when and how the process ended; `None` if the launcher has not written it.
    #[must_use]
    pub fn decode(words: [u64; 2]) -> Option<Self> {
        let number = low(words[1]).cast_signed();
        let cause = match byte(words[1], 4) {
            1 => ExitCause::Code(number),
            2 => ExitCause::Signal(number),
            _ => return None,
        };
        Some(Self { unix_ns: words[0], cause, stopped: byte(words[1], 5) != 0 })
    }
}

impl Group {
    /// Encodes the group record, with its lock word.
    #[must_use]
    pub fn encode(&self) -> [u64; GROUP_LEN] {
        let mut words = [0; GROUP_LEN];
        let kind = self.cause.map_or(0, |cause| 1 + cause.kind as u64);
        words[0] = lock(u64::from(self.number));
        words[1] = self.state as u64 | kind << 8;
        words[2] = pair(self.rank, self.size);
        words[3] = self.id;
        words[4..6].copy_from_slice(&encode_generation(self.generation));
        words[6] = self.created_ns;
        words[7] = self.ended_ns;
        if let Some(Cause { suspect, reported_by, .. }) = self.cause {
            words[8] = pair(suspect.unwrap_or(NONE), reported_by);
        }
        let listed =
            self.world_ranks.as_ref().map(|world_ranks| &world_ranks[..world_ranks.len().min(LISTED_RANKS)]);
        words[9] = listed.map_or(u64::MAX, |listed| listed.len() as u64);
        put_text(&mut words[12..32], &self.name);
        for (word, ranks) in words[32..].iter_mut().zip(listed.unwrap_or_default().chunks(2)) {
            *word = pair(ranks[0], ranks.get(1).copied().unwrap_or(NONE));
        }
        words
    }

    /// Returns the world rank of a rank of this group. A rank whose world rank is not recorded is
    /// returned as it is.
    #[must_use]
    pub fn world_rank(&self, rank: u32) -> u32 {
        let listed = self.world_ranks.as_ref().and_then(|world_ranks| world_ranks.get(rank as usize));
        listed.copied().unwrap_or(rank)
    }

    /// Decodes a group record; `None` if the record is empty, incomplete or malformed.
    #[must_use]
    pub fn decode(words: &[u64; GROUP_LEN]) -> Option<Self> {
        let number = u32::try_from(words[0] >> 1).ok().filter(|&number| number > 0 && words[0] & 1 == 0)?;
        let state = match byte(words[1], 0) {
            0 => GroupState::Forming,
            1 => GroupState::Formed,
            2 => GroupState::Unformed,
            3 => GroupState::Failed,
            4 => GroupState::Left,
            _ => return None,
        };
        let kind = match byte(words[1], 1) {
            0 => None,
            1 => Some(CauseKind::Lost),
            2 => Some(CauseKind::Timeout),
            3 => Some(CauseKind::Mismatch),
            4 => Some(CauseKind::Aborted),
            _ => Some(CauseKind::Other),
        };
        let listed = usize::try_from(words[9]).ok().filter(|&listed| listed <= LISTED_RANKS);
        let ranks = || words[32..].iter().flat_map(|&word| [low(word), high(word)]);
        Some(Self {
            number,
            state,
            cause: kind.map(|kind| Cause {
                kind,
                suspect: optional(low(words[8])),
                reported_by: high(words[8]),
            }),
            rank: low(words[2]),
            size: high(words[2]),
            id: words[3],
            generation: generation(words[4], words[5]),
            created_ns: words[6],
            ended_ns: words[7],
            name: get_line(&words[12..32]),
            world_ranks: listed.map(|listed| ranks().take(listed).collect()),
        })
    }
}

impl Entry {
    /// Encodes the call record, with its lock word.
    #[inline]
    #[must_use]
    pub fn encode(&self) -> [u64; ENTRY_LEN] {
        let [c0, c1, c2, c3, c4, c5, c6, c7, d0, d1, d2, d3, d4, d5, d6, d7] = self.call;
        let peers = self.peers;
        [
            lock(self.number),
            tags(self.group, self.state, self.operation, self.algorithm),
            self.seq,
            u64::from_le_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
            u64::from_le_bytes([d0, d1, d2, d3, d4, d5, d6, d7]),
            self.enqueued_ns,
            self.started_ns,
            self.ended_ns,
            self.received_bytes,
            self.sent_bytes,
            self.to_receive_bytes,
            self.to_send_bytes,
            waiting(self.thread, self.waits_for),
            pair(peers[0], peers[1]),
            pair(peers[2], peers[3]),
            pair(peers[4], peers[5]),
        ]
    }

    /// Decodes a call record; `None` if the record is empty, incomplete or malformed.
    #[must_use]
    pub fn decode(words: &[u64; ENTRY_LEN]) -> Option<Self> {
        let number = Some(words[0] >> 1).filter(|&number| number > 0 && words[0] & 1 == 0)?;
        let state = match byte(words[1], 4) {
            0 => State::Queued,
            1 => State::Running,
            2 => State::Done,
            3 => State::Failed,
            _ => return None,
        };
        let operation = match byte(words[1], 5) {
            0 => Operation::Collective,
            1 => Operation::Send,
            2 => Operation::Recv,
            3 => Operation::Probe,
            _ => return None,
        };
        let mut call = [0; 16];
        call[..8].copy_from_slice(&words[3].to_le_bytes());
        call[8..].copy_from_slice(&words[4].to_le_bytes());
        let (a, b, c) = (words[13], words[14], words[15]);
        Some(Self {
            number,
            group: low(words[1]),
            state,
            operation,
            algorithm: byte(words[1], 6),
            seq: words[2],
            call,
            enqueued_ns: words[5],
            started_ns: words[6],
            ended_ns: words[7],
            received_bytes: words[8],
            sent_bytes: words[9],
            to_receive_bytes: words[10],
            to_send_bytes: words[11],
            thread: low(words[12]),
            waits_for: high(words[12]),
            peers: [low(a), high(a), low(b), high(b), low(c), high(c)],
        })
    }

    /// Returns the ranks of the group for which the call waits, as far as they are recorded.
    #[must_use]
    pub fn listed_peers(&self) -> &[u32] {
        &self.peers[..(self.waits_for as usize).min(LISTED_PEERS)]
    }
}
