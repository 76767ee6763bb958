//! Broadcast and reduce along a tree: a binomial tree for small buffers, a chain for large ones.

use super::{Apply, Plan, Stream, Topology};

/// The parent and children of a rank in a tree, whose root has no parent.
pub(super) struct TreeNeighbours {
    pub(super) parent: Option<usize>,
    /// A reduce adds the sums of the children in this order.
    pub(super) children: Vec<usize>,
}

/// Returns the plan of a rank for a broadcast from the root. It forwards data as soon as it arrives.
pub(super) fn broadcast(TreeNeighbours { parent, children }: TreeNeighbours, count: usize) -> Plan {
    let mut plan = Plan::default();
    let got = parent.map(|parent| plan.push(Stream::recv(parent, [(0..count, Apply::Copy)])));
    for child in children.into_iter().rev() {
        plan.push(Stream::send(child, Some(0..count)).after(got, 0));
    }
    plan
}

/// Returns the plan of a rank for a reduce to the root: the broadcast in reverse.
///
/// The sums of the children's subtrees are added in a fixed order, which does not depend on timing, and are
/// forwarded as soon as they are there. In the end, buffers of ranks other than the root hold partial sums.
pub(super) fn reduce(TreeNeighbours { parent, children }: TreeNeighbours, count: usize) -> Plan {
    let mut plan = Plan::default();
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

/// Returns the neighbours of `rank` in a binomial tree of hosts, in which each host is a binomial tree of its
/// ranks. So the data is sent only once to each host but that of the root, in log2(H) and then log2(L) rounds
/// for H hosts of L ranks.
///
/// Children on this host come first, then those on other hosts; each with the smallest subtree first. A
/// broadcast sends to them in reverse.
pub(super) fn binomial(rank: usize, topology: &Topology, root: usize) -> TreeNeighbours {
    let hosts = topology.hosts();
    let ((host, place), (root_host, root_place)) =
        (topology.host_and_index(rank), topology.host_and_index(root));
    let leader = |host: usize| if host == root_host { root_place } else { 0 };
    let here = &hosts[host];
    let inside = |place: usize| here[(place + leader(host)) % here.len()];
    let place = (place + here.len() - leader(host)) % here.len();
    let mut children: Vec<_> = children_of(place, here.len()).map(inside).collect();
    if place > 0 {
        return TreeNeighbours { parent: parent_of(place).map(inside), children };
    }
    let across = |place: usize| {
        let host = (place + root_host) % hosts.len();
        hosts[host][leader(host)]
    };
    let place = (host + hosts.len() - root_host) % hosts.len();
    children.extend(children_of(place, hosts.len()).map(across));
    TreeNeighbours { parent: parent_of(place).map(across), children }
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
fn parent_of(place: usize) -> Option<usize> {
    (place > 0).then(|| place & (place - 1))
}

/// Returns the children of node `place` in a binomial tree of `size` nodes with root 0. They are `place` +
/// 2^k, for all 2^k below the lowest set bit of `place`.
fn children_of(place: usize, size: usize) -> impl Iterator<Item = usize> {
    let reach = if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() };
    (0..reach.ilog2()).map(move |bit| place + (1 << bit)).filter(move |&child| child < size)
}
