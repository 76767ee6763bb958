//! Binomial tree: broadcast and reduce of small buffers.

use super::{Apply, Plan, Stream};

/// Broadcast in log2(P) rounds, as `rank` of `world` sees it.
///
/// With v = rank − root, the parent of v is v without its lowest set bit, and the children of v are
/// v + 2^k for all 2^k below that bit. The largest subtree is served first.
///
/// ```text
/// 0 ── 4 ── 6 ── 7
/// │    └─── 5
/// ├─── 2 ── 3
/// └─── 1
/// ```
pub(super) fn broadcast(rank: usize, world: usize, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let place = (rank + world - root) % world;
    let real = |place: usize| (place + root) % world;
    let parent = place & place.wrapping_sub(1);
    let got = (place > 0).then(|| plan.push(Stream::recv(real(parent), [(0..count, Apply::Copy)])));
    let reach = if place == 0 { world.next_power_of_two() } else { place & place.wrapping_neg() };
    for bit in (0..reach.ilog2()).rev() {
        let child = place + (1 << bit);
        if child < world {
            plan.push(Stream::send(real(child), Some(0..count)).after(got, 0));
        }
    }
    plan
}

/// Reduce in log2(P) rounds, as `rank` of `world` sees it: the broadcast backwards.
///
/// Shares of the children are added in the order of the bits, so that the order never depends on who
/// is early. Buffers of ranks other than the root end as partial sums.
pub(super) fn reduce(rank: usize, world: usize, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let place = (rank + world - root) % world;
    let real = |place: usize| (place + root) % world;
    let reach = if place == 0 { world.next_power_of_two() } else { place & place.wrapping_neg() };
    let children: Vec<usize> =
        (0..reach.ilog2()).map(|bit| place + (1 << bit)).filter(|&child| child < world).collect();
    let mut before = None;
    for &child in &children {
        let last = place == 0 && Some(&child) == children.last();
        let apply = if last { Apply::ReduceLast } else { Apply::Reduce };
        before = Some(plan.push(Stream::recv(real(child), [(0..count, apply)]).after(before, 0)));
    }
    if place > 0 {
        plan.push(Stream::send(real(place & (place - 1)), Some(0..count)).after(before, 0));
    }
    plan
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_root_gets_everybodys_share() {
        crate::plan::check::reduce_is_right(super::reduce);
    }

    #[test]
    fn everyone_gets_what_the_root_has() {
        crate::plan::check::broadcast_is_right(super::broadcast);
    }
}
