//! Shared memory: collectives and messages between the ranks of one host, without connections.
//!
//! ```text
//! meeting ─► segment, layout       memory that all of them have
//! program ─► run, small ─► moves   collectives: what a rank does, step by step; doing it, also at once; copies and sums
//!            ring ─► segment       a way for bytes, in the place of a connection
//!            bells                 waking who sleeps
//! handout ─► allocations ─► part   memory of programs that all of them reach
//! ```
//!
//! Control connections stay open: they report a rank that has died, left or aborted. Memory holds data and
//! counters only. The rules of connections hold here too: calls are compared before data is touched, every
//! wait has a deadline, one rank reports a failure to all.
//!
//! Only a rank itself writes to its memory. The order of a call's steps ([`program`]) determines when others
//! may read it and how long it must stay. `tests.rs` checks that in many orders of events.

pub(crate) mod allocations;
mod bells;
pub(crate) mod handout;
mod layout;
pub(crate) mod meeting;
#[cfg(all(test, loom))]
mod models;
mod moves;
pub(crate) mod obstacle;
mod pace;
pub(crate) mod part;
mod program;
mod put;
mod ring;
pub(crate) mod run;
pub(crate) mod segment;
pub(crate) mod small;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::call::Call;
use crate::engine::streams::RunError;
use crate::kernels::Kernel;
use allocations::{Allocations, Told};
use bells::Bells;
use layout::{CALL_AT, Counter, INLINE_AT, PAST_AT, ROUND_BYTES, SLOT_HEADER, SLOTS, SMALL_BYTES};
pub(crate) use layout::{Layout, RingLane};
use meeting::Met;
use pace::Pace;
pub(crate) use program::is_known;
use program::{CACHED_BYTES, Limits, Program, Step, Whom};
use ring::Ring;
use segment::{Segment, View};

/// The memory that this rank shares with the others on its host.
#[derive(Debug)]
pub(crate) struct Node {
    segment: Arc<Segment>,
    layout: Layout,
    bells: Arc<Bells>,
    /// The ranks in the group of the host's ranks, and the place of this one.
    ranks: Vec<usize>,
    me: usize,
    processes: Vec<OwnedFd>,
    /// The core on which this rank last said that it waits, plus 1.
    core: u64,
    /// Calls and rounds that were begun here, and the size of the rounds.
    calls: u32,
    rounds: u64,
    round_bytes: u64,
    past: u64,
    /// The calls that the others had begun, and their counters, when last read.
    begun: Vec<u32>,
    counted: [Vec<u64>; Counter::COUNT],
    scratch: Vec<u8>,
    /// The store policy of writes for all ranks, and of writes for one rank each.
    to_all: Pace,
    to_each: Vec<Pace>,
    allocations: Arc<Allocations>,
    /// A list of steps that the next run reuses, which saves an allocation.
    steps: Vec<Step>,
}

/// The ranks that a call waits for.
type Waits = SmallVec<[usize; 4]>;

/// The description of a call that a rank publishes in its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    call: [u8; 16],
    /// The sequence number among the group's collectives.
    seq: u32,
    /// A digest of the earlier calls. A rank that publishes or leaves without waiting is compared later by
    /// it.
    past: u64,
}

/// The number of a call among those of the host's ranks, and the position of its rounds.
#[derive(Debug, Clone, Copy)]
struct Numbered {
    number: u32,
    /// The number of rounds before its own, and the offset of its first round in bytes after the first of all
    /// calls.
    rounds: u64,
    position: u64,
    /// The distance from each of its rounds to the next.
    round_bytes: u64,
    header: Header,
}

impl Header {
    /// The digest of this call and those before it.
    fn digest(&self) -> u64 {
        let (low, high) = self.call.split_at(8);
        let words = [low, high].map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        // Odd multipliers are invertible, so every call affects the digest; the rotation makes the order
        // count.
        let mix = |hash: u64, word: u64| (hash.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        words.into_iter().chain([u64::from(self.seq)]).fold(self.past, mix)
    }
}

impl Node {
    pub(crate) fn new(met: Met, layout: Layout, ranks: Vec<usize>, me: usize) -> Self {
        let Met { segment, bells, processes } = met;
        let bells = Arc::new(Bells::new(Arc::clone(&segment), layout, me, bells));
        let (begun, counted) = (vec![0; ranks.len()], std::array::from_fn(|_| vec![0; ranks.len()]));
        let (scratch, to_each) =
            (vec![0; Kernel::SCRATCH_BYTES], ranks.iter().map(|_| Pace::default()).collect());
        let (calls, rounds, round_bytes, past, steps) = (0, 0, 0, 0, Vec::new());
        Self {
            segment,
            layout,
            bells,
            ranks,
            me,
            processes,
            core: 0,
            calls,
            rounds,
            round_bytes,
            past,
            begun,
            counted,
            scratch,
            to_all: Pace::default(),
            to_each,
            allocations: Arc::default(),
            steps,
        }
    }

    /// The allocations that the ranks created together.
    pub(crate) fn allocations(&self) -> &Arc<Allocations> {
        &self.allocations
    }

    /// The other ranks of the host, with their places.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let me = self.me;
        self.ranks.clone().into_iter().enumerate().filter(move |&(place, _)| place != me)
    }

    /// The processes of the host's ranks, if the system has descriptors for them.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        self.ranks.iter().copied().zip(self.processes.iter().map(AsFd::as_fd))
    }

    pub(crate) fn process(&self, rank: usize) -> Option<BorrowedFd<'_>> {
        self.processes().find(|&(of, _)| of == rank).map(|(_, process)| process)
    }

    /// A pair of rings to the rank at `place`.
    pub(crate) fn way(&self, lane: RingLane, place: usize) -> Ring {
        let (out, into) = (self.layout.ring(lane, self.me, place), self.layout.ring(lane, place, self.me));
        Ring::new(Arc::clone(&self.segment), Arc::clone(&self.bells), place, out, into)
    }

    /// Sets the failure flag. Control connections report the reason.
    pub(crate) fn fail(&self) {
        self.segment.word(Layout::failed()).store(1, Ordering::Release);
    }

    /// Returns whether a rank has set the failure flag.
    pub(crate) fn has_failed(&self) -> bool {
        self.segment.word(Layout::failed()).load(Ordering::Acquire) != 0
    }

    pub(crate) fn fall_asleep(&self) {
        self.bells.fall_asleep();
    }

    /// Returns whether this rank is still marked as sleeping, because nobody has rung since.
    pub(crate) fn is_asleep(&self) -> bool {
        self.bells.is_asleep()
    }

    pub(crate) fn wake_up(&self) {
        self.bells.wake_up();
    }

    fn program(&self, call: &Call) -> Program {
        let limits = Limits { small: SMALL_BYTES, round: ROUND_BYTES, cached: CACHED_BYTES };
        let root = self.ranks.iter().position(|&rank| rank == call.root as usize).unwrap_or(0);
        Program::new(&Call { root: root as u32, ..*call }, self.me, self.ranks.len(), limits)
    }

    /// Numbers a call and its rounds; all ranks do so in the same order.
    fn count(&mut self, call: &Call, seq: u64, rounds: u64, round_bytes: usize) -> Numbered {
        self.calls = self.calls.wrapping_add(1);
        let header = Header { call: call.encode(), seq: seq as u32, past: self.past };
        self.past = header.digest();
        let numbered = Numbered {
            number: self.calls,
            rounds: self.rounds,
            position: self.round_bytes,
            round_bytes: round_bytes as u64,
            header,
        };
        self.rounds += rounds;
        self.round_bytes += rounds * round_bytes as u64;
        numbered
    }

    /// The bytes at `at` of what `rank` gives in the slot of call `number`, beside its stamp if `inline`.
    fn in_slot(&self, rank: usize, number: u32, inline: bool, at: usize, bytes: usize) -> View<'_> {
        let start = if inline { INLINE_AT } else { SLOT_HEADER };
        self.segment.view(self.layout.slot(rank, number) + start + at, bytes)
    }

    fn in_round(&self, rank: usize, position: u64, at: usize, bytes: usize) -> View<'_> {
        debug_assert!(at + bytes <= ROUND_BYTES);
        self.segment.view(self.layout.round(rank, position) + at, bytes)
    }

    /// The ranks that may still read the slot of call `number`: they have not begun a call that is late
    /// enough.
    fn late_for(&mut self, number: u32) -> Waits {
        let needed = number.wrapping_sub(SLOTS - 1);
        let mut late = Waits::new();
        for place in 0..self.ranks.len() {
            if place != self.me && !self.has_begun(place, needed) {
                late.push(self.ranks[place]);
            }
        }
        late
    }

    /// Returns whether the slot of the next call is free.
    #[inline]
    fn is_free_for_next(&mut self) -> bool {
        let needed = self.calls.wrapping_add(1).wrapping_sub(SLOTS - 1);
        (0..self.ranks.len()).all(|place| place == self.me || self.has_begun(place, needed))
    }

    fn has_begun(&mut self, rank: usize, number: u32) -> bool {
        if reaches(self.begun[rank], number) {
            return true;
        }
        let stamp = self.segment.word(self.layout.slot(rank, number)).load(Ordering::Acquire);
        if reaches(stamp as u32, number) {
            self.begun[rank] = stamp as u32;
        }
        reaches(stamp as u32, number)
    }

    /// Publishes a call with its stamp, once all data of its slot is written. The caller must then
    /// [ring](Bells::ring_all) for sleeping ranks.
    fn announce(&self, number: u32, header: &Header, told: Option<Told>) {
        let slot = self.layout.slot(self.me, number);
        if let Some(told) = told {
            self.segment.view(slot + INLINE_AT, Told::BYTES).put(&told.encode());
        }
        self.segment.view(slot + CALL_AT, 16).put(&header.call);
        self.segment.view(slot + PAST_AT, 8).put(&header.past.to_le_bytes());
        let stamp = u64::from(header.seq) << 32 | u64::from(number);
        self.segment.word(slot).store(stamp, Ordering::Release);
    }

    /// Returns whether one of `ranks` was last on this rank's core, so that it can run only if this one
    /// yields.
    pub(crate) fn is_near(&mut self, ranks: impl IntoIterator<Item = usize>) -> bool {
        self.tell_core();
        let mut places =
            ranks.into_iter().filter_map(|rank| self.ranks.iter().position(|&other| other == rank));
        places.any(|place| self.shares_core(place))
    }

    /// Publishes the core on which this rank waits.
    fn tell_core(&mut self) {
        let core = nix::sched::sched_getcpu().map_or(0, |core| core as u64 + 1);
        if core != std::mem::replace(&mut self.core, core) {
            self.segment.word(Layout::core(self.me)).store(core, Ordering::Relaxed);
        }
    }

    fn shares_core(&self, place: usize) -> bool {
        self.core != 0 && self.segment.word(Layout::core(place)).load(Ordering::Relaxed) == self.core
    }

    /// Wakes ranks that sleep, after something was announced.
    #[inline]
    pub(crate) fn ring(&self) {
        self.bells.ring_all();
    }

    /// Returns whether `rank` has made call `number`, which this rank describes as `ours` and which is its
    /// collective `seq`.
    ///
    /// # Errors
    ///
    /// The rank made another call, now or before.
    #[inline]
    fn meet(&mut self, rank: usize, number: u32, ours: &Header, seq: u64) -> Result<bool, RunError> {
        match self.header(rank, number) {
            None => Ok(false),
            Some(theirs) if theirs == *ours => Ok(true),
            Some(theirs) => Err(self.differs(rank, number, theirs, seq)),
        }
    }

    #[cold]
    fn differs(&mut self, rank: usize, number: u32, theirs: Header, seq: u64) -> RunError {
        let peer = self.ranks[rank];
        let theirs = self.difference(rank, number).unwrap_or(theirs);
        match Call::decode(theirs.call) {
            Ok(call) => {
                let seq = seq & !u64::from(u32::MAX) | u64::from(theirs.seq);
                RunError::Mismatch { peer, theirs: call, seq }
            }
            Err(what) => RunError::Protocol { peer, what },
        }
    }

    /// The description that `rank` published of call `number`. `None` if the rank has not made it yet, or has
    /// reused the slot.
    fn header(&mut self, rank: usize, number: u32) -> Option<Header> {
        let slot = self.layout.slot(rank, number);
        let stamp = self.segment.word(slot).load(Ordering::Acquire);
        if stamp as u32 != number {
            return None;
        }
        if reaches(number, self.begun[rank]) {
            self.begun[rank] = number;
        }
        let (mut call, mut past) = ([0; 16], [0; 8]);
        self.segment.view(slot + CALL_AT, 16).take(&mut call);
        self.segment.view(slot + PAST_AT, 8).take(&mut past);
        Some(Header { call, seq: (stamp >> 32) as u32, past: u64::from_le_bytes(past) })
    }

    /// The call of `rank`, `number` or one shortly before, in which it was the first to differ from this
    /// rank.
    fn difference(&mut self, rank: usize, number: u32) -> Option<Header> {
        let last = (0..SLOTS).map(|back| number.wrapping_sub(back));
        let differ = last.filter_map(|number| {
            let (theirs, ours) = (self.header(rank, number)?, self.header(self.me, number)?);
            (theirs.call != ours.call || theirs.seq != ours.seq).then_some(theirs)
        });
        differ.last()
    }

    /// The location of the elements of `rank` for call `number`, which it has made.
    fn told(&self, rank: usize, number: u32) -> Told {
        let mut bytes = [0; Told::BYTES];
        self.segment.view(self.layout.slot(rank, number) + INLINE_AT, Told::BYTES).take(&mut bytes);
        Told::decode(bytes)
    }

    fn publish(&self, counter: Counter, count: u64) {
        self.segment.word(self.layout.counter(self.me, counter)).store(count, Ordering::Release);
        self.bells.ring_all();
    }

    /// Returns whether the counter of `rank` has reached `count`.
    fn has_counted(&mut self, rank: usize, counter: Counter, count: u64) -> bool {
        let known = &mut self.counted[counter as usize][rank];
        if *known < count {
            *known = self.segment.word(self.layout.counter(rank, counter)).load(Ordering::Acquire);
        }
        *known >= count
    }

    /// The first of `whom` whose counter has not reached `count`.
    fn behind(&mut self, whom: Whom, counter: Counter, count: u64) -> Option<usize> {
        match whom {
            Whom::One(rank) => (!self.has_counted(rank, counter, count)).then_some(rank),
            Whom::All => {
                let me = self.me;
                (0..self.ranks.len()).find(|&rank| rank != me && !self.has_counted(rank, counter, count))
            }
        }
    }
}

/// Returns whether `number` is `to` or later, modulo the wrap-around.
fn reaches(number: u32, to: u32) -> bool {
    number.wrapping_sub(to).cast_signed() >= 0
}
