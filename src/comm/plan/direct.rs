//! Direct exchange: in two rounds, with the owner of a block computing it; and each round alone.

use std::ops::Range;

use super::{Apply, Blocks, Plan, Stream, block, ordered};

/// All-reduce in two rounds, as `rank` of `world` sees it.
///
/// Rank i owns block i. Every rank sends its share of block i to rank i; rank i adds the shares and sends the
/// sum to every rank. This sends as few bytes as the ring, in two rounds instead of 2(P−1), but over P−1
/// connections.
pub(super) fn all_reduce(rank: usize, world: usize, count: usize, ordered_window: Option<usize>) -> Plan {
    let mut plan = Plan::default();
    let own = block(rank, world, count);
    for peer in others(rank, world) {
        plan.push(Stream::send(peer, [block(peer, world, count)]));
    }
    let sum = add(&mut plan, rank, world, own.clone(), ordered_window);
    for peer in others(rank, world) {
        plan.push(Stream::send(peer, [own.clone()]).after(sum, 0));
    }
    for peer in others(rank, world) {
        plan.push(Stream::recv(peer, [(block(peer, world, count), Apply::Copy)]));
    }
    plan
}

/// Reduce to `root` in two rounds, as `rank` of `world` sees it. It differs from the all-reduce in that the
/// sums are sent only to the root.
pub(super) fn reduce(rank: usize, world: usize, count: usize, root: usize, window: usize) -> Plan {
    let mut plan = Plan::default();
    let own = block(rank, world, count);
    for peer in others(rank, world) {
        plan.push(Stream::send(peer, [block(peer, world, count)]));
    }
    let sum = add(&mut plan, rank, world, own.clone(), Some(window));
    if rank != root {
        plan.push(Stream::send(root, [own]).after(sum, 0));
        return plan;
    }
    for peer in others(rank, world) {
        plan.push(Stream::recv(peer, [(block(peer, world, count), Apply::Copy)]));
    }
    plan
}

/// Receives every rank's share of `range` and adds it to the local one. Returns the stream that completes the
/// sum.
///
/// Shares are added into the buffer in the order i, i+1, ..., or by an ordered reduction with a window of
/// elements. Each stream waits for the one before it, so data that arrives early waits in its connection.
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

/// All-gather in one round, as `rank` sees it.
pub(super) fn all_gather(rank: usize, blocks: &Blocks) -> Plan {
    let mut plan = Plan::default();
    for peer in others(rank, blocks.world()) {
        plan.push(Stream::send(peer, [blocks.range(rank)]));
        plan.push(Stream::recv(peer, [(blocks.range(peer), Apply::Copy)]));
    }
    plan
}

/// Reduce-scatter in one round, as `rank` sees it: in the end its own block is summed over all ranks. Its
/// other blocks are only sent.
pub(super) fn reduce_scatter(rank: usize, blocks: &Blocks, ordered_window: Option<usize>) -> Plan {
    let (mut plan, world) = (Plan::default(), blocks.world());
    for peer in others(rank, world) {
        plan.push(Stream::send(peer, [blocks.range(peer)]));
    }
    add(&mut plan, rank, world, blocks.range(rank), ordered_window);
    plan
}

/// All-to-all, as `rank` sees it. The row has the blocks of `sent`, one for each rank, followed by those of
/// `filled`, one from each rank.
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
    use crate::plan::check::{
        all_gather_is_right, all_reduce_is_right, all_to_all_is_right, flat, reduce_is_right,
        reduce_scatter_is_right,
    };

    #[test]
    fn direct_blocks_are_delivered_to_their_destinations() {
        all_gather_is_right(flat, |rank, _, blocks| super::all_gather(rank, blocks));
        all_to_all_is_right(super::all_to_all);
        for ordered_window in [None, Some(2)] {
            reduce_scatter_is_right(flat, |rank, _, blocks| {
                super::reduce_scatter(rank, blocks, ordered_window)
            });
        }
    }

    #[test]
    fn result_includes_every_rank_exactly_once() {
        for ordered_window in [None, Some(2)] {
            all_reduce_is_right(flat, |rank, topology, count| {
                super::all_reduce(rank, topology.world(), count, ordered_window)
            });
        }
        reduce_is_right(flat, |rank, topology, count, root| {
            super::reduce(rank, topology.world(), count, root, 2)
        });
    }
}
