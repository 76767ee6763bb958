//! Direct exchange: owner computes, in two rounds.

use super::{Apply, Plan, Stream, block};

/// All-reduce in two rounds, as `rank` of `world` sees it.
///
/// Rank i owns block i. Everybody sends its share of block i to rank i; rank i adds the shares in the
/// order i, i+1, ... and sends the sum to everybody. As few bytes as the ring, two rounds instead of
/// 2(P−1), but P−1 connections. What arrives early waits in its connection: each receiving stream of
/// the first round waits for the one before it.
pub(super) fn all_reduce(rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = Plan::default();
    let own = block(rank, world, count);
    let others = || (1..world).map(|distance| (rank + distance) % world);
    let mut sum = None;
    for peer in others() {
        plan.push(Stream::send(peer, [block(peer, world, count)]));
    }
    for peer in others() {
        let last = peer == (rank + world - 1) % world;
        let apply = if last { Apply::ReduceLast } else { Apply::Reduce };
        sum = Some(plan.push(Stream::recv(peer, [(own.clone(), apply)]).after(sum, 0)));
    }
    for peer in others() {
        plan.push(Stream::send(peer, [own.clone()]).after(sum, 0));
    }
    for peer in others() {
        plan.push(Stream::recv(peer, [(block(peer, world, count), Apply::Copy)]));
    }
    plan
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_rank_counts_once_in_every_element() {
        crate::plan::check::all_reduce_is_right(super::all_reduce);
    }
}
