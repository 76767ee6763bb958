//! Runs the plans of all ranks against each other, on sets of ranks instead of numbers.
//!
//! Elements travel one at a time in random order through queues that hold few of them. A plan passes only if
//! it is right for every interleaving that came up. No contribution is lost or counted twice, both ends of
//! each connection agree, and there is no deadlock.
//!
//! [`algorithms`] checks every algorithm of the list, so a new one needs no test of its own for that.

mod algorithms;
mod simulation;

use super::{Apply, Blocks, Plan, Topology};
use simulation::Simulation;

/// The content of an element: the ranks that contributed, the bracketing, and whether its reduction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Value {
    ranks: u64,
    /// A hash that is equal on two ranks only if they added in one order, swapped operands not counted.
    bracketing: u64,
    finished: bool,
}

/// The content of memory that no plan has filled.
const EMPTY: Value = Value { ranks: 0, bracketing: 0, finished: false };

impl Value {
    fn of(rank: usize) -> Self {
        Self { ranks: 1 << rank, bracketing: mix(rank as u64 + 1), finished: false }
    }

    /// Returns whether each rank's share is in it once, and it is finished if there was anything to add.
    fn is_complete(self, world: usize) -> bool {
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

/// Returns the value of all shares, added in the order of the ranks.
fn in_rank_order(world: usize) -> Value {
    let add = |sum: Value, rank: usize| sum.plus(Value::of(rank), rank + 1 == world);
    (1..world).fold(Value::of(0), add)
}

/// Returns whether `plans` use ordered reduction: then they must add in the order of the ranks.
fn is_ordered(plans: &[Plan]) -> bool {
    let mut parts = plans.iter().flat_map(|plan| &plan.streams).flat_map(|stream| &stream.parts);
    parts.any(|part| matches!(part.apply, Apply::ReduceOrdered(_)))
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Largest number of ranks on one host, and on several hosts.
const LARGEST_WORLD: usize = 33;
const LARGEST_ON_HOSTS: usize = 17;

/// The topologies of a given number of ranks for which a plan is checked.
pub(crate) type Topologies = fn(usize) -> Vec<Topology>;

/// Returns the topology with all ranks on one host.
pub(crate) fn flat(world: usize) -> Vec<Topology> {
    vec![Topology::one_host(world)]
}

/// Returns topologies on one host and on several. The ranks fill host after host, or alternate, or are placed
/// at random.
pub(crate) fn on_hosts(world: usize) -> Vec<Topology> {
    let mut topologies = flat(world);
    if world <= LARGEST_ON_HOSTS {
        topologies.extend((1..world).map(|ranks| Topology::new((0..world).map(|rank| rank / ranks))));
        topologies.extend((2..world.min(5)).map(|hosts| Topology::new((0..world).map(|rank| rank % hosts))));
        topologies.push(Topology::new((0..world).map(|rank| mix((world * 50 + rank) as u64) % 3)));
    }
    topologies
}

fn each_topology(topologies: Topologies, check: impl FnMut(&Topology)) {
    (1..=LARGEST_WORLD).flat_map(topologies).collect::<Vec<_>>().iter().for_each(check);
}

/// The plans of one number of ranks that were checked. Many algorithms do the same on all hosts.
#[derive(Default)]
struct Checked(Vec<([usize; 2], Vec<Plan>)>);

impl Checked {
    /// Returns whether these plans were not checked yet for this count and root.
    fn is_new(&mut self, parameters: [usize; 2], plans: &[Plan]) -> bool {
        self.0.retain(|(_, known)| known.len() == plans.len());
        let new = !self.0.iter().any(|(of, known)| *of == parameters && known == plans);
        if new {
            self.0.push((parameters, plans.to_vec()));
        }
        new
    }
}

/// Returns counts around the numbers at which blocks change: none, fewer than ranks, odd ones.
fn counts(world: usize) -> [usize; 5] {
    [0, 1, world.saturating_sub(1), world + 1, 3 * world + 2]
}

/// Checks `plan(rank, topology, count)`.
pub(crate) fn all_reduce_is_right(topologies: Topologies, plan: impl Fn(usize, &Topology, usize) -> Plan) {
    let mut checked = Checked::default();
    each_topology(topologies, |topology| {
        let world = topology.world();
        for count in counts(world) {
            let plans: Vec<_> = (0..world).map(|rank| plan(rank, topology, count)).collect();
            if !checked.is_new([count, 0], &plans) {
                continue;
            }
            let end = simulate(&plans, count);
            for (element, &first) in end[0].iter().enumerate() {
                assert!(first.is_complete(world), "{topology:?} count {count}: {first:?}");
                assert!(
                    !is_ordered(&plans) || first == in_rank_order(world),
                    "{topology:?} count {count}: order"
                );
                for values in &end {
                    assert_eq!(values[element], first, "{topology:?} count {count}: ranks differ");
                }
            }
        }
    });
}

/// Checks `plan(rank, topology, count, root)`.
pub(crate) fn broadcast_is_right(
    topologies: Topologies,
    plan: impl Fn(usize, &Topology, usize, usize) -> Plan,
) {
    each_root(topologies, plan, |root, _, end| {
        assert!(end.iter().flatten().all(|&value| value == Value::of(root)));
    });
}

/// Checks `plan(rank, topology, count, root)`: the root has the shares of all ranks, and their order does not
/// depend on timing.
pub(crate) fn reduce_is_right(topologies: Topologies, plan: impl Fn(usize, &Topology, usize, usize) -> Plan) {
    each_root(topologies, plan, |root, plans, end| {
        let (world, first) = (plans.len(), end[root].first());
        assert!(end[root].iter().all(|value| value.is_complete(world) && Some(value) == first));
        assert!(!is_ordered(plans) || first.is_none_or(|&first| first == in_rank_order(world)), "order");
    });
}

fn each_root(
    topologies: Topologies,
    plan: impl Fn(usize, &Topology, usize, usize) -> Plan,
    check: impl Fn(usize, &[Plan], &[Vec<Value>]),
) {
    let mut checked = Checked::default();
    each_topology(topologies, |topology| {
        let world = topology.world();
        for root in [0, world / 2, world - 1] {
            for count in [0, 1, 7] {
                let plans: Vec<_> = (0..world).map(|rank| plan(rank, topology, count, root)).collect();
                if checked.is_new([count, root], &plans) {
                    check(root, &plans, &simulate(&plans, count));
                }
            }
        }
    });
}

/// Checks `plan(rank, world, count)`: each rank ends with the shares of all ranks up to itself.
pub(crate) fn scan_is_right(plan: impl Fn(usize, usize, usize) -> Plan) {
    scans_are_right(1, plan, |rank, row| assert!(row.iter().all(|value| value.ranks == (2 << rank) - 1)));
}

/// Checks `plan(rank, world, count)`: the second half of each rank's row ends with the shares of all lower
/// ranks.
pub(crate) fn exclusive_scan_is_right(plan: impl Fn(usize, usize, usize) -> Plan) {
    scans_are_right(2, plan, |rank, row| {
        let expected = if rank == 0 { 1 } else { (1 << rank) - 1 };
        assert!(row[row.len() / 2..].iter().all(|value| value.ranks == expected), "rank {rank}");
    });
}

fn scans_are_right(rows: usize, plan: impl Fn(usize, usize, usize) -> Plan, check: impl Fn(usize, &[Value])) {
    each_topology(flat, |topology| {
        let world = topology.world();
        for count in [0, 1, 7] {
            let start = (0..world).map(|rank| vec![Value::of(rank); rows * count]).collect();
            let plans: Vec<_> = (0..world).map(|rank| plan(rank, world, count)).collect();
            let end = Simulation::new(&plans, start).run();
            end.iter().enumerate().for_each(|(rank, row)| check(rank, row));
        }
    });
}

/// Checks `plan(rank, topology, blocks)` over a row of which each rank has its own block.
pub(crate) fn all_gather_is_right(topologies: Topologies, plan: impl Fn(usize, &Topology, &Blocks) -> Plan) {
    blocks_are_right(topologies, own_block, plan, |_, blocks, end| {
        assert!(end.iter().copied().eq(whole_row(blocks)));
    });
}

/// Checks `plan(rank, topology, blocks)`; the result is the rank's own block.
pub(crate) fn reduce_scatter_is_right(
    topologies: Topologies,
    plan: impl Fn(usize, &Topology, &Blocks) -> Plan,
) {
    blocks_are_right(
        topologies,
        |rank, blocks| vec![Value::of(rank); blocks.end()],
        plan,
        |rank, blocks, end| {
            let result = &end[blocks.range(rank)];
            assert!(result.iter().all(|value| value.is_complete(blocks.world())), "rank {rank}: {result:?}");
        },
    );
}

/// Checks `plan(rank, sent, filled)` over a row with the blocks to send, followed by the blocks to fill.
pub(crate) fn all_to_all_is_right(plan: impl Fn(usize, &Blocks, &Blocks) -> Plan) {
    let mark = |from: usize, to: usize| Value { bracketing: (from * 100 + to) as u64, ..Value::of(from) };
    // The data that rank a sends to rank b is as long as block (a + b) of the given blocks: symmetric, and
    // unequal.
    let of_rank = |rank: usize, blocks: &Blocks| {
        let world = blocks.world();
        let lens: Vec<_> = (0..world).map(|peer| blocks.range((rank + peer) % world).len()).collect();
        Blocks::new(&lens).unwrap()
    };
    let got = |rank: usize, mine: &Blocks| -> Vec<Value> {
        (0..mine.world()).flat_map(|from| vec![mark(from, rank); mine.range(from).len()]).collect()
    };
    blocks_are_right(
        flat,
        |rank, blocks| {
            let mine = of_rank(rank, blocks);
            let sent = (0..mine.world()).flat_map(|to| vec![mark(rank, to); mine.range(to).len()]);
            let filled = got(rank, &mine).into_iter().map(|v| if v.ranks == 1 << rank { v } else { EMPTY });
            sent.chain(filled).collect()
        },
        |rank, _, blocks| plan(rank, &of_rank(rank, blocks), &of_rank(rank, blocks)),
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
            flat,
            own_block,
            |rank, _, blocks| plan(rank, blocks, root_of(blocks.world())),
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
            flat,
            |rank, blocks| {
                let full = rank == root_of(blocks.world());
                if full { whole_row(blocks).collect() } else { vec![EMPTY; blocks.end()] }
            },
            |rank, _, blocks| plan(rank, blocks, root_of(blocks.world())),
            |rank, blocks, end| {
                assert!(end[blocks.range(rank)].iter().all(|&value| value == Value::of(rank)), "rank {rank}");
            },
        );
    }
}

/// Returns a row of which only this rank's block is filled.
fn own_block(rank: usize, blocks: &Blocks) -> Vec<Value> {
    let mut row = vec![EMPTY; blocks.end()];
    row[blocks.range(rank)].fill(Value::of(rank));
    row
}

fn whole_row(blocks: &Blocks) -> impl Iterator<Item = Value> + '_ {
    (0..blocks.world()).flat_map(|rank| vec![Value::of(rank); blocks.range(rank).len()])
}

/// Runs `plan` from the rows of `start` for many worlds and blocks, and calls `check` with every rank's row.
fn blocks_are_right(
    topologies: Topologies,
    start: impl Fn(usize, &Blocks) -> Vec<Value>,
    plan: impl Fn(usize, &Topology, &Blocks) -> Plan,
    check: impl Fn(usize, &Blocks, &[Value]),
) {
    let mut checked = Checked::default();
    each_topology(topologies, |topology| {
        let world = topology.world();
        let unequal: Vec<_> = (0..world).map(|rank| mix((world * 40 + rank) as u64) as usize % 5).collect();
        let rows = [0, 1, 5].map(|count| Blocks::uniform(world, count));
        for (index, blocks) in rows.into_iter().chain(Blocks::new(&unequal)).enumerate() {
            let rows = (0..world).map(|rank| start(rank, &blocks)).collect();
            let plans: Vec<_> = (0..world).map(|rank| plan(rank, topology, &blocks)).collect();
            if !checked.is_new([index, 0], &plans) {
                continue;
            }
            for (rank, row) in Simulation::new(&plans, rows).run().iter().enumerate() {
                check(rank, &blocks, row);
            }
        }
    });
}

/// Checks a barrier `plan(rank, topology)` over `rounds(topology)` elements. It must end on no rank as long
/// as one rank is missing, and on every rank when all have arrived.
pub(crate) fn barrier_is_right(rounds: impl Fn(&Topology) -> usize, plan: impl Fn(usize, &Topology) -> Plan) {
    each_topology(on_hosts, |topology| {
        let world = topology.world();
        let plans: Vec<_> = (0..world).map(|rank| plan(rank, topology)).collect();
        let memory = || vec![vec![EMPTY; rounds(topology)]; world];
        Simulation::new(&plans, memory()).run();
        for late in 0..world {
            let ended = Simulation::new(&plans, memory()).ended_without(late);
            assert!(ended.is_empty(), "{topology:?}: {ended:?} did not wait for {late}");
        }
    });
}

/// Returns every rank's memory after `plans` over `count` elements, which begin as the rank's own share.
fn simulate(plans: &[Plan], count: usize) -> Vec<Vec<Value>> {
    Simulation::new(plans, (0..plans.len()).map(|rank| vec![Value::of(rank); count]).collect()).run()
}
