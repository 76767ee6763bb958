//! Which ranks share a host.

use std::collections::HashMap;
use std::hash::Hash;

/// The hosts of a group's ranks. All ranks of the group have the same topology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology {
    /// The ranks of each host, lowest first; hosts in the order of their lowest ranks. No host is empty.
    hosts: Vec<Vec<usize>>,
    /// For each rank: the index of its host, and its index among the ranks of that host.
    positions: Vec<(usize, usize)>,
}

impl Topology {
    /// Makes a topology. Ranks with equal keys share a host; the keys are in rank order.
    pub(crate) fn new<K: Eq + Hash>(keys: impl IntoIterator<Item = K>) -> Self {
        let (mut hosts, mut positions, mut known) = (Vec::<Vec<usize>>::new(), Vec::new(), HashMap::new());
        for (rank, key) in keys.into_iter().enumerate() {
            let host = *known.entry(key).or_insert(hosts.len());
            if host == hosts.len() {
                hosts.push(Vec::new());
            }
            positions.push((host, hosts[host].len()));
            hosts[host].push(rank);
        }
        Self { hosts, positions }
    }

    /// Returns the topology of `world` ranks on one host.
    pub(crate) fn one_host(world: usize) -> Self {
        Self::new(std::iter::repeat_n((), world))
    }

    pub(crate) fn world(&self) -> usize {
        self.positions.len()
    }

    pub(crate) fn hosts(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    /// Returns the index of the host of `rank`, and the index of `rank` among the ranks of that host.
    pub(crate) fn host_and_index(&self, rank: usize) -> (usize, usize) {
        self.positions[rank]
    }

    /// Returns all ranks that are on the same host as `rank`, which is one of them.
    pub(crate) fn local_ranks(&self, rank: usize) -> &[usize] {
        &self.hosts[self.positions[rank].0]
    }

    /// The number of rails: ranks of each host that exchange data with other hosts at the same time. It is
    /// the number of ranks of the smallest host.
    pub(crate) fn rails(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(0)
    }

    pub(crate) fn largest_host(&self) -> usize {
        self.hosts.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns whether there are several hosts, and several ranks on one of them.
    pub(crate) fn is_hierarchical(&self) -> bool {
        self.hosts.len() > 1 && self.largest_host() > 1
    }

    /// Returns whether all hosts have equally many ranks.
    pub(crate) fn is_even(&self) -> bool {
        self.rails() == self.largest_host()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_local_ranks_follow_the_rank_order() {
        let topology = Topology::new(["b", "a", "b", "c", "a", "b"]);
        assert_eq!(topology.hosts(), [vec![0, 2, 5], vec![1, 4], vec![3]]);
        assert_eq!(
            (0..6).map(|rank| topology.host_and_index(rank)).collect::<Vec<_>>(),
            [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
        );
        assert_eq!((topology.world(), topology.rails(), topology.largest_host()), (6, 1, 3));
        assert!(topology.is_hierarchical() && !topology.is_even());
    }

    #[test]
    fn single_host_and_one_rank_per_host_need_no_hierarchy() {
        assert!(!Topology::one_host(4).is_hierarchical());
        assert!(!Topology::new(0..4).is_hierarchical());
        assert!(Topology::new([0, 0, 1, 1]).is_hierarchical() && Topology::new([0, 0, 1, 1]).is_even());
    }
}
