//! Binomial tree: broadcast of small buffers.

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

#[cfg(test)]
mod tests {
    #[test]
    fn everyone_gets_what_the_root_has() {
        crate::plan::check::broadcast_is_right(super::broadcast);
    }
}
