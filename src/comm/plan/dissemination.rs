//! Dissemination barrier.

use super::{Apply, Plan, Stream};

/// Number of rounds: log2(P), rounded up.
pub(super) fn rounds(world: usize) -> usize {
    world.next_power_of_two().ilog2() as usize
}

/// Barrier in log2(P) rounds, as `rank` of `world` sees it.
///
/// In round k a rank tells rank + 2^k that it and all it has heard of are there. One byte a round; only its coming
/// counts, and it counts only after those of the rounds before: what is told in round k is true only then.
///
/// Hensgen, Finkel & Manber 1988, doi:10.1007/BF01379320.
pub(super) fn barrier(rank: usize, world: usize) -> Plan {
    let mut plan = Plan::default();
    let mut heard = None;
    for round in 0..rounds(world) {
        let distance = 1 << round;
        let (to, from) = ((rank + distance) % world, (rank + world - distance) % world);
        plan.push(Stream::send(to, Some(round..round + 1)).after(heard, 0));
        let segment = Some((round..round + 1, Apply::Copy));
        heard = Some(plan.push(Stream::recv(from, segment).after(heard, 0)));
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::check::barrier_is_right;

    #[test]
    fn nobody_leaves_before_everybody_came() {
        for world in 1..=33 {
            barrier_is_right(world, rounds(world), |rank| barrier(rank, world));
        }
    }

    /// Without it, of 6 ranks, 5 could leave before 0 had come.
    #[test]
    fn a_round_counts_only_after_the_one_before() {
        for world in 2..=33 {
            let streams = barrier(0, world).streams;
            for round in 1..rounds(world) {
                let gates =
                    [2 * round, 2 * round + 1].map(|index| streams[index].gate.map(|gate| gate.stream));
                assert_eq!(gates, [Some(2 * round - 1); 2], "round {round} of {world} ranks");
            }
        }
    }
}
