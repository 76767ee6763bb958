//! Shared memory: collectives and messages between the ranks of one host, without connections.
//!
//! ```text
//! bootstrap ─► segment, layout          memory that all of them have; of later groups: parts of the arena
//! schedule ─► collective, small_call    collectives: the steps of a rank; their execution, also inline
//!              └─► copy_reduce          copies and sums
//! numbering ─► announcements            the calls that ranks tell each other, and compare
//!              ring ─► segment          a byte stream in the place of a connection
//!               └─► cells               short messages, past the byte stream
//!              doorbells                wake-up of sleeping ranks
//! fd_passing ─► allocations ─► region   memory of programs that all of them reach
//! single_copy ─► peer_memory            copies from the memory of another process
//! unix_socket                           passes descriptors, for bootstrap and fd_passing
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
mod announcements;
pub(crate) mod arena;
pub(crate) mod bootstrap;
mod cells;
pub(crate) mod collective;
pub(crate) mod copy_reduce;
pub(crate) mod doorbells;
mod exchange;
pub(crate) mod fd_passing;
mod layout;
#[cfg(all(test, loom))]
mod models;
mod numbering;
mod peer_memory;
pub(crate) mod region;
pub(crate) mod ring;
mod schedule;
pub(crate) mod segment;
pub(crate) mod single_copy;
pub(crate) mod small_call;
mod store_policy;
#[cfg(test)]
mod tests;
pub(crate) mod unavailable;
mod unix_socket;
mod write;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::collectives::call::Call;
use crate::error::ExecutionError;
use allocations::Allocations;
use announcements::PeerProgress;
use arena::Arena;
use bootstrap::SharedResources;
use cells::Cells;
use doorbells::{Doorbells, HostProcesses};
use layout::{
    CHUNK_BYTES, Counter, EXCHANGE_BYTES, FIRST_BYTES, ONE_WAY_SLOT_BYTES, PIECE_BYTES, READ_BYTES,
    ROUND_BYTES, ROUNDS_BYTES, ROUNDS_IN_MEMORY, SLOT_BYTES, SWAPPING_SLOT_BYTES, WHOLE_BYTES,
};
pub(crate) use layout::{Layout, RingChannel};
use numbering::{CallNumber, StartedCalls};
use peer_memory::PeerMemory;
use ring::{MessageAreas, Ring};
pub(crate) use schedule::is_supported;
use schedule::{CACHED_BYTES, Limits, Peers, Schedule, ScheduleStep};
use segment::Segment;
use single_copy::{PeerReader, SingleCopyPolicy};
use store_policy::StorePolicy;

/// The memory that this rank shares with the others on its host.
#[derive(Debug)]
pub(crate) struct HostMemory {
    segment: Arc<Segment>,
    layout: Layout,
    pub(crate) doorbells: Arc<Doorbells>,
    peer_reader: Arc<PeerReader>,
    /// The numbers in the group of the host's ranks. `me` is the local rank of this rank: its index in
    /// `ranks`.
    pub(crate) ranks: Vec<usize>,
    me: usize,
    /// The resources that groups made from this group share with it. `None` without memory for them.
    pub(crate) share: Option<HostShare>,
    /// The memory whose pages this rank knows to be allocated, if the layout is sparse.
    allocated: Option<Allocated>,
    /// The core that this rank last published, plus 1.
    core: u64,
    calls: StartedCalls,
    peers: PeerProgress,
    /// For writes to slots and rounds, to exchange areas and to warm ones, and to allocations of other ranks, by local rank.
    store_policy: StorePolicy,
    area_policy: StorePolicy,
    warm_policy: StorePolicy,
    rank_policies: Vec<StorePolicy>,
    /// The memory of programs that the ranks created together.
    pub(crate) allocations: Arc<Allocations>,
    /// A list whose memory the next collective reuses for its steps, which saves an allocation.
    steps: Vec<ScheduleStep>,
}

/// The part of a group that groups made from it need, to share memory inside a host.
#[derive(Debug, Clone)]
pub(crate) struct HostShare {
    pub(crate) arena: Arc<Arena>,
    /// The processes of the new group's ranks on this host.
    processes: HostProcesses,
}

/// The memory of a sparse layout whose pages are allocated: the number of rows of slots, the bytes of this rank's
/// rounds, and the bytes of each exchange area.
#[derive(Debug, Clone, Copy, Default)]
struct Allocated {
    slot_rows: u32,
    rounds: usize,
    exchange: usize,
}

/// The ranks that a collective call waits for.
type AwaitedRanks = SmallVec<[usize; 4]>;

impl HostShare {
    /// Returns what those of the ranks share whose indices among the ranks of this host are `chosen`.
    pub(crate) fn of(&self, chosen: &[usize]) -> Self {
        let of_rank = chosen.iter().map(|&local_rank| self.processes.of_rank[local_rank]).collect();
        let processes = HostProcesses { of_rank, ..self.processes.clone() };
        Self { arena: Arc::clone(&self.arena), processes }
    }
}

impl HostMemory {
    /// Returns the memory of the first group of a host, with the descriptors of the ranks' processes.
    pub(crate) fn new(
        resources: SharedResources,
        layout: Layout,
        ranks: Vec<usize>,
        me: usize,
        single_copy: SingleCopyPolicy,
    ) -> (Self, Vec<OwnedFd>) {
        let SharedResources { segment, arena, doorbells, processes } = resources;
        let of_rank = (0..ranks.len()).collect();
        let memory = Arc::new(PeerMemory::new(Arc::clone(&segment), layout, me, single_copy.reads()));
        let host = HostProcesses { doorbells: doorbells.into(), memory, of_rank };
        (Self::with_segment(segment, layout, (ranks, me), (host, arena), single_copy), processes)
    }

    /// Returns the memory of a group that was made from another group: the part `number` of the arena, of
    /// those that the first rank has reserved.
    pub(crate) fn of_part(
        host: &HostShare,
        number: u64,
        ranks: Vec<usize>,
        me: usize,
        single_copy: SingleCopyPolicy,
    ) -> io::Result<Self> {
        let HostShare { arena, processes } = host;
        let segment = Arc::new(arena.map(processes.of_rank[0], number, ranks.len())?);
        let (layout, arena) = (Layout::sparse(ranks.len()), Some(Arc::clone(arena)));
        Ok(Self::with_segment(segment, layout, (ranks, me), (processes.clone(), arena), single_copy))
    }

    fn with_segment(
        segment: Arc<Segment>,
        layout: Layout,
        (ranks, me): (Vec<usize>, usize),
        (host, arena): (HostProcesses, Option<Arc<Arena>>),
        single_copy: SingleCopyPolicy,
    ) -> Self {
        let peer_reader = PeerReader::new(host.clone(), Arc::clone(&segment), single_copy).into();
        let doorbells = Arc::new(Doorbells { segment: Arc::clone(&segment), layout, me, host: host.clone() });
        Self {
            segment,
            layout,
            doorbells,
            peer_reader,
            me,
            share: arena.map(|arena| HostShare { arena, processes: host }),
            allocated: layout.is_sparse.then(Allocated::default),
            core: 0,
            calls: StartedCalls::default(),
            peers: PeerProgress::new(ranks.len()),
            store_policy: StorePolicy::default(),
            area_policy: StorePolicy::default(),
            warm_policy: StorePolicy::patient(),
            rank_policies: ranks.iter().map(|_| StorePolicy::default()).collect(),
            allocations: Arc::default(),
            steps: Vec::new(),
            ranks,
        }
    }

    /// Returns the local rank of each other rank of the host, and its number in the group.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let me = self.me;
        self.ranks.clone().into_iter().enumerate().filter(move |&(local_rank, _)| local_rank != me)
    }

    /// Returns this rank's end of the pair of rings between it and the rank `local_rank` of the host.
    pub(crate) fn ring_to(&self, channel: RingChannel, local_rank: usize) -> Ring {
        let (out, into) =
            (self.layout.ring(channel, self.me, local_rank), self.layout.ring(channel, local_rank, self.me));
        let is_sparse = self.allocated.is_some();
        let allocated = if is_sparse { 0 } else { out.bytes };
        let messages = (channel == RingChannel::Messages).then(|| {
            let (me, layout) = (self.me, self.layout);
            let (out, into) = (layout.cells(me, local_rank), layout.cells(local_rank, me));
            let (first, second) = (me.min(local_rank), me.max(local_rank));
            let areas = [layout.message_area(first, second), layout.message_area(second, first)];
            let areas = MessageAreas::new(areas, usize::from(me > local_rank), !is_sparse);
            (Cells::new(out, into, !is_sparse), areas)
        });
        let (segment, doorbells) = (Arc::clone(&self.segment), Arc::clone(&self.doorbells));
        let peer_reader = Arc::clone(&self.peer_reader);
        Ring::new(
            segment,
            (doorbells, peer_reader),
            (local_rank, self.ranks.len()),
            (out, allocated),
            into,
            messages,
        )
    }

    /// Sets the failure flag, which all ranks of the host read. Control connections report the reason of the
    /// failure.
    pub(crate) fn fail(&self) {
        self.segment.word(Layout::FAILURE_FLAG).store(1, Ordering::Release);
    }

    /// Returns whether a rank has set the failure flag.
    pub(crate) fn has_failed(&self) -> bool {
        self.segment.word(Layout::FAILURE_FLAG).load(Ordering::Acquire) != 0
    }

    #[inline(always)]
    fn schedule(&self, call: &Call) -> Schedule {
        let limits = Limits {
            slot_bytes: SLOT_BYTES,
            swapping_slot_bytes: SWAPPING_SLOT_BYTES,
            one_way_slot_bytes: ONE_WAY_SLOT_BYTES,
            piece_bytes: PIECE_BYTES,
            round_bytes: ROUND_BYTES,
            chunk_bytes: CHUNK_BYTES,
            whole_bytes: WHOLE_BYTES,
            exchange_bytes: EXCHANGE_BYTES,
            read_bytes: READ_BYTES,
            cached_bytes: CACHED_BYTES,
        };
        let root = self.ranks.iter().position(|&rank| rank == call.root as usize).unwrap_or(0);
        Schedule::new(&Call { root: root as u32, ..*call }, self.me, self.ranks.len(), limits)
    }

    /// Returns whether the pages of the slots of call `number` are allocated.
    #[inline]
    fn has_slots(&self, number: u32) -> bool {
        self.allocated.is_none_or(|allocated| Layout::slot_row(number) < allocated.slot_rows)
    }

    /// Returns whether the next call can publish its only round: the pages are allocated, and no rank
    /// still reads the round whose memory it reuses.
    fn has_next_round(&mut self, schedule: &Schedule) -> bool {
        let (rounds, position) = self.calls.rounds();
        let needed = Layout::rounds_until(position.saturating_add(schedule.round_bytes() as u64));
        let has_pages = |allocated: Allocated| {
            needed <= allocated.rounds && schedule.bytes_in_area() <= allocated.exchange
        };
        self.allocated.is_none_or(has_pages)
            && self
                .first_behind(Peers::All, Counter::Done, (rounds + 1).saturating_sub(ROUNDS_IN_MEMORY))
                .is_none()
    }

    /// Allocates the pages that call `number` may access on all ranks, apart from the rounds of other ranks,
    /// which those allocate before they publish them. Fails if there is not enough memory.
    fn allocate(&mut self, call_number: &CallNumber, schedule: &Schedule) -> Result<(), ExecutionError> {
        let Some(mut allocated) = self.allocated else { return Ok(()) };
        let rounds = schedule.rounds();
        let failed = |source| ExecutionError::OutOfMemory(source);
        if !self.has_slots(call_number.number) {
            let rows = (Layout::slot_row(call_number.number) + 1).next_power_of_two();
            self.segment.commit(self.layout.slot_rows(allocated.slot_rows..rows)).map_err(failed)?;
            allocated.slot_rows = rows;
        }
        let bytes =
            Layout::rounds_until(call_number.position.saturating_add(rounds * call_number.round_bytes));
        if rounds > 0 && bytes > allocated.rounds {
            let all = self.layout.all_rounds(self.me);
            self.segment.commit(all.start + allocated.rounds..all.start + bytes).map_err(failed)?;
            allocated.rounds = bytes;
            if bytes == all.len() {
                self.segment.collapse(all.start..all.start + ROUNDS_BYTES);
            }
        }
        let in_area = schedule.bytes_in_area();
        if in_area > allocated.exchange {
            // The other ranks may not have come to this call yet, so each rank allocates the pages of both areas of its pairs.
            let end = in_area.next_power_of_two().max(FIRST_BYTES).min(self.layout.exchange_bytes());
            for other in (0..self.ranks.len()).filter(|&other| other != self.me) {
                for area in [0, 1] {
                    let start = self.layout.exchange(self.me.min(other), self.me.max(other), area);
                    self.segment.commit(start + allocated.exchange..start + end).map_err(failed)?;
                }
            }
            allocated.exchange = end;
        }
        self.allocated = Some(allocated);
        Ok(())
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
}
