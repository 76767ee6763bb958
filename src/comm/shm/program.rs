//! The steps of one rank in one collective through shared memory: a straight list. Pure.
//!
//! Few bytes: each rank writes its data to its slot for the call, and reads the others' slots when they are
//! ready. That needs one synchronisation.
//!
//! Many bytes go in rounds; if they exceed the caches, the last part goes first. In each round a rank
//! publishes data, fetches or adds up what it needs, and counts that. It publishes one round ahead of what it
//! fetches, so a small delay of one rank does not stall the others. In an all-reduce every rank owns a part
//! of each round: it adds up all shares of that part in rank order, and all ranks fetch the sum from it.
//!
//! A slot or the memory of a round is reused when all ranks have counted that they no longer read it. All
//! ranks count all rounds of all calls, also those in which they have no work, so counters are never reset.

use std::ops::Range;

use super::layout::Counter;
use crate::call::{Call, CallKind};
use crate::plan::block;

/// The alignment of data in rounds: a line.
const ALIGNED: usize = 64;
/// The least number of rounds of a call in which one rank can read while another writes. These are calls
/// where some ranks only write and others only read, and all-reduces of two ranks.
const COPY_ROUNDS: usize = 4;
/// The least size of a round if there is more than one.
const COPY_BYTES: usize = 16 << 10;

/// The largest piece of a rank's own part that is added up in one step in place.
const DIRECT_BYTES: usize = 256 << 10;

/// Buffers of up to this size are usually still in the caches of the cores that wrote them.
pub(crate) const CACHED_BYTES: usize = 2 << 20;

/// The sizes that decide how a call is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most bytes that a rank publishes in the slot of a call.
    pub(crate) small: usize,
    /// Most bytes that a rank publishes in a round.
    pub(crate) round: usize,
    /// Most bytes that usually stay in the caches of the core that wrote them.
    pub(crate) cached: usize,
}

/// The location to which a rank publishes data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The rank's slot for the call.
    Slot,
    /// The rank's memory for a round, counted from the first of the call.
    Round(u64),
}

/// The other ranks that a step is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whom {
    All,
    One(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits until this rank's slot for the call is free.
    Claim,
    /// Copies bytes of the row to a place where others read them.
    Give { row: Range<usize>, place: Place, at: usize },
    /// Publishes that this rank has made the call.
    Announce,
    /// Waits until these ranks have made the call, and compares it.
    Meet(Whom),
    /// Checks whether all ranks have published the location of their elements. If so, the rest of the program
    /// is [another](Program::make_direct).
    Decide,
    /// Waits until the memory of the round is free.
    Room(u64),
    /// Sets this rank's counter for a round.
    Publish(Counter, u64),
    /// Waits until the counters of other ranks have reached a round.
    Await(Counter, u64, Whom),
    /// Copies data that a rank published into the row.
    Take { from: usize, place: Place, at: usize, row: Range<usize> },
    /// Adds up the shares of all ranks in place and leaves the sums in all their rows.
    AddUpDirect { row: Range<usize> },
    /// Adds up the shares of all ranks: the others' at `at` of their places, this one's in the row. If it
    /// `tells`, it also writes the sums to the place in its own memory, where others fetch them.
    AddUp { place: Place, at: usize, row: Range<usize>, tells: bool },
}

/// The program of one rank for one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    kind: CallKind,
    me: usize,
    ranks: usize,
    root: usize,
    /// The size of the buffer, or of one block if there is one for each rank.
    bytes: usize,
    element: usize,
    limits: Limits,
    /// If set, the program works on the elements in place on all ranks.
    direct: bool,
}

/// Returns whether there is a program for calls of a kind.
pub(crate) fn is_known(kind: CallKind) -> bool {
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

impl Program {
    /// For rank `me` of `ranks`, and a call of a kind that [is known](is_known).
    pub(crate) fn new(call: &Call, me: usize, ranks: usize, limits: Limits) -> Self {
        debug_assert!(is_known(call.kind));
        let (bytes, element) = (call.bytes() as usize, call.dtype.size_bytes());
        let bytes = if call.kind == CallKind::Barrier { 0 } else { bytes };
        Self { kind: call.kind, me, ranks, root: call.root as usize, bytes, element, limits, direct: false }
    }

    /// The number of rounds; 0 if the data fits in a slot.
    pub(crate) fn rounds(&self) -> u64 {
        if self.is_small() { 0 } else { self.bytes.div_ceil(self.piece()) as u64 }
    }

    /// The approximate numbers of bytes that this rank publishes, and that it fetches or adds up.
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
        self.is_inline(self.limits.small)
    }

    /// Returns whether the data of every rank has at most `most` bytes.
    pub(crate) fn is_inline(&self, most: usize) -> bool {
        self.bytes.saturating_mul(self.blocks()) <= most
    }

    /// The largest number of blocks that a rank publishes at a time, its own included.
    fn blocks(&self) -> usize {
        match self.kind {
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll => self.ranks,
            _ => 1,
        }
    }

    /// The bytes of the buffer, or of each block, that one round works on.
    fn piece(&self) -> usize {
        let blocks = self.blocks();
        let most = self.limits.round / blocks;
        let is_cut = match self.kind {
            CallKind::Broadcast | CallKind::Scatter | CallKind::Gather => true,
            CallKind::AllReduce => !self.has_owners(),
            // No rank waits while another copies, and each round may cost a context switch.
            _ => false,
        };
        let piece = if is_cut { (self.bytes / COPY_ROUNDS).max(COPY_BYTES / blocks).min(most) } else { most };
        let aligned = piece - piece % ALIGNED.max(self.element);
        if aligned > 0 { aligned } else { (piece - piece % self.element).max(self.element) }
    }

    /// The distance between the memory of one round and of the next; equal on all ranks.
    pub(crate) fn round_bytes(&self) -> usize {
        (self.stride() * self.blocks()).next_multiple_of(ALIGNED)
    }

    /// The distance between the pieces of two blocks, if a rank publishes several.
    fn stride(&self) -> usize {
        self.piece().min(self.bytes.next_multiple_of(ALIGNED))
    }

    /// The piece of a buffer or block that a round works on. If the data exceeds the caches, the last piece
    /// comes first, since the program wrote it last and it is still cached.
    fn part(&self, round: u64) -> Range<usize> {
        let piece = self.piece();
        let from_end = self.bytes > self.limits.cached;
        let index = if from_end { self.rounds() - 1 - round } else { round };
        let start = (index as usize).saturating_mul(piece);
        start.min(self.bytes)..(start.saturating_add(piece)).min(self.bytes)
    }

    /// The bytes of a round that `rank` owns, in an all-reduce.
    fn owned(&self, rank: usize, round: u64) -> Range<usize> {
        let part = self.part(round);
        let own = block(rank, self.ranks, part.len() / self.element);
        part.start + own.start * self.element..part.start + own.end * self.element
    }

    /// Returns whether every rank adds up its part of each round.
    fn has_owners(&self) -> bool {
        matches!(self.kind, CallKind::AllReduce | CallKind::Reduce) && self.ranks > 2
    }

    /// Returns whether this rank, in a call without owners, adds up everything.
    fn adds_all(&self) -> bool {
        self.kind == CallKind::AllReduce || self.kind == CallKind::Reduce && self.is_root()
    }

    /// Adds the steps of batch `index` to `steps`. Returns whether there is another batch. A batch is done in
    /// one turn, unless one of its steps has to wait.
    pub(crate) fn batch(&self, index: u64, steps: &mut Vec<Step>) -> bool {
        let each = &mut |step| steps.push(step);
        if self.is_small() {
            each(Step::Claim);
            self.give_all(each);
            self.meet(each);
            self.read_all(each);
            return false;
        }
        match index.checked_sub(1) {
            None => {
                each(Step::Claim);
                self.meet(each);
                if self.may_be_direct() {
                    each(Step::Decide);
                } else {
                    self.give(0, each);
                }
                true
            }
            Some(piece) if self.direct => self.direct_piece(piece as usize, each),
            Some(0) if self.may_be_direct() => {
                self.give(0, each);
                true
            }
            Some(index) => self.round(index - u64::from(self.may_be_direct()), each),
        }
    }

    /// Publishes that this rank has made the call, and waits for the ranks whose data it needs.
    fn meet(&self, each: &mut impl FnMut(Step)) {
        each(Step::Announce);
        if let Some(whom) = self.sources() {
            each(Step::Meet(whom));
        }
    }

    /// Adds the steps of a round, and those that belong to it. Returns whether there is another batch.
    fn round(&self, round: u64, each: &mut impl FnMut(Step)) -> bool {
        let rounds = self.rounds();
        if round == rounds {
            self.take_sums(rounds - 1, each);
            return false;
        }
        if round + 1 < rounds {
            self.give(round + 1, each);
        }
        self.read(round, each);
        if let Some(before) = round.checked_sub(1).filter(|_| self.has_owners()) {
            self.take_sums(before, each);
        }
        round + 1 < rounds || self.has_owners()
    }

    /// Returns whether ranks publish the locations of their elements.
    pub(crate) fn may_be_direct(&self) -> bool {
        self.kind == CallKind::AllReduce && !self.is_small()
    }

    /// Switches to the direct form: each rank adds up its part of the whole for all, and none continues
    /// before all are done.
    pub(crate) fn make_direct(&mut self) {
        self.direct = true;
    }

    /// Adds the steps of a piece of the own part, the last piece first. Returns whether there is another
    /// batch.
    fn direct_piece(&self, piece: usize, each: &mut impl FnMut(Step)) -> bool {
        let own = block(self.me, self.ranks, self.bytes / self.element);
        let (start, end) = (own.start * self.element, own.end * self.element);
        let end = end.saturating_sub(piece * DIRECT_BYTES);
        if start < end {
            each(Step::AddUpDirect { row: start.max(end.saturating_sub(DIRECT_BYTES))..end });
            return true;
        }
        let last = self.rounds() - 1;
        each(Step::Publish(Counter::Done, last));
        each(Step::Await(Counter::Done, last, Whom::All));
        false
    }

    /// The ranks whose data this rank needs.
    pub(crate) fn sources(&self) -> Option<Whom> {
        match self.kind {
            CallKind::Broadcast | CallKind::Scatter => (!self.is_root()).then_some(Whom::One(self.root)),
            CallKind::Gather => self.is_root().then_some(Whom::All),
            CallKind::Reduce => {
                (self.is_root() || self.has_owners() && !self.is_small()).then_some(Whom::All)
            }
            _ => Some(Whom::All),
        }
    }

    /// Publishes all data of a small call.
    #[inline(always)]
    pub(crate) fn give_all(&self, each: &mut impl FnMut(Step)) {
        let (bytes, me, place) = (self.bytes, self.me, Place::Slot);
        if bytes == 0 {
            return;
        }
        let mut give = |row: Range<usize>| each(Step::Give { row, place, at: 0 });
        match self.kind {
            CallKind::AllReduce => give(0..bytes),
            CallKind::Reduce if !self.is_root() => give(0..bytes),
            CallKind::Broadcast if self.is_root() => give(0..bytes),
            CallKind::AllGather => give(me * bytes..(me + 1) * bytes),
            CallKind::Gather if !self.is_root() => give(me * bytes..(me + 1) * bytes),
            CallKind::Scatter if self.is_root() => self.give_blocks(&(0..bytes), place, bytes, each),
            CallKind::ReduceScatter | CallKind::AllToAll => {
                self.give_blocks(&(0..bytes), place, bytes, each);
            }
            _ => {}
        }
    }

    /// Fetches or adds up all data of a small call, once the ranks that publish it have made the call.
    #[inline(always)]
    pub(crate) fn read_all(&self, each: &mut impl FnMut(Step)) {
        let (bytes, place) = (self.bytes, Place::Slot);
        match bytes {
            0 => {}
            _ if self.adds_all() => each(Step::AddUp { place, at: 0, row: 0..bytes, tells: false }),
            _ => self.read_blocks(&(0..bytes), place, bytes, each),
        }
    }

    /// Publishes the piece `part` of each other rank's block; the pieces are `stride` bytes apart.
    fn give_blocks(&self, part: &Range<usize>, place: Place, stride: usize, each: &mut impl FnMut(Step)) {
        for rank in self.others() {
            let start = rank * self.bytes;
            let row = start + part.start..start + part.end;
            each(Step::Give { row, place, at: rank * stride });
        }
    }

    /// Fetches or adds up the piece `part` of blocks.
    fn read_blocks(&self, part: &Range<usize>, place: Place, stride: usize, each: &mut impl FnMut(Step)) {
        let of = |block: usize| block * self.bytes + part.start..block * self.bytes + part.end;
        let take = |from: usize, at: usize, row: Range<usize>| Step::Take { from, place, at, row };
        match self.kind {
            CallKind::Broadcast if !self.is_root() => each(take(self.root, 0, part.clone())),
            CallKind::Scatter if !self.is_root() => {
                each(take(self.root, self.me * stride, of(self.me)));
            }
            CallKind::AllGather => self.others().for_each(|rank| each(take(rank, 0, of(rank)))),
            CallKind::Gather if self.is_root() => {
                self.others().for_each(|rank| each(take(rank, 0, of(rank))));
            }
            CallKind::AllToAll => {
                let (me, ranks) = (self.me, self.ranks);
                self.others().for_each(|rank| each(take(rank, me * stride, of(ranks + rank))));
            }
            CallKind::ReduceScatter => {
                let (at, row) = (self.me * stride, of(self.me));
                each(Step::AddUp { place, at, row, tells: false });
            }
            _ => {}
        }
    }

    /// The other ranks, beginning with the next one, so that not all begin with the same rank.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.ranks);
        (1..ranks).map(move |distance| (me + distance) % ranks)
    }

    /// Publishes the data of a round that others need.
    fn give(&self, round: u64, each: &mut impl FnMut(Step)) {
        let (part, place) = (self.part(round), Place::Round(round));
        let gives = match self.kind {
            CallKind::Broadcast | CallKind::Scatter => self.is_root(),
            CallKind::Gather => !self.is_root(),
            CallKind::Reduce => self.has_owners() || !self.is_root(),
            _ => true,
        };
        if !gives {
            return;
        }
        each(Step::Room(round));
        match self.kind {
            _ if self.has_owners() => {
                for rank in self.others() {
                    let row = self.owned(rank, round);
                    let at = row.start - part.start;
                    each(Step::Give { row, place, at });
                }
            }
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll => {
                self.give_blocks(&part, place, self.stride(), each);
            }
            CallKind::AllGather | CallKind::Gather => {
                let start = self.me * self.bytes;
                each(Step::Give { row: start + part.start..start + part.end, place, at: 0 });
            }
            _ => each(Step::Give { row: part, place, at: 0 }),
        }
        each(Step::Publish(Counter::Given, round));
    }

    /// Fetches or adds up the data of a round that this rank needs.
    fn read(&self, round: u64, each: &mut impl FnMut(Step)) {
        let (part, place) = (self.part(round), Place::Round(round));
        if let Some(whom) = self.sources() {
            each(Step::Await(Counter::Given, round, whom));
        }
        if self.has_owners() {
            let row = self.owned(self.me, round);
            let at = row.start - part.start;
            let tells = self.kind != CallKind::Reduce || !self.is_root();
            each(Step::AddUp { place, at, row, tells });
            each(Step::Publish(Counter::Summed, round));
            return;
        }
        if self.adds_all() {
            each(Step::AddUp { place, at: 0, row: part, tells: false });
        } else {
            self.read_blocks(&part, place, self.stride(), each);
        }
        each(Step::Publish(Counter::Done, round));
    }

    /// Fetches the sums of a round from their owners.
    fn take_sums(&self, round: u64, each: &mut impl FnMut(Step)) {
        let (part, place) = (self.part(round), Place::Round(round));
        if self.kind == CallKind::AllReduce || self.is_root() {
            for from in self.others() {
                let row = self.owned(from, round);
                let at = row.start - part.start;
                each(Step::Await(Counter::Summed, round, Whom::One(from)));
                each(Step::Take { from, place, at, row });
            }
        }
        each(Step::Publish(Counter::Done, round));
    }
}
