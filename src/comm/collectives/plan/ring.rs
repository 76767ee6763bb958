//! Ring algorithms: they send the fewest bytes for large buffers, and use only two connections per rank.

use std::cmp::Ordering;
use std::ops::Range;

use super::{Apply, Blocks, Plan, Stream, block, subrange};

/// Returns the plan of `rank` for a ring all-reduce over `world` blocks (`world >= 1`) of each chunk.
///
/// It takes P−1 rounds of reduce-scatter, then P−1 of all-gather. Of a buffer of S bytes, each rank sends
/// 2·S·(P−1)/P bytes. The table shows the content of the buffers for P = 3 (`012` = summed over ranks 0, 1
/// and 2):
///
/// ```text
///          start    reduce 0   reduce 1     gather 0      gather 1
/// rank 0   0 0 0    0  0  02   0   012 02   012 012 02    012 012 012
/// rank 1   1 1 1    01 1  1    01  1   012  01  012 012   012 012 012
/// rank 2   2 2 2    2  12 2    012 12  2    012 12  012   012 012 012
/// ```
///
/// The rounds are not visible in the plan. A rank sends its own block and then, byte for byte, what it has
/// received. So the plan is one stream to the successor, one from the predecessor, and the rule `sent <=
/// first block + received`. Chunks of the buffer follow each other in these two streams.
///
/// Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
pub(super) fn all_reduce(rank: usize, world: usize, count: usize, chunk: usize) -> Plan {
    let chunk = even_chunk(world, count, chunk);
    let part = |index: usize, behind: usize| {
        let whole = index * chunk..count.min((index + 1) * chunk);
        subrange(&whole, &block((rank + 2 * world - behind) % world, world, whole.len()))
    };
    // The last reducing step is number P−2.
    let apply = |step: usize| match (step + 2).cmp(&world) {
        Ordering::Less => Apply::Reduce,
        Ordering::Equal => Apply::ReduceLast,
        Ordering::Greater => Apply::Copy,
    };
    ring_steps(rank, world, (count.div_ceil(chunk).max(1), 2 * (world - 1)), part, apply)
}

/// Returns the plan of `rank` for a ring all-gather: the rank sends its own block and then the blocks that it
/// has received.
pub(super) fn all_gather(rank: usize, blocks: &Blocks, chunk: usize) -> Plan {
    block_steps(rank, blocks, chunk, 0, |_| Apply::Copy)
}

/// Returns the plan of `rank` for a ring reduce-scatter: in the end the rank's own block is summed over all
/// ranks, and its other blocks hold partial sums.
pub(super) fn reduce_scatter(rank: usize, blocks: &Blocks, chunk: usize) -> Plan {
    let last = blocks.world().saturating_sub(2);
    block_steps(rank, blocks, chunk, 1, |step| if step == last { Apply::ReduceLast } else { Apply::Reduce })
}

/// Returns the plan of `rank` for P−1 steps around the ring; step k sends block `rank − first − k`.
///
/// Equal blocks are sent chunk by chunk, so that a part is still in the cache when it is forwarded. Unequal
/// blocks are sent whole: with parts of different length, sending could not be ahead of receiving by one
/// fixed number of elements (the lead) in all chunks.
fn block_steps(
    rank: usize,
    blocks: &Blocks,
    chunk: usize,
    first: usize,
    apply: impl Fn(usize) -> Apply,
) -> Plan {
    let world = blocks.world();
    let chunks = blocks.uniform_len().map_or(1, |len| len.div_ceil((chunk / world).max(1)).max(1));
    let part = |index: usize, behind: usize| {
        let whole = blocks.range((rank + 2 * world - first - behind) % world);
        subrange(&whole, &block(index, chunks, whole.len()))
    };
    ring_steps(rank, world, (chunks, world - 1), part, apply)
}

/// Returns the plan of `rank` for steps around the ring in each chunk. Step k of chunk i sends `part(i, k)`,
/// which step k−1 has received.
fn ring_steps(
    rank: usize,
    world: usize,
    (chunks, steps): (usize, usize),
    part: impl Fn(usize, usize) -> Range<usize>,
    apply: impl Fn(usize) -> Apply,
) -> Plan {
    let mut plan = Plan::default();
    if world == 1 {
        return plan;
    }
    let (to, from) = ((rank + 1) % world, (rank + world - 1) % world);
    let moves = || (0..chunks).flat_map(|index| (0..steps).map(move |step| (index, step)));
    let recv = Stream::recv(from, moves().map(|(index, step)| (part(index, step + 1), apply(step))));
    let send = Stream::send(to, moves().map(|(index, step)| part(index, step)));
    // Within a chunk, the send stream may be ahead of the receive stream by the first block. The whole
    // streams use the least of these leads of all chunks.
    let lead = (0..chunks).map(|index| part(index, 0).len()).min().unwrap_or(0);
    let recv = plan.push(recv);
    plan.push(send.after(Some(recv), lead.cast_signed()));
    plan
}

/// Returns the number of elements of a chunk, a multiple of `world`, so that all chunks have about equal
/// size, at most about `chunk`.
///
/// A rank may send ahead of what it has received by one block of the shortest chunk, the same number of
/// elements in all chunks. So a last chunk much shorter than the others would make ranks wait for each other.
fn even_chunk(world: usize, count: usize, chunk: usize) -> usize {
    let chunks = count.div_ceil(chunk.max(world)).max(1);
    count.div_ceil(chunks).next_multiple_of(world).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::plan::{BLOCK_BYTES, Direction};

    #[test]
    fn ring_sends_the_minimum_of_an_all_reduce() {
        let (world, count) = (4, 4000);
        let plan = all_reduce(1, world, count, 400);
        let sent = plan.streams.iter().find(|stream| stream.direction == Direction::Send).unwrap();
        assert_eq!(sent.len(), 2 * count * (world - 1) / world);
    }

    #[test]
    fn odd_element_count_keeps_the_prefetch_distance() {
        let plan = all_reduce(0, 2, (16 << 20) + 1, 2 * BLOCK_BYTES / 4);
        let lead = plan.streams[1].dependency.unwrap().lead;
        assert!(lead.unsigned_abs() * 4 > BLOCK_BYTES * 9 / 10, "{lead}");
    }
}
