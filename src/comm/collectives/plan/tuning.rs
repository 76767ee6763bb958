//! Choice of the algorithm of a collective: one table, unless the user has overridden it.
//!
//! Every rank must decide alike. So the choice depends only on values that all ranks know: the size, which
//! ranks share a host, and the overrides, whose text is compared during the bootstrap.

use super::{Algorithm, Algorithms, Rounding, Topology, WIDE_FACTOR};

/// Version of the table below, and of the plans: ranks with different versions refuse to form a group.
pub(crate) const TABLE_VERSION: u32 = 11;

/// Largest all-reduce by recursive doubling, in bytes: of two ranks, of more on one host, and of more on several hosts.
/// There bytes count more than system calls.
const DOUBLING_PAIR_BYTES: usize = 128 << 10;
const DOUBLING_HOST_BYTES: usize = 64 << 10;
const DOUBLING_BYTES: usize = 16 << 10;
/// Largest all-reduce by the flat algorithm, in bytes, if the reduction is ordered: of two ranks, and of more.
const FLAT_PAIR_BYTES: usize = 128 << 10;
const FLAT_BYTES: usize = 8 << 10;
/// Largest all-gather by recursive doubling, and largest reduce-scatter by recursive halving, in bytes of all blocks.
const DOUBLING_GATHER_BYTES: usize = 256 << 10;
const HALVING_BYTES: usize = 64 << 10;
/// Most ranks for a direct exchange, which connects each rank to all others.
const DIRECT_RANKS: usize = 8;
/// Largest direct exchange, in bytes, if several hosts have several ranks: it sends the same data over the
/// network more than once.
const DIRECT_MULTI_HOST_BYTES: usize = 256 << 10;
/// Largest all-reduce by direct exchange, in bytes, if there is one host or one rank on each host. For larger
/// ones the ring, in which a rank has one neighbour each way, uses the caches better. All-gather and
/// reduce-scatter exchange blocks directly at any size, since a ring has to forward them.
const DIRECT_BYTES: usize = 4 << 20;
/// Most ranks for an ordered reduction: the adding rank receives the contribution of every rank to a sum that
/// is rounded once. Up to this number, all ranks are connected from the start. With more ranks, few
/// connections matter more than few bytes, and partial sums are sent as wide elements (`f32`).
const ORDERED_RANKS: usize = 16;
/// Largest broadcast and reduce by the binomial tree, in bytes.
const BINOMIAL_BYTES: usize = 64 << 10;
/// Least bytes for which it is faster to reduce inside each host first and then across the hosts.
const HIERARCHY_BYTES: usize = 64 << 10;
/// Most ranks of the largest host for each rail. Rails are the ranks of a host that use the network. With
/// more ranks for each, they would be the bottleneck.
const HIERARCHY_MAX_IMBALANCE: usize = 2;

impl Algorithms {
    /// Describes each choice that ranks on these hosts cannot use, with the algorithm that they use instead.
    pub(crate) fn unusable(&self, topology: &Topology) -> Vec<String> {
        let world = topology.world();
        // With 2 ranks, doubling and halving are the same as a direct exchange.
        let unpaired = |collective: &str, choice: Option<Algorithm>, pairs: Algorithm| {
            (choice == Some(pairs) && world > 2 && !pairs_up(world)).then(|| {
                let name = pairs.name();
                format!(
                    "{collective}:{name} needs 4, 8, 16, ... ranks; {world} ranks use {collective}:direct"
                )
            })
        };
        let uneven = |collective: &str, choice: Option<Algorithm>| {
            (choice == Some(Algorithm::Hierarchy) && !topology.is_even()).then(|| {
                format!(
                    "{collective}:hierarchy needs equally many ranks on each host; these ranks use {collective}:ring"
                )
            })
        };
        let (gather, scatter) = (self.all_gather, self.reduce_scatter);
        let described = [
            unpaired("all_gather", gather, Algorithm::Doubling),
            unpaired("reduce_scatter", scatter, Algorithm::Halving),
            uneven("all_gather", gather),
            uneven("reduce_scatter", scatter),
        ];
        described.into_iter().flatten().collect()
    }

    pub(crate) fn for_all_reduce(&self, bytes: usize, topology: &Topology, rounding: Rounding) -> Algorithm {
        let world = topology.world();
        let (flat, doubling) = match (world, topology.hosts().len()) {
            (2, _) => (FLAT_PAIR_BYTES, DOUBLING_PAIR_BYTES),
            (_, 1) => (FLAT_BYTES, DOUBLING_HOST_BYTES),
            _ => (FLAT_BYTES, DOUBLING_BYTES),
        };
        let sent = bytes_on_wire(bytes, world, rounding);
        self.all_reduce.unwrap_or(match sent {
            _ if hierarchy_pays(bytes, topology, rounding) => Algorithm::Hierarchy,
            _ if reduces_in_order(world, rounding) && sent <= flat => Algorithm::Flat,
            _ if reduces_in_order(world, rounding) => Algorithm::Direct,
            _ if sent <= doubling => Algorithm::Doubling,
            _ if uses_direct(sent, DIRECT_BYTES, topology) => Algorithm::Direct,
            _ => Algorithm::Ring,
        })
    }

    pub(crate) fn for_broadcast(&self, bytes: usize) -> Algorithm {
        self.broadcast.unwrap_or(Self::rooted_algorithm(bytes))
    }

    pub(crate) fn for_reduce(&self, bytes: usize, topology: &Topology, rounding: Rounding) -> Algorithm {
        let world = topology.world();
        let sent = bytes_on_wire(bytes, world, rounding);
        self.reduce.unwrap_or(match sent {
            _ if reduces_in_order(world, rounding) && sent <= BINOMIAL_BYTES => Algorithm::Linear,
            _ if reduces_in_order(world, rounding) => Algorithm::Direct,
            _ => Self::rooted_algorithm(sent),
        })
    }

    /// Returns the algorithm of an all-gather of blocks of `bytes` bytes.
    pub(crate) fn for_all_gather(&self, bytes: usize, topology: &Topology) -> Algorithm {
        let (pairs, all) = (pairs_up(topology.world()), bytes.saturating_mul(topology.world()));
        let uses_hierarchy = topology.is_even() && hierarchy_pays(all, topology, Rounding::Stepwise);
        match self.all_gather {
            Some(Algorithm::Doubling) if !pairs => Algorithm::Direct,
            None if pairs && all <= DOUBLING_GATHER_BYTES && !uses_hierarchy => Algorithm::Doubling,
            chosen => Self::block_algorithm(chosen, bytes, topology, Rounding::Stepwise),
        }
    }

    /// Returns the algorithm of a reduce-scatter of blocks of `bytes` bytes.
    pub(crate) fn for_reduce_scatter(
        &self,
        bytes: usize,
        topology: &Topology,
        rounding: Rounding,
    ) -> Algorithm {
        let (world, pairs) = (topology.world(), pairs_up(topology.world()));
        let sent = bytes_on_wire(bytes.saturating_mul(world), world, rounding);
        match self.reduce_scatter {
            Some(Algorithm::Halving) if !pairs => Algorithm::Direct,
            None if pairs
                && !reduces_in_order(world, rounding)
                && sent <= HALVING_BYTES
                && !hierarchy_pays(bytes.saturating_mul(world), topology, rounding) =>
            {
                Algorithm::Halving
            }
            chosen => Self::block_algorithm(chosen, bytes, topology, rounding),
        }
    }

    fn rooted_algorithm(bytes: usize) -> Algorithm {
        if bytes <= BINOMIAL_BYTES { Algorithm::Binomial } else { Algorithm::Chain }
    }

    fn block_algorithm(
        chosen: Option<Algorithm>,
        bytes: usize,
        topology: &Topology,
        rounding: Rounding,
    ) -> Algorithm {
        let world = topology.world();
        let all = bytes.saturating_mul(world);
        match chosen {
            // Blocks belong to ranks, and no rail would carry the block of a rank without a rail.
            Some(Algorithm::Hierarchy) if !topology.is_even() => Algorithm::Ring,
            Some(chosen) => chosen,
            None if topology.is_even() && hierarchy_pays(all, topology, rounding) => Algorithm::Hierarchy,
            // With two ranks, a direct exchange sends the same data as a ring.
            None if world == 2 || reduces_in_order(world, rounding) => Algorithm::Direct,
            None if uses_direct(bytes_on_wire(all, world, rounding), usize::MAX, topology) => {
                Algorithm::Direct
            }
            None => Algorithm::Ring,
        }
    }
}

/// Returns whether recursive doubling and halving can exchange the blocks of so many ranks, and save a round.
fn pairs_up(world: usize) -> bool {
    world > 2 && world.is_power_of_two()
}

/// Returns whether a reduction is ordered: the adding rank receives the contributions of all ranks, not
/// partial sums.
fn reduces_in_order(world: usize, rounding: Rounding) -> bool {
    rounding != Rounding::Stepwise && world <= ORDERED_RANKS
}

/// Returns whether the ranks exchange data directly: they are few, and `sent` bytes are at most `most`. The
/// bound is lower if several hosts have several ranks.
fn uses_direct(sent: usize, most: usize, topology: &Topology) -> bool {
    let most = if topology.is_hierarchical() { most.min(DIRECT_MULTI_HOST_BYTES) } else { most };
    sent <= most && topology.world() <= DIRECT_RANKS
}

/// Returns the number of bytes that are sent for `bytes` bytes of elements, which may be sent as wide
/// elements.
fn bytes_on_wire(bytes: usize, world: usize, rounding: Rounding) -> usize {
    let wide = match rounding {
        Rounding::Stepwise => false,
        Rounding::Once { wide_inputs } => wide_inputs || !reduces_in_order(world, rounding),
    };
    if wide { bytes.saturating_mul(WIDE_FACTOR) } else { bytes }
}

/// Returns whether it is faster to reduce `bytes` bytes inside the hosts first, so that only sums are sent
/// over the network.
///
/// It is not faster if the reduction is ordered: the adding rank receives the contributions of all ranks, so
/// there are no partial sums to send.
fn hierarchy_pays(bytes: usize, topology: &Topology, rounding: Rounding) -> bool {
    !reduces_in_order(topology.world(), rounding)
        && topology.is_hierarchical()
        && topology.largest_host() <= HIERARCHY_MAX_IMBALANCE * topology.rails()
        && bytes_on_wire(bytes, topology.world(), rounding) >= HIERARCHY_BYTES
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use super::*;
    use crate::collectives::plan::algorithms::{AllGather, AllReduce, ReduceScatter};

    #[test]
    fn default_tuning_prefers_few_rounds_for_small_messages() {
        let tuning = Algorithms::default();
        let all_reduce =
            |bytes, world| tuning.for_all_reduce(bytes, &Topology::one_host(world), Rounding::Stepwise);
        assert_eq!(all_reduce(4, 4), Algorithm::Doubling);
        assert_eq!(all_reduce(64 << 10, 9), Algorithm::Doubling);
        assert_eq!(all_reduce(65 << 10, 4), Algorithm::Direct);
        assert_eq!(all_reduce(65 << 10, 9), Algorithm::Ring);
        assert_eq!(all_reduce(64 << 20, 4), Algorithm::Ring);
        for (world, algorithm) in [(4, Algorithm::Direct), (9, Algorithm::Ring)] {
            let topology = Topology::one_host(world);
            assert_eq!(tuning.for_all_gather(16 << 20, &topology), algorithm);
            assert_eq!(tuning.for_reduce_scatter(16 << 20, &topology, Rounding::Stepwise), algorithm);
        }
        assert_eq!(tuning.for_broadcast(1 << 20), Algorithm::Chain);
    }

    #[test]
    fn small_reduce_scatter_uses_halving_for_powers_of_two() {
        let (tuning, forced) =
            (Algorithms::default(), Algorithms::from_str("reduce_scatter:halving").unwrap());
        let scatter = |tuning: &Algorithms, bytes, world| {
            tuning.for_reduce_scatter(bytes, &Topology::one_host(world), Rounding::Stepwise)
        };
        assert_eq!(scatter(&tuning, 16 << 10, 4), Algorithm::Halving);
        assert_eq!(scatter(&tuning, 4, 64), Algorithm::Halving);
        assert_eq!(scatter(&tuning, 17 << 10, 4), Algorithm::Direct);
        assert_eq!((scatter(&tuning, 4, 3), scatter(&forced, 4, 3)), (Algorithm::Direct, Algorithm::Direct));
        assert_eq!(scatter(&forced, 1 << 20, 4), Algorithm::Halving);
        let once = Rounding::Once { wide_inputs: false };
        assert_eq!(tuning.for_reduce_scatter(4, &Topology::one_host(16), once), Algorithm::Direct);
        assert_eq!(tuning.for_reduce_scatter(4, &Topology::one_host(32), once), Algorithm::Halving);
    }

    #[test]
    fn small_all_gather_uses_doubling_for_powers_of_two() {
        let (tuning, forced) = (Algorithms::default(), Algorithms::from_str("all_gather:doubling").unwrap());
        let gather =
            |tuning: &Algorithms, bytes, world| tuning.for_all_gather(bytes, &Topology::one_host(world));
        assert_eq!(gather(&tuning, 64 << 10, 4), Algorithm::Doubling);
        assert_eq!(gather(&tuning, 4, 64), Algorithm::Doubling);
        assert_eq!(gather(&tuning, 65 << 10, 4), Algorithm::Direct);
        assert_eq!((gather(&tuning, 4, 3), gather(&forced, 4, 3)), (Algorithm::Direct, Algorithm::Direct));
        assert_eq!(gather(&forced, 1 << 20, 4), Algorithm::Doubling);
    }

    #[test]
    fn single_rounding_reductions_use_direct_up_to_16_ranks() {
        let tuning = Algorithms::default();
        let once = Rounding::Once { wide_inputs: false };
        let all_reduce = |bytes, world| tuning.for_all_reduce(bytes, &Topology::one_host(world), once);
        let (some, more) = (Topology::one_host(16), Topology::one_host(17));
        assert_eq!(all_reduce(8 << 10, 16), Algorithm::Flat);
        assert_eq!(all_reduce(64 << 20, 16), Algorithm::Direct);
        assert_eq!(all_reduce(4 << 10, 17), Algorithm::Doubling, "as many bytes, twice as long");
        assert_eq!(all_reduce(64 << 20, 17), Algorithm::Ring);
        assert_eq!(tuning.for_reduce(4, &some, once), Algorithm::Linear);
        assert_eq!(tuning.for_reduce(1 << 20, &some, once), Algorithm::Direct);
        assert_eq!(tuning.for_reduce(1 << 20, &more, once), Algorithm::Chain);
        assert_eq!(tuning.for_reduce_scatter(1 << 20, &some, once), Algorithm::Direct);
        assert_eq!(tuning.for_reduce_scatter(1 << 20, &more, once), Algorithm::Ring);
        assert_eq!(tuning.for_reduce_scatter(1 << 20, &some, Rounding::Stepwise), Algorithm::Ring);
    }

    #[test]
    fn large_messages_use_a_hierarchy_on_multi_rank_hosts() {
        let tuning = Algorithms::default();
        let all_reduce =
            |hosts: &[usize], bytes| tuning.for_all_reduce(bytes, &Topology::new(hosts), Rounding::Stepwise);
        assert_eq!(all_reduce(&[0, 0, 1, 1], 4), Algorithm::Doubling);
        assert_eq!(all_reduce(&[0, 1, 2], 16 << 10), Algorithm::Doubling);
        assert_eq!(all_reduce(&[0, 1, 2], 17 << 10), Algorithm::Direct);
        assert_eq!(all_reduce(&[0, 0, 1, 1], 1 << 20), Algorithm::Hierarchy);
        assert_eq!(all_reduce(&[0, 0, 0, 1, 1], 1 << 20), Algorithm::Hierarchy);
        assert_eq!(all_reduce(&[0, 1, 0, 1], 1 << 20), Algorithm::Hierarchy);
        // These have one rail for three ranks, and one rank on each host.
        assert_eq!(all_reduce(&[0, 0, 0, 1], 1 << 20), Algorithm::Ring);
        assert_eq!(all_reduce(&[0, 1, 2], 1 << 20), Algorithm::Direct);
        assert_eq!(all_reduce(&[0, 1, 2], 64 << 20), Algorithm::Ring);
        let all_gather = |hosts: &[usize]| tuning.for_all_gather(1 << 20, &Topology::new(hosts));
        assert_eq!(all_gather(&[0, 0, 1, 1]), Algorithm::Hierarchy);
        assert_eq!(all_gather(&[0, 0, 0, 1, 1]), Algorithm::Ring);
        let forced = Algorithms::from_str("reduce_scatter:hierarchy,all_reduce:hierarchy").unwrap();
        let uneven = Topology::new([0, 0, 0, 1]);
        assert_eq!(forced.for_reduce_scatter(4, &uneven, Rounding::Stepwise), Algorithm::Ring);
        assert_eq!(forced.for_all_reduce(4, &uneven, Rounding::Stepwise), Algorithm::Hierarchy);
    }

    #[test]
    fn single_rounding_reductions_use_a_hierarchy_beyond_16_ranks() {
        let tuning = Algorithms::default();
        let of = |hosts: usize| Topology::new((0..8 * hosts).map(|rank| rank / 8));
        for wide_inputs in [false, true] {
            let once = Rounding::Once { wide_inputs };
            assert_eq!(tuning.for_all_reduce(1 << 20, &of(2), once), Algorithm::Direct, "16 ranks");
            assert_eq!(tuning.for_reduce_scatter(1 << 20, &of(2), once), Algorithm::Direct);
            assert_eq!(tuning.for_reduce(1 << 20, &of(2), once), Algorithm::Direct);
            assert_eq!(tuning.for_all_reduce(1 << 20, &of(3), once), Algorithm::Hierarchy);
            assert_eq!(tuning.for_all_reduce(32 << 10, &of(3), once), Algorithm::Hierarchy, "twice as long");
            assert_eq!(tuning.for_reduce_scatter(1 << 20, &of(3), once), Algorithm::Hierarchy);
            assert_eq!(tuning.for_reduce(1 << 20, &of(3), once), Algorithm::Chain);
        }
    }

    #[test]
    fn choices_that_the_ranks_cannot_use_are_described() {
        let chosen = Algorithms::new()
            .all_gather(AllGather::Doubling)
            .reduce_scatter(ReduceScatter::Hierarchy)
            .all_reduce(AllReduce::Hierarchy);
        let describe = |hosts: &[usize]| chosen.unusable(&Topology::new(hosts)).join("\n");
        let halving = Algorithms::new().reduce_scatter(ReduceScatter::Halving);
        let described = halving.unusable(&Topology::one_host(6)).join("\n");
        assert!(described.contains("6 ranks use reduce_scatter:direct"), "{described}");
        assert_eq!(describe(&[0, 0, 1, 1]), "");
        assert_eq!(describe(&[0, 1]), "");
        let described = describe(&[0, 0, 1]);
        assert!(described.contains("3 ranks use all_gather:direct"), "{described}");
        assert!(described.contains("these ranks use reduce_scatter:ring"), "{described}");
        assert_eq!(Algorithms::new().unusable(&Topology::new([0, 0, 1])), [""; 0]);
    }
}
