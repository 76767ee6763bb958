//! Recursive doubling: it has the fewest rounds, and sends a rank's whole data in each.

use super::{Apply, Blocks, Plan, Stream};

/// All-reduce in log2(P) exchanges, as `rank` of `world` sees it.
///
/// In round k a rank exchanges its whole buffer with the rank that differs in bit k, and both add what they
/// received. Both add the same two numbers, and addition commutes to the last bit, so all ranks end with the
/// same bits. If P is no power of two, let p be the largest power of two below it. Ranks from p upwards first
/// give their numbers to rank − p and get the result at the end:
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
/// The buffer is sent from the memory that it is received into. So each receiving stream waits for the
/// sending stream of its round, and each sending stream for the receiving stream of the round before.
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

/// All-gather in log2(P) exchanges, as `rank` sees it; P is a power of two.
///
/// In round k a rank exchanges all blocks that it has with the rank that differs in bit k. It sends its own
/// block, then those of each round before, in the order in which they came. Blocks that a round receives may
/// be forwarded as they come.
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
    // These are the blocks of this rank and of its partner, in order.
    let ours = order(rank, blocks.world());
    let mut came: Vec<usize> = Vec::new();
    for round in 0..blocks.world().ilog2() {
        let (partner, had) = (rank ^ (1 << round), 1 << round);
        // The rank's own block waits for nothing, and is sent with that of the first round.
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

/// Returns the ranks whose blocks a rank receives, in the order of the rounds.
fn order(rank: usize, world: usize) -> Vec<usize> {
    (0..world).map(|distance| rank ^ distance).collect()
}

#[cfg(test)]
mod tests {
    use crate::plan::check::{all_gather_is_right, all_reduce_is_right, flat};

    #[test]
    fn every_rank_receives_every_block() {
        let powers = |world: usize| if world.is_power_of_two() { flat(world) } else { Vec::new() };
        all_gather_is_right(powers, |rank, _, blocks| super::all_gather(rank, blocks));
    }

    #[test]
    fn result_includes_every_rank_exactly_once() {
        all_reduce_is_right(flat, |rank, topology, count| super::all_reduce(rank, topology.world(), count));
    }
}
