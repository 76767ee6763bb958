//! What one rank does in one collective through shared memory: a straight list of steps. Pure.
//!
//! Few bytes: each rank leaves what it gives in its slot for the call, and reads the others' when they are there. One
//! synchronisation. Many bytes go in rounds, very many from the end on. In each a rank gives what others need, takes or
//! adds up what it needs, and says so; it gives one round ahead of what it takes, so that nobody waits for who is a
//! little late. In an all-reduce every rank owns a part of each round: it adds up all shares of that part, in the order of
//! the ranks, and all take the sum from it.
//!
//! A slot, and the memory of a round, is used again when all have said that they need nothing of it any more. All ranks
//! count all rounds of all calls alike, also those in which they have nothing to do, so counters never begin anew.

use std::ops::Range;

use super::layout::Counter;
use crate::call::{Call, CallKind};
use crate::plan::block;

/// Alignment of what is given in rounds: a line.
const ALIGNED: usize = 64;
/// In how many rounds a call is cut at least where one rank can read while another gives: those where some only give and
/// others only take, and all-reduces of two.
const COPY_ROUNDS: usize = 4;
/// Least that is copied in a round, where there is more than one.
const COPY_BYTES: usize = 16 << 10;

/// Most of a rank's own part that is added up at once where the elements are.
const DIRECT_BYTES: usize = 256 << 10;

/// Elements of so many bytes are as a rule in the caches of the cores that have written them.
pub(crate) const CACHED_BYTES: usize = 2 << 20;

/// How much fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most that a rank gives in the slot of a call.
    pub(crate) small: usize,
    /// Most that a rank gives in a round.
    pub(crate) round: usize,
    /// Most that is in the caches, as a rule, of the core that has written it.
    pub(crate) cached: usize,
}

/// Where a rank leaves what it gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In its slot for the call.
    Slot,
    /// In its memory for the round, counted from the first of the call.
    Round(u64),
}

/// Which others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whom {
    All,
    One(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits until the slot of the call is free.
    Claim,
    /// Copies bytes of the row to where others find them.
    Give { row: Range<usize>, place: Place, at: usize },
    /// Says that this rank has made the call.
    Announce,
    /// Waits until they have made the call, and compares it.
    Meet(Whom),
    /// Looks whether all have told where their elements are; if so the rest of the program is
    /// [another](Program::make_direct).
    Decide,
    /// Waits until the memory of the round is free.
    Room(u64),
    /// Says that a round has come so far.
    Publish(Counter, u64),
    /// Waits until a round has come so far.
    Await(Counter, u64, Whom),
    /// Copies what a rank gave into the row.
    Take { from: usize, place: Place, at: usize, row: Range<usize> },
    /// Adds up all ranks' shares, and leaves the sums, in their rows.
    AddUpDirect { row: Range<usize> },
    /// Adds up all ranks' shares: the others' where they gave them, at `at`, to this one's in the row. If it `tells`, the
    /// sums go also to the place in its own memory, for others to take.
    AddUp { place: Place, at: usize, row: Range<usize>, tells: bool },
}

/// The program of one rank for one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    kind: CallKind,
    me: usize,
    ranks: usize,
    root: usize,
    /// Bytes of the buffer, or of one block where there is one for each rank.
    bytes: usize,
    element: usize,
    limits: Limits,
    /// Elements are worked on where all ranks have them.
    direct: bool,
}

/// Whether there is a program for calls of a kind.
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

    /// Number of rounds; none if what is given fits in a slot.
    pub(crate) fn rounds(&self) -> u64 {
        if self.is_small() { 0 } else { self.bytes.div_ceil(self.piece()) as u64 }
    }

    /// Bytes that this rank gives, and that it takes or adds up, in all, about.
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

    /// Whether what any rank gives fits in a slot.
    pub(crate) fn is_small(&self) -> bool {
        self.is_inline(self.limits.small)
    }

    /// Whether what any rank gives at once has at most `most` bytes.
    pub(crate) fn is_inline(&self, most: usize) -> bool {
        self.bytes.saturating_mul(self.blocks()) <= most
    }

    /// Blocks that the rank which gives most gives at a time, its own counted.
    fn blocks(&self) -> usize {
        match self.kind {
            CallKind::ReduceScatter | CallKind::Scatter | CallKind::AllToAll => self.ranks,
            _ => 1,
        }
    }

    /// Bytes of the buffer, or of each block, that are worked on in a round.
    fn piece(&self) -> usize {
        let blocks = self.blocks();
        let most = self.limits.round / blocks;
        let is_cut = match self.kind {
            CallKind::Broadcast | CallKind::Scatter | CallKind::Gather => true,
            CallKind::AllReduce => !self.has_owners(),
            // Nobody has to wait while another copies, and each round may cost a change of ranks.
            _ => false,
        };
        let piece = if is_cut { (self.bytes / COPY_ROUNDS).max(COPY_BYTES / blocks).min(most) } else { most };
        let aligned = piece - piece % ALIGNED.max(self.element);
        if aligned > 0 { aligned } else { (piece - piece % self.element).max(self.element) }
    }

    /// How far the memory of one round is from that of the next; the same on all ranks.
    pub(crate) fn round_bytes(&self) -> usize {
        (self.stride() * self.blocks()).next_multiple_of(ALIGNED)
    }

    /// From the piece of one block to that of the next, where a rank gives several.
    fn stride(&self) -> usize {
        self.piece().min(self.bytes.next_multiple_of(ALIGNED))
    }

    /// The piece of a buffer or block that a round works on. Where not all can be in the caches the last comes first:
    /// what a program has written last is there still.
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

    /// Whether every rank adds up its part of each round.
    fn has_owners(&self) -> bool {
        matches!(self.kind, CallKind::AllReduce | CallKind::Reduce) && self.ranks > 2
    }

    /// Whether this rank, where there are no owners, adds up all that there is.
    fn adds_all(&self) -> bool {
        self.kind == CallKind::AllReduce || self.kind == CallKind::Reduce && self.is_root()
    }

    /// Adds the steps of batch `index` to `steps`; whether there is another. A batch is what is done at once, as far as
    /// nothing has to be waited for.
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

    /// Says that this rank has made the call, and waits for those that it gets anything from.
    fn meet(&self, each: &mut impl FnMut(Step)) {
        each(Step::Announce);
        if let Some(whom) = self.sources() {
            each(Step::Meet(whom));
        }
    }

    /// Adds the steps of a round, and of those that go with it; whether there is another batch.
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

    /// Whether ranks tell where their elements are.
    pub(crate) fn may_be_direct(&self) -> bool {
        self.kind == CallKind::AllReduce && !self.is_small()
    }

    /// All ranks have told where their elements are: each adds up its part of the whole, for all, and nobody goes on
    /// before all have.
    pub(crate) fn make_direct(&mut self) {
        self.direct = true;
    }

    /// Adds the steps of a piece of the own part, the last first; whether there is another batch.
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

    /// From whom this rank gets anything.
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

    /// Gives all that is given in a small call.
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

    /// Takes or adds up all of a small call, when those that give it have come.
    #[inline(always)]
    pub(crate) fn read_all(&self, each: &mut impl FnMut(Step)) {
        let (bytes, place) = (self.bytes, Place::Slot);
        match bytes {
            0 => {}
            _ if self.adds_all() => each(Step::AddUp { place, at: 0, row: 0..bytes, tells: false }),
            _ => self.read_blocks(&(0..bytes), place, bytes, each),
        }
    }

    /// Gives to every other rank the piece `part` of its block, `stride` bytes after that of the one before.
    fn give_blocks(&self, part: &Range<usize>, place: Place, stride: usize, each: &mut impl FnMut(Step)) {
        for rank in self.others() {
            let start = rank * self.bytes;
            let row = start + part.start..start + part.end;
            each(Step::Give { row, place, at: rank * stride });
        }
    }

    /// Takes, or adds up, the piece `part` of blocks.
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

    /// The other ranks, from the next one on, so that not all begin with the same.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.ranks);
        (1..ranks).map(move |distance| (me + distance) % ranks)
    }

    /// Gives what others need of a round.
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

    /// Takes or adds up what this rank needs of a round.
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

    /// Takes the sums of a round from their owners.
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
