//! Pipelined chain: broadcast and reduce of large buffers, and scans.

use super::{Apply, Plan, Stream};

/// Broadcast from rank to rank, as `rank` of `world` sees it.
///
/// Each rank sends on what it has, as it comes. Every byte crosses each connection once, so the time is
/// that of one transfer plus P−1 times the delay of the pieces in which the bytes happen to arrive.
pub(super) fn broadcast(rank: usize, world: usize, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let place = (rank + world - root) % world;
    let before = (rank + world - 1) % world;
    let got = (place > 0).then(|| plan.push(Stream::recv(before, [(0..count, Apply::Copy)])));
    if place + 1 < world {
        plan.push(Stream::send((rank + 1) % world, Some(0..count)).after(got, 0));
    }
    plan
}

/// Reduce from rank to rank towards `root`, as `rank` of `world` sees it.
///
/// The broadcast backwards: each rank adds what comes and sends it on, as it comes. Buffers of ranks
/// other than the root end as partial sums.
pub(super) fn reduce(rank: usize, world: usize, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let place = (rank + world - root) % world;
    let apply = if place == 0 { Apply::ReduceLast } else { Apply::Reduce };
    let got = (place + 1 < world).then(|| plan.push(Stream::recv((rank + 1) % world, [(0..count, apply)])));
    if place > 0 {
        plan.push(Stream::send((rank + world - 1) % world, Some(0..count)).after(got, 0));
    }
    plan
}

/// Inclusive scan, as `rank` of `world` sees it: each rank adds what those before it have to its own, and
/// sends that on, as it comes.
pub(super) fn scan(rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = Plan::default();
    let got = (rank > 0).then(|| plan.push(Stream::recv(rank - 1, [(0..count, Apply::Reduce)])));
    if rank + 1 < world {
        plan.push(Stream::send(rank + 1, Some(0..count)).after(got, 0));
    }
    plan
}

/// Exclusive scan, as `rank` of `world` sees it: an inclusive one over the first half of the row, whose result then
/// goes to the second half of the next rank.
pub(super) fn exclusive_scan(rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = scan(rank, world, count);
    let got = (rank > 0).then_some(0);
    if rank + 1 < world {
        plan.push(Stream::send(rank + 1, Some(0..count)).after(got, 0));
    }
    if rank > 0 {
        plan.push(Stream::recv(rank - 1, [(count..2 * count, Apply::Copy)]));
    }
    plan
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_scan_has_the_share_of_each_rank_up_to_this_one() {
        crate::plan::check::scan_is_right(super::scan);
    }

    #[test]
    fn an_exclusive_scan_has_also_the_share_of_the_ranks_before() {
        crate::plan::check::exclusive_scan_is_right(super::exclusive_scan);
    }

    #[test]
    fn the_root_gets_everybodys_share() {
        crate::plan::check::reduce_is_right(super::reduce);
    }

    #[test]
    fn everyone_gets_what_the_root_has() {
        crate::plan::check::broadcast_is_right(super::broadcast);
    }
}
