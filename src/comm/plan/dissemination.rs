//! Dissemination barrier.

use super::{Apply, Plan, Stream};

/// Number of rounds: log2(P), rounded up.
pub(super) fn rounds(world: usize) -> usize {
    world.next_power_of_two().ilog2() as usize
}

/// Barrier in log2(P) rounds, as `rank` of `world` sees it.
///
/// In round k a rank tells rank + 2^k that it and all it has heard of are there. One byte a round;
/// only its coming counts.
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
        heard = Some(plan.push(Stream::recv(from, segment)));
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
}
