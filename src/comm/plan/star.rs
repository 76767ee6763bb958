//! Star: the root exchanges a block with every other rank.

use super::{Apply, Plan, Stream};

/// Gather of one block of `count` elements from each rank to `root`, as `rank` of `world` sees it.
///
/// The row has one block for each rank; ranks other than the root have only their own.
pub(crate) fn gather(rank: usize, world: usize, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let of = |rank: usize| rank * count..(rank + 1) * count;
    if rank == root {
        for peer in (0..world).filter(|&peer| peer != root) {
            plan.push(Stream::recv(peer, [(of(peer), Apply::Copy)]));
        }
    } else {
        plan.push(Stream::send(root, [of(rank)]));
    }
    plan
}

/// Scatter of one block of `count` elements to each rank from `root`; the gather backwards.
pub(crate) fn scatter(rank: usize, world: usize, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let of = |rank: usize| rank * count..(rank + 1) * count;
    if rank == root {
        for peer in (0..world).filter(|&peer| peer != root) {
            plan.push(Stream::send(peer, [of(peer)]));
        }
    } else {
        plan.push(Stream::recv(root, [(of(rank), Apply::Copy)]));
    }
    plan
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_root_has_all_blocks_before_or_after() {
        crate::plan::check::gather_is_right(super::gather);
        crate::plan::check::scatter_is_right(super::scatter);
    }
}
