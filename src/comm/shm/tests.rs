//! The programs of all ranks, run against each other in a model of the memory, in many orders of events.

use std::ops::Range;

use super::layout::{Counter, DEPTH};
use super::program::{Limits, Place, Program, Step, Whom, is_known};
use crate::call::{Call, CallKind};
use crate::dtype::{Dtype, ReduceOp};
use convoke_testkit::Random;

/// Limits so small that calls of a few elements have many rounds.
const LIMITS: Limits = Limits { small: 24, round: 192, cached: 700 };
const ROUNDS_BYTES: usize = (DEPTH as usize + 2) * LIMITS.round;
/// A number of slots so small that they are reused.
const SLOTS: u32 = 8;

/// The memory of one rank.
#[derive(Debug, Clone)]
struct Memory {
    stamp: u32,
    slots: Vec<Vec<u8>>,
    rounds: Vec<u8>,
    counted: [u64; Counter::COUNT],
    /// A flag for each slot: true if the rank has offered its elements.
    told: Vec<bool>,
    /// The rows of all its calls.
    rows: Vec<Vec<u8>>,
}

/// The state of one rank within the sequence of calls.
#[derive(Debug)]
struct Rank {
    calls: Vec<Call>,
    /// A flag for each call: true if the rank offers its elements.
    offers: Vec<bool>,
    direct: bool,
    call: usize,
    batch: u64,
    steps: Vec<Step>,
    more: bool,
    base: u64,
    at: Position,
}

/// The position of a call's first round, and the distance between rounds.
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    first: u64,
    each: u64,
}

/// The value of byte `at` of the row of rank `rank` at the beginning of call `call`.
fn value(rank: usize, call: usize, at: usize) -> u8 {
    (rank * 89 + call * 31 + at * 7 + 3) as u8
}

fn row_bytes(call: &Call, ranks: usize) -> usize {
    let bytes = call.bytes() as usize;
    match call.kind {
        CallKind::AllReduce | CallKind::Broadcast | CallKind::Reduce => bytes,
        CallKind::AllToAll => 2 * ranks * bytes,
        _ => ranks * bytes,
    }
}

/// The values that the row of `me` must have after a call; other bytes are unspecified.
fn expected(call: &Call, index: usize, ranks: usize, me: usize) -> Vec<(usize, u8)> {
    let bytes = call.bytes() as usize;
    let sum = |at: usize| (0..ranks).fold(0_u8, |sum, rank| sum.wrapping_add(value(rank, index, at)));
    let from = |rank: usize, at: usize| value(rank, index, at);
    let (root, own) = (call.root as usize, me * bytes..(me + 1) * bytes);
    match call.kind {
        CallKind::AllReduce => (0..bytes).map(|at| (at, sum(at))).collect(),
        CallKind::Reduce if me == root => (0..bytes).map(|at| (at, sum(at))).collect(),
        CallKind::Broadcast => (0..bytes).map(|at| (at, from(root, at))).collect(),
        CallKind::AllGather => (0..ranks * bytes).map(|at| (at, from(at / bytes, at))).collect(),
        CallKind::Gather if me == root => (0..ranks * bytes).map(|at| (at, from(at / bytes, at))).collect(),
        CallKind::ReduceScatter => own.map(|at| (at, sum(at))).collect(),
        CallKind::Scatter => own.map(|at| (at, from(root, at))).collect(),
        CallKind::AllToAll => {
            let others = (0..ranks).filter(|&rank| rank != me);
            others
                .flat_map(|rank| {
                    (0..bytes)
                        .map(move |at| ((ranks + rank) * bytes + at, value(rank, index, me * bytes + at)))
                })
                .collect()
        }
        _ => Vec::new(),
    }
}

impl Rank {
    fn new(calls: &[Call], offers: Vec<bool>) -> Self {
        let calls = calls.to_vec();
        let (call, batch, base, at) = (0, 0, 0, Position::default());
        Self { calls, offers, direct: false, call, batch, steps: Vec::new(), more: true, base, at }
    }

    /// Does the next step. Returns `false` if it has to wait or all calls are done.
    fn step(&mut self, me: usize, all: &mut [Memory]) -> bool {
        let ranks = all.len();
        let Some(call) = self.calls.get(self.call) else { return false };
        let mut program = Program::new(call, me, ranks, LIMITS);
        if self.direct {
            program.make_direct();
        }
        self.at.each = program.round_bytes() as u64;
        if self.steps.is_empty() {
            if !self.more {
                self.base += program.rounds();
                self.at.first += program.rounds() * self.at.each;
                (self.call, self.batch, self.more, self.direct) = (self.call + 1, 0, true, false);
                return true;
            }
            self.more = program.batch(self.batch, &mut self.steps);
            self.batch += 1;
            return true;
        }
        if self.act(me, all) {
            self.steps.remove(0);
            return true;
        }
        false
    }

    fn act(&mut self, me: usize, all: &mut [Memory]) -> bool {
        let (ranks, number) = (all.len(), self.call as u32 + 1);
        let whom = move |whom: Whom| match whom {
            Whom::All => 0..ranks,
            Whom::One(rank) => rank..rank + 1,
        };
        let (call, base) = (self.call, self.base);
        // Taken out during the step, since the step also reads the rows of other ranks.
        let mut row = std::mem::take(&mut all[me].rows[call]);
        let acted = self.act_on(&mut row, (me, number), all, whom, base);
        all[me].rows[call] = row;
        acted
    }

    fn act_on(
        &mut self,
        row: &mut [u8],
        (me, number): (usize, u32),
        all: &mut [Memory],
        whom: impl Fn(Whom) -> Range<usize>,
        base: u64,
    ) -> bool {
        let (ranks, call, slot, position) = (all.len(), self.call, (number % SLOTS) as usize, self.at);
        match self.steps[0].clone() {
            Step::Claim => {
                return (0..ranks).all(|rank| rank == me || all[rank].stamp + SLOTS > number);
            }
            Step::Announce => {
                all[me].told[slot] = self.offers[call];
                all[me].stamp = number;
            }
            Step::Decide => self.direct = all.iter().all(|memory| memory.told[slot]),
            Step::AddUpDirect { row: range } => {
                for at in range {
                    let others = (0..ranks).filter(|&rank| rank != me);
                    row[at] =
                        others.clone().fold(row[at], |sum, rank| sum.wrapping_add(all[rank].rows[call][at]));
                    others.for_each(|rank| all[rank].rows[call][at] = row[at]);
                }
            }
            Step::Meet(those) => {
                return whom(those).all(|rank| rank == me || all[rank].stamp >= number);
            }
            Step::Room(round) => {
                let count = (base + round + 1).saturating_sub(DEPTH);
                return (0..ranks)
                    .all(|rank| rank == me || all[rank].counted[Counter::Done as usize] >= count);
            }
            Step::Await(counter, round, those) => {
                let count = base + round + 1;
                return whom(those).all(|rank| rank == me || all[rank].counted[counter as usize] >= count);
            }
            Step::Publish(counter, round) => {
                let counted = &mut all[me].counted[counter as usize];
                assert!(*counted < base + round + 1, "counters only grow");
                *counted = base + round + 1;
            }
            Step::Give { row: from, place, at } => {
                place_of(&mut all[me], place, position, number, at..at + from.len())
                    .copy_from_slice(&row[from]);
            }
            Step::Take { from, place, at, row: into } => {
                assert_ne!(from, me);
                let given = place_of(&mut all[from], place, position, number, at..at + into.len()).to_vec();
                row[into].copy_from_slice(&given);
            }
            Step::AddUp { place, at, row: into, tells } => {
                let mut sums = row[into.clone()].to_vec();
                for rank in (0..ranks).filter(|&rank| rank != me) {
                    let share = place_of(&mut all[rank], place, position, number, at..at + into.len());
                    sums.iter_mut().zip(share).for_each(|(sum, share)| *sum = sum.wrapping_add(*share));
                }
                row[into.clone()].copy_from_slice(&sums);
                if tells {
                    place_of(&mut all[me], place, position, number, at..at + into.len())
                        .copy_from_slice(&sums);
                }
            }
        }
        true
    }
}

fn place_of(
    memory: &mut Memory,
    place: Place,
    position: Position,
    number: u32,
    range: Range<usize>,
) -> &mut [u8] {
    match place {
        Place::Slot => &mut memory.slots[(number % SLOTS) as usize][range],
        Place::Round(round) => {
            assert!(range.end <= LIMITS.round);
            let start = (position.first + round * position.each) as usize % ROUNDS_BYTES;
            &mut memory.rounds[start + range.start..start + range.end]
        }
    }
}

/// Runs the calls on `ranks` ranks. `next` chooses the rank that makes the next step from those that are not
/// stuck.
///
/// `offers` tells whether a rank offers the elements of a call.
fn check(
    ranks: usize,
    calls: &[Call],
    mut offers: impl FnMut(usize, usize) -> bool,
    mut next: impl FnMut(&[usize]) -> usize,
) {
    let row = |me: usize, index: usize| {
        (0..row_bytes(&calls[index], ranks)).map(|at| value(me, index, at)).collect::<Vec<u8>>()
    };
    let memory = |me: usize| Memory {
        stamp: 0,
        slots: vec![vec![0; LIMITS.small]; SLOTS as usize],
        rounds: vec![0; ROUNDS_BYTES + LIMITS.round],
        counted: [0; Counter::COUNT],
        told: vec![false; SLOTS as usize],
        rows: (0..calls.len()).map(|index| row(me, index)).collect(),
    };
    let mut all: Vec<_> = (0..ranks).map(memory).collect();
    let offered = |me: usize| (0..calls.len()).map(|index| offers(me, index)).collect();
    let mut those: Vec<_> = (0..ranks).map(offered).map(|offers| Rank::new(calls, offers)).collect();
    let mut able: Vec<usize> = (0..ranks).collect();
    while !able.is_empty() {
        let chosen = next(&able);
        if those[chosen].step(chosen, &mut all) {
            able = (0..ranks).collect();
        } else {
            able.retain(|&rank| rank != chosen);
        }
    }
    for (me, rank) in those.iter().enumerate() {
        assert_eq!(
            rank.call,
            calls.len(),
            "rank {me} of {ranks} is stuck in {:?}",
            rank.calls.get(rank.call)
        );
        for (index, call) in calls.iter().enumerate() {
            for (at, value) in expected(call, index, ranks, me) {
                assert_eq!(
                    all[me].rows[index][at], value,
                    "byte {at} of call {index}, {call}, at {me} of {ranks}"
                );
            }
        }
    }
}

fn kinds() -> Vec<CallKind> {
    CallKind::ALL.into_iter().filter(|&kind| is_known(kind)).collect()
}

fn call(kind: CallKind, dtype: Dtype, root: usize, count: usize) -> Call {
    Call::new(kind, dtype, Some(ReduceOp::Sum), root as u32, count as u64)
}

#[test]
fn each_collective_is_correct_at_sizes_around_the_limits() {
    let mut random = Random::new("each_collective_is_correct_at_sizes_around_the_limits");
    for kind in kinds() {
        for ranks in 2..6 {
            for dtype in [Dtype::U8, Dtype::F32, Dtype::ComplexF64] {
                let most = 1200 / dtype.size_bytes();
                for count in (0..most).step_by(if most > 100 { 17 } else { 1 }) {
                    let call = call(kind, dtype, random.below(ranks), count);
                    let offered = random.below(2) == 0;
                    check(ranks, &[call], |_, _| offered, |able| able[random.below(able.len())]);
                }
            }
        }
    }
}

#[test]
fn consecutive_calls_work_in_any_event_order() {
    let mut random = Random::new("consecutive_calls_work_in_any_event_order");
    let kinds = kinds();
    for _ in 0..3000 {
        let ranks = 2 + random.below(4);
        let calls: Vec<_> = (0..1 + random.below(24))
            .map(|_| {
                let dtype = [Dtype::U8, Dtype::F32][random.below(2)];
                let count = [0, 1, 5, 24, 90, 400][random.below(6)];
                call(kinds[random.below(kinds.len())], dtype, random.below(ranks), count)
            })
            .collect();
        // One rank goes as far as it can, or all make a step in turn, or something in between.
        let hurry = random.below(4);
        let mut first = random.below(ranks);
        // All ranks offer, none does, or one does not.
        let offered: Vec<_> = calls.iter().map(|_| (random.below(3), random.below(ranks))).collect();
        let offers = |me: usize, call: usize| match offered[call] {
            (0, _) => true,
            (1, _) => false,
            (_, other) => me != other,
        };
        check(ranks, &calls, offers, |able| {
            if hurry == 0 || random.below(200) == 0 {
                first = random.below(ranks);
            }
            *able.iter().find(|&&rank| rank == first).unwrap_or(&able[random.below(able.len())])
        });
    }
}
