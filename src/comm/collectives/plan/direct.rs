//! Direct exchange: each rank owns a block and is connected to all other ranks. An all-reduce has two rounds:
//! each rank adds up its own block, then sends the sum to all others. A reduce-scatter or an all-gather is
//! one of these rounds.

use std::ops::Range;

use super::{Apply, Blocks, Plan, Stream, block, ordered};

/// Returns the plan of `rank` of `world` for an all-reduce in two rounds.
///
/// Rank i owns block i. Every rank sends its contribution to block i to rank i; rank i adds the contributions
/// and sends the sum to every rank. This sends as few bytes as the ring, in two rounds instead of 2(P−1), but
/// over P−1 connections per rank.
pub(super) fn all_reduce(rank: usize, world: usize, count: usize, ordered_window: Option<usize>) -> Plan {
    two_rounds(rank, world, count, ordered_window, |_| true)
}

/// Returns the plan of `rank` of `world` for a reduce to `root` in two rounds. It differs from the all-reduce
/// in that the sums are sent only to the root.
pub(super) fn reduce(rank: usize, world: usize, count: usize, root: usize, window: usize) -> Plan {
    two_rounds(rank, world, count, Some(window), |receiver| receiver == root)
}

/// Returns the plan of `rank` of `world` for two rounds, the second of which sends the sums to the ranks for
/// which `receives` is true.
fn two_rounds(
    rank: usize,
    world: usize,
    count: usize,
    ordered_window: Option<usize>,
    receives: impl Fn(usize) -> bool,
) -> Plan {
    let mut plan = Plan::default();
    let own = block(rank, world, count);
    for peer in others(rank, world) {
        plan.push(Stream::send(peer, [block(peer, world, count)]));
    }
    let sum = add(&mut plan, rank, world, own.clone(), ordered_window);
    for peer in others(rank, world).filter(|&peer| receives(peer)) {
        plan.push(Stream::send(peer, [own.clone()]).after(sum, 0));
    }
    for peer in others(rank, world).filter(|_| receives(rank)) {
        plan.push(Stream::recv(peer, [(block(peer, world, count), Apply::Copy)]));
    }
    plan
}

/// Adds the streams that receive the other ranks' contributions to `range` and add them to this rank's own,
/// in the order i, i+1, ... on rank i, or by an ordered reduction if there is an `ordered_window` of so many
/// elements. Returns the stream that completes the sum.
///
/// Each stream waits for the one before it, so data that arrives early waits in its connection.
fn add(
    plan: &mut Plan,
    rank: usize,
    world: usize,
    range: Range<usize>,
    ordered_window: Option<usize>,
) -> Option<usize> {
    if let Some(window) = ordered_window {
        return ordered::push(plan, rank, world, range, ordered::Start::Window(window));
    }
    let mut sum = None;
    for peer in others(rank, world) {
        let last = peer == (rank + world - 1) % world;
        let apply = if last { Apply::ReduceLast } else { Apply::Reduce };
        sum = Some(plan.push(Stream::recv(peer, [(range.clone(), apply)]).after(sum, 0)));
    }
    sum
}

/// Returns the plan of `rank` for an all-gather in one round.
pub(super) fn all_gather(rank: usize, blocks: &Blocks) -> Plan {
    let mut plan = Plan::default();
    for peer in others(rank, blocks.world()) {
        plan.push(Stream::send(peer, [blocks.range(rank)]));
        plan.push(Stream::recv(peer, [(blocks.range(peer), Apply::Copy)]));
    }
    plan
}

/// Returns the plan of `rank` for a reduce-scatter in one round: in the end the rank's own block is summed
/// over all ranks. Its other blocks are only sent.
pub(super) fn reduce_scatter(rank: usize, blocks: &Blocks, ordered_window: Option<usize>) -> Plan {
    let (mut plan, world) = (Plan::default(), blocks.world());
    for peer in others(rank, world) {
        plan.push(Stream::send(peer, [blocks.range(peer)]));
    }
    add(&mut plan, rank, world, blocks.range(rank), ordered_window);
    plan
}

/// Returns the plan of `rank` for an all-to-all. The buffer has the blocks of `sent`, one to send to each
/// rank, followed by those of `filled`, one to receive from each rank.
pub(crate) fn all_to_all(rank: usize, sent: &Blocks, filled: &Blocks) -> Plan {
    let (mut plan, world) = (Plan::default(), sent.world());
    for distance in 1..world {
        let (to, from) = ((rank + distance) % world, (rank + world - distance) % world);
        let into = filled.range(from);
        let into = sent.end() + into.start..sent.end() + into.end;
        plan.push(Stream::send(to, [sent.range(to)]));
        plan.push(Stream::recv(from, [(into, Apply::Copy)]));
    }
    plan
}

/// Returns the other ranks from the next one on, so that not all ranks begin with the same peer.
fn others(rank: usize, world: usize) -> impl Iterator<Item = usize> {
    (1..world).map(move |distance| (rank + distance) % world)
}

#[cfg(test)]
mod tests {
    use crate::collectives::plan::check::{
        all_reduce_is_right, all_to_all_is_right, flat, reduce_is_right, reduce_scatter_is_right,
    };

    #[test]
    fn all_to_all_delivers_each_block_to_its_destination() {
        all_to_all_is_right(super::all_to_all);
    }

    #[test]
    fn sums_with_a_window_of_two_elements_include_every_rank_exactly_once() {
        reduce_scatter_is_right(flat, |rank, _, blocks| super::reduce_scatter(rank, blocks, Some(2)));
        all_reduce_is_right(flat, |rank, topology, count| {
            super::all_reduce(rank, topology.world(), count, Some(2))
        });
        reduce_is_right(flat, |rank, topology, count, root| {
            super::reduce(rank, topology.world(), count, root, 2)
        });
    }
}
