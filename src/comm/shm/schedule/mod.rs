//! The list of steps that one rank executes for one collective through shared memory. Pure: it accesses no
//! memory.
//!
//! If the data fits in a slot, each rank writes its data to its slot for the call. It reads the slots of
//! other ranks when these have announced the call. That needs one synchronisation. In most kinds of calls, some
//! more data is written as a whole too, to the memory of one round.
//!
//! More data is handled in rounds, one piece in each; if it exceeds the caches, the last piece is first. In
//! each round a rank publishes data, fetches or reduces what it needs, and advances its counters. It
//! publishes one round ahead of what it fetches, so a small delay of one rank does not stall the others. If some
//! ranks only publish and others only fetch, a round is published and fetched in chunks. In an all-reduce every
//! rank owns a part of each round: it adds up all contributions to that part in rank order, and all ranks fetch
//! the sum from this rank.
//!
//! In some calls, ranks read the data in the memory of another rank instead (`single_copy`).
//!
//! A slot or the memory of a round is reused when all ranks have shown that they no longer read it. All ranks
//! count all rounds of all calls, also those in which they have no work, so counters are never reset.

mod chunks;
mod single_copy;
mod steps;
mod transfers;

use std::ops::Range;

use super::exchange;
use super::layout::Counter;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::plan::block;
pub(crate) use transfers::{Results, Transfer, Transfers};

/// The alignment in bytes of data in the memory of a round: a cache line.
const ALIGNMENT: usize = 64;

/// Buffers below this size are usually still in the caches of the cores that wrote them.
pub(crate) const CACHED_BYTES: usize = 2 << 20;

/// The sizes that decide how a call is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Maximum number of bytes that a rank publishes in the slot of a call.
    pub(crate) slot_bytes: usize,
    /// Maximum number of bytes that a rank publishes in the slot of a call in which [pairs](Schedule::swaps_areas) could swap
    /// exchange areas.
    pub(crate) swapping_slot_bytes: usize,
    /// Maximum number of bytes that one of two ranks publishes in the slot of a call in which only one rank publishes.
    pub(crate) one_way_slot_bytes: usize,
    /// Maximum number of bytes that a rank publishes in a round.
    pub(crate) piece_bytes: usize,
    /// Maximum number of bytes that a rank publishes in a round [in chunks](Schedule::has_chunks), or in the exchange areas of
    /// [several pairs](Schedule::is_pairwise).
    pub(crate) round_bytes: usize,
    /// Number of bytes of a round that a rank publishes at a time, if its round [has chunks](Schedule::has_chunks).
    pub(crate) chunk_bytes: usize,
    /// Maximum number of bytes that a rank publishes in the only round of a small call, where some ranks publish whole
    /// rounds and others only fetch or reduce.
    pub(crate) whole_bytes: usize,
    /// Size of an exchange area.
    pub(crate) exchange_bytes: usize,
    /// Maximum number of bytes that one step reads in the memory of another rank.
    pub(crate) read_bytes: usize,
    /// Buffers below this size usually stay in the caches of the core that wrote them.
    pub(crate) cached_bytes: usize,
}

/// The area of shared memory to which a rank publishes data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Area {
    /// The rank's slot for the call.
    Slot,
    /// The rank's memory for a round, numbered from 0 within the call, or its exchange areas.
    Round(u64),
    /// The rank's memory for the sums of a round, all of whose other data is in exchange areas.
    Sums(u64),
}

/// The ranks that a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peers {
    All,
    One(usize),
}

impl Peers {
    /// Returns the local ranks, of `ranks` ranks of the host.
    #[inline]
    pub(super) fn range(self, ranks: usize) -> Range<usize> {
        match self {
            Self::All => 0..ranks,
            Self::One(local_rank) => local_rank..local_rank + 1,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScheduleStep {
    /// Waits until no rank reads the slot that this rank uses for the call.
    AwaitSlot,
    /// Copies the bytes `range` of the buffer to offset `at` of this rank's area, where rank `to` reads them. Other ranks
    /// may read them too.
    Publish { range: Range<usize>, area: Area, at: usize, to: usize },
    /// Publishes that this rank has made the call.
    Announce,
    /// Waits until these ranks have announced the call, and compares their descriptions of it with this
    /// rank's.
    MatchCall(Peers),
    /// Checks whether the elements of all ranks are in one allocation. If so, the rest of the schedule
    /// [reduces in place](Schedule::make_direct).
    DecideDirect,
    /// Checks whether the ranks whose data this rank needs expose it. If so, the rest of the schedule
    /// [copies once](Schedule::make_direct).
    DecideSingleCopy,
    /// Copies the data that rank `from` exposes, from offset `at` on, to the bytes `range` of the buffer.
    ReadExposed { from: usize, at: usize, range: Range<usize> },
    /// Waits until no rank reads the memory that the round reuses.
    AwaitRound(u64),
    /// Sets this rank's counter so that it counts a round.
    SetCounter(Counter, u64),
    /// Publishes that the first bytes of a round, up to an offset of its area, are there.
    SetPublished { round: u64, end: usize },
    /// Waits until rank `from` has published the bytes of a round up to an offset of its area.
    AwaitPublished { round: u64, end: usize, from: usize },
    /// Waits until the counters of other ranks count a round.
    AwaitCounter(Counter, u64, Peers),
    /// Copies data that rank `from` published, at offset `at` of its area, to the bytes `range` of the
    /// buffer.
    Fetch { from: usize, area: Area, at: usize, range: Range<usize> },
    /// Reduces the bytes `range` of the buffers of all ranks in place, and writes the result to all these
    /// buffers.
    ReduceDirect { range: Range<usize> },
    /// Reduces the contributions of all ranks: those of other ranks at offset `at` of their areas, this
    /// rank's in the bytes `range` of the buffer. If `sums` is set, it also writes the result to this area of
    /// this rank, where other ranks fetch it.
    Reduce { area: Area, at: usize, range: Range<usize>, sums: Option<Area> },
}

/// The schedule of one rank for one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schedule {
    kind: CallKind,
    me: usize,
    ranks: usize,
    root: usize,
    /// The bytes of the buffer, or of one block if the buffer has a block for each rank.
    bytes: usize,
    element: usize,
    limits: Limits,
    /// This rank publishes the location of its elements: in a shared allocation, or in its own memory.
    exposed: bool,
    /// If set, the ranks reduce in place in a shared allocation, or copy once.
    direct: bool,
}

/// Returns whether collective calls of this kind can run through shared memory.
pub(crate) fn is_supported(kind: CallKind) -> bool {
    match kind {
        CallKind::Barrier
        | CallKind::AllReduce
        | CallKind::Broadcast
        | CallKind::Reduce
        | CallKind::AllGather
        | CallKind::ReduceScatter
        | CallKind::Gather
        | CallKind::Scatter
        | CallKind::AllToAll => true,
        CallKind::PointToPoint
        | CallKind::AllGatherV
        | CallKind::ReduceScatterV
        | CallKind::GatherV
        | CallKind::ScatterV
        | CallKind::AllToAllV
        | CallKind::Scan
        | CallKind::ExclusiveScan
        | CallKind::MonitoredBarrier
        | CallKind::Subgroup => false,
    }
}

impl Schedule {
    /// Makes the schedule of rank `me` of the host's `ranks` for a call of a kind that [is
    /// supported](is_supported).
    #[inline(always)]
    pub(crate) fn new(call: &Call, me: usize, ranks: usize, limits: Limits) -> Self {
        debug_assert!(is_supported(call.kind));
        let (bytes, element) = (call.bytes() as usize, call.dtype.size_bytes());
        let bytes = if call.kind == CallKind::Barrier { 0 } else { bytes };
        let (kind, root) = (call.kind, call.root as usize);
        Self { kind, me, ranks, root, bytes, element, limits, exposed: false, direct: false }
    }

    /// The number of rounds; 0 if the data fits in a slot.
    #[inline(always)]
    pub(crate) fn rounds(&self) -> u64 {
        match self.fits_in_slot() {
            true => 0,
            false if self.has_turns() => (self.ranks as u64 - 1) * self.pieces(),
            false => self.pieces(),
        }
    }

    /// The number of pieces of the buffer, or of each block.
    fn pieces(&self) -> u64 {
        self.bytes.div_ceil(self.piece()) as u64
    }

    /// Returns whether each round has data for one rank only, and the ranks get their blocks one after the other. Most ranks
    /// then have their block before the root has published the last one. Longer blocks gain nothing.
    fn has_turns(&self) -> bool {
        self.kind == CallKind::Scatter && self.ranks > 2 && !self.is_small() && !self.begins_at_end()
    }

    /// The turn to which this round belongs, if the ranks [have turns](Self::has_turns).
    fn turn(&self, round: u64) -> usize {
        (round / self.pieces()) as usize
    }

    /// The rank that gets data in this turn. The rank after the root is first.
    fn reader(&self, turn: usize) -> usize {
        (self.root + 1 + turn) % self.ranks
    }

    /// Returns the approximate numbers of bytes that this rank publishes, and that it fetches or reduces.
    #[inline(always)]
    pub(crate) fn volume(&self) -> (u64, u64) {
        let (all, others) = (self.bytes as u64, self.ranks as u64 - 1);
        match self.kind {
            CallKind::AllReduce if self.fits_in_slot() || !self.has_owners() => (all, all),
            CallKind::AllReduce => (all - all / (others + 1), all),
            CallKind::ReduceScatter => (all * others, all),
            CallKind::AllGather => (all, all * others),
            CallKind::AllToAll => (all * others, all * others),
            CallKind::Broadcast if self.is_root() => (all, 0),
            CallKind::Scatter if self.is_root() => (all * others, 0),
            CallKind::Gather if self.is_root() => (0, all * others),
            CallKind::Reduce if self.is_root() => (0, all),
            CallKind::Broadcast | CallKind::Scatter => (0, all),
            _ => (all, 0),
        }
    }

    fn is_root(&self) -> bool {
        self.me == self.root
    }

    /// Returns whether every rank publishes all its data before it announces the call: in a slot, or in one round.
    #[inline(always)]
    pub(crate) fn is_small(&self) -> bool {
        self.fits_in_slot() || self.has_one_round()
    }

    /// Returns whether the data of every rank fits in a slot.
    #[inline(always)]
    pub(crate) fn fits_in_slot(&self) -> bool {
        self.fits_in(match self.ranks {
            // More data would have several rounds.
            _ if self.has_owners() => self.limits.slot_bytes,
            _ if self.swaps_areas() => self.limits.swapping_slot_bytes,
            2 => self.limits.one_way_slot_bytes,
            _ => self.limits.slot_bytes,
        })
    }

    /// Returns whether the data does not fit in a slot, but the call is small.
    #[inline(always)]
    pub(crate) fn has_one_round(&self) -> bool {
        !self.has_owners() && !self.fits_in_slot() && self.fits_in(self.most_in_one_round())
    }

    #[inline(always)]
    fn most_in_one_round(&self) -> usize {
        match self.kind {
            // All ranks publish at the same time, and then all fetch.
            CallKind::AllGather | CallKind::AllToAll | CallKind::ReduceScatter => self.most_in_a_round(),
            _ if self.has_chunks() => self.most_in_a_round(),
            // A longer all-reduce may reduce in place.
            CallKind::AllReduce => self.limits.slot_bytes,
            _ => self.limits.whole_bytes,
        }
    }

    /// Returns the maximum number of bytes that a rank publishes in one of several rounds.
    #[inline(always)]
    fn most_in_a_round(&self) -> usize {
        if self.has_chunks() || self.is_pairwise() {
            self.limits.round_bytes
        } else {
            self.limits.piece_bytes
        }
    }

    /// Returns the area where this rank publishes its data in a small call.
    #[inline(always)]
    pub(crate) fn area(&self) -> Area {
        if self.fits_in_slot() { Area::Slot } else { Area::Round(0) }
    }

    /// Returns whether the data of every rank has at most `most` bytes.
    #[inline(always)]
    pub(crate) fn fits_in(&self, most: usize) -> bool {
        // `bytes` is checked first, so the product of the two does not overflow.
        self.bytes <= most && self.bytes * self.blocks() <= most
    }

    /// Returns the offset in the area of each source, and the number, of the bytes that this rank reads from it in a
    /// small call.
    #[inline(always)]
    pub(crate) fn awaited_bytes(&self) -> (usize, usize) {
        (self.me * self.block_step(self.bytes), self.bytes)
    }

    /// The number of blocks for which a rank has room in one round.
    fn blocks_in_round(&self) -> usize {
        if self.has_turns() { 1 } else { self.blocks() }
    }

    /// The number of blocks for which a rank has room in a small call. There is one for each rank, its own included. Of two
    /// ranks, it is one for the other rank.
    #[inline(always)]
    fn blocks(&self) -> usize {
        match self.kind {
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll if self.ranks > 2 => self.ranks,
            _ => 1,
        }
    }

    /// Returns the distance in bytes between two published [blocks](Self::blocks), where several of them in one area are `stride`
    /// bytes apart; 0 if each block has an area of its own.
    #[inline(always)]
    fn block_step(&self, stride: usize) -> usize {
        let is_alone = self.blocks() == 1 || !self.fits_in_slot() && (self.is_pairwise() || self.has_turns());
        if is_alone { 0 } else { stride }
    }

    /// The bytes of the buffer, or of each block, that one round works on.
    fn piece(&self) -> usize {
        if self.has_one_round() {
            return self.bytes;
        }
        let blocks = self.blocks_in_round();
        // More rounds gain nothing: all ranks copy at the same time, or the rounds have chunks. Each round may cost a
        // context switch.
        let piece = self.most_in_a_round() / blocks;
        let aligned = piece - piece % ALIGNMENT.max(self.element);
        if aligned > 0 { aligned } else { (piece - piece % self.element).max(self.element) }
    }

    /// The distance in bytes between the memory of one round and of the next; equal on all ranks.
    #[inline(always)]
    pub(crate) fn round_bytes(&self) -> usize {
        let bytes = match self.is_pairwise() {
            _ if self.has_owners() => (self.piece() / self.element).div_ceil(self.ranks) * self.element,
            true => self.stride(),
            false => self.stride() * self.blocks_in_round(),
        };
        bytes.next_multiple_of(ALIGNMENT)
    }

    /// Returns whether each of several ranks reads one block of what a rank publishes in a round. These blocks are in exchange
    /// areas.
    #[inline(always)]
    fn is_pairwise(&self) -> bool {
        self.has_owners()
            || self.ranks > 2 && matches!(self.kind, CallKind::ReduceScatter | CallKind::AllToAll)
    }

    /// Returns whether both ranks of each pair publish data that only the other one reads. Then they swap exchange areas.
    #[inline(always)]
    pub(super) fn swaps_areas(&self) -> bool {
        match self.kind {
            CallKind::AllToAll | CallKind::ReduceScatter | CallKind::AllReduce | CallKind::AllGather
                if self.ranks == 2 =>
            {
                true
            }
            _ => self.is_pairwise(),
        }
    }

    /// Returns the bytes of an exchange area that the call uses, if the ranks of each pair may publish their data there, else 0.
    #[inline(always)]
    pub(crate) fn bytes_in_area(&self) -> usize {
        let rounds = match self.exchanging_ranks() {
            None => 0,
            Some([true, true]) => exchange::rounds_in_area(self.rounds()),
            Some(_) => self.rounds(),
        };
        rounds as usize * self.round_bytes()
    }

    /// The distance in bytes between the pieces of two blocks in the memory of a round, if a rank publishes
    /// several.
    fn stride(&self) -> usize {
        self.piece().min(self.bytes.next_multiple_of(ALIGNMENT))
    }

    /// Returns the bytes of the buffer, or of each block, that a round works on. If the data exceeds the
    /// caches, the last bytes come first, since the program wrote them last and they are still cached.
    fn round_range(&self, round: u64) -> Range<usize> {
        let piece = self.piece();
        let (pieces, round) = (self.pieces(), round % self.pieces());
        let index = if self.begins_at_end() { pieces - 1 - round } else { round };
        let start = (index as usize).saturating_mul(piece);
        start.min(self.bytes)..(start.saturating_add(piece)).min(self.bytes)
    }

    fn begins_at_end(&self) -> bool {
        self.bytes >= self.limits.cached_bytes
    }

    /// Returns whether a rank copies its own block to the result round by round, when it has just published the bytes of a
    /// round. They are in its cache then. Shorter data is in the cache anyway, and other ranks wait for the next round.
    pub(crate) fn copies_own_block_with_rounds(&self) -> bool {
        self.kind == CallKind::AllGather && self.begins_at_end()
    }

    /// Returns the bytes of a round that `rank` reduces for all ranks, if each rank [owns](Self::has_owners)
    /// a part.
    fn owned_part(&self, rank: usize, round: u64) -> Range<usize> {
        let part = self.round_range(round);
        let own = block(rank, self.ranks, part.len() / self.element);
        part.start + own.start * self.element..part.start + own.end * self.element
    }

    /// Returns whether a rank publishes a round in chunks, so that another rank copies one chunk while it publishes the
    /// next. These are calls in which a rank only publishes, or only fetches.
    #[inline(always)]
    pub(crate) fn has_chunks(&self) -> bool {
        matches!(self.kind, CallKind::Broadcast | CallKind::Gather | CallKind::Scatter)
    }

    /// Returns whether every rank owns a part of each round, which it reduces for the other ranks.
    #[inline(always)]
    pub(crate) fn has_owners(&self) -> bool {
        matches!(self.kind, CallKind::AllReduce | CallKind::Reduce) && self.ranks > 2
    }

    /// Returns whether this rank reduces all elements of a call in which ranks own no parts of a round.
    fn reduces_all(&self) -> bool {
        self.kind == CallKind::AllReduce || self.kind == CallKind::Reduce && self.is_root()
    }
}
