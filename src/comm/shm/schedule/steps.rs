//! The steps of a schedule, batch by batch. Pure: it accesses no memory.

use std::ops::Range;

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
            emit(ScheduleStep::AwaitSlot);
            self.publish_all(emit);
            self.match_calls(emit);
            self.consume_all(emit);
            return false;
        }
        match index.checked_sub(1) {
            None => {
                emit(ScheduleStep::AwaitSlot);
                // If this rank exposes no elements, no rank reduces in place. The first round is published before
                // the call, so ranks wait for each other once and not twice.
                if !self.exposed {
                    self.publish_round(0, emit);
                }
                self.match_calls(emit);
                if self.exposed {
                    emit(ScheduleStep::DecideDirect);
                }
                true
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

    /// Lets this rank publish the location of its elements, which are in a shared allocation.
    pub(crate) fn expose(&mut self) {
        debug_assert!(self.may_be_direct());
        self.exposed = true;
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
        if self.bytes > 0 && self.has_data() {
            self.publish_part(0..self.bytes, Area::Slot, self.bytes, emit);
        }
    }

    /// Returns whether other ranks need data of this rank, apart from calls in which ranks own parts of a
    /// round.
    #[inline(always)]
    fn has_data(&self) -> bool {
        match self.kind {
            CallKind::Broadcast | CallKind::Scatter => self.is_root(),
            CallKind::Gather | CallKind::Reduce => !self.is_root(),
            _ => true,
        }
    }

    /// Emits the steps that publish the piece `part` of this rank's buffer, or of the blocks in it that other
    /// ranks need, `stride` bytes apart.
    #[inline(always)]
    fn publish_part(
        &self,
        part: Range<usize>,
        area: Area,
        stride: usize,
        emit: &mut impl FnMut(ScheduleStep),
    ) {
        match self.kind {
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll => {
                self.publish_blocks(&part, area, stride, emit);
            }
            CallKind::AllGather | CallKind::Gather => {
                emit(ScheduleStep::Publish { range: self.of_block(self.me, &part), area, at: 0 });
            }
            _ => emit(ScheduleStep::Publish { range: part, area, at: 0 }),
        }
    }

    /// The piece `part` of the block `block` of the buffer.
    fn of_block(&self, block: usize, part: &Range<usize>) -> Range<usize> {
        block * self.bytes + part.start..block * self.bytes + part.end
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
            let at = self.block_index(rank) * stride;
            emit(ScheduleStep::Publish { range: self.of_block(rank, part), area, at });
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
        let of = |block: usize| self.of_block(block, part);
        let at = self.block_index(self.me) * stride;
        let fetch =
            |from: usize, at: usize, range: Range<usize>| ScheduleStep::Fetch { from, area, at, range };
        match self.kind {
            CallKind::Broadcast if !self.is_root() => emit(fetch(self.root, 0, part.clone())),
            CallKind::Scatter if !self.is_root() => {
                emit(fetch(self.root, at, of(self.me)));
            }
            CallKind::AllGather => self.others().for_each(|rank| emit(fetch(rank, 0, of(rank)))),
            CallKind::Gather if self.is_root() => {
                self.others().for_each(|rank| emit(fetch(rank, 0, of(rank))));
            }
            CallKind::AllToAll => {
                let ranks = self.ranks;
                self.others().for_each(|rank| emit(fetch(rank, at, of(ranks + rank))));
            }
            CallKind::ReduceScatter => {
                let range = of(self.me);
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
        let area = Area::Round(round);
        if !self.has_owners() && !self.has_data() {
            return;
        }
        emit(ScheduleStep::AwaitRound(round));
        if self.has_owners() {
            for rank in self.others() {
                let (range, at) = self.owned_part(rank, round);
                emit(ScheduleStep::Publish { range, area, at });
            }
        } else {
            self.publish_part(self.round_range(round), area, self.stride(), emit);
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
            let (range, at) = self.owned_part(self.me, round);
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
        if self.kind == CallKind::AllReduce || self.is_root() {
            for from in self.others() {
                let (range, at) = self.owned_part(from, round);
                emit(ScheduleStep::AwaitCounter(Counter::Reduced, round, Peers::One(from)));
                emit(ScheduleStep::Fetch { from, area: Area::Round(round), at, range });
            }
        }
        emit(ScheduleStep::SetCounter(Counter::Done, round));
    }
}
