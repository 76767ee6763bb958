//! Runs the plans of all ranks against each other, on sets of ranks instead of numbers.
//!
//! Elements travel one at a time in random order through queues that hold few of them, so a plan
//! passes only if it is right for every interleaving that came up: no contribution lost or counted
//! twice, both ends of each connection agree, nobody waits in a circle.

use std::collections::VecDeque;

use super::{Apply, Blocks, Direction, Plan};
use crate::kernels::Fold;

/// What an element holds: who contributed, how it was bracketed, and whether its reduction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Value {
    ranks: u64,
    /// Equal on two ranks only if they added in the same order, swapped operands not counted.
    bracketing: u64,
    finished: bool,
}

/// What is in memory that nobody has filled.
const NOTHING: Value = Value { ranks: 0, bracketing: 0, finished: false };

impl Value {
    fn of(rank: usize) -> Self {
        Self { ranks: 1 << rank, bracketing: mix(rank as u64 + 1), finished: false }
    }

    /// Everybody's share once, and finished if there was anything to add.
    fn is_whole(self, world: usize) -> bool {
        self.ranks == (1 << world) - 1 && self.finished == (world > 1)
    }

    fn plus(self, other: Self, last: bool) -> Self {
        assert_eq!(self.ranks & other.ranks, 0, "a contribution is counted twice");
        assert!(!self.finished && !other.finished, "a finished element is added to");
        Self {
            ranks: self.ranks | other.ranks,
            bracketing: mix(self.bracketing.wrapping_add(other.bracketing)),
            finished: last,
        }
    }
}

/// What shares are that were added in the order of the ranks.
fn in_rank_order(world: usize) -> Value {
    let add = |sum: Value, rank: usize| sum.plus(Value::of(rank), rank + 1 == world);
    (1..world).fold(Value::of(0), add)
}

/// Whether `plans` fold: then they must add in the order of the ranks.
fn fold(plans: &[Plan]) -> bool {
    let mut segments = plans.iter().flat_map(|plan| &plan.streams).flat_map(|stream| &stream.segments);
    segments.any(|segment| matches!(segment.apply, Apply::Fold(_)))
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

const LARGEST_WORLD: usize = 33;

/// Counts around the numbers where blocks change: none, fewer than ranks, odd ones.
fn counts(world: usize) -> [usize; 5] {
    [0, 1, world.saturating_sub(1), world + 1, 3 * world + 2]
}

/// Checks `plan(rank, world, count)` for worlds up to [`LARGEST_WORLD`] and counts around them.
pub(crate) fn all_reduce_is_right(plan: impl Fn(usize, usize, usize) -> Plan) {
    all_reduce_is_right_up_to(LARGEST_WORLD, plan);
}

/// As [`all_reduce_is_right`], for worlds up to `largest`.
pub(crate) fn all_reduce_is_right_up_to(largest: usize, plan: impl Fn(usize, usize, usize) -> Plan) {
    for world in 1..=largest {
        for count in counts(world) {
            all_reduce_of(world, count, |rank| plan(rank, world, count));
        }
    }
}

fn all_reduce_of(world: usize, count: usize, plan: impl Fn(usize) -> Plan) {
    let start: Vec<_> = (0..world).map(|rank| vec![Value::of(rank); count]).collect();
    let plans = plans(world, plan);
    let end = simulate(&plans, start);
    for element in 0..count {
        let first = end[0][element];
        assert!(first.is_whole(world), "world {world} count {count}: {first:?}");
        assert!(!fold(&plans) || first == in_rank_order(world), "world {world} count {count}: order");
        for values in &end {
            assert_eq!(values[element], first, "world {world} count {count}: ranks differ");
        }
    }
}

/// Checks `plan(rank, world, count, root)` for worlds up to [`LARGEST_WORLD`].
pub(crate) fn broadcast_is_right(plan: impl Fn(usize, usize, usize, usize) -> Plan) {
    for world in 1..=LARGEST_WORLD {
        for root in [0, world / 2, world - 1] {
            for count in [0, 1, 7] {
                broadcast_of(world, count, root, |rank| plan(rank, world, count, root));
            }
        }
    }
}

fn broadcast_of(world: usize, count: usize, root: usize, plan: impl Fn(usize) -> Plan) {
    let start: Vec<_> = (0..world).map(|rank| vec![Value::of(rank); count]).collect();
    let end = simulate(&plans(world, plan), start);
    assert!(end.iter().flatten().all(|&value| value == Value::of(root)), "world {world} root {root}");
}

/// Checks `plan(rank, world, count, root)`: the root has everybody's share, the order is that of no accident.
pub(crate) fn reduce_is_right(plan: impl Fn(usize, usize, usize, usize) -> Plan) {
    for world in 1..=LARGEST_WORLD {
        for root in [0, world / 2, world - 1] {
            for count in [0, 1, 7] {
                let start: Vec<_> = (0..world).map(|rank| vec![Value::of(rank); count]).collect();
                let plans = plans(world, |rank| plan(rank, world, count, root));
                let end = simulate(&plans, start);
                for value in &end[root] {
                    assert!(value.is_whole(world) && *value == end[root][0], "world {world} root {root}");
                    assert!(!fold(&plans) || *value == in_rank_order(world), "world {world}: order");
                }
            }
        }
    }
}

/// Checks `plan(rank, world, count)`: each rank ends with the shares of all up to itself.
pub(crate) fn scan_is_right(plan: impl Fn(usize, usize, usize) -> Plan) {
    scans_are_right(1, plan, |rank, row| assert!(row.iter().all(|value| value.ranks == (2 << rank) - 1)));
}

/// Checks `plan(rank, world, count)`: the second half of each rank's row ends with the shares of all before it.
pub(crate) fn exclusive_scan_is_right(plan: impl Fn(usize, usize, usize) -> Plan) {
    scans_are_right(2, plan, |rank, row| {
        let expected = if rank == 0 { 1 } else { (1 << rank) - 1 };
        assert!(row[row.len() / 2..].iter().all(|value| value.ranks == expected), "rank {rank}");
    });
}

fn scans_are_right(rows: usize, plan: impl Fn(usize, usize, usize) -> Plan, check: impl Fn(usize, &[Value])) {
    for world in 1..=LARGEST_WORLD {
        for count in [0, 1, 7] {
            let start: Vec<_> = (0..world).map(|rank| vec![Value::of(rank); rows * count]).collect();
            let end = simulate(&plans(world, |rank| plan(rank, world, count)), start);
            end.iter().enumerate().for_each(|(rank, row)| check(rank, row));
        }
    }
}

/// Checks `plan(rank, blocks)` over a row of which each rank has its own block.
pub(crate) fn all_gather_is_right(plan: impl Fn(usize, &Blocks) -> Plan) {
    blocks_are_right(own_block, plan, |_, blocks, end| assert!(end.iter().copied().eq(whole_row(blocks))));
}

/// Checks `plan(rank, blocks)`; the result is the rank's own block.
pub(crate) fn reduce_scatter_is_right(plan: impl Fn(usize, &Blocks) -> Plan) {
    blocks_are_right(
        |rank, blocks| vec![Value::of(rank); blocks.end()],
        plan,
        |rank, blocks, end| {
            let result = &end[blocks.of(rank)];
            assert!(result.iter().all(|value| value.is_whole(blocks.world())), "rank {rank}: {result:?}");
        },
    );
}

/// Checks `plan(rank, sent, filled)` over blocks that are sent, and behind them those that are filled.
pub(crate) fn all_to_all_is_right(plan: impl Fn(usize, &Blocks, &Blocks) -> Plan) {
    let mark = |from: usize, to: usize| Value { bracketing: (from * 100 + to) as u64, ..Value::of(from) };
    // What rank a sends to rank b is as long as block (a + b) of the given ones: symmetric, and unequal.
    let of_rank = |rank: usize, blocks: &Blocks| {
        let world = blocks.world();
        let lens: Vec<_> = (0..world).map(|peer| blocks.of((rank + peer) % world).len()).collect();
        Blocks::new(&lens).unwrap()
    };
    let got = |rank: usize, mine: &Blocks| -> Vec<Value> {
        (0..mine.world()).flat_map(|from| vec![mark(from, rank); mine.of(from).len()]).collect()
    };
    blocks_are_right(
        |rank, blocks| {
            let mine = of_rank(rank, blocks);
            let sent = (0..mine.world()).flat_map(|to| vec![mark(rank, to); mine.of(to).len()]);
            let filled = got(rank, &mine).into_iter().map(|v| if v.ranks == 1 << rank { v } else { NOTHING });
            sent.chain(filled).collect()
        },
        |rank, blocks| plan(rank, &of_rank(rank, blocks), &of_rank(rank, blocks)),
        |rank, blocks, end| {
            let mine = of_rank(rank, blocks);
            assert_eq!(end[mine.end()..], got(rank, &mine), "rank {rank}");
        },
    );
}

/// Checks `plan(rank, blocks, root)` over a row of which each rank has its own block.
pub(crate) fn gather_is_right(plan: impl Fn(usize, &Blocks, usize) -> Plan) {
    for root_of in [|_| 0, |world| world / 2, |world| world - 1] {
        blocks_are_right(
            own_block,
            |rank, blocks| plan(rank, blocks, root_of(blocks.world())),
            |rank, blocks, end| {
                let is_root = rank == root_of(blocks.world());
                assert!(!is_root || end.iter().copied().eq(whole_row(blocks)));
            },
        );
    }
}

/// Checks `plan(rank, blocks, root)` over a row that the root has.
pub(crate) fn scatter_is_right(plan: impl Fn(usize, &Blocks, usize) -> Plan) {
    for root_of in [|_| 0, |world| world / 2, |world| world - 1] {
        blocks_are_right(
            |rank, blocks| {
                let full = rank == root_of(blocks.world());
                if full { whole_row(blocks).collect() } else { vec![NOTHING; blocks.end()] }
            },
            |rank, blocks| plan(rank, blocks, root_of(blocks.world())),
            |rank, blocks, end| {
                assert!(end[blocks.of(rank)].iter().all(|&value| value == Value::of(rank)), "rank {rank}");
            },
        );
    }
}

/// A row of which only this rank's block is filled.
fn own_block(rank: usize, blocks: &Blocks) -> Vec<Value> {
    let mut row = vec![NOTHING; blocks.end()];
    row[blocks.of(rank)].fill(Value::of(rank));
    row
}

fn whole_row(blocks: &Blocks) -> impl Iterator<Item = Value> + '_ {
    (0..blocks.world()).flat_map(|rank| vec![Value::of(rank); blocks.of(rank).len()])
}

/// Runs `plan` from the rows of `start` for many worlds and blocks, and gives every rank's row to `check`.
fn blocks_are_right(
    start: impl Fn(usize, &Blocks) -> Vec<Value>,
    plan: impl Fn(usize, &Blocks) -> Plan,
    check: impl Fn(usize, &Blocks, &[Value]),
) {
    for world in 1..=LARGEST_WORLD {
        let unequal: Vec<_> = (0..world).map(|rank| mix((world * 40 + rank) as u64) as usize % 5).collect();
        let rows = [0, 1, 5].map(|count| Blocks::equal_of(world, count));
        for blocks in rows.into_iter().chain(Blocks::new(&unequal)) {
            let rows = (0..world).map(|rank| start(rank, &blocks)).collect();
            let end = simulate(&plans(world, |rank| plan(rank, &blocks)), rows);
            for (rank, row) in end.iter().enumerate() {
                check(rank, &blocks, row);
            }
        }
    }
}

/// A barrier is right if each rank has heard, directly or not, of all others before it ends. A byte
/// that a rank sends stands for all it has heard of by then.
pub(crate) fn barrier_is_right(world: usize, rounds: usize, plan: impl Fn(usize) -> Plan) {
    let plans = plans(world, plan);
    let start = vec![vec![Value::of(0); rounds]; world];
    simulate(&plans, start);
    let mut heard: Vec<u64> = (0..world).map(|rank| 1 << rank).collect();
    for round in 0..rounds {
        let before = heard.clone();
        for (rank, plan) in plans.iter().enumerate() {
            let recv = &plan.streams[2 * round + 1];
            assert_eq!(recv.direction, Direction::Recv);
            assert_eq!(
                plan.streams[2 * round].gate.map(|gate| gate.stream),
                (round > 0).then(|| 2 * round - 1)
            );
            heard[rank] |= before[recv.peer];
        }
    }
    assert!(heard.iter().all(|&ranks| ranks == (1 << world) - 1), "world {world}");
}

fn plans(world: usize, plan: impl Fn(usize) -> Plan) -> Vec<Plan> {
    (0..world).map(plan).collect()
}

/// One direction of one pair of ranks.
struct Wire {
    from: usize,
    to: usize,
    /// Remaining moves at each end: (stream, element, what to do), in the order of the plan.
    sends: VecDeque<(usize, usize)>,
    recvs: VecDeque<(usize, usize, Apply)>,
    queue: VecDeque<Value>,
}

fn simulate(plans: &[Plan], mut memory: Vec<Vec<Value>>) -> Vec<Vec<Value>> {
    let mut seed = mix(plans.len() as u64 + 7);
    let mut random = move |below: usize| {
        seed = mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15));
        (seed % below.max(1) as u64) as usize
    };
    let capacity = 1 + random(4);
    let mut wires = wires(plans);
    let mut progress: Vec<Vec<usize>> = plans.iter().map(|plan| vec![0; plan.streams.len()]).collect();
    let mut sums: Vec<Vec<Value>> = plans.iter().map(|plan| vec![NOTHING; plan.window]).collect();
    let open = |progress: &[Vec<usize>], rank: usize, stream: usize| {
        let gate = plans[rank].streams[stream].gate;
        gate.is_none_or(|gate| progress[rank][stream] < gate.lead + progress[rank][gate.stream])
    };
    while !wires.is_empty() {
        let start = random(wires.len());
        let mut moved = false;
        for offset in 0..wires.len() {
            let index = (start + offset) % wires.len();
            let wire = &mut wires[index];
            let may_send = wire.queue.len() < capacity
                && wire.sends.front().is_some_and(|&(stream, _)| open(&progress, wire.from, stream));
            let may_recv = !wire.queue.is_empty()
                && wire.recvs.front().is_some_and(|&(stream, ..)| open(&progress, wire.to, stream));
            if may_send && (!may_recv || random(2) == 0) {
                let (stream, element) = wire.sends.pop_front().unwrap();
                wire.queue.push_back(memory[wire.from][element]);
                progress[wire.from][stream] += 1;
                moved = true;
            } else if may_recv {
                let (stream, element, apply) = wire.recvs.pop_front().unwrap();
                let value = wire.queue.pop_front().unwrap();
                let into = &mut memory[wire.to][element];
                match apply {
                    Apply::Copy => *into = value,
                    Apply::Reduce => *into = into.plus(value, false),
                    Apply::ReduceLast => *into = into.plus(value, true),
                    Apply::Fold(Fold { first, own, last }) => {
                        let slot = progress[wire.to][stream] % plans[wire.to].window;
                        let sum = &mut sums[wire.to][slot];
                        // Who comes too early finds the sum of another element, and takes it for its own.
                        *sum = if first { value } else { sum.plus(value, last && !own) };
                        *sum = if own { sum.plus(*into, last) } else { *sum };
                        *into = if last { *sum } else { *into };
                    }
                }
                progress[wire.to][stream] += 1;
                moved = true;
            }
            if wire.sends.is_empty() && wire.recvs.is_empty() {
                assert!(wire.queue.is_empty());
                wires.swap_remove(index);
            }
            if moved {
                break;
            }
        }
        assert!(moved || wires.is_empty(), "the ranks wait for each other in a circle");
    }
    memory
}

fn wires(plans: &[Plan]) -> Vec<Wire> {
    let mut wires = Vec::new();
    for from in 0..plans.len() {
        for to in 0..plans.len() {
            let of = |rank: usize, peer: usize, direction: Direction| {
                let streams = plans[rank].streams.iter().enumerate();
                streams.filter(move |(_, stream)| stream.peer == peer && stream.direction == direction)
            };
            let sends: VecDeque<_> = of(from, to, Direction::Send)
                .flat_map(|(index, stream)| {
                    stream.segments.iter().flat_map(move |segment| {
                        assert_eq!(segment.apply, Apply::Copy);
                        segment.range.clone().map(move |element| (index, element))
                    })
                })
                .collect();
            let recvs: VecDeque<_> = of(to, from, Direction::Recv)
                .flat_map(|(index, stream)| {
                    stream.segments.iter().flat_map(move |segment| {
                        let apply = segment.apply;
                        segment.range.clone().map(move |element| (index, element, apply))
                    })
                })
                .collect();
            let ends = (of(from, to, Direction::Send).count(), of(to, from, Direction::Recv).count());
            assert_eq!(ends.0 > 0, ends.1 > 0, "{from} to {to}: only one end knows of it");
            assert_eq!(sends.len(), recvs.len(), "{from} to {to}: the ends disagree on the length");
            if !sends.is_empty() {
                wires.push(Wire { from, to, sends, recvs, queue: VecDeque::new() });
            }
        }
    }
    wires
}
