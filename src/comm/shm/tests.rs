//! The schedules of all ranks, run against each other in a model of the memory, in many orders of events.

use std::ops::Range;

use super::exchange::{CallAreas, ExchangeAreas, rounds_in_area};
use super::layout::{Counter, EXCHANGE_BYTES, Layout, MAX_RANKS, PIECE_BYTES, ROUND_BYTES, ROUNDS_IN_MEMORY};
use super::schedule::{Area, Limits, Peers, Schedule, ScheduleStep, is_supported};
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::{Dtype, ReduceOp};
use convoke_testkit::Random;

/// Limits so small that calls of a few elements have many rounds.
const LIMITS: Limits = Limits {
    slot_bytes: 24,
    swapping_slot_bytes: 16,
    one_way_slot_bytes: 20,
    piece_bytes: 192,
    round_bytes: 300,
    chunk_bytes: 48,
    whole_bytes: 64,
    exchange_bytes: 600,
    read_bytes: 100,
    cached_bytes: 700,
};
const ROUNDS_BYTES: usize = (ROUNDS_IN_MEMORY as usize + 2) * LIMITS.round_bytes;
/// A number of slots so small that they are reused.
const SLOTS: u32 = 8;

/// The memory of one rank.
#[derive(Debug, Clone)]
struct Memory {
    stamp: u32,
    slots: Vec<Vec<u8>>,
    rounds: Vec<u8>,
    /// The exchange areas that the rank writes to first, by the other rank of the pair.
    exchange: Vec<Vec<u8>>,
    counters: [u64; Counter::COUNT],
    /// A flag for each slot: true if the rank has exposed its elements.
    exposed: Vec<bool>,
    /// The call that the rank has not ended yet.
    call: usize,
    /// The buffers of all its calls.
    buffers: Vec<Vec<u8>>,
}

impl Memory {
    /// The memory of rank `me` of `ranks` before its first call.
    fn new(calls: &[Call], ranks: usize, me: usize) -> Self {
        let buffer = |index: usize| {
            (0..buffer_bytes(&calls[index], ranks)).map(|at| value(me, index, at)).collect::<Vec<u8>>()
        };
        Self {
            stamp: 0,
            slots: vec![vec![0; LIMITS.slot_bytes]; SLOTS as usize],
            rounds: vec![0; ROUNDS_BYTES + LIMITS.round_bytes],
            exchange: vec![vec![0; exchange_bytes(ranks)]; ranks],
            counters: [0; Counter::COUNT],
            exposed: vec![false; SLOTS as usize],
            call: 0,
            buffers: (0..calls.len()).map(buffer).collect(),
        }
    }

    fn count(&mut self, counter: Counter, count: u64) {
        let now = &mut self.counters[counter as usize];
        assert!(*now < count, "counters only grow");
        *now = count;
    }
}

/// The state of one rank within the sequence of calls.
#[derive(Debug)]
struct Rank {
    calls: Vec<Call>,
    /// A flag for each call: true if the rank exposes its elements.
    exposes: Vec<bool>,
    direct: bool,
    call: usize,
    batch: u64,
    steps: Vec<ScheduleStep>,
    more: bool,
    base: u64,
    at: Position,
    areas: ExchangeAreas,
}

/// The position of a call's first round, and the distance between rounds. The rounds of a call may be in exchange areas.
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    first: u64,
    each: u64,
    exchange: Option<CallAreas>,
}

/// The size of the exchange areas of `ranks` ranks.
fn exchange_bytes(ranks: usize) -> usize {
    if ranks == 2 {
        LIMITS.exchange_bytes
    } else {
        (LIMITS.round_bytes / ranks).next_multiple_of(64) * rounds_in_area(u64::MAX) as usize
    }
}

/// The value of byte `at` of the buffer of rank `rank` at the beginning of call `call`.
fn value(rank: usize, call: usize, at: usize) -> u8 {
    (rank * 89 + call * 31 + at * 7 + 3) as u8
}

fn buffer_bytes(call: &Call, ranks: usize) -> usize {
    let bytes = call.bytes() as usize;
    match call.kind {
        CallKind::AllReduce | CallKind::Broadcast | CallKind::Reduce => bytes,
        CallKind::AllToAll => 2 * ranks * bytes,
        _ => ranks * bytes,
    }
}

/// The values that the buffer of `me` must have after a call; other bytes are unspecified.
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
    fn new(calls: &[Call], exposes: Vec<bool>) -> Self {
        let calls = calls.to_vec();
        let (call, batch, base, at) = (0, 0, 0, Position::default());
        let (steps, areas) = (Vec::new(), ExchangeAreas::default());
        Self { calls, exposes, direct: false, call, batch, steps, more: true, base, at, areas }
    }

    /// Does the next step. Returns `false` if it has to wait or all calls are done.
    fn step(&mut self, me: usize, all: &mut [Memory]) -> bool {
        let ranks = all.len();
        let Some(call) = self.calls.get(self.call) else { return false };
        let mut schedule = Schedule::new(call, me, ranks, LIMITS);
        if (schedule.may_be_direct() || schedule.exposable().is_some()) && self.exposes[self.call] {
            schedule.expose();
        }
        if self.direct {
            schedule.make_direct();
        }
        self.at.each = schedule.round_bytes() as u64;
        if self.steps.is_empty() {
            if !self.more {
                self.base += schedule.rounds();
                if self.at.exchange.is_none() || schedule.has_owners() {
                    self.at.first += schedule.rounds() * self.at.each;
                }
                (self.call, self.batch, self.more, self.direct) = (self.call + 1, 0, true, false);
                all[me].call = self.call;
                return true;
            }
            if self.batch == 0 {
                let (publishes, rounds) = (schedule.exchanging_ranks(), schedule.rounds());
                self.at.exchange = publishes.and_then(|publishes| self.areas.next_call(publishes, rounds, 1));
                assert!(schedule.bytes_in_area() <= exchange_bytes(ranks));
            }
            self.more = schedule.batch(self.batch, &mut self.steps);
            self.batch += 1;
            return true;
        }
        if self.execute_step(me, all) {
            self.steps.remove(0);
            return true;
        }
        false
    }

    fn execute_step(&mut self, me: usize, all: &mut [Memory]) -> bool {
        let (ranks, number) = (all.len(), self.call as u32 + 1);
        let peers = move |peers: Peers| match peers {
            Peers::All => 0..ranks,
            Peers::One(rank) => rank..rank + 1,
        };
        let (call, base) = (self.call, self.base);
        // Taken out during the step, since the step also reads the buffers of other ranks.
        let mut buffer = std::mem::take(&mut all[me].buffers[call]);
        let done = self.execute_step_on(&mut buffer, (me, number), all, peers, base);
        all[me].buffers[call] = buffer;
        done
    }

    fn execute_step_on(
        &mut self,
        buffer: &mut [u8],
        (me, number): (usize, u32),
        all: &mut [Memory],
        peers: impl Fn(Peers) -> Range<usize>,
        base: u64,
    ) -> bool {
        let (ranks, call, slot, position) = (all.len(), self.call, (number % SLOTS) as usize, self.at);
        match self.steps[0].clone() {
            ScheduleStep::AwaitSlot => {
                return (0..ranks).all(|rank| rank == me || all[rank].stamp + SLOTS > number);
            }
            ScheduleStep::Announce => {
                all[me].exposed[slot] = self.exposes[call];
                all[me].stamp = number;
            }
            ScheduleStep::DecideDirect => self.direct = all.iter().all(|memory| memory.exposed[slot]),
            ScheduleStep::DecideSingleCopy => {
                let schedule = Schedule::new(&self.calls[call], me, ranks, LIMITS);
                let mut sources = peers(schedule.sources().unwrap()).filter(|&rank| rank != me);
                self.direct = sources.all(|rank| all[rank].exposed[slot]);
            }
            ScheduleStep::ReadExposed { from, at, range: into } => {
                assert!(from != me && all[from].exposed[slot]);
                assert_eq!(all[from].call, call, "a rank returns only when its data was read");
                let data = all[from].buffers[call][at..at + into.len()].to_vec();
                buffer[into].copy_from_slice(&data);
            }
            ScheduleStep::ReduceDirect { range } => {
                for at in range {
                    let others = (0..ranks).filter(|&rank| rank != me);
                    buffer[at] = others
                        .clone()
                        .fold(buffer[at], |sum, rank| sum.wrapping_add(all[rank].buffers[call][at]));
                    others.for_each(|rank| all[rank].buffers[call][at] = buffer[at]);
                }
            }
            ScheduleStep::MatchCall(those) => {
                return peers(those).all(|rank| rank == me || all[rank].stamp >= number);
            }
            ScheduleStep::AwaitRound(round) => {
                let count = (base + round + 1).saturating_sub(ROUNDS_IN_MEMORY);
                return (0..ranks)
                    .all(|rank| rank == me || all[rank].counters[Counter::Done as usize] >= count);
            }
            ScheduleStep::AwaitPublished { round, end, from } => {
                assert_ne!(from, me);
                let count = Counter::Published.after(base + round) + end as u64;
                return all[from].counters[Counter::Published as usize] >= count;
            }
            ScheduleStep::SetPublished { round, end } => {
                all[me].count(Counter::Published, Counter::Published.after(base + round) + end as u64);
            }
            ScheduleStep::AwaitCounter(counter, round, those) => {
                let count = counter.after(base + round + 1);
                return peers(those).all(|rank| rank == me || all[rank].counters[counter as usize] >= count);
            }
            ScheduleStep::SetCounter(counter, round) => {
                all[me].count(counter, counter.after(base + round + 1));
            }
            ScheduleStep::Publish { range: from, area, at, to } => {
                let into = area_mut(all, (me, to), area, position, number, at..at + from.len());
                into.copy_from_slice(&buffer[from]);
            }
            ScheduleStep::Fetch { from, area, at, range: into } => {
                assert_ne!(from, me);
                let published =
                    area_mut(all, (from, me), area, position, number, at..at + into.len()).to_vec();
                buffer[into].copy_from_slice(&published);
            }
            ScheduleStep::Reduce { area, at, range: into, sums: published } => {
                let mut sums = buffer[into.clone()].to_vec();
                for rank in (0..ranks).filter(|&rank| rank != me) {
                    let share = area_mut(all, (rank, me), area, position, number, at..at + into.len());
                    sums.iter_mut().zip(share).for_each(|(sum, share)| *sum = sum.wrapping_add(*share));
                }
                buffer[into.clone()].copy_from_slice(&sums);
                if let Some(area) = published {
                    area_mut(all, (me, me), area, position, number, 0..into.len()).copy_from_slice(&sums);
                }
            }
        }
        true
    }
}

/// Returns bytes of the area in which `rank` publishes for `reader`.
fn area_mut(
    all: &mut [Memory],
    (rank, reader): (usize, usize),
    area: Area,
    position: Position,
    number: u32,
    range: Range<usize>,
) -> &mut [u8] {
    match area {
        Area::Slot => &mut all[rank].slots[(number % SLOTS) as usize][range],
        Area::Round(round) | Area::Sums(round) => {
            assert!(range.end <= LIMITS.round_bytes);
            let exchange = position.exchange.filter(|_| matches!(area, Area::Round(_)));
            let (memory, start) = match exchange {
                None => {
                    let before = position.first + round * position.each;
                    (&mut all[rank].rounds, before as usize % ROUNDS_BYTES)
                }
                Some(areas) => {
                    let (areas, at) = areas.of_round(round);
                    let (lower, higher) = (rank.min(reader), rank.max(reader));
                    let memory = match areas[usize::from(rank > reader)] {
                        0 => &mut all[lower].exchange[higher],
                        _ => &mut all[higher].exchange[lower],
                    };
                    (memory, (at * position.each) as usize)
                }
            };
            &mut memory[start + range.start..start + range.end]
        }
    }
}

/// Runs the calls on `ranks` ranks. `next` chooses the rank that makes the next step from those that are not
/// stuck.
///
/// `exposes` returns whether a rank exposes the elements of a call.
fn check(
    ranks: usize,
    calls: &[Call],
    mut exposes: impl FnMut(usize, usize) -> bool,
    mut next: impl FnMut(&[usize]) -> usize,
) {
    let mut all: Vec<_> = (0..ranks).map(|me| Memory::new(calls, ranks, me)).collect();
    let exposed = |me: usize| (0..calls.len()).map(|index| exposes(me, index)).collect();
    let mut those: Vec<_> = (0..ranks).map(exposed).map(|exposes| Rank::new(calls, exposes)).collect();
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
                    all[me].buffers[index][at], value,
                    "byte {at} of call {index}, {call}, at {me} of {ranks}"
                );
            }
        }
    }
}

fn kinds() -> Vec<CallKind> {
    CallKind::ALL.into_iter().filter(|&kind| is_supported(kind)).collect()
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
                    let exposed = random.below(2) == 0;
                    check(ranks, &[call], |_, _| exposed, |able| able[random.below(able.len())]);
                }
            }
        }
    }
}

#[test]
fn rank_fetches_a_chunk_before_the_next_one_is_published() {
    // The publishing rank, the fetching rank, and where its first chunk goes in its buffer.
    for (kind, from, to, at) in
        [(CallKind::Broadcast, 0, 1, 0), (CallKind::Scatter, 0, 1, 600), (CallKind::Gather, 1, 0, 600)]
    {
        let calls = [call(kind, Dtype::U8, 0, 600)];
        let mut all: Vec<_> = (0..3).map(|me| Memory::new(&calls, 3, me)).collect();
        let mut those: Vec<_> = (0..3).map(|_| Rank::new(&calls, vec![false])).collect();
        for rank in (0..3).filter(|&rank| rank != from && rank != to) {
            while those[rank].step(rank, &mut all) {}
        }
        while all[from].stamp == 0 {
            assert!(those[from].step(from, &mut all));
        }
        while those[to].step(to, &mut all) {}
        let expected: Vec<u8> = (at..at + LIMITS.chunk_bytes).map(|at| value(from, 0, at)).collect();
        assert_eq!(all[to].buffers[0][at..at + LIMITS.chunk_bytes], expected, "{kind:?}");
        assert!(those[from].step(from, &mut all), "most is not published yet");
    }
}

#[test]
fn ranks_get_their_blocks_of_a_long_scatter_before_the_last_rank_has_made_the_call() {
    let calls = [call(CallKind::Scatter, Dtype::U8, 1, 690)];
    let mut all: Vec<_> = (0..5).map(|me| Memory::new(&calls, 5, me)).collect();
    let mut those: Vec<_> = (0..5).map(|_| Rank::new(&calls, vec![false])).collect();
    // Rank 0, whose turn is the last one, has not made the call.
    while (1..5).any(|rank| those[rank].step(rank, &mut all)) {}
    for (rank, memory) in all.iter().enumerate().skip(2) {
        for (at, value) in expected(&calls[0], 0, 5, rank) {
            assert_eq!(memory.buffers[0][at], value, "byte {at} of rank {rank}");
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
        let switches = random.below(4);
        let mut first = random.below(ranks);
        // All ranks expose theirs, none does, or one does not.
        let exposed: Vec<_> = calls.iter().map(|_| (random.below(3), random.below(ranks))).collect();
        let exposes = |me: usize, call: usize| match exposed[call] {
            (0, _) => true,
            (1, _) => false,
            (_, other) => me != other,
        };
        check(ranks, &calls, exposes, |able| {
            if switches == 0 || random.below(200) == 0 {
                first = random.below(ranks);
            }
            *able.iter().find(|&&rank| rank == first).unwrap_or(&able[random.below(able.len())])
        });
    }
}

#[test]
fn exchange_areas_have_space_for_calls_of_any_number_of_ranks() {
    let limits = Limits {
        piece_bytes: PIECE_BYTES,
        round_bytes: ROUND_BYTES,
        exchange_bytes: EXCHANGE_BYTES,
        ..LIMITS
    };
    for ranks in 2..=MAX_RANKS {
        let space = Layout::dense(ranks).exchange_bytes();
        for kind in kinds() {
            for dtype in Dtype::ALL {
                for bytes in [PIECE_BYTES, ROUND_BYTES, 4 * EXCHANGE_BYTES] {
                    let schedule =
                        Schedule::new(&call(kind, dtype, 0, bytes / dtype.size_bytes()), 0, ranks, limits);
                    assert!(schedule.bytes_in_area() <= space, "{kind:?} of {bytes} bytes by {ranks} ranks");
                }
            }
        }
    }
}
