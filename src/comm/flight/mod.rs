//! The flight recorder: records the communication calls of this process in its groups, in a mapped file that
//! survives the process.
//!
//! ```text
//! FlightRecorder ─► GroupRecorder (a group) ─► CallRecord (a call)
//!   └─► CallRing ─► a file of CONVOKE_FLIGHT_DIR, mapped; or plain memory
//! ```
//!
//! Each process has one recorder for all its sessions and groups. The recorder holds the last 1024 calls of
//! all threads in the order in which they were made, and is always on. Recording a call costs one or two
//! readings of the time ([`clock`]) and some memory writes, no lock and no system call. If two threads write to one slot
//! at the same time, one of the two calls is not recorded, and no thread waits.
//!
//! The format of the file is defined in [`convoke_recorder`], since the launcher reads the file.
//!
//! The recorder is the only global state of the runtime, since a file belongs to a process. The recorder
//! covers all sessions and groups of the process, because a reader wants to know in which group a process
//! waits. No other code depends on the recorder being global.

mod call_ring;
mod clock;
#[cfg(feature = "bench")]
pub(crate) mod cost;
mod file;
mod map;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use convoke_env::{Generation, WorkerEnv, vars};
use convoke_recorder::layout::{
    self, Cause as RecordedCause, CauseKind, Entry, Group, GroupState, Header, LISTED_PEERS, LISTED_RANKS,
    Operation, State,
};
use convoke_recorder::{names, process};

use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::{Dtype, ReduceOp};
use crate::collectives::plan::Algorithm;
use crate::error::cause::{Cause, Report};
use crate::fence::{AtomicUpdate, full_fence};
use call_ring::CallRing;
pub(crate) use clock::now_ns;
use file::RecordingFile;

/// Records the groups and communication calls of this process.
#[derive(Debug)]
pub(crate) struct FlightRecorder {
    ring: CallRing,
    groups: Mutex<Groups>,
    /// `None` if the recording is a mapped file, or there is no folder.
    file: Option<RecordingFile>,
    /// One moment, read from `Instant` and as nanoseconds of CLOCK_MONOTONIC, to convert between the two.
    clock_origin: (Instant, u64),
}

/// The groups of a recording by slot; the flag is set while a group recorder uses the slot.
#[derive(Debug, Default)]
struct Groups {
    slots: Vec<(Group, bool)>,
    made: u32,
}

impl FlightRecorder {
    /// Returns the recorder of this process.
    pub(crate) fn for_process() -> &'static Self {
        static FOR_PROCESS: Mutex<Option<(u32, &'static FlightRecorder)>> = Mutex::new(None);
        let mut for_process = FOR_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id();
        // A forked child gets a recorder with a file of its own.
        if let Some((_, recorder)) = for_process.filter(|(owner, _)| *owner == pid) {
            return recorder;
        }
        let folder = std::env::var_os(vars::FLIGHT_DIR).filter(|folder| !folder.is_empty());
        let recorder = Self::new(folder.map(Into::into), WorkerEnv::from_process().ok().flatten().as_ref());
        *for_process = Some((pid, recorder));
        recorder
    }

    /// Creates a recorder that is never freed, since nonblocking calls that the program does not await may
    /// write to it until the process ends.
    fn new(folder: Option<PathBuf>, env: Option<&WorkerEnv>) -> &'static Self {
        let header = header(env);
        let (words, file) = RecordingFile::open(folder, &header);
        Self::with_memory(words, file, &header)
    }

    fn with_memory(
        words: &'static [AtomicU64],
        file: Option<RecordingFile>,
        header: &Header,
    ) -> &'static Self {
        let ring = CallRing::new(words, header);
        let clock_origin = (Instant::now(), now_ns());
        Box::leak(Box::new(Self { ring, groups: Mutex::default(), file, clock_origin }))
    }

    /// Begins to record a group whose ranks are about to connect.
    pub(crate) fn group(
        &'static self,
        name: &str,
        id: u64,
        generation: Option<Generation>,
        (rank, size): (usize, usize),
        origin: &[usize],
    ) -> GroupRecorder {
        let same = origin.iter().enumerate().all(|(rank, &first)| rank == first);
        let listed = origin.iter().take(LISTED_RANKS).map(|&rank| number(rank)).collect();
        let mut groups = self.groups();
        groups.made += 1;
        let group = Group {
            number: groups.made,
            state: GroupState::Forming,
            cause: None,
            rank: number(rank),
            size: number(size),
            id,
            generation,
            created_ns: now_ns(),
            ended_ns: 0,
            name: name.to_owned(),
            world_ranks: (!same).then_some(listed),
        };
        let number = group.number;
        let slot = groups.add(group);
        drop(groups);
        let group_recorder = GroupRecorder { recorder: self, number, slot };
        group_recorder.change(|_| {});
        group_recorder
    }

    fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Groups {
    /// Puts the group into an unused slot, otherwise into the slot of the oldest group that has ended, and
    /// returns the slot. Returns `None` if no group has ended: the new group is then not recorded, and its
    /// calls are recorded without a group name.
    fn add(&mut self, group: Group) -> Option<usize> {
        if self.slots.len() < layout::GROUPS {
            self.slots.push((group, true));
            return Some(self.slots.len() - 1);
        }
        let free = self.slots.iter().enumerate().filter(|(_, (_, in_use))| !in_use);
        let (slot, _) = free.min_by_key(|(_, (group, _))| group.number)?;
        self.slots[slot] = (group, true);
        Some(slot)
    }
}

/// The recorder of one group. Dropping it records that this rank has left the group, unless the group has
/// failed.
#[derive(Debug)]
pub(crate) struct GroupRecorder {
    recorder: &'static FlightRecorder,
    number: u32,
    slot: Option<usize>,
}

/// The description of a communication call at the time at which the program makes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallInfo {
    pub(crate) operation: Operation,
    pub(crate) call: Call,
    /// The time at which the call was made, in nanoseconds of CLOCK_MONOTONIC.
    pub(crate) at_ns: u64,
    /// The sequence number of a collective in its group; 0 for a message.
    pub(crate) seq: u64,
    pub(crate) algorithm: Option<Algorithm>,
    /// The other rank of a point-to-point message; `None` for a collective, or for a receive from any rank.
    pub(crate) peer: Option<usize>,
    pub(crate) to_receive_bytes: u64,
    pub(crate) to_send_bytes: u64,
    /// True if the call has to wait until earlier calls in the queue have ended.
    pub(crate) queued: bool,
}

impl CallInfo {
    /// Describes a collective on a GPU. The recorder learns only when it ends, not its progress.
    #[cfg(feature = "nccl")]
    pub(crate) fn device(call: Call, seq: u64, at_ns: u64) -> Self {
        Self {
            operation: Operation::Collective,
            call,
            at_ns,
            seq,
            algorithm: None,
            peer: None,
            to_receive_bytes: call.bytes(),
            to_send_bytes: call.bytes(),
            queued: false,
        }
    }
}

impl GroupRecorder {
    /// Converts an instant to nanoseconds of CLOCK_MONOTONIC.
    pub(crate) fn ns(&self, at: Instant) -> u64 {
        let (clock_origin, clock_origin_ns) = self.recorder.clock_origin;
        clock_origin_ns + at.saturating_duration_since(clock_origin).as_nanos() as u64
    }

    /// Records that the ranks have connected, in this generation.
    pub(crate) fn formed(&self, generation: Generation) {
        self.change(|group| {
            group.state = GroupState::Formed;
            group.generation = Some(generation);
        });
    }

    /// Records that the group has failed; only the first report counts.
    pub(crate) fn failed(&self, report: &Report) {
        let (kind, suspect) = match &report.cause {
            Cause::PeerLost { rank, .. } => (CauseKind::Lost, Some(*rank)),
            Cause::Timeout { missing, .. } => (CauseKind::Timeout, missing.first().copied()),
            Cause::Mismatch { rank, .. } => (CauseKind::Mismatch, Some(*rank)),
            Cause::Aborted { .. } => (CauseKind::Aborted, None),
            Cause::Exhausted { .. } => (CauseKind::Other, Some(report.by)),
            Cause::Protocol { peer, .. } => (CauseKind::Other, Some(*peer)),
            Cause::Unauthorized { .. } => (CauseKind::Other, None),
        };
        let why = RecordedCause { kind, suspect: suspect.map(number), reported_by: number(report.by) };
        self.end(GroupState::Failed, Some(why));
    }

    /// Records that the group has ended, in `state` if it had formed; only the first call counts.
    fn end(&self, state: GroupState, cause: Option<RecordedCause>) {
        self.change(|group| {
            group.state = match group.state {
                GroupState::Forming => GroupState::Unformed,
                GroupState::Formed => state,
                GroupState::Unformed | GroupState::Failed | GroupState::Left => return,
            };
            (group.cause, group.ended_ns) = (cause, now_ns());
        });
    }

    /// Saves the recording to a file, unless it is in a mapped file. The caller does this when the group has
    /// failed.
    pub(crate) fn save(&self) {
        if let Some(file) = &self.recorder.file {
            file.save(&self.recorder.ring);
        }
    }

    /// Begins to record a call.
    pub(crate) fn begin(&self, info: &CallInfo) -> CallRecord {
        let entry = self.entry(info);
        let tags = layout::tags(self.number, State::Queued, info.operation, entry.algorithm);
        let (ring, thread) = (&self.recorder.ring, entry.thread);
        let &CallInfo { to_receive_bytes, to_send_bytes, .. } = info;
        CallRecord { ring, number: ring.add(&entry), tags, thread, to_receive_bytes, to_send_bytes }
    }

    /// Records a call that completed at once, without waiting. This makes an atomic update.
    #[inline(always)]
    pub(crate) fn done(&self, info: &CallInfo) -> AtomicUpdate {
        let mut entry = self.entry(info);
        (entry.state, entry.ended_ns) = (State::Done, entry.enqueued_ns);
        (entry.received_bytes, entry.sent_bytes) = (info.to_receive_bytes, info.to_send_bytes);
        self.recorder.ring.add(&entry);
        if !self.recorder.ring.is_own_process() {
            full_fence();
        }
        AtomicUpdate::made()
    }

    #[inline(always)]
    fn entry(&self, info: &CallInfo) -> Entry {
        let mut peers = [0; LISTED_PEERS];
        peers[0] = info.peer.map_or(0, number);
        Entry {
            number: 0,
            group: self.number,
            state: if info.queued { State::Queued } else { State::Running },
            operation: info.operation,
            algorithm: info.algorithm.map_or(0, |algorithm| algorithm as u8 + 1),
            seq: info.seq,
            call: info.call.with_lens(0).encode(),
            enqueued_ns: info.at_ns,
            started_ns: if info.queued { 0 } else { info.at_ns },
            ended_ns: 0,
            received_bytes: 0,
            sent_bytes: 0,
            to_receive_bytes: info.to_receive_bytes,
            to_send_bytes: info.to_send_bytes,
            thread: self.recorder.ring.thread_id(),
            waits_for: u32::from(info.peer.is_some()),
            peers,
        }
    }

    fn change(&self, change: impl FnOnce(&mut Group)) {
        let Some(slot) = self.slot.filter(|_| self.recorder.ring.is_own_process()) else { return };
        let mut groups = self.recorder.groups();
        let (group, _) = &mut groups.slots[slot];
        change(group);
        self.recorder.ring.set_group(slot, group);
    }
}

impl Drop for GroupRecorder {
    fn drop(&mut self) {
        self.end(GroupState::Left, None);
        if let Some(slot) = self.slot.filter(|_| self.recorder.ring.is_own_process()) {
            self.recorder.groups().slots[slot].1 = false;
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct CallRecord {
    ring: &'static CallRing,
    /// The number of the call; `None` if the call could not be recorded.
    number: Option<u64>,
    tags: u64,
    thread: u32,
    to_receive_bytes: u64,
    to_send_bytes: u64,
}

impl CallRecord {
    /// Records that the call has started.
    pub(crate) fn start(&self) {
        self.change(|slot| {
            slot.set(layout::entry::TAGS, self.tagged(State::Running));
            slot.set(layout::entry::STARTED, now_ns());
        });
    }

    /// Records for which ranks the call waits, and how many bytes it has received and sent so far.
    pub(crate) fn wait(&self, ranks: impl Iterator<Item = usize>, received_bytes: u64, sent_bytes: u64) {
        let (mut peers, mut count) = ([0; LISTED_PEERS], 0);
        for rank in ranks.map(number) {
            // A call that waits to send to and to receive from one peer lists that peer twice.
            if peers[..LISTED_PEERS.min(count as usize)].contains(&rank) {
                continue;
            }
            if let Some(peer) = peers.get_mut(count as usize) {
                *peer = rank;
            }
            count += 1;
        }
        self.change(|slot| {
            slot.set(layout::entry::RECEIVED, received_bytes);
            slot.set(layout::entry::RECEIVED + 1, sent_bytes);
            slot.set(layout::entry::WAITING, layout::pair(self.thread, count));
            for (index, pair) in peers.as_chunks::<2>().0.iter().enumerate() {
                slot.set(layout::entry::WAITING + 1 + index, layout::pair(pair[0], pair[1]));
            }
        });
    }

    /// Records that the call has ended: successfully if `well` is true.
    pub(crate) fn end(&self, well: bool) {
        self.ended(well, |_| now_ns());
    }

    /// Records that the call has succeeded within so few microseconds that its start time is recorded as its
    /// end time. Reading the clock would add a tenth to the time of a short message.
    pub(crate) fn end_immediately(&self) {
        self.ended(true, |slot| slot.get(layout::entry::STARTED));
    }

    fn ended(&self, well: bool, when: impl FnOnce(&call_ring::Slot<'_>) -> u64) {
        self.change(|slot| {
            slot.set(layout::entry::TAGS, self.tagged(if well { State::Done } else { State::Failed }));
            slot.set(layout::entry::ENDED, when(slot));
            if well {
                slot.set(layout::entry::RECEIVED, self.to_receive_bytes);
                slot.set(layout::entry::RECEIVED + 1, self.to_send_bytes);
            }
        });
    }

    /// Returns the tags of the call with `state`. `self.tags` has the state `Queued`, which is encoded as 0.
    fn tagged(&self, state: State) -> u64 {
        self.tags | (state as u64) << 32
    }

    fn change(&self, change: impl FnOnce(&call_ring::Slot<'_>)) {
        if let Some(number) = self.number {
            self.ring.change(number, change);
        }
    }
}

fn header(env: Option<&WorkerEnv>) -> Header {
    let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Header {
        rank: env.map(|env| number(env.rank)),
        world_size: env.map(|env| number(env.world_size)),
        local_rank: env.map(|env| number(env.local_rank)),
        restart_count: env.map_or(0, |env| env.restart_count),
        process: process::current(),
        generation: env.and_then(|env| env.generation),
        started_unix_ns: wall.map_or(0, |wall| wall.as_nanos() as u64),
        started_ns: now_ns(),
        run_id: env.map_or_else(String::new, |env| env.run_id.clone()),
        host: convoke_env::host::name().unwrap_or_default(),
        names: names::encode(
            &CallKind::ALL.map(CallKind::template),
            &Dtype::ALL.map(Dtype::name),
            &ReduceOp::ALL.map(ReduceOp::name),
            &Algorithm::ALL.map(Algorithm::name),
        ),
    }
}

/// Converts a rank to 32 bits, which suffice: groups have at most 2^24 ranks.
fn number(rank: usize) -> u32 {
    u32::try_from(rank).unwrap_or(u32::MAX)
}
