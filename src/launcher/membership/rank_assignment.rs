//! Assignment of group ranks to nodes and of ranks to workers. Pure.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use super::messages::AgentId;

/// Worker ranks of a node: rank of its first worker, number of workers of all nodes, then the same two
/// numbers counted only among the workers of the node's role.
pub(crate) type Ranks = (usize, usize, usize, usize);

/// Returns the worker ranks of all nodes. `nodes` holds the role and the number of workers of each. A node
/// gets as many consecutive ranks as it has workers, in the order of the nodes. O(n).
pub(crate) fn assign<'a>(nodes: impl Iterator<Item = (&'a str, usize)>) -> Vec<Ranks> {
    let (mut base_rank, mut role_sizes) = (0_usize, HashMap::<&str, usize>::new());
    let bases: Vec<_> = nodes
        .map(|(role, workers)| {
            let role_size = role_sizes.entry(role).or_default();
            let bases = (role, base_rank, *role_size);
            // The numbers of workers come from the network and may be arbitrarily large. A saturated sum is
            // too large for any job.
            base_rank = base_rank.saturating_add(workers);
            *role_size = role_size.saturating_add(workers);
            bases
        })
        .collect();
    let world_size = base_rank;
    bases.into_iter().map(|(role, base, role_base)| (base, world_size, role_base, role_sizes[role])).collect()
}

/// A node that is ready for the next round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate<'a> {
    pub(super) agent: AgentId,
    pub(super) host: &'a str,
    pub(super) pid: u32,
    /// Group rank of the node in the previous round, if it took part in that round.
    pub(super) previous_rank: Option<usize>,
    /// The host of the node has ended several rounds. Other nodes are selected before this one.
    pub(super) fails_often: bool,
}

/// Selects at most `max` of the `candidates` for the next round. Returns them in the order of their new group
/// ranks.
///
/// A node of the previous round keeps its rank if the new round is large enough, and otherwise gets the
/// lowest free rank. New nodes get the remaining ranks by host name, with numbers in it compared as numbers,
/// then by pid. Nodes of the previous round are selected before new ones, and nodes whose hosts fail often last.
/// O(n log n).
pub(super) fn assign_node_ranks(mut candidates: Vec<Candidate<'_>>, max: usize) -> Vec<AgentId> {
    candidates.sort_by(|a, b| {
        let old = |candidate: &Candidate<'_>| candidate.previous_rank.unwrap_or(usize::MAX);
        a.fails_often
            .cmp(&b.fails_often)
            .then(old(a).cmp(&old(b)))
            .then_with(|| natural_order(a.host, b.host))
            .then(a.pid.cmp(&b.pid))
            .then(a.agent.cmp(&b.agent))
    });
    candidates.truncate(max);
    let size = candidates.len();
    let keeps = |candidate: &Candidate<'_>| candidate.previous_rank.filter(|&rank| rank < size);
    let mut assigned: BTreeMap<usize, AgentId> = BTreeMap::new();
    let mut rest = Vec::new();
    for candidate in &candidates {
        match keeps(candidate) {
            // Two candidates cannot have the same previous rank. If they had, the second would get a free
            // rank.
            Some(rank) if !assigned.contains_key(&rank) => drop(assigned.insert(rank, candidate.agent)),
            _ => rest.push(candidate.agent),
        }
    }
    let free: Vec<usize> = (0..size).filter(|rank| !assigned.contains_key(rank)).collect();
    assigned.extend(free.into_iter().zip(rest));
    assigned.into_values().collect()
}

/// Compares two host names. Numbers in them are compared as numbers, so that h2 stands before h10.
pub(super) fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    while let (Some(x), Some(y)) = (left.chars().next(), right.chars().next()) {
        if x.is_ascii_digit() && y.is_ascii_digit() {
            let ((one, rest_left), (two, rest_right)) = (number(left), number(right));
            // Without leading zeros the longer number is the larger one.
            let order = one.len().cmp(&two.len()).then_with(|| one.cmp(two));
            if order.is_ne() {
                return order;
            }
            (left, right) = (rest_left, rest_right);
        } else if x == y {
            (left, right) = (&left[x.len_utf8()..], &right[y.len_utf8()..]);
        } else {
            return x.cmp(&y);
        }
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Splits `text` into its leading number, without leading zeros, and the remainder.
fn number(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (text[..end].trim_start_matches('0'), &text[end..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn host_order(candidates: &[(&str, Option<usize>)], max: usize) -> Vec<String> {
        let list = candidates.iter().enumerate().map(|(index, &(host, previous_rank))| Candidate {
            fails_often: false,
            agent: AgentId(index as u128),
            host,
            pid: 1,
            previous_rank,
        });
        let names = assign_node_ranks(list.collect(), max)
            .into_iter()
            .map(|agent| candidates[agent.0 as usize].0.to_owned());
        names.collect()
    }

    #[test]
    fn first_round_assigns_ranks_in_name_order() {
        assert_eq!(
            host_order(&[("h10", None), ("h9", None), ("h1", None), ("h02", None)], 9),
            ["h1", "h02", "h9", "h10"]
        );
        assert_eq!(host_order(&[("b", None), ("a", None), ("c", None)], 2), ["a", "b"]);
    }

    #[test]
    fn ranks_are_kept_and_others_fill_the_gaps() {
        // h1 is lost: the last node gets its rank.
        assert_eq!(host_order(&[("h0", Some(0)), ("h2", Some(2)), ("h3", Some(3))], 9), ["h0", "h3", "h2"]);
        // A new node gets the free rank.
        assert_eq!(host_order(&[("a", None), ("h0", Some(0)), ("h2", Some(2))], 9), ["h0", "a", "h2"]);
        // A new node never displaces a node of the previous round.
        assert_eq!(host_order(&[("a", None), ("z", Some(1)), ("y", Some(0))], 2), ["y", "z"]);
    }

    proptest! {
        #[test]
        fn node_gets_one_rank_and_keeps_it_when_possible(
            previous_rank in prop::collection::vec(prop::option::of(0..12_usize), 1..12), max in 1..12_usize,
        ) {
            let mut used = std::collections::BTreeSet::new();
            let previous_rank: Vec<_> = previous_rank.into_iter().map(|rank| rank.filter(|&rank| used.insert(rank))).collect();
            let list: Vec<_> = previous_rank.iter().enumerate().map(|(index, &previous_rank)| Candidate {
                fails_often: false,
                agent: AgentId(index as u128), host: "h", pid: 1, previous_rank,
            }).collect();
            let assigned = assign_node_ranks(list, max);
            prop_assert_eq!(assigned.len(), max.min(previous_rank.len()));
            let distinct: std::collections::BTreeSet<_> = assigned.iter().collect();
            prop_assert_eq!(distinct.len(), assigned.len());
            for (rank, agent) in assigned.iter().enumerate() {
                match previous_rank[agent.0 as usize] {
                    Some(old) if old < assigned.len() => prop_assert_eq!(rank, old),
                    _ => {}
                }
            }
        }

        #[test]
        fn host_name_order_is_total(a in "[a-b0-2.]{0,6}", b in "[a-b0-2.]{0,6}", c in "[a-b0-2.]{0,6}") {
            prop_assert_eq!(natural_order(&a, &b), natural_order(&b, &a).reverse());
            prop_assert_eq!(natural_order(&a, &b).is_eq(), a == b);
            if natural_order(&a, &b).is_le() && natural_order(&b, &c).is_le() {
                prop_assert!(natural_order(&a, &c).is_le(), "{} {} {}", a, b, c);
            }
        }
    }
}
