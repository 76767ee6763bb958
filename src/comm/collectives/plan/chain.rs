//! Pipelined chain: broadcast and reduce of large buffers, and scans.

use super::tree::TreeNeighbours;
use super::{Algorithm, Apply, Plan, Rounding, Stream, Topology};

/// Returns the neighbours of `rank` in a chain, a tree in which each rank has one child: `root`, then the
/// other ranks of its host, then those of the other hosts.
///
/// Every byte crosses each connection once. So the time is that of one transfer plus P−1 times the delay of a
/// piece, whose size depends on how the bytes arrive. With H hosts, the data is sent H−1 times from one host
/// to another.
pub(super) fn neighbours(rank: usize, topology: &Topology, root: usize) -> TreeNeighbours {
    let (root_host, root_place) = topology.host_and_index(root);
    let mut hosts = topology.hosts().to_vec();
    hosts.rotate_left(root_host);
    hosts[0].rotate_left(root_place);
    let chain = hosts.concat();
    let place = chain.iter().position(|&member| member == rank).expect("the chain has all ranks");
    let parent = place.checked_sub(1).map(|place| chain[place]);
    TreeNeighbours { parent, children: chain.get(place + 1).copied().into_iter().collect() }
}

/// Returns the plan of `rank` of `world` for an inclusive scan. Each rank adds the sum of the lower ranks to
/// its own elements, and forwards the result as soon as it is there.
pub(crate) fn scan(rounding: Rounding, rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = Plan { wide: rounding.is_wide(Algorithm::Chain), ..Plan::default() };
    let got = (rank > 0).then(|| plan.push(Stream::recv(rank - 1, [(0..count, Apply::Reduce)])));
    if rank + 1 < world {
        plan.push(Stream::send(rank + 1, Some(0..count)).after(got, 0));
    }
    plan
}

/// Returns the plan of `rank` of `world` for an exclusive scan. The buffer has twice `count` elements. An
/// inclusive scan runs over its first half; the result is then sent to the second half of the next rank's
/// buffer.
pub(crate) fn exclusive_scan(rounding: Rounding, rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = scan(rounding, rank, world, count);
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
    use super::{Rounding, exclusive_scan, scan};
    use crate::collectives::plan::check::{exclusive_scan_is_right, scan_is_right};

    #[test]
    fn inclusive_scan_combines_all_ranks_up_to_this_one() {
        scan_is_right(|rank, world, count| scan(Rounding::Stepwise, rank, world, count));
    }

    #[test]
    fn exclusive_scan_combines_all_ranks_before_this_one() {
        exclusive_scan_is_right(|rank, world, count| exclusive_scan(Rounding::Stepwise, rank, world, count));
    }
}
