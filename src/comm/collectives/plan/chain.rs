//! Pipelined chain: broadcast and reduce of large buffers, and scans.

use super::{Apply, Plan, Stream, Topology};

/// Returns the plan of `rank` for a broadcast from rank to rank, host by host.
///
/// Each rank forwards data as soon as it arrives. Every byte crosses each connection once. So the time is
/// that of one transfer plus P−1 times the delay of a piece, whose size depends on how the bytes arrive. With
/// H hosts, the data is sent H−1 times from one host to another.
pub(super) fn broadcast(rank: usize, topology: &Topology, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let (before, next) = neighbours(rank, topology, root);
    let got = before.map(|before| plan.push(Stream::recv(before, [(0..count, Apply::Copy)])));
    if let Some(next) = next {
        plan.push(Stream::send(next, Some(0..count)).after(got, 0));
    }
    plan
}

/// Returns the plan of `rank` for a reduce from rank to rank towards `root`.
///
/// It is the broadcast in reverse: each rank adds its own data to what it receives, and forwards the sums as
/// soon as they are there. In the end, the buffers of ranks other than the root hold partial sums.
pub(super) fn reduce(rank: usize, topology: &Topology, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let (before, next) = neighbours(rank, topology, root);
    let apply = if before.is_none() { Apply::ReduceLast } else { Apply::Reduce };
    let got = next.map(|next| plan.push(Stream::recv(next, [(0..count, apply)])));
    if let Some(before) = before {
        plan.push(Stream::send(before, Some(0..count)).after(got, 0));
    }
    plan
}

/// Returns the previous and the next rank in a chain that begins with `root`, then has the other ranks of its
/// host, then those of the other hosts.
fn neighbours(rank: usize, topology: &Topology, root: usize) -> (Option<usize>, Option<usize>) {
    let hosts = topology.hosts();
    let (root_host, root_place) = topology.host_and_index(root);
    let mut chain: Vec<usize> = Vec::with_capacity(topology.world());
    chain.extend(&hosts[root_host][root_place..]);
    chain.extend(&hosts[root_host][..root_place]);
    let others = hosts.iter().cycle().skip(root_host + 1).take(hosts.len() - 1);
    chain.extend(others.flatten());
    let place = chain.iter().position(|&member| member == rank).expect("the chain has all ranks");
    (place.checked_sub(1).map(|place| chain[place]), chain.get(place + 1).copied())
}

/// Returns the plan of `rank` of `world` for an inclusive scan. Each rank adds the sum of the lower ranks to
/// its own elements, and forwards the result as soon as it is there.
pub(super) fn scan(rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = Plan::default();
    let got = (rank > 0).then(|| plan.push(Stream::recv(rank - 1, [(0..count, Apply::Reduce)])));
    if rank + 1 < world {
        plan.push(Stream::send(rank + 1, Some(0..count)).after(got, 0));
    }
    plan
}

/// Returns the plan of `rank` of `world` for an exclusive scan. The buffer has twice `count` elements. An
/// inclusive scan runs over its first half; the result is then sent to the second half of the next rank's
/// buffer.
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
    fn inclusive_scan_combines_all_ranks_up_to_this_one() {
        crate::collectives::plan::check::scan_is_right(super::scan);
    }

    #[test]
    fn exclusive_scan_combines_all_ranks_before_this_one() {
        crate::collectives::plan::check::exclusive_scan_is_right(super::exclusive_scan);
    }
}
