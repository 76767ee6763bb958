//! Linear algorithms: the root exchanges a block with every other rank.

use super::{Apply, Blocks, Plan, Stream};

/// Returns the plan of `rank` for a gather of one block from each rank to `root`.
///
/// The buffer has one block for each rank; ranks other than the root need only their own block of it.
pub(crate) fn gather(rank: usize, blocks: &Blocks, root: usize) -> Plan {
    let recv = |peer: usize| Stream::recv(peer, [(blocks.range(peer), Apply::Copy)]);
    let peers = (0..blocks.world()).filter(|&peer| peer != root);
    plan(rank == root, peers.map(recv), Stream::send(root, [blocks.range(rank)]))
}

/// Returns the plan of `rank` for a scatter of one block from `root` to each rank: the gather in reverse.
///
/// The root sends to the rank after it first. So if each rank is the root in turn, the next root waits for one send only.
pub(crate) fn scatter(rank: usize, blocks: &Blocks, root: usize) -> Plan {
    let send = |peer: usize| Stream::send(peer, [blocks.range(peer)]);
    let world = blocks.world();
    let peers = (1..world).map(|distance| (root + distance) % world);
    plan(rank == root, peers.map(send), Stream::recv(root, [(blocks.range(rank), Apply::Copy)]))
}

/// Returns a plan with the streams `at_root` for the root, and with `elsewhere` for another rank.
fn plan(is_root: bool, at_root: impl Iterator<Item = Stream>, elsewhere: Stream) -> Plan {
    let streams = if is_root { at_root.collect() } else { vec![elsewhere] };
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
