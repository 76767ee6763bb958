//! Recursive doubling and halving: they have the fewest rounds among exchanges of pairs.

use std::ops::Range;

use super::{Apply, Blocks, Plan, Stream};

/// Returns the plan of `rank` of `world` for an all-reduce in log2(P) exchanges.
///
/// In round k a rank exchanges its whole buffer with the rank whose number differs in bit k, and both add
/// what they received. Both add the same two numbers, and swapped operands give equal bits, so all ranks end
/// with the same bits. If P is no power of two, let p be the largest power of two below it. Each rank r from
/// p upwards first sends its numbers to rank r − p and receives the result at the end:
///
/// ```text
///          fold     round 0    round 1     unfold
/// rank 0   0 4      0 1 4      0 1 2 3 4   0 1 2 3 4
/// rank 1   1        0 1 4      0 1 2 3 4   0 1 2 3 4
/// rank 2   2        2 3        0 1 2 3 4   0 1 2 3 4
/// rank 3   3        2 3        0 1 2 3 4   0 1 2 3 4
/// rank 4   -        -          -           0 1 2 3 4
/// ```
///
/// The buffer is sent from the memory into which the received data is added. So each receiving stream waits
/// for the sending stream of its round, and each sending stream for the receiving stream of the round before.
pub(super) fn all_reduce(rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = Plan::default();
    let whole = 0..count;
    let power = 1 << world.ilog2();
    if rank >= power {
        plan.push(Stream::send(rank - power, [whole.clone()]));
        plan.push(Stream::recv(rank - power, [(whole, Apply::Copy)]));
        return plan;
    }
    let folded = (rank + power < world).then_some(rank + power);
    let mut before = folded.map(|extra| plan.push(Stream::recv(extra, [(whole.clone(), Apply::Reduce)])));
    for round in 0..power.ilog2() {
        let partner = rank ^ (1 << round);
        let apply = if round + 1 == power.ilog2() { Apply::ReduceLast } else { Apply::Reduce };
        let sent = plan.push(Stream::send(partner, [whole.clone()]).after(before, 0));
        before = Some(plan.push(Stream::recv(partner, [(whole.clone(), apply)]).after(Some(sent), 0)));
    }
    if let Some(extra) = folded {
        plan.push(Stream::send(extra, [whole]).after(before, 0));
    }
    plan
}

/// Returns the plan of `rank` for an all-gather in log2(P) exchanges; P is a power of two.
///
/// In round k a rank exchanges all blocks that it has with the rank whose number differs in bit k. It sends
/// its own block, then the blocks that it received in each earlier round, in the order of their arrival. It
/// may forward the received blocks while they arrive.
///
/// ```text
///          begin   round 0   round 1
/// rank 0   0       0 1       0 1 2 3
/// rank 1   1       1 0       1 0 3 2
/// rank 2   2       2 3       2 3 0 1
/// rank 3   3       3 2       3 2 1 0
/// ```
pub(super) fn all_gather(rank: usize, blocks: &Blocks) -> Plan {
    let mut plan = Plan::default();
    let of = |ranks: &[usize]| ranks.iter().map(|&rank| blocks.range(rank)).collect::<Vec<_>>();
    // These are the ranks whose blocks this rank has, in the order in which it gets them.
    let ours = order(rank, blocks.world());
    let mut came: Vec<usize> = Vec::new();
    for round in 0..blocks.world().ilog2() {
        let (partner, had) = (rank ^ (1 << round), 1 << round);
        // The rank's own block waits for nothing. It is sent in one stream with the block received in the
        // first round.
        let first = ours[..had.min(2)].to_vec();
        let own = blocks.range(rank).len().cast_signed();
        plan.push(Stream::send(partner, of(&first)).after(came.first().copied(), own));
        for (index, &stream) in came.iter().enumerate().skip(1) {
            let piece = &ours[1 << index..2 << index];
            plan.push(Stream::send(partner, of(piece)).after(Some(stream), 0));
        }
        let theirs = order(partner, blocks.world());
        let pieces = of(&theirs[..had]).into_iter().map(|range| (range, Apply::Copy));
        came.push(plan.push(Stream::recv(partner, pieces)));
    }
    plan
}

/// Returns the plan of `rank` for a reduce-scatter in log2(P) exchanges; P is a power of two.
///
/// In each round a rank keeps the half of its blocks that contains its own block. It sends the other half to the rank at
/// that distance, and adds the partial sums that it receives from there. It sends and adds elements as soon as the sum of
/// the round before has come.
///
/// ```text
///          begin     round 0   round 1
/// rank 0   0 1 2 3   0 1       0
/// rank 1   0 1 2 3   0 1       1
/// rank 2   0 1 2 3   2 3       2
/// rank 3   0 1 2 3   2 3       3
/// ```
pub(super) fn reduce_scatter(rank: usize, blocks: &Blocks) -> Plan {
    let mut plan = Plan::default();
    let elements = |ranks: &Range<usize>| blocks.range(ranks.start).start..blocks.range(ranks.end - 1).end;
    let (mut ours, mut before) = (0..blocks.world(), None);
    while ours.len() > 1 {
        let half = ours.len() / 2;
        let (lower, upper) = (ours.start..ours.start + half, ours.start + half..ours.end);
        let (kept, sent) = if lower.contains(&rank) { (lower, upper) } else { (upper, lower) };
        // The stream of the round before begins with the first of our blocks.
        let lead = |part: &Range<usize>| -(elements(part).start - elements(&ours).start).cast_signed();
        plan.push(Stream::send(rank ^ half, [elements(&sent)]).after(before, lead(&sent)));
        let apply = if half == 1 { Apply::ReduceLast } else { Apply::Reduce };
        let recv = Stream::recv(rank ^ half, [(elements(&kept), apply)]).after(before, lead(&kept));
        before = Some(plan.push(recv));
        ours = kept;
    }
    plan
}

/// Returns the ranks whose blocks a rank has, its own first, then in the order of the rounds that receive
/// them.
fn order(rank: usize, world: usize) -> Vec<usize> {
    (0..world).map(|distance| rank ^ distance).collect()
}
