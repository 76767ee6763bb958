//! Binomial tree: broadcast and reduce of small buffers.

use super::{Apply, Plan, Stream, Topology};

/// Returns the plan of `rank` for a broadcast in log2(H) and then log2(L) rounds, for H hosts of L ranks.
///
/// A rank sends to children on other hosts before those on its own, and to the largest subtree of these
/// first.
pub(super) fn broadcast(rank: usize, topology: &Topology, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let neighbours = TreeNeighbours::of(rank, topology, root);
    let got = neighbours.parent.map(|parent| plan.push(Stream::recv(parent, [(0..count, Apply::Copy)])));
    for &child in neighbours.children.iter().rev() {
        plan.push(Stream::send(child, Some(0..count)).after(got, 0));
    }
    plan
}

/// Returns the plan of `rank` for a reduce in log2(L) and then log2(H) rounds, for H hosts of L ranks: the
/// broadcast in reverse.
///
/// The sums of the children's subtrees are added in a fixed order, which does not depend on timing. In the
/// end, buffers of ranks other than the root hold partial sums.
pub(super) fn reduce(rank: usize, topology: &Topology, count: usize, root: usize) -> Plan {
    let mut plan = Plan::default();
    let TreeNeighbours { parent, children } = TreeNeighbours::of(rank, topology, root);
    let mut before = None;
    for &child in &children {
        let last = parent.is_none() && Some(&child) == children.last();
        let apply = if last { Apply::ReduceLast } else { Apply::Reduce };
        before = Some(plan.push(Stream::recv(child, [(0..count, apply)]).after(before, 0)));
    }
    if let Some(parent) = parent {
        plan.push(Stream::send(parent, Some(0..count)).after(before, 0));
    }
    plan
}

/// The parent and children of a rank in a binomial tree of hosts, in which each host is a binomial tree of
/// its ranks. So the data is sent only once to each host but that of the root.
struct TreeNeighbours {
    parent: Option<usize>,
    /// Children on this host come first, then those on other hosts; each with the smallest subtree first.
    children: Vec<usize>,
}

impl TreeNeighbours {
    fn of(rank: usize, topology: &Topology, root: usize) -> Self {
        let hosts = topology.hosts();
        let ((host, place), (root_host, root_place)) =
            (topology.host_and_index(rank), topology.host_and_index(root));
        let leader = |host: usize| if host == root_host { root_place } else { 0 };
        let here = &hosts[host];
        let inside = |place: usize| here[(place + leader(host)) % here.len()];
        let place = (place + here.len() - leader(host)) % here.len();
        let parent = parent(place).map(inside);
        let mut children: Vec<_> = children(place, here.len()).map(inside).collect();
        if place > 0 {
            return Self { parent, children };
        }
        let across = |place: usize| {
            let host = (place + root_host) % hosts.len();
            hosts[host][leader(host)]
        };
        let place = (host + hosts.len() - root_host) % hosts.len();
        children.extend(self::children(place, hosts.len()).map(across));
        Self { parent: self::parent(place).map(across), children }
    }
}

/// Returns the parent of node `place` in a binomial tree with root 0: the number `place` without its lowest
/// set bit.
///
/// ```text
/// 0 ── 4 ── 6 ── 7
/// │    └─── 5
/// ├─── 2 ── 3
/// └─── 1
/// ```
fn parent(place: usize) -> Option<usize> {
    (place > 0).then(|| place & (place - 1))
}

/// Returns the children of node `place` in a binomial tree of `size` nodes with root 0. They are `place` +
/// 2^k, for all 2^k below the lowest set bit of `place`.
fn children(place: usize, size: usize) -> impl Iterator<Item = usize> {
    let reach = if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() };
    (0..reach.ilog2()).map(move |bit| place + (1 << bit)).filter(move |&child| child < size)
}
