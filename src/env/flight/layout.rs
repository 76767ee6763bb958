//! The layout of a recording: words of 8 bytes, little endian. Pure.
//!
//! ```text
//! header          HEADER_WORDS
//! groups          GROUPS × GROUP_WORDS
//! calls           ENTRIES × ENTRY_WORDS     a ring: call number n is in slot n % ENTRIES
//! ```
//!
//! The first word of a group and of a call is its lock: twice its number, plus 1 while somebody writes there. A
//! process that was killed while it wrote leaves an odd lock, and that slot is not read.

use crate::{ExitCause, Generation};

/// The first word: `cvkflght`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"cvkflght");
/// Version of the layout, in the second word.
pub const VERSION: u64 = 1;

/// Words of the header.
pub const HEADER_WORDS: usize = 256;
/// Groups that a recording has room for; one that has ended makes room for another.
pub const GROUPS: usize = 64;
/// Words of a group.
pub const GROUP_WORDS: usize = 64;
/// Calls that a recording has room for: the last ones.
pub const ENTRIES: usize = 1024;
/// Words of a call.
pub const ENTRY_WORDS: usize = 16;
/// Words of a recording.
pub const FILE_WORDS: usize = HEADER_WORDS + GROUPS * GROUP_WORDS + ENTRIES * ENTRY_WORDS;
/// Bytes of a recording.
pub const FILE_BYTES: usize = 8 * FILE_WORDS;

/// Ranks of a group that are listed with their ranks in the world.
pub const LISTED_RANKS: usize = 64;
/// Ranks that are named of those that a call waits for.
pub const LISTED_PEERS: usize = 6;
/// Calls are numbered from 1 up to here.
pub const LAST_NUMBER: u64 = u64::MAX >> 1;

/// Where words of the header stand that change.
pub mod header {
    /// The number of calls so far, which is the number of the last.
    pub const CLAIMED: usize = 2;
    /// Calls that were not recorded because two threads met in one slot.
    pub const LOST: usize = 3;
    /// Two words of [`super::Exit`], which the launcher writes when the process is gone.
    pub const EXIT: usize = 15;
}

/// Where words of a call stand that change, from its first.
pub mod entry {
    /// See [`super::lock`].
    pub const LOCK: usize = 0;
    /// See [`super::tags`].
    pub const TAGS: usize = 1;
    /// Its number within its group.
    pub const SEQ: usize = 2;
    /// When it began to move data.
    pub const STARTED: usize = 6;
    /// When it ended.
    pub const ENDED: usize = 7;
    /// Bytes received so far; sent so far in the next word.
    pub const RECEIVED: usize = 8;
    /// See [`super::waiting`]; the ranks follow, two in a word.
    pub const WAITING: usize = 12;
}

/// Index of the first word of a group.
#[must_use]
pub const fn group_at(slot: usize) -> usize {
    HEADER_WORDS + (slot % GROUPS) * GROUP_WORDS
}

/// Index of the first word of a call.
#[inline]
#[must_use]
pub const fn entry_at(number: u64) -> usize {
    HEADER_WORDS + GROUPS * GROUP_WORDS + (number % ENTRIES as u64) as usize * ENTRY_WORDS
}

/// The index of the first word of each group and of each call, and how many words it has.
pub fn slots() -> impl Iterator<Item = (usize, usize)> {
    let groups = (0..GROUPS).map(|slot| (group_at(slot), GROUP_WORDS));
    groups.chain((0..ENTRIES as u64).map(|slot| (entry_at(slot), ENTRY_WORDS)))
}

/// The first word of a group or call that nobody is writing to.
#[inline]
#[must_use]
pub const fn lock(number: u64) -> u64 {
    number << 1
}

/// Which process made a recording, and when.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Header {
    /// RANK, if it was set.
    pub rank: Option<u32>,
    /// WORLD_SIZE, if it was set.
    pub world_size: Option<u32>,
    /// LOCAL_RANK, if it was set.
    pub local_rank: Option<u32>,
    /// TORCHELASTIC_RESTART_COUNT.
    pub restart_count: u32,
    /// Which process.
    pub process: Process,
    /// The generation that the launcher gave.
    pub generation: Option<Generation>,
    /// When it began to record, in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// The same moment by the clock of all times below, CLOCK_MONOTONIC, which all processes of a boot share.
    pub started_ns: u64,
    /// TORCHELASTIC_RUN_ID; at most 120 bytes of it.
    pub run_id: String,
    /// Name of the host; at most 120 bytes of it.
    pub host: String,
    /// The writer's words, see [`super::names`].
    pub names: String,
}

/// A process, told apart from all others that ever were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Process {
    /// Its pid, in its own namespace.
    pub pid: u32,
    /// When it was started, in clock ticks since the boot; 0 if that is not known.
    pub start_ticks: u64,
    /// Inode of its pid namespace; 0 if that is not known.
    pub pid_namespace: u64,
    /// Boot of the kernel that it ran on; 0 if that is not known.
    pub boot_id: u128,
}

/// How the process ended, as its launcher saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// When, in nanoseconds since 1970.
    pub unix_ns: u64,
    /// How.
    pub cause: ExitCause,
    /// It had been told to, because of others or by the user.
    pub stopped: bool,
}

/// A group that the process was in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its number in this recording, from 1.
    pub number: u32,
    /// How far it is.
    pub state: GroupState,
    /// Why it failed, if it did, as far as this rank knows.
    pub cause: Option<Cause>,
    /// This process's rank in it.
    pub rank: u32,
    /// Its number of ranks.
    pub size: u32,
    /// What tells it from others of the same generation on the wire.
    pub id: u64,
    /// The incarnation of the job that it belongs to, once that is known.
    pub generation: Option<Generation>,
    /// When its ranks began to look for each other.
    pub made_ns: u64,
    /// When it ended; 0 as long as it has not.
    pub ended_ns: u64,
    /// Its name; at most 152 bytes of it.
    pub name: String,
    /// The ranks in the world of its ranks, at most [`LISTED_RANKS`] of them; `None` if they are the same.
    pub origin: Option<Vec<u32>>,
}

/// How far a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupState {
    /// Its ranks look for each other.
    Forming,
    /// They have found together.
    Formed,
    /// It never formed.
    Unformed,
    /// It has failed.
    Failed,
    /// This rank has left it in good order.
    Left,
}

/// Why a group has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// What happened.
    pub kind: CauseKind,
    /// The rank to blame, if there is one.
    pub blamed: Option<u32>,
    /// The rank that noticed.
    pub by: u32,
}

/// What can happen to a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CauseKind {
    /// A rank is gone.
    Lost,
    /// A call took too long.
    Timeout,
    /// Two ranks made different calls.
    Mismatch,
    /// The program gave up.
    Aborted,
    /// Something else.
    Other,
}

/// A call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its number in this recording, from 1.
    pub number: u64,
    /// The number of its group in this recording.
    pub group: u32,
    /// How far it is.
    pub state: State,
    /// What kind of call.
    pub operation: Operation,
    /// One more than the number of its algorithm among the writer's names; 0 if there is only one.
    pub algorithm: u8,
    /// Of a collective: which one of its group, from 0. Of a message that is sent: which one to that rank.
    pub seq: u64,
    /// What was called: operation, element type, reduction, 0, root or tag (4 bytes), count (8 bytes).
    pub call: [u8; 16],
    /// When the engine took it, see [`Header::started_ns`].
    pub enqueued_ns: u64,
    /// When its turn came; 0 as long as it has not.
    pub started_ns: u64,
    /// When it ended; 0 as long as it has not.
    pub ended_ns: u64,
    /// Bytes received so far.
    pub received_bytes: u64,
    /// Bytes sent so far.
    pub sent_bytes: u64,
    /// Bytes that it is to receive.
    pub to_receive_bytes: u64,
    /// Bytes that it is to send.
    pub to_send_bytes: u64,
    /// The thread that handed it in, as the kernel numbers them.
    pub thread: u32,
    /// How many ranks it waits for; 0 if it has not had to wait.
    pub waits_for: u32,
    /// Their ranks in the group, the first [`LISTED_PEERS`] of them. Of a message: the other rank.
    pub peers: [u32; LISTED_PEERS],
}

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Others are before it.
    Queued,
    /// It is being carried out.
    Running,
    /// It has succeeded.
    Done,
    /// It has failed.
    Failed,
}

/// What kind of call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// All ranks of the group make it.
    Collective,
    /// A message to a rank.
    Send,
    /// A message from a rank, or from any.
    Recv,
    /// A wait for a message that could be received; of the call only the tag counts.
    Probe,
}

/// The word of a call that holds its group, state, operation and algorithm.
#[inline]
#[must_use]
pub fn tags(group: u32, state: State, operation: Operation, algorithm: u8) -> u64 {
    u64::from(group) | (state as u64) << 32 | (operation as u64) << 40 | u64::from(algorithm) << 48
}

/// The word of a call that holds its thread and the number of ranks that it waits for.
#[inline]
#[must_use]
pub fn waiting(thread: u32, ranks: u32) -> u64 {
    pair(thread, ranks)
}

/// Two halves of a word.
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

/// An optional number: `u32::MAX` stands for none.
const NONE: u32 = u32::MAX;

fn some(number: u32) -> Option<u32> {
    (number != NONE).then_some(number)
}

/// Writes the length of `text` into the first word and as much of it as there is room for behind it.
fn put_text(words: &mut [u64], text: &str) {
    let room = 8 * (words.len() - 1);
    let end = (0..=room.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    words[0] = end as u64;
    for (word, bytes) in words[1..].iter_mut().zip(text.as_bytes()[..end].chunks(8)) {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(eight);
    }
}

fn get_text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let length = usize::try_from(words[0]).unwrap_or(usize::MAX).min(bytes.len());
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

/// The same for what is shown: it must not steer a terminal.
fn get_line(words: &[u64]) -> String {
    get_text(words).replace(char::is_control, "\u{fffd}")
}

fn generation(low: u64, high: u64) -> Option<Generation> {
    let number = u128::from(low) | u128::from(high) << 64;
    (number != 0).then(|| Generation::from_bytes(number.to_le_bytes()))
}

/// Two words for a number of 128 bits.
fn halves(number: u128) -> [u64; 2] {
    [number as u64, (number >> 64) as u64]
}

fn generation_words(generation: Option<Generation>) -> [u64; 2] {
    halves(generation.map_or(0, |generation| u128::from_le_bytes(generation.to_bytes())))
}

impl Header {
    /// The header's words; nothing recorded yet.
    #[must_use]
    pub fn encode(&self) -> Box<[u64; HEADER_WORDS]> {
        let mut words = Box::new([0; HEADER_WORDS]);
        let number = |number: Option<u32>| number.unwrap_or(NONE);
        words[0] = MAGIC;
        words[1] = VERSION;
        words[4] = pair(number(self.rank), number(self.world_size));
        words[5] = pair(number(self.local_rank), self.restart_count);
        words[6] = u64::from(self.process.pid);
        words[7] = self.process.start_ticks;
        words[8] = self.process.pid_namespace;
        words[9..11].copy_from_slice(&halves(self.process.boot_id));
        words[11..13].copy_from_slice(&generation_words(self.generation));
        words[13] = self.started_unix_ns;
        words[14] = self.started_ns;
        put_text(&mut words[17..33], &self.run_id);
        put_text(&mut words[33..49], &self.host);
        put_text(&mut words[49..], &self.names);
        words
    }

    /// The header in `words`, whose first two were looked at.
    #[must_use]
    pub fn decode(words: &[u64; HEADER_WORDS]) -> Self {
        Self {
            rank: some(low(words[4])),
            world_size: some(high(words[4])),
            local_rank: some(low(words[5])),
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
    /// Its words, for [`header::EXIT`].
    #[must_use]
    pub fn encode(&self) -> [u64; 2] {
        let (kind, number) = match self.cause {
            ExitCause::Code(code) => (1, code),
            ExitCause::Signal(signal) => (2, signal),
        };
        [self.unix_ns, pair(number.cast_unsigned(), kind | u32::from(self.stopped) << 8)]
    }

    /// The end in `words`; `None` if the process has not ended, as far as anybody has written.
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
    /// Its words, the lock included.
    #[must_use]
    pub fn encode(&self) -> [u64; GROUP_WORDS] {
        let mut words = [0; GROUP_WORDS];
        let kind = self.cause.map_or(0, |cause| 1 + cause.kind as u64);
        words[0] = lock(u64::from(self.number));
        words[1] = self.state as u64 | kind << 8;
        words[2] = pair(self.rank, self.size);
        words[3] = self.id;
        words[4..6].copy_from_slice(&generation_words(self.generation));
        words[6] = self.made_ns;
        words[7] = self.ended_ns;
        if let Some(Cause { blamed, by, .. }) = self.cause {
            words[8] = pair(blamed.unwrap_or(NONE), by);
        }
        let listed = self.origin.as_ref().map(|origin| &origin[..origin.len().min(LISTED_RANKS)]);
        words[9] = listed.map_or(u64::MAX, |listed| listed.len() as u64);
        put_text(&mut words[12..32], &self.name);
        for (word, ranks) in words[32..].iter_mut().zip(listed.unwrap_or_default().chunks(2)) {
            *word = pair(ranks[0], ranks.get(1).copied().unwrap_or(NONE));
        }
        words
    }

    /// The rank in the world of one of its ranks; one that is not listed keeps its number.
    #[must_use]
    pub fn world_rank(&self, rank: u32) -> u32 {
        let listed = self.origin.as_ref().and_then(|origin| origin.get(rank as usize));
        listed.copied().unwrap_or(rank)
    }

    /// The group in `words`; `None` if there is none, or it was not written to its end.
    #[must_use]
    pub fn decode(words: &[u64; GROUP_WORDS]) -> Option<Self> {
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
            cause: kind.map(|kind| Cause { kind, blamed: some(low(words[8])), by: high(words[8]) }),
            rank: low(words[2]),
            size: high(words[2]),
            id: words[3],
            generation: generation(words[4], words[5]),
            made_ns: words[6],
            ended_ns: words[7],
            name: get_line(&words[12..32]),
            origin: listed.map(|listed| ranks().take(listed).collect()),
        })
    }
}

impl Entry {
    /// Its words, the lock included.
    #[inline]
    #[must_use]
    pub fn encode(&self) -> [u64; ENTRY_WORDS] {
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

    /// The call in `words`; `None` if there is none, or it was not written to its end.
    #[must_use]
    pub fn decode(words: &[u64; ENTRY_WORDS]) -> Option<Self> {
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

    /// Ranks that it waits for, as far as they are listed.
    #[must_use]
    pub fn listed_peers(&self) -> &[u32] {
        &self.peers[..(self.waits_for as usize).min(LISTED_PEERS)]
    }
}
