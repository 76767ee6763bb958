//! Recursive doubling: the fewest rounds, the whole buffer in each.

use super::{Apply, Plan, Stream};

/// All-reduce in log2(P) exchanges, as `rank` of `world` sees it.
///
/// In round k a rank exchanges all it has with the rank that differs in bit k, and both add what they
/// got. Both add the same two numbers, and addition commutes to the last bit, so all ranks end with
/// the same bits. If P is no power of two, ranks from the power of two p upwards first give their
/// numbers to rank − p and get the result at the end:
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
/// The buffer is sent from where it is received into, so each receiving stream waits for the sending
/// one of its round, and that for the receiving one of the round before.
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

#[cfg(test)]
mod tests {
    #[test]
    fn every_rank_counts_once_in_every_element() {
        crate::plan::check::all_reduce_is_right(super::all_reduce);
    }
}
