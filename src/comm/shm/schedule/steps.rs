//! The steps of a schedule, batch by batch. Pure: it accesses no memory.

use std::ops::Range;

use super::transfers::{Results, Transfer, Transfers};
use super::{Area, Peers, Schedule, ScheduleStep};
use crate::collectives::call::CallKind;
use crate::collectives::plan::block;
use crate::shm::layout::Counter;

/// Maximum number of bytes of a rank's own part that one step reduces in place.
const DIRECT_BYTES: usize = 256 << 10;

impl Schedule {
    /// Appends the steps of batch `index` to `steps`. Returns whether there is another batch. The engine
    /// executes a batch without doing other work in between, unless a step has to wait.
    pub(crate) fn batch(&self, index: u64, steps: &mut Vec<ScheduleStep>) -> bool {
        let emit = &mut |step| steps.push(step);
        if self.is_small() {
            let area = self.area();
            emit(ScheduleStep::AwaitSlot);
            if area != Area::Slot && self.has_data() {
                emit(ScheduleStep::AwaitRound(0));
            }
            Self::publish(self.published(), area, emit);
            if area != Area::Slot && self.has_chunks() {
                if self.has_data() {
                    emit(ScheduleStep::SetCounter(Counter::Published, 0));
                }
                self.match_calls(emit);
                self.fetch_chunks(0, emit);
                return false;
            }
            self.match_calls(emit);
            Self::consume(self.results(), area, emit);
            if area != Area::Slot {
                emit(ScheduleStep::SetCounter(Counter::Done, 0));
            }
            return false;
        }
        match index.checked_sub(1) {
            None => {
                emit(ScheduleStep::AwaitSlot);
                // If this rank exposes no elements, no rank reduces in place. The first round, or its first chunk, is
                // published before the call, so ranks wait for each other once and not twice.
                if self.has_chunks() {
                    if self.exposed {
                        self.match_calls(emit);
                    } else {
                        self.publish_chunks(0, true, emit);
                        self.decide_single_copy(emit);
                    }
                    return true;
                }
                if !self.exposed {
                    self.publish_round(0, emit);
                }
                self.match_calls(emit);
                if self.may_copy_once() {
                    self.decide_single_copy(emit);
                } else if self.exposed {
                    emit(ScheduleStep::DecideDirect);
                }
                true
            }
            Some(piece) if self.direct && self.may_copy_once() => {
                self.single_copy_steps(piece as usize, emit)
            }
            Some(piece) if self.direct => self.direct_steps(piece as usize, emit),
            Some(0) if self.exposed => {
                self.publish_round(0, emit);
                true
            }
            Some(index) => self.round_steps(index - u64::from(self.exposed), emit),
        }
    }

    /// Emits the steps that announce this rank's call, and that wait for the calls of the ranks whose data it
    /// needs.
    pub(super) fn match_calls(&self, emit: &mut impl FnMut(ScheduleStep)) {
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
        self.kind == CallKind::AllReduce && !self.fits_in(self.limits.slot_bytes)
    }

    /// Lets this rank publish the location of its elements.
    pub(crate) fn expose(&mut self) {
        debug_assert!(self.may_be_direct() || self.exposable().is_some());
        self.exposed = true;
        // The root of a `scatter` decides alone.
        self.direct = self.has_chunks();
    }

    /// Switches to reduction in place: each rank reduces its part of the whole buffer for all ranks. Or switches to single copy:
    /// each rank reads its data in the memory of other ranks. No rank continues while another one accesses its memory.
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
    #[inline(always)]
    pub(crate) fn sources(&self) -> Option<Peers> {
        match self.kind {
            CallKind::Broadcast | CallKind::Scatter => (!self.is_root()).then_some(Peers::One(self.root)),
            CallKind::Gather => self.is_root().then_some(Peers::All),
            CallKind::Reduce => {
                (self.is_root() || self.has_owners() && !self.fits_in_slot()).then_some(Peers::All)
            }
            _ => Some(Peers::All),
        }
    }

    /// Returns what this rank publishes in its area in a small call.
    #[inline(always)]
    pub(crate) fn published(&self) -> Transfers {
        if self.has_data() { self.published_part(0..self.bytes, self.bytes) } else { Transfers::NONE }
    }

    /// Returns what this rank takes from the areas of other ranks in a small call, when they have made the call.
    #[inline(always)]
    pub(crate) fn results(&self) -> Results {
        if self.reduces_all() {
            Results::Reduced(Transfer { rank: self.me, at: 0, range: 0..self.bytes })
        } else {
            self.results_part(&(0..self.bytes), self.bytes)
        }
    }

    /// Returns whether other ranks need data of this rank, apart from calls in which ranks own parts of a
    /// round.
    #[inline(always)]
    pub(crate) fn has_data(&self) -> bool {
        self.publishes(self.me)
    }

    #[inline(always)]
    fn publishes(&self, rank: usize) -> bool {
        match self.kind {
            CallKind::Broadcast | CallKind::Scatter => rank == self.root,
            CallKind::Gather | CallKind::Reduce => rank != self.root,
            _ => true,
        }
    }

    /// Returns which ranks of each pair publish data that only the other rank reads, if this data may be in exchange areas.
    #[inline]
    pub(crate) fn exchanging_ranks(&self) -> Option<[bool; 2]> {
        match self.rounds() {
            0 => None,
            _ if self.swaps_areas() => Some([true, true]),
            rounds => {
                let fits = rounds as usize * self.round_bytes() <= self.limits.exchange_bytes;
                (self.ranks == 2 && fits).then(|| [0, 1].map(|rank| self.publishes(rank)))
            }
        }
    }

    /// Returns the blocks of this rank's buffer that other ranks need, each reduced to its piece `part`, and their
    /// positions in this rank's area, `stride` bytes apart. For a kind of call without blocks, it is the piece itself.
    #[inline(always)]
    pub(super) fn published_part(&self, part: Range<usize>, stride: usize) -> Transfers {
        let len = part.len();
        match self.kind {
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll => {
                let at_step = self.block_step(stride);
                Transfers { at_step, ..self.with_others(part.start, self.bytes, len) }
            }
            CallKind::AllGather | CallKind::Gather => {
                Transfers::one(self.next_rank(), 0, self.me * self.bytes + part.start, len)
            }
            _ => Transfers::one(self.next_rank(), 0, part.start, len),
        }
    }

    /// Returns what this rank takes of the piece `part` of each block, where the pieces are `stride` bytes apart.
    #[inline(always)]
    pub(super) fn results_part(&self, part: &Range<usize>, stride: usize) -> Results {
        let (len, own) = (part.len(), self.me * self.bytes + part.start);
        let at = self.me * self.block_step(stride);
        match self.kind {
            CallKind::Broadcast if !self.is_root() => {
                Results::Fetched(Transfers::one(self.root, 0, part.start, len))
            }
            CallKind::Scatter if !self.is_root() => Results::Fetched(Transfers::one(self.root, at, own, len)),
            CallKind::AllGather => Results::Fetched(self.with_others(part.start, self.bytes, len)),
            CallKind::Gather if self.is_root() => {
                Results::Fetched(self.with_others(part.start, self.bytes, len))
            }
            CallKind::AllToAll => {
                let start = self.ranks * self.bytes + part.start;
                Results::Fetched(Transfers { at, ..self.with_others(start, self.bytes, len) })
            }
            CallKind::ReduceScatter => {
                Results::Reduced(Transfer { rank: self.me, at, range: own..own + len })
            }
            _ => Results::Fetched(Transfers::NONE),
        }
    }

    /// Returns a transfer with each other rank, beginning with the next one, so that not all ranks begin with the same
    /// rank. The one with rank r has the `len` bytes from `start` + r * `step` on.
    #[inline(always)]
    fn with_others(&self, start: usize, step: usize, len: usize) -> Transfers {
        let left = if len == 0 { 0 } else { self.ranks - 1 };
        Transfers { next: self.next_rank(), left, ranks: self.ranks, at: 0, at_step: 0, start, step, len }
    }

    /// The rank after this one; the rank after the last one is rank 0.
    #[inline(always)]
    fn next_rank(&self) -> usize {
        if self.me + 1 == self.ranks { 0 } else { self.me + 1 }
    }

    /// The other ranks, beginning with the next one, so that not all ranks begin with the same rank.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.ranks);
        (me + 1..ranks).chain(0..me)
    }

    /// Emits the steps that publish `transfers` in an area.
    fn publish(transfers: Transfers, area: Area, emit: &mut impl FnMut(ScheduleStep)) {
        transfers.for_each(|Transfer { rank: to, at, range }| {
            emit(ScheduleStep::Publish { range, area, at, to });
        });
    }

    /// Emits the steps that fetch or reduce `results` from an area.
    fn consume(results: Results, area: Area, emit: &mut impl FnMut(ScheduleStep)) {
        match results {
            Results::Reduced(Transfer { range, .. }) if range.is_empty() => {}
            Results::Reduced(Transfer { at, range, .. }) => {
                emit(ScheduleStep::Reduce { area, at, range, sums: None });
            }
            Results::Fetched(transfers) => transfers.for_each(|Transfer { rank: from, at, range }| {
                emit(ScheduleStep::Fetch { from, area, at, range });
            }),
        }
    }

    /// Emits the steps that publish the data of a round that other ranks need.
    fn publish_round(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        if self.has_chunks() {
            return self.publish_chunks(round, false, emit);
        }
        let area = Area::Round(round);
        if !self.has_owners() && !self.has_data() {
            return;
        }
        emit(ScheduleStep::AwaitRound(round));
        if self.has_owners() {
            for rank in self.others() {
                let range = self.owned_part(rank, round);
                emit(ScheduleStep::Publish { range, area, at: 0, to: rank });
            }
        } else {
            Self::publish(self.published_part(self.round_range(round), self.stride()), area, emit);
        }
        emit(ScheduleStep::SetCounter(Counter::Published, round));
    }

    /// Emits the steps that fetch or reduce the data of a round that this rank needs.
    fn consume_round(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        if self.has_chunks() {
            return self.fetch_chunks(round, emit);
        }
        let (part, area) = (self.round_range(round), Area::Round(round));
        if let Some(peers) = self.sources() {
            emit(ScheduleStep::AwaitCounter(Counter::Published, round, peers));
        }
        if self.has_owners() {
            let range = self.owned_part(self.me, round);
            let is_read = self.kind != CallKind::Reduce || !self.is_root();
            emit(ScheduleStep::Reduce { area, at: 0, range, sums: is_read.then_some(Area::Sums(round)) });
            emit(ScheduleStep::SetCounter(Counter::Reduced, round));
            return;
        }
        if self.reduces_all() {
            emit(ScheduleStep::Reduce { area, at: 0, range: part, sums: None });
        } else {
            Self::consume(self.results_part(&part, self.stride()), area, emit);
        }
        emit(ScheduleStep::SetCounter(Counter::Done, round));
    }

    /// Emits the steps that fetch the sums of a round from the ranks that own its parts.
    fn fetch_sums(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        if self.kind == CallKind::AllReduce || self.is_root() {
            for from in self.others() {
                let range = self.owned_part(from, round);
                emit(ScheduleStep::AwaitCounter(Counter::Reduced, round, Peers::One(from)));
                emit(ScheduleStep::Fetch { from, area: Area::Sums(round), at: 0, range });
            }
        }
        emit(ScheduleStep::SetCounter(Counter::Done, round));
    }
}
