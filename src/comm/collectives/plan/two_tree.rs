//! Two-tree broadcast of large buffers: half of the data through each of two binary trees.
//!
//! In a single binary tree the leaves only receive, and the inner nodes send everything twice. With two
//! trees, an inner node of one is a leaf of the other. So no rank sends more bytes than the data has, and the
//! delay grows with log2(P), not with P as in a chain.
//!
//! Sanders, Speck & Träff 2009, doi:10.1016/j.parco.2009.09.001.

use super::{Apply, Plan, Stream, block};

/// Returns the plan of `rank` of `world` for a broadcast of `count` elements from `root`.
///
/// Each rank forwards the data while it arrives. The streams of the first tree come first between all pairs
/// of ranks, so the trees cannot wait for each other in a circle.
pub(super) fn broadcast(rank: usize, world: usize, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let me = (rank + world - root) % world;
    for tree in 0..2 {
        let rank_at = |place: usize| (relabelled(tree, place, world) + root) % world;
        let place = (0..world).find(|&place| relabelled(tree, place, world) == me);
        let place = place.expect("each rank has a place in the tree");
        let half = block(tree, 2, count);
        let got = parent(place, world)
            .map(|parent| plan.push(Stream::recv(rank_at(parent), [(half.clone(), Apply::Copy)])));
        for child in (1..world).filter(|&child| parent(child, world) == Some(place)) {
            plan.push(Stream::send(rank_at(child), [half.clone()]).after(got, 0));
        }
    }
    plan
}

/// Returns the parent of node `place` in a tree whose inorder traversal is 1, 2, ..., below node 0. So odd
/// nodes are leaves.
///
/// ```text
/// 0 ── 4 ── 2 ── 1
///      │    └─── 3
///      └─── 6 ── 5
///           └─── 7
/// ```
fn parent(place: usize, world: usize) -> Option<usize> {
    let lowest = place & place.wrapping_neg();
    let above = (place ^ lowest) | lowest << 1;
    (place > 0).then_some(if above < world { above } else { place ^ lowest })
}

/// Returns the rank, counted from the root, at node `place` of a tree. The second tree exchanges the odd and
/// the even nodes: it counts backwards if an even number of ranks follows the root, else it is shifted by
/// one.
fn relabelled(tree: usize, place: usize, world: usize) -> usize {
    match tree {
        1 if place > 0 && world % 2 == 1 => world - place,
        1 if place > 0 => place % (world - 1) + 1,
        _ => place,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::plan::Direction;

    #[test]
    fn each_rank_sends_in_one_tree_only() {
        for world in 2..40 {
            for rank in 1..world {
                let plan = broadcast(rank, world, 10, 0);
                let of = |direction| plan.streams.iter().filter(move |stream| stream.direction == direction);
                let halves: Vec<_> = of(Direction::Send).map(|stream| &stream.parts[0].range).collect();
                assert!(
                    halves.len() <= 2 && halves.iter().all(|half| *half == halves[0]),
                    "{rank} of {world}"
                );
                assert_eq!(of(Direction::Recv).map(Stream::len).sum::<usize>(), 10, "{rank} of {world}");
            }
        }
    }
}
