//! Linear algorithms: the root exchanges a block with every other rank.

use super::{Apply, Blocks, Plan, Stream};

/// Returns the plan of `rank` for a gather of one block from each rank to `root`.
///
/// The buffer has one block for each rank; ranks other than the root need only their own block of it.
pub(crate) fn gather(rank: usize, blocks: &Blocks, root: usize) -> Plan {
    let mut plan = Plan::default();
    if rank == root {
        for peer in (0..blocks.world()).filter(|&peer| peer != root) {
            plan.push(Stream::recv(peer, [(blocks.range(peer), Apply::Copy)]));
        }
    } else {
        plan.push(Stream::send(root, [blocks.range(rank)]));
    }
    plan
}

/// Returns the plan of `rank` for a scatter of one block from `root` to each rank: the gather in reverse.
pub(crate) fn scatter(rank: usize, blocks: &Blocks, root: usize) -> Plan {
    let mut plan = Plan::default();
    if rank == root {
        for peer in (0..blocks.world()).filter(|&peer| peer != root) {
            plan.push(Stream::send(peer, [blocks.range(peer)]));
        }
    } else {
        plan.push(Stream::recv(root, [(blocks.range(rank), Apply::Copy)]));
    }
    plan
}

#[cfg(test)]
mod tests {
    use crate::collectives::plan::check::{gather_is_right, scatter_is_right};

    #[test]
    fn linear_gather_and_scatter_deliver_all_blocks() {
        gather_is_right(super::gather);
        scatter_is_right(super::scatter);
    }
}
