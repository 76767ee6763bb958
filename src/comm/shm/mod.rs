//! Shared memory: collectives and messages between the ranks of one host, without connections.
//!
//! ```text
//! bootstrap ─► segment, layout          memory that all of them have; of later groups: parts of the arena
//! schedule ─► collective, small_call    collectives: the steps of a rank; their execution, also inline
//!              └─► copy_reduce          copies and sums
//!              ring ─► segment          a byte stream in the place of a connection
//!              doorbells                wake-up of sleeping ranks
//! fd_passing ─► allocations ─► region   memory of programs that all of them reach
//! ```
//!
//! Control connections stay open: they report a rank that has died, left or aborted. Shared memory has data
//! and counters only. As over connections, ranks compare their collective calls before they touch data, every
//! wait has a deadline, and one rank reports a failure to all.
//!
//! Only the rank that owns a part of the memory writes to it. The order of a call's steps ([`schedule`])
//! determines when other ranks may read data and how long it must stay. `tests.rs` checks this in many orders
//! of events.

pub(crate) mod allocations;
pub(crate) mod arena;
pub(crate) mod bootstrap;
pub(crate) mod collective;
mod copy_reduce;
pub(crate) mod doorbells;
pub(crate) mod fd_passing;
mod layout;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod region;
mod ring;
mod schedule;
pub(crate) mod segment;
pub(crate) mod small_call;
mod store_policy;
#[cfg(test)]
mod tests;
pub(crate) mod unavailable;
mod write;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::collectives::call::Call;
use crate::error::ExecutionError;
use allocations::{Allocations, PublishedLocation};
use arena::Arena;
use bootstrap::SharedResources;
use doorbells::{Doorbells, HostProcesses};
use layout::{
    CALL_OFFSET, Counter, HISTORY_OFFSET, INLINE_OFFSET, ROUND_BYTES, ROUNDS_BYTES, SLOT_BYTES, SLOT_HEADER,
    SLOTS,
};
pub(crate) use layout::{Layout, RingChannel};
use ring::Ring;
pub(crate) use schedule::is_supported;
use schedule::{CACHED_BYTES, Limits, Peers, Schedule, ScheduleStep};
use segment::{Segment, View};
use store_policy::StorePolicy;

/// The memory that this rank shares with the others on its host.
#[derive(Debug)]
pub(crate) struct HostMemory {
    segment: Arc<Segment>,
    layout: Layout,
    doorbells: Arc<Doorbells>,
    /// The numbers in the group of the host's ranks. `me` is the local rank of this rank: its index in
    /// `ranks`.
    ranks: Vec<usize>,
    me: usize,
    /// The processes of the host, and the memory for groups that are made from this group.
    host: HostProcesses,
    arena: Option<Arc<Arena>>,
    /// The memory whose pages this rank knows to be allocated, if the layout is sparse.
    allocated: Option<Allocated>,
    /// The core that this rank last published, plus 1.
    core: u64,
    /// The numbers of collective calls and rounds that this rank has started, and the total bytes of these
    /// rounds.
    calls: u32,
    rounds: u64,
    round_bytes: u64,
    history: u64,
    /// The latest call that each other rank had started, and its counters, when this rank last read them.
    started: Vec<u32>,
    counters: [Vec<u64>; Counter::COUNT],
    /// Chooses the store instructions of writes that all ranks read, and of writes that one rank reads.
    policy_for_all: StorePolicy,
    policy_for_rank: Vec<StorePolicy>,
    allocations: Arc<Allocations>,
    /// A list whose memory the next collective reuses for its steps, which saves an allocation.
    steps: Vec<ScheduleStep>,
}

/// The part of a group that groups made from it need, to share memory inside a host.
#[derive(Debug, Clone)]
pub(crate) struct HostShare {
    arena: Arc<Arena>,
    /// The processes of the new group's ranks on this host.
    processes: HostProcesses,
}

/// The memory of a sparse layout whose pages are allocated: the number of rows of slots, and the bytes of this
/// rank's rounds.
#[derive(Debug, Clone, Copy, Default)]
struct Allocated {
    slot_rows: u32,
    rounds: usize,
}

/// The ranks that a collective call waits for.
type AwaitedRanks = SmallVec<[usize; 4]>;

/// The description of a call that a rank publishes in its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    call: [u8; 16],
    /// The sequence number among the group's collectives.
    seq: u32,
    /// A digest of the rank's earlier calls. It shows later that an earlier call of the rank differed, if the
    /// rank has published or left without waiting for others.
    history: u64,
}

/// The number of a collective call among those in this shared memory, and the position of its rounds.
#[derive(Debug, Clone, Copy)]
struct CallNumber {
    number: u32,
    /// The number of rounds of all earlier calls, and the total bytes of these rounds.
    rounds: u64,
    position: u64,
    /// The distance in bytes from each round of this call to the next.
    round_bytes: u64,
    header: Header,
}

impl Header {
    /// Returns the digest of this call and all earlier calls of the rank.
    fn digest(&self) -> u64 {
        let (low, high) = self.call.split_at(8);
        let words = [low, high].map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        // Odd multipliers are invertible, so every call affects the digest; the rotation makes the order
        // count.
        let mix = |hash: u64, word: u64| (hash.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        words.into_iter().chain([u64::from(self.seq)]).fold(self.history, mix)
    }
}

impl HostShare {
    /// Returns what those of the ranks share whose indices among the ranks of this host are `chosen`.
    pub(crate) fn of(&self, chosen: &[usize]) -> Self {
        let of_rank = chosen.iter().map(|&local_rank| self.processes.of_rank[local_rank]).collect();
        let processes = HostProcesses { of_rank, ..self.processes.clone() };
        Self { arena: Arc::clone(&self.arena), processes }
    }

    /// Reserves `count` parts of the arena, and returns the number of the first; `None` if none is left.
    pub(crate) fn reserve(&self, count: u64) -> Option<u64> {
        self.arena.reserve(count)
    }
}

impl HostMemory {
    /// Returns the memory of the first group of a host, with the descriptors of the ranks' processes.
    pub(crate) fn new(
        resources: SharedResources,
        layout: Layout,
        ranks: Vec<usize>,
        me: usize,
    ) -> (Self, Vec<OwnedFd>) {
        let SharedResources { segment, arena, doorbells, processes } = resources;
        let of_rank = (0..ranks.len()).collect();
        let host = HostProcesses { doorbells: doorbells.into(), of_rank };
        (Self::with_segment(segment, layout, ranks, me, host, arena), processes)
    }

    /// Returns the memory of a group that was made from another group: the part `number` of the arena, of
    /// those that the first rank has reserved.
    pub(crate) fn of_part(host: &HostShare, number: u64, ranks: Vec<usize>, me: usize) -> io::Result<Self> {
        let HostShare { arena, processes } = host;
        let segment = Arc::new(arena.map(processes.of_rank[0], number, ranks.len())?);
        let (layout, arena) = (Layout::sparse(ranks.len()), Some(Arc::clone(arena)));
        Ok(Self::with_segment(segment, layout, ranks, me, processes.clone(), arena))
    }

    fn with_segment(
        segment: Arc<Segment>,
        layout: Layout,
        ranks: Vec<usize>,
        me: usize,
        host: HostProcesses,
        arena: Option<Arc<Arena>>,
    ) -> Self {
        let doorbells = Arc::new(Doorbells::new(Arc::clone(&segment), layout, me, host.clone()));
        let (started, counters) = (vec![0; ranks.len()], std::array::from_fn(|_| vec![0; ranks.len()]));
        let policy_for_rank = ranks.iter().map(|_| StorePolicy::default()).collect();
        let (calls, rounds, round_bytes, history, steps) = (0, 0, 0, 0, Vec::new());
        Self {
            segment,
            layout,
            doorbells,
            ranks,
            me,
            host,
            arena,
            allocated: layout.is_sparse().then(Allocated::default),
            core: 0,
            calls,
            rounds,
            round_bytes,
            history,
            started,
            counters,
            policy_for_all: StorePolicy::default(),
            policy_for_rank,
            allocations: Arc::default(),
            steps,
        }
    }

    /// Returns the memory of programs that the ranks created together.
    pub(crate) fn allocations(&self) -> &Arc<Allocations> {
        &self.allocations
    }

    /// Returns the local rank of each other rank of the host, and its number in the group.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let me = self.me;
        self.ranks.clone().into_iter().enumerate().filter(move |&(local_rank, _)| local_rank != me)
    }

    /// Returns what groups that are made from this group share with it. `None` without an arena.
    pub(crate) fn share(&self) -> Option<HostShare> {
        Some(HostShare { arena: Arc::clone(self.arena.as_ref()?), processes: self.host.clone() })
    }

    /// Returns the numbers in the group of the host's ranks, by local rank.
    pub(crate) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    pub(crate) fn doorbells(&self) -> &Arc<Doorbells> {
        &self.doorbells
    }

    /// Returns this rank's end of the pair of rings between it and the rank `local_rank` of the host.
    pub(crate) fn ring_to(&self, channel: RingChannel, local_rank: usize) -> Ring {
        let (out, into) =
            (self.layout.ring(channel, self.me, local_rank), self.layout.ring(channel, local_rank, self.me));
        let allocated = if self.allocated.is_some() { 0 } else { out.bytes };
        Ring::new(Arc::clone(&self.segment), Arc::clone(&self.doorbells), local_rank, (out, allocated), into)
    }

    /// Sets the failure flag, which all ranks of the host read. Control connections report the reason of the
    /// failure.
    pub(crate) fn fail(&self) {
        self.segment.word(Layout::failure_flag()).store(1, Ordering::Release);
    }

    /// Returns whether a rank has set the failure flag.
    pub(crate) fn has_failed(&self) -> bool {
        self.segment.word(Layout::failure_flag()).load(Ordering::Acquire) != 0
    }

    pub(crate) fn mark_sleeping(&self) {
        self.doorbells.mark_sleeping();
    }

    /// Returns whether this rank is still marked as sleeping, because no other rank has woken it since.
    pub(crate) fn is_marked_sleeping(&self) -> bool {
        self.doorbells.is_marked_sleeping()
    }

    pub(crate) fn clear_sleeping(&self) {
        self.doorbells.clear_sleeping();
    }

    fn schedule(&self, call: &Call) -> Schedule {
        let limits = Limits { slot_bytes: SLOT_BYTES, round_bytes: ROUND_BYTES, cached_bytes: CACHED_BYTES };
        let root = self.ranks.iter().position(|&rank| rank == call.root as usize).unwrap_or(0);
        Schedule::new(&Call { root: root as u32, ..*call }, self.me, self.ranks.len(), limits)
    }

    /// Numbers a collective call and its rounds. All ranks make their calls in the same order, so these
    /// numbers agree.
    fn number_call(&mut self, call: &Call, seq: u64, rounds: u64, round_bytes: usize) -> CallNumber {
        self.calls = self.calls.wrapping_add(1);
        let header = Header { call: call.encode(), seq: seq as u32, history: self.history };
        self.history = header.digest();
        let call_number = CallNumber {
            number: self.calls,
            rounds: self.rounds,
            position: self.round_bytes,
            round_bytes: round_bytes as u64,
            header,
        };
        self.rounds += rounds;
        self.round_bytes += rounds * round_bytes as u64;
        call_number
    }

    /// Returns whether the pages of the slots of call `number` are allocated.
    #[inline]
    fn has_slots(&self, number: u32) -> bool {
        self.allocated.is_none_or(|allocated| Layout::slot_row(number) < allocated.slot_rows)
    }

    /// Allocates the pages that call `number` may access on all ranks, apart from the rounds of other ranks,
    /// which those allocate before they publish them.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    fn allocate(&mut self, call_number: &CallNumber, rounds: u64) -> Result<(), ExecutionError> {
        let Some(mut allocated) = self.allocated else { return Ok(()) };
        let failed = |source| ExecutionError::OutOfMemory(source);
        if !self.has_slots(call_number.number) {
            let rows = (Layout::slot_row(call_number.number) + 1).next_power_of_two();
            self.segment.commit(self.layout.slot_rows(allocated.slot_rows..rows)).map_err(failed)?;
            allocated.slot_rows = rows;
        }
        let end = call_number.position.saturating_add(rounds * call_number.round_bytes);
        let all = self.layout.all_rounds(self.me);
        if rounds > 0 && allocated.rounds < all.len() {
            let fits = usize::try_from(end).ok().filter(|&end| end <= ROUNDS_BYTES);
            let bytes = fits.map_or(all.len(), |end| end.max(ROUND_BYTES).next_power_of_two());
            if bytes > allocated.rounds {
                self.segment.commit(all.start + allocated.rounds..all.start + bytes).map_err(failed)?;
                allocated.rounds = bytes;
                if bytes == all.len() {
                    self.segment.collapse(all.start..all.start + ROUNDS_BYTES);
                }
            }
        }
        self.allocated = Some(allocated);
        Ok(())
    }

    /// Returns `bytes` bytes from offset `at` of the data that `rank` publishes in the slot of call `number`.
    /// If `inline`, the data is in the header of the slot, beside the stamp.
    fn slot_view(&self, rank: usize, number: u32, inline: bool, at: usize, bytes: usize) -> View<'_> {
        let start = if inline { INLINE_OFFSET } else { SLOT_HEADER };
        self.segment.view(self.layout.slot(rank, number) + start + at, bytes)
    }

    fn round_view(&self, rank: usize, position: u64, at: usize, bytes: usize) -> View<'_> {
        debug_assert!(at + bytes <= ROUND_BYTES);
        self.segment.view(self.layout.round(rank, position) + at, bytes)
    }

    /// Returns the ranks that may still read the earlier call in the slot of call `number`: those that have
    /// not started the call after the earlier one.
    fn slot_readers(&mut self, number: u32) -> AwaitedRanks {
        let needed = number.wrapping_sub(SLOTS - 1);
        let mut late = AwaitedRanks::new();
        for local_rank in 0..self.ranks.len() {
            if local_rank != self.me && !self.has_started(local_rank, needed) {
                late.push(self.ranks[local_rank]);
            }
        }
        late
    }

    /// Returns whether no other rank still reads the slot that the next call uses.
    #[inline]
    fn is_next_slot_free(&mut self) -> bool {
        let needed = self.calls.wrapping_add(1).wrapping_sub(SLOTS - 1);
        (0..self.ranks.len()).all(|local_rank| local_rank == self.me || self.has_started(local_rank, needed))
    }

    fn has_started(&mut self, rank: usize, number: u32) -> bool {
        if reaches(self.started[rank], number) {
            return true;
        }
        let stamp = self.segment.word(self.layout.slot(rank, number)).load(Ordering::Acquire);
        if reaches(stamp as u32, number) {
            self.started[rank] = stamp as u32;
        }
        reaches(stamp as u32, number)
    }

    /// Publishes the description of a call and its stamp, after all data of its slot was written. The stamp
    /// tells other ranks that the slot is complete. The caller must then [wake](Doorbells::wake_all) sleeping
    /// ranks.
    fn announce(&self, number: u32, header: &Header, location: Option<PublishedLocation>) {
        let slot = self.layout.slot(self.me, number);
        if let Some(location) = location {
            self.segment.view(slot + INLINE_OFFSET, PublishedLocation::BYTES).write(&location.encode());
        }
        self.segment.view(slot + CALL_OFFSET, 16).write(&header.call);
        self.segment.view(slot + HISTORY_OFFSET, 8).write(&header.history.to_le_bytes());
        let stamp = u64::from(header.seq) << 32 | u64::from(number);
        self.segment.word(slot).store(stamp, Ordering::Release);
    }

    /// Returns whether one of `ranks` last waited on the core of this rank, so that it can run only if this
    /// rank yields the core.
    pub(crate) fn shares_core_with_any(&mut self, ranks: impl IntoIterator<Item = usize>) -> bool {
        self.publish_core();
        let mut local_ranks =
            ranks.into_iter().filter_map(|rank| self.ranks.iter().position(|&other| other == rank));
        local_ranks.any(|local_rank| self.shares_core(local_rank))
    }

    /// Publishes the core on which this rank waits.
    fn publish_core(&mut self) {
        let core = nix::sched::sched_getcpu().map_or(0, |core| core as u64 + 1);
        if core != std::mem::replace(&mut self.core, core) {
            self.segment.word(Layout::core(self.me)).store(core, Ordering::Relaxed);
        }
    }

    fn shares_core(&self, local_rank: usize) -> bool {
        self.core != 0 && self.segment.word(Layout::core(local_rank)).load(Ordering::Relaxed) == self.core
    }

    /// Wakes the ranks that sleep. Call it after announcing a call.
    #[inline]
    pub(crate) fn wake_sleepers(&self) {
        self.doorbells.wake_all();
    }

    /// Compares call `number` of `rank` with this rank's call, described by `ours`. `seq` is the sequence
    /// number of this rank's call among the group's collectives. Returns false if `rank` has not made the
    /// call yet.
    ///
    /// # Errors
    ///
    /// The rank's call differs from this rank's: call `number` itself, or an earlier one.
    #[inline]
    fn match_call(
        &mut self,
        rank: usize,
        number: u32,
        ours: &Header,
        seq: u64,
    ) -> Result<bool, ExecutionError> {
        match self.header(rank, number) {
            None => Ok(false),
            Some(theirs) if theirs == *ours => Ok(true),
            Some(theirs) => Err(self.mismatch(rank, number, theirs, seq)),
        }
    }

    #[cold]
    fn mismatch(&mut self, rank: usize, number: u32, theirs: Header, seq: u64) -> ExecutionError {
        let peer = self.ranks[rank];
        let theirs = self.first_difference(rank, number).unwrap_or(theirs);
        match Call::decode(theirs.call) {
            Ok(call) => {
                let seq = seq & !u64::from(u32::MAX) | u64::from(theirs.seq);
                ExecutionError::Mismatch { peer, theirs: call, seq }
            }
            Err(error) => ExecutionError::Protocol { peer, what: error.into() },
        }
    }

    /// Returns the description that `rank` published of call `number`. `None` if the rank has not made the
    /// call yet, or has reused the slot for a later call.
    fn header(&mut self, rank: usize, number: u32) -> Option<Header> {
        let slot = self.layout.slot(rank, number);
        let stamp = self.segment.word(slot).load(Ordering::Acquire);
        if stamp as u32 != number {
            return None;
        }
        if reaches(number, self.started[rank]) {
            self.started[rank] = number;
        }
        let (mut call, mut history) = ([0; 16], [0; 8]);
        self.segment.view(slot + CALL_OFFSET, 16).read(&mut call);
        self.segment.view(slot + HISTORY_OFFSET, 8).read(&mut history);
        Some(Header { call, seq: (stamp >> 32) as u32, history: u64::from_le_bytes(history) })
    }

    /// Returns the earliest call of `rank`, up to `number`, that differs from this rank's call of the same
    /// number. Only calls whose slots were not reused can be compared.
    fn first_difference(&mut self, rank: usize, number: u32) -> Option<Header> {
        let last = (0..SLOTS).map(|back| number.wrapping_sub(back)).filter(|&number| self.has_slots(number));
        let last: Vec<u32> = last.collect();
        let differ = last.into_iter().filter_map(|number| {
            let (theirs, ours) = (self.header(rank, number)?, self.header(self.me, number)?);
            (theirs.call != ours.call || theirs.seq != ours.seq).then_some(theirs)
        });
        differ.last()
    }

    /// Returns the location of its elements that `rank` published for call `number`, which the rank has made.
    fn published_location(&self, rank: usize, number: u32) -> PublishedLocation {
        let mut bytes = [0; PublishedLocation::BYTES];
        self.segment
            .view(self.layout.slot(rank, number) + INLINE_OFFSET, PublishedLocation::BYTES)
            .read(&mut bytes);
        PublishedLocation::decode(bytes)
    }

    fn set_counter(&self, counter: Counter, count: u64) {
        self.segment.word(self.layout.counter(self.me, counter)).store(count, Ordering::Release);
        self.doorbells.wake_all();
    }

    /// Returns whether the counter of `rank` has reached `count`.
    fn has_reached(&mut self, rank: usize, counter: Counter, count: u64) -> bool {
        let known = &mut self.counters[counter as usize][rank];
        if *known < count {
            *known = self.segment.word(self.layout.counter(rank, counter)).load(Ordering::Acquire);
        }
        *known >= count
    }

    /// Returns the first of `peers` whose counter has not reached `count`, by local rank.
    fn first_behind(&mut self, peers: Peers, counter: Counter, count: u64) -> Option<usize> {
        match peers {
            Peers::One(rank) => (!self.has_reached(rank, counter, count)).then_some(rank),
            Peers::All => {
                let me = self.me;
                (0..self.ranks.len()).find(|&rank| rank != me && !self.has_reached(rank, counter, count))
            }
        }
    }
}

/// Returns whether call number `number` is `to` or later. Numbers wrap around.
fn reaches(number: u32, to: u32) -> bool {
    number.wrapping_sub(to).cast_signed() >= 0
}
