//! Schedule of the pairs of hosts, and analysis of their bandwidths. Pure.

use super::{stats, table};

/// Returns rounds of host pairs (lower index, higher index). A host is in at most one pair of a round; each
/// pair occurs once.
pub(crate) fn rounds(hosts: usize) -> Vec<Vec<(usize, usize)>> {
    // Circle method: one host stays, the others rotate. With an odd number, the unpaired host pauses.
    let slots = hosts.next_multiple_of(2);
    let others = slots.saturating_sub(1);
    let host = |slot: usize, round: usize| if slot == 0 { 0 } else { (slot - 1 + round) % others + 1 };
    let round = |round: usize| {
        let pairs = (0..slots / 2).map(|slot| (host(slot, round), host(slots - 1 - slot, round)));
        let met = pairs.filter(|&(a, b)| a.max(b) < hosts).map(|(a, b)| (a.min(b), a.max(b)));
        met.collect()
    };
    (0..others).map(round).collect()
}

/// A host or pair that is slower than the others.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slowest<T> {
    pub(crate) item: T,
    /// Bandwidth in GB/s.
    pub(crate) bandwidth: f64,
    /// Median bandwidth of the others, with which it is compared.
    pub(crate) median: f64,
}

/// Returns the slowest of `pairs`, compared with the median of the pairs without the host `slow`. The slower
/// direction of a pair counts. `None` if there are no pairs.
pub(crate) fn slowest_pair(
    pairs: &[((usize, usize), f64)],
    slow: Option<usize>,
) -> Option<Slowest<(usize, usize)>> {
    let usual = pairs.iter().filter(|((a, b), _)| ![Some(*a), Some(*b)].contains(&slow));
    let usual: Vec<f64> = usual.map(|&(_, bandwidth)| bandwidth).collect();
    let &(item, bandwidth) = pairs.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(Slowest { item, bandwidth, median: stats::median(&usual) })
}

/// Returns the host whose best pair is less than half as fast as the best pairs of other hosts. With 3 hosts,
/// two of three pairs contain a slow host, so a median over pairs would not show it.
pub(crate) fn slowest_host(hosts: usize, pairs: &[((usize, usize), f64)]) -> Option<Slowest<usize>> {
    if hosts < 3 {
        return None;
    }
    let best = |host: usize| {
        let with = pairs.iter().filter(|((a, b), _)| host == *a || host == *b);
        with.map(|&(_, bandwidth)| bandwidth).fold(0.0, f64::max)
    };
    let best: Vec<f64> = (0..hosts).map(best).collect();
    let median = stats::median(&best);
    let (item, &bandwidth) = best.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1))?;
    (bandwidth < median / 2.0).then_some(Slowest { item, bandwidth, median })
}

impl<T> Slowest<T> {
    pub(crate) fn text(&self) -> String {
        format!("{} GB/s", short(self.bandwidth))
    }

    /// Describes how much slower the host or pair is than the median.
    pub(crate) fn compare_with_median(&self) -> String {
        let Self { bandwidth, median, .. } = self;
        let below = 100.0 * (1.0 - bandwidth / median);
        match median / bandwidth {
            times if times >= 2.0 => format!("{times:.0} times slower than the median ({})", short(*median)),
            _ if below >= 1.0 => format!("{below:.0} % below the median ({})", short(*median)),
            _ => "as fast as the median".to_owned(),
        }
    }
}

/// Formats a bandwidth with two digits after the decimal point, or more if the number is small.
fn short(bandwidth: f64) -> String {
    if bandwidth >= 0.1 { format!("{bandwidth:.2}") } else { table::digits(bandwidth) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_host_pair_runs_once_and_hosts_never_overlap() {
        for hosts in 0..20 {
            let rounds = rounds(hosts);
            let mut met = BTreeSet::new();
            for round in &rounds {
                let there: BTreeSet<usize> = round.iter().flat_map(|&(a, b)| [a, b]).collect();
                assert_eq!(there.len(), 2 * round.len(), "{hosts}: {round:?}");
                assert!(
                    round.iter().all(|&(a, b)| a < b && b < hosts && met.insert((a, b))),
                    "{hosts}: {round:?}"
                );
            }
            assert_eq!(met.len(), hosts * hosts.saturating_sub(1) / 2);
            assert!(rounds.len() <= hosts, "as few as can be");
        }
    }

    #[test]
    fn slowest_pair_is_named_with_its_difference_from_the_median() {
        let pairs = [((0, 1), 0.94), ((0, 2), 0.11), ((1, 2), 0.96)];
        let slowest = slowest_pair(&pairs, None).unwrap();
        assert_eq!((slowest.item, slowest.bandwidth, slowest.median), ((0, 2), 0.11, 0.94));
        assert_eq!(slowest.compare_with_median(), "9 times slower than the median (0.94)");
        assert_eq!(slowest_host(3, &pairs), None, "each host is fast with somebody");
        assert_eq!(slowest_pair(&[], None), None);
        let near = |bandwidth| Slowest { item: 0, bandwidth, median: 1.0 }.compare_with_median();
        assert_eq!(
            (near(0.8).as_str(), near(1.0).as_str()),
            ("20 % below the median (1.00)", "as fast as the median")
        );
    }

    #[test]
    fn slow_host_and_slow_pair_are_distinguished() {
        let pairs = [((0, 1), 0.1), ((0, 2), 1.0), ((1, 2), 0.12)];
        assert_eq!(slowest_host(3, &pairs), Some(Slowest { item: 1, bandwidth: 0.12, median: 1.0 }));
        assert_eq!(slowest_host(2, &pairs[..1]), None);
        let pair = slowest_pair(&pairs, Some(1)).unwrap();
        assert_eq!((pair.item, pair.median), ((0, 1), 1.0), "not the median of its own pairs");
        assert_eq!((short(0.123), short(0.0123)), ("0.12".to_owned(), "0.012".to_owned()));
    }
}
