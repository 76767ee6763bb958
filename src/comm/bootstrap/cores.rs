//! Computes which ranks of a host share CPU cores, and how many cores they have. Pure.

use serde::{Deserialize, Serialize};

/// Bit set of the cores that a thread may run on. It is empty if the affinity is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CoreSet(Vec<u64>);

/// The cores that a rank shares with other ranks of its host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CoreShare {
    /// Number of ranks whose core sets overlap with that of this rank, directly or through other ranks; it
    /// includes this rank.
    pub(super) ranks: usize,
    /// Number of cores in the union of the core sets of these ranks; `usize::MAX` if the affinity is unknown.
    pub(super) cores: usize,
    /// Index of this rank among the ranks that share cores. It is set only if these ranks outnumber the cores
    /// and all have the same core set, so that the cores can be assigned evenly.
    pub(super) index: Option<usize>,
}

impl FromIterator<usize> for CoreSet {
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        let mut words = Vec::new();
        for core in numbers {
            let word = core / 64;
            words.resize(words.len().max(word + 1), 0);
            words[word] |= 1 << (core % 64);
        }
        Self(words)
    }
}

impl CoreSet {
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(ours, theirs)| ours & theirs != 0)
    }

    fn union_with(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(ours, theirs)| *ours |= theirs);
    }
}

/// Returns which cores the rank with index `me` shares with others; `all` holds the core set of each rank of
/// the host.
pub(super) fn core_share(all: &[&CoreSet], me: usize) -> CoreShare {
    let ours = all[me];
    if ours.count() == 0 {
        return CoreShare { ranks: all.len(), cores: usize::MAX, index: None };
    }
    let (mut joined, mut inside) = (ours.clone(), vec![false; all.len()]);
    inside[me] = true;
    while let Some(next) = (0..all.len()).find(|&other| !inside[other] && joined.overlaps(all[other])) {
        inside[next] = true;
        joined.union_with(all[next]);
    }
    let sharing = |until: usize| inside[..until].iter().filter(|&&inside| inside).count();
    let (ranks, cores) = (sharing(all.len()), joined.count());
    let alike = (0..all.len()).filter(|&other| inside[other]).all(|other| all[other] == ours);
    CoreShare { ranks, cores, index: (ranks > cores && alike).then(|| sharing(me)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cores: impl IntoIterator<Item = usize>) -> CoreSet {
        cores.into_iter().collect()
    }

    fn shares(all: &[CoreSet]) -> Vec<CoreShare> {
        let all: Vec<_> = all.iter().collect();
        (0..all.len()).map(|me| core_share(&all, me)).collect()
    }

    #[test]
    fn ranks_allowed_on_all_cores_share_them_evenly() {
        let places: Vec<_> = shares(&vec![of(0..2); 4]).into_iter().map(|share| share.index).collect();
        assert_eq!(places, [Some(0), Some(1), Some(2), Some(3)]);
        let enough = CoreShare { ranks: 4, cores: 70, index: None };
        assert_eq!(shares(&vec![of(0..70); 4])[3], enough);
    }

    #[test]
    fn ranks_with_exclusive_cores_share_nothing() {
        let alone = CoreShare { ranks: 1, cores: 2, index: None };
        for share in shares(&[of(0..2), of(2..4), of([4, 64]), of([65, 130])]) {
            assert_eq!(share, alone);
        }
    }

    #[test]
    fn ranks_of_each_socket_share_its_cores() {
        // Slurm and mpirun assign ranks to sockets round robin.
        let socket = |rank: usize| if rank.is_multiple_of(2) { of(0..2) } else { of(2..4) };
        let all: Vec<_> = (0..4).map(socket).collect();
        assert!(shares(&all).iter().all(|share| *share == CoreShare { ranks: 2, cores: 2, index: None }));
        let all: Vec<_> = (0..8).map(socket).collect();
        let places: Vec<_> = shares(&all).into_iter().map(|share| share.index).collect();
        let expected = [0, 0, 1, 1, 2, 2, 3, 3].map(Some);
        assert_eq!(places, expected, "on both cores of both sockets");
    }

    #[test]
    fn partly_overlapping_ranks_are_counted_but_get_no_local_index() {
        let all = [of(0..2), of(1..3), of([2]), of([2, 3]), of([3]), of([9])];
        assert_eq!(shares(&all)[0], CoreShare { ranks: 5, cores: 4, index: None });
        assert_eq!(shares(&all)[5], CoreShare { ranks: 1, cores: 1, index: None });
    }

    #[test]
    fn ranks_with_unknown_cores_count_all_ranks() {
        let unknown = CoreShare { ranks: 2, cores: usize::MAX, index: None };
        assert_eq!(shares(&[of([]), of(0..2)])[0], unknown);
    }
}
