//! Linear algorithms: the root exchanges a block with every other rank.

use super::{Apply, Blocks, Plan, Stream};

/// Returns the plan of `rank` for a gather of one block from each rank to `root`.
///
/// The buffer has one block for each rank; ranks other than the root need only their own block of it.
pub(crate) fn gather(rank: usize, blocks: &Blocks, root: usize) -> Plan {
    let recv = |peer: usize| Stream::recv(peer, [(blocks.range(peer), Apply::Copy)]);
    plan(rank, blocks.world(), root, recv, Stream::send(root, [blocks.range(rank)]))
}

/// Returns the plan of `rank` for a scatter of one block from `root` to each rank: the gather in reverse.
pub(crate) fn scatter(rank: usize, blocks: &Blocks, root: usize) -> Plan {
    let send = |peer: usize| Stream::send(peer, [blocks.range(peer)]);
    plan(rank, blocks.world(), root, send, Stream::recv(root, [(blocks.range(rank), Apply::Copy)]))
}

/// Returns a plan with the stream `at_root(peer)` for each peer of the root, and `elsewhere` for another
/// rank.
fn plan(
    rank: usize,
    world: usize,
    root: usize,
    at_root: impl Fn(usize) -> Stream,
    elsewhere: Stream,
) -> Plan {
    let peers = (0..world).filter(|&peer| peer != root);
    let streams = if rank == root { peers.map(at_root).collect() } else { vec![elsewhere] };
    Plan { streams, ..Plan::default() }
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
