//! The list of steps that one rank executes for one collective through shared memory. Pure: it accesses no
//! memory.
//!
//! If the data fits in a slot, each rank writes its data to its slot for the call. It reads the slots of
//! other ranks when these have announced the call. That needs one synchronisation.
//!
//! More data is handled in rounds, one piece in each; if it exceeds the caches, the last piece is first. In
//! each round a rank publishes data, fetches or reduces what it needs, and advances its counters. It
//! publishes one round ahead of what it fetches, so a small delay of one rank does not stall the others. In
//! an all-reduce every rank owns a part of each round: it adds up all contributions to that part in rank
//! order, and all ranks fetch the sum from this rank.
//!
//! A slot or the memory of a round is reused when all ranks have shown that they no longer read it. All ranks
//! count all rounds of all calls, also those in which they have no work, so counters are never reset.

use std::ops::Range;

use super::layout::Counter;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::plan::block;

/// The alignment in bytes of data in the memory of a round: a cache line.
const ALIGNMENT: usize = 64;
/// The least number of rounds of a call in which one rank can read one round while another rank writes the
/// next. These are calls where some ranks only write and others only read, and all-reduces of two ranks.
const MIN_COPY_ROUNDS: usize = 4;
/// The least bytes of a round in a call that is cut so that one rank reads one round while another writes the
/// next.
const MIN_COPY_BYTES: usize = 16 << 10;

/// Maximum number of bytes of a rank's own part that one step reduces in place.
const DIRECT_BYTES: usize = 256 << 10;

/// Buffers of up to this size are usually still in the caches of the cores that wrote them.
pub(crate) const CACHED_BYTES: usize = 2 << 20;

/// The sizes that decide how a call is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Maximum number of bytes that a rank publishes in the slot of a call.
    pub(crate) slot_bytes: usize,
    /// Maximum number of bytes that a rank publishes in a round.
    pub(crate) round_bytes: usize,
    /// Maximum number of bytes that usually stay in the caches of the core that wrote them.
    pub(crate) cached_bytes: usize,
}

/// The area of shared memory to which a rank publishes data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Area {
    /// The rank's slot for the call.
    Slot,
    /// The rank's memory for a round, numbered from 0 within the call.
    Round(u64),
}

/// The ranks that a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peers {
    All,
    One(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScheduleStep {
    /// Waits until no rank reads the slot that this rank uses for the call.
    AwaitSlot,
    /// Copies the bytes `range` of the buffer to offset `at` of this rank's area, where other ranks read
    /// them.
    Publish { range: Range<usize>, area: Area, at: usize },
    /// Publishes that this rank has made the call.
    Announce,
    /// Waits until these ranks have announced the call, and compares their descriptions of it with this
    /// rank's.
    MatchCall(Peers),
    /// Checks whether the elements of all ranks are in one allocation. If so, the rest of the schedule
    /// [reduces in place](Schedule::make_direct).
    DecideDirect,
    /// Waits until no rank reads the memory that the round reuses.
    AwaitRound(u64),
    /// Sets this rank's counter so that it counts a round.
    SetCounter(Counter, u64),
    /// Waits until the counters of other ranks count a round.
    AwaitCounter(Counter, u64, Peers),
    /// Copies data that rank `from` published, at offset `at` of its area, to the bytes `range` of the
    /// buffer.
    Fetch { from: usize, area: Area, at: usize, range: Range<usize> },
    /// Reduces the bytes `range` of the buffers of all ranks in place, and writes the result to all these
    /// buffers.
    ReduceDirect { range: Range<usize> },
    /// Reduces the contributions of all ranks: those of other ranks at offset `at` of their areas, this
    /// rank's in the bytes `range` of the buffer. If `publishes` is set, it also writes the result to this
    /// rank's area, where other ranks fetch it.
    Reduce { area: Area, at: usize, range: Range<usize>, publishes: bool },
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
    /// If set, the ranks reduce in place in a shared allocation.
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
    pub(crate) fn new(call: &Call, me: usize, ranks: usize, limits: Limits) -> Self {
        debug_assert!(is_supported(call.kind));
        let (bytes, element) = (call.bytes() as usize, call.dtype.size_bytes());
        let bytes = if call.kind == CallKind::Barrier { 0 } else { bytes };
        Self { kind: call.kind, me, ranks, root: call.root as usize, bytes, element, limits, direct: false }
    }

    /// The number of rounds; 0 if the data fits in a slot.
    pub(crate) fn rounds(&self) -> u64 {
        if self.is_small() { 0 } else { self.bytes.div_ceil(self.piece()) as u64 }
    }

    /// Returns the approximate numbers of bytes that this rank publishes, and that it fetches or reduces.
    pub(crate) fn volume(&self) -> (u64, u64) {
        let (all, others) = (self.bytes as u64, self.ranks as u64 - 1);
        match self.kind {
            CallKind::AllReduce if self.is_small() || !self.has_owners() => (all, all),
            CallKind::AllReduce => (all - all / (others + 1), all),
            CallKind::ReduceScatter => (all * others, all),
            CallKind::AllGather => (all, all * others),
            CallKind::AllToAll => (all * others, all * others),
            CallKind::Broadcast if self.me == self.root => (all, 0),
            CallKind::Scatter if self.me == self.root => (all * others, 0),
            CallKind::Gather if self.me == self.root => (0, all * others),
            CallKind::Reduce if self.me == self.root => (0, all),
            CallKind::Broadcast | CallKind::Scatter => (0, all),
            _ => (all, 0),
        }
    }

    fn is_root(&self) -> bool {
        self.me == self.root
    }

    /// Returns whether the data of every rank fits in a slot.
    pub(crate) fn is_small(&self) -> bool {
        self.fits_in(self.limits.slot_bytes)
    }

    /// Returns whether the data of every rank has at most `most` bytes.
    pub(crate) fn fits_in(&self, most: usize) -> bool {
        self.bytes.saturating_mul(self.blocks()) <= most
    }

    /// The number of blocks of which a rank publishes data in one round, its own included.
    fn blocks(&self) -> usize {
        match self.kind {
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll => self.ranks,
            _ => 1,
        }
    }

    /// The bytes of the buffer, or of each block, that one round works on.
    fn piece(&self) -> usize {
        let blocks = self.blocks();
        let most = self.limits.round_bytes / blocks;
        let is_cut = match self.kind {
            CallKind::Broadcast | CallKind::Scatter | CallKind::Gather => true,
            CallKind::AllReduce => !self.has_owners(),
            // More rounds gain nothing, as all ranks copy at the same time, and each round may cost a context
            // switch.
            _ => false,
        };
        let piece =
            if is_cut { (self.bytes / MIN_COPY_ROUNDS).max(MIN_COPY_BYTES / blocks).min(most) } else { most };
        let aligned = piece - piece % ALIGNMENT.max(self.element);
        if aligned > 0 { aligned } else { (piece - piece % self.element).max(self.element) }
    }

    /// The distance in bytes between the memory of one round and of the next; equal on all ranks.
    pub(crate) fn round_bytes(&self) -> usize {
        (self.stride() * self.blocks()).next_multiple_of(ALIGNMENT)
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
        let from_end = self.bytes > self.limits.cached_bytes;
        let index = if from_end { self.rounds() - 1 - round } else { round };
        let start = (index as usize).saturating_mul(piece);
        start.min(self.bytes)..(start.saturating_add(piece)).min(self.bytes)
    }

    /// Returns the bytes of a round that `rank` reduces for all ranks, if each rank [owns](Self::has_owners)
    /// a part.
    fn owned_range(&self, rank: usize, round: u64) -> Range<usize> {
        let part = self.round_range(round);
        let own = block(rank, self.ranks, part.len() / self.element);
        part.start + own.start * self.element..part.start + own.end * self.element
    }

    /// Returns whether every rank owns a part of each round, which it reduces for the other ranks.
    fn has_owners(&self) -> bool {
        matches!(self.kind, CallKind::AllReduce | CallKind::Reduce) && self.ranks > 2
    }

    /// Returns whether this rank reduces all elements of a call in which ranks own no parts of a round.
    fn reduces_all(&self) -> bool {
        self.kind == CallKind::AllReduce || self.kind == CallKind::Reduce && self.is_root()
    }

    /// Appends the steps of batch `index` to `steps`. Returns whether there is another batch. The engine
    /// executes a batch without doing other work in between, unless a step has to wait.
    pub(crate) fn batch(&self, index: u64, steps: &mut Vec<ScheduleStep>) -> bool {
        let emit = &mut |step| steps.push(step);
        if self.is_small() {
            emit(ScheduleStep::AwaitSlot);
            self.publish_all(emit);
            self.match_calls(emit);
            self.consume_all(emit);
            return false;
        }
        match index.checked_sub(1) {
            None => {
                emit(ScheduleStep::AwaitSlot);
                self.match_calls(emit);
                if self.may_be_direct() {
                    emit(ScheduleStep::DecideDirect);
                } else {
                    self.publish_round(0, emit);
                }
                true
            }
            Some(piece) if self.direct => self.direct_steps(piece as usize, emit),
            Some(0) if self.may_be_direct() => {
                self.publish_round(0, emit);
                true
            }
            Some(index) => self.round_steps(index - u64::from(self.may_be_direct()), emit),
        }
    }

    /// Emits the steps that announce this rank's call, and that wait for the calls of the ranks whose data it
    /// needs.
    fn match_calls(&self, emit: &mut impl FnMut(ScheduleStep)) {
        emit(ScheduleStep::Announce);
        if let Some(peers) = self.sources() {
            emit(ScheduleStep::MatchCall(peers));
        }
    }

    /// Emits the steps that publish the next round, work on this one, and fetch the sums of the previous one.
    /// Returns whether there is another batch.
    fn round_steps(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) -> bool {
        let rounds = self.rounds();
        if round == rounds {
            self.fetch_sums(rounds - 1, emit);
            return false;
        }
        if round + 1 < rounds {
            self.publish_round(round + 1, emit);
        }
        self.consume_round(round, emit);
        if let Some(before) = round.checked_sub(1).filter(|_| self.has_owners()) {
            self.fetch_sums(before, emit);
        }
        round + 1 < rounds || self.has_owners()
    }

    /// Returns whether the call may reduce in place: then ranks publish the locations of their elements.
    pub(crate) fn may_be_direct(&self) -> bool {
        self.kind == CallKind::AllReduce && !self.is_small()
    }

    /// Switches to reduction in place: each rank reduces its part of the whole buffer for all ranks. No rank
    /// continues before all ranks are done.
    pub(crate) fn make_direct(&mut self) {
        self.direct = true;
    }

    /// Emits the steps for one piece of this rank's own part, the last piece first. Returns whether there is
    /// another batch.
    fn direct_steps(&self, piece: usize, emit: &mut impl FnMut(ScheduleStep)) -> bool {
        let own = block(self.me, self.ranks, self.bytes / self.element);
        let (start, end) = (own.start * self.element, own.end * self.element);
        let end = end.saturating_sub(piece * DIRECT_BYTES);
        if start < end {
            emit(ScheduleStep::ReduceDirect { range: start.max(end.saturating_sub(DIRECT_BYTES))..end });
            return true;
        }
        let last = self.rounds() - 1;
        emit(ScheduleStep::SetCounter(Counter::Done, last));
        emit(ScheduleStep::AwaitCounter(Counter::Done, last, Peers::All));
        false
    }

    /// The ranks whose data this rank needs; `None` if it needs none.
    pub(crate) fn sources(&self) -> Option<Peers> {
        match self.kind {
            CallKind::Broadcast | CallKind::Scatter => (!self.is_root()).then_some(Peers::One(self.root)),
            CallKind::Gather => self.is_root().then_some(Peers::All),
            CallKind::Reduce => {
                (self.is_root() || self.has_owners() && !self.is_small()).then_some(Peers::All)
            }
            _ => Some(Peers::All),
        }
    }

    /// Emits the steps that publish all data of this rank in a small call.
    #[inline(always)]
    pub(crate) fn publish_all(&self, emit: &mut impl FnMut(ScheduleStep)) {
        let (bytes, me, area) = (self.bytes, self.me, Area::Slot);
        if bytes == 0 {
            return;
        }
        let mut publish = |range: Range<usize>| emit(ScheduleStep::Publish { range, area, at: 0 });
        match self.kind {
            CallKind::AllReduce => publish(0..bytes),
            CallKind::Reduce if !self.is_root() => publish(0..bytes),
            CallKind::Broadcast if self.is_root() => publish(0..bytes),
            CallKind::AllGather => publish(me * bytes..(me + 1) * bytes),
            CallKind::Gather if !self.is_root() => publish(me * bytes..(me + 1) * bytes),
            CallKind::Scatter if self.is_root() => self.publish_blocks(&(0..bytes), area, bytes, emit),
            CallKind::ReduceScatter | CallKind::AllToAll => {
                self.publish_blocks(&(0..bytes), area, bytes, emit);
            }
            _ => {}
        }
    }

    /// Emits the steps that fetch or reduce all data of a small call, for when the ranks that publish it have
    /// made the call.
    #[inline(always)]
    pub(crate) fn consume_all(&self, emit: &mut impl FnMut(ScheduleStep)) {
        let (bytes, area) = (self.bytes, Area::Slot);
        match bytes {
            0 => {}
            _ if self.reduces_all() => {
                emit(ScheduleStep::Reduce { area, at: 0, range: 0..bytes, publishes: false })
            }
            _ => self.consume_blocks(&(0..bytes), area, bytes, emit),
        }
    }

    /// Emits the steps that publish the piece `part` of each other rank's block, `stride` bytes apart.
    fn publish_blocks(
        &self,
        part: &Range<usize>,
        area: Area,
        stride: usize,
        emit: &mut impl FnMut(ScheduleStep),
    ) {
        for rank in self.others() {
            let start = rank * self.bytes;
            let range = start + part.start..start + part.end;
            emit(ScheduleStep::Publish { range, area, at: rank * stride });
        }
    }

    /// Emits the steps that fetch or reduce the piece `part` of each block that this rank needs.
    fn consume_blocks(
        &self,
        part: &Range<usize>,
        area: Area,
        stride: usize,
        emit: &mut impl FnMut(ScheduleStep),
    ) {
        let of = |block: usize| block * self.bytes + part.start..block * self.bytes + part.end;
        let fetch =
            |from: usize, at: usize, range: Range<usize>| ScheduleStep::Fetch { from, area, at, range };
        match self.kind {
            CallKind::Broadcast if !self.is_root() => emit(fetch(self.root, 0, part.clone())),
            CallKind::Scatter if !self.is_root() => {
                emit(fetch(self.root, self.me * stride, of(self.me)));
            }
            CallKind::AllGather => self.others().for_each(|rank| emit(fetch(rank, 0, of(rank)))),
            CallKind::Gather if self.is_root() => {
                self.others().for_each(|rank| emit(fetch(rank, 0, of(rank))));
            }
            CallKind::AllToAll => {
                let (me, ranks) = (self.me, self.ranks);
                self.others().for_each(|rank| emit(fetch(rank, me * stride, of(ranks + rank))));
            }
            CallKind::ReduceScatter => {
                let (at, range) = (self.me * stride, of(self.me));
                emit(ScheduleStep::Reduce { area, at, range, publishes: false });
            }
            _ => {}
        }
    }

    /// The other ranks, beginning with the next one, so that not all ranks begin with the same rank.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.ranks);
        (1..ranks).map(move |distance| (me + distance) % ranks)
    }

    /// Emits the steps that publish the data of a round that other ranks need.
    fn publish_round(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        let (part, area) = (self.round_range(round), Area::Round(round));
        let publishes = match self.kind {
            CallKind::Broadcast | CallKind::Scatter => self.is_root(),
            CallKind::Gather => !self.is_root(),
            CallKind::Reduce => self.has_owners() || !self.is_root(),
            _ => true,
        };
        if !publishes {
            return;
        }
        emit(ScheduleStep::AwaitRound(round));
        match self.kind {
            _ if self.has_owners() => {
                for rank in self.others() {
                    let range = self.owned_range(rank, round);
                    let at = range.start - part.start;
                    emit(ScheduleStep::Publish { range, area, at });
                }
            }
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll => {
                self.publish_blocks(&part, area, self.stride(), emit);
            }
            CallKind::AllGather | CallKind::Gather => {
                let start = self.me * self.bytes;
                emit(ScheduleStep::Publish { range: start + part.start..start + part.end, area, at: 0 });
            }
            _ => emit(ScheduleStep::Publish { range: part, area, at: 0 }),
        }
        emit(ScheduleStep::SetCounter(Counter::Published, round));
    }

    /// Emits the steps that fetch or reduce the data of a round that this rank needs.
    fn consume_round(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        let (part, area) = (self.round_range(round), Area::Round(round));
        if let Some(peers) = self.sources() {
            emit(ScheduleStep::AwaitCounter(Counter::Published, round, peers));
        }
        if self.has_owners() {
            let range = self.owned_range(self.me, round);
            let at = range.start - part.start;
            let publishes = self.kind != CallKind::Reduce || !self.is_root();
            emit(ScheduleStep::Reduce { area, at, range, publishes });
            emit(ScheduleStep::SetCounter(Counter::Reduced, round));
            return;
        }
        if self.reduces_all() {
            emit(ScheduleStep::Reduce { area, at: 0, range: part, publishes: false });
        } else {
            self.consume_blocks(&part, area, self.stride(), emit);
        }
        emit(ScheduleStep::SetCounter(Counter::Done, round));
    }

    /// Emits the steps that fetch the sums of a round from the ranks that own its parts.
    fn fetch_sums(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        let (part, area) = (self.round_range(round), Area::Round(round));
        if self.kind == CallKind::AllReduce || self.is_root() {
            for from in self.others() {
                let range = self.owned_range(from, round);
                let at = range.start - part.start;
                emit(ScheduleStep::AwaitCounter(Counter::Reduced, round, Peers::One(from)));
                emit(ScheduleStep::Fetch { from, area, at, range });
            }
        }
        emit(ScheduleStep::SetCounter(Counter::Done, round));
    }
}
