//! Choice of the algorithm of a collective: one table, and overrides for users who measure.
//!
//! Every rank must decide alike. So the choice depends only on values that all ranks know: the size, which
//! ranks share a host, and the overrides, whose text is compared during the bootstrap.

use std::fmt;

use super::{Rounding, Topology, WIDE_FACTOR};
use crate::collectives::call::CallKind;

/// Version of the table below: ranks with different versions refuse to form a group.
pub(crate) const TABLE_VERSION: u32 = 6;

/// Largest all-reduce, in bytes, by recursive doubling, or by the flat algorithm if the reduction is ordered:
/// for two ranks, and for more.
const DOUBLING_PAIR_BYTES: usize = 128 << 10;
const DOUBLING_BYTES: usize = 8 << 10;
/// Largest all-gather by recursive doubling, in bytes of all blocks.
const DOUBLING_GATHER_BYTES: usize = 64 << 10;
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

/// The communication pattern of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Ring,
    Direct,
    Doubling,
    Binomial,
    Chain,
    Flat,
    Linear,
    Hierarchy,
    /// Shared memory ([`crate::shm`]) instead of streams.
    Memory,
}

impl Algorithm {
    /// All algorithms, in the order of their numbers in recordings.
    pub(crate) const ALL: [Self; 9] = [
        Self::Ring,
        Self::Direct,
        Self::Doubling,
        Self::Binomial,
        Self::Chain,
        Self::Flat,
        Self::Linear,
        Self::Hierarchy,
        Self::Memory,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Direct => "direct",
            Self::Doubling => "doubling",
            Self::Binomial => "binomial",
            Self::Chain => "chain",
            Self::Flat => "flat",
            Self::Linear => "star",
            Self::Hierarchy => "hierarchy",
            Self::Memory => "shm",
        }
    }
}

const ALL_REDUCE: [Algorithm; 4] =
    [Algorithm::Ring, Algorithm::Direct, Algorithm::Doubling, Algorithm::Hierarchy];
const BROADCAST: [Algorithm; 2] = [Algorithm::Binomial, Algorithm::Chain];
const REDUCE_SCATTER: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Ring, Algorithm::Hierarchy];
const ALL_GATHER: [Algorithm; 4] =
    [Algorithm::Direct, Algorithm::Ring, Algorithm::Hierarchy, Algorithm::Doubling];

/// The choice of algorithms: the table and its overrides.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Tuning {
    all_reduce: Option<Algorithm>,
    broadcast: Option<Algorithm>,
    reduce: Option<Algorithm>,
    all_gather: Option<Algorithm>,
    reduce_scatter: Option<Algorithm>,
}

impl Tuning {
    /// Reads overrides such as `all_reduce:ring,broadcast:chain`; the empty text overrides nothing.
    ///
    /// The error says what is wrong with the text.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut tuning = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (collective, algorithm) =
                entry.split_once(':').ok_or_else(|| format!("{entry:?} is not COLLECTIVE:ALGORITHM"))?;
            let (slot, known): (_, &[Algorithm]) = match collective.trim() {
                "all_reduce" => (&mut tuning.all_reduce, &ALL_REDUCE),
                "broadcast" => (&mut tuning.broadcast, &BROADCAST),
                "reduce" => (&mut tuning.reduce, &BROADCAST),
                "all_gather" => (&mut tuning.all_gather, &ALL_GATHER),
                "reduce_scatter" => (&mut tuning.reduce_scatter, &REDUCE_SCATTER),
                other => {
                    return Err(format!(
                        "{other:?} has no choice of algorithms: all_reduce, broadcast, reduce, all_gather, \
                         reduce_scatter have"
                    ));
                }
            };
            let found = known.iter().find(|known| known.name() == algorithm.trim());
            *slot = Some(*found.ok_or_else(|| {
                let names: Vec<_> = known.iter().map(|algorithm| algorithm.name()).collect();
                format!("{collective} has no algorithm {algorithm:?}: {}", names.join(", "))
            })?);
        }
        Ok(tuning)
    }

    /// Returns whether the user has chosen the algorithm for collective calls of this kind.
    pub(crate) fn has_override(&self, kind: CallKind) -> bool {
        let chosen = match kind {
            CallKind::AllReduce => self.all_reduce,
            CallKind::Broadcast => self.broadcast,
            CallKind::Reduce => self.reduce,
            CallKind::AllGather => self.all_gather,
            CallKind::ReduceScatter => self.reduce_scatter,
            _ => None,
        };
        chosen.is_some()
    }

    /// Returns the algorithm of an all-reduce of `bytes` bytes.
    pub(crate) fn all_reduce(&self, bytes: usize, topology: &Topology, rounding: Rounding) -> Algorithm {
        let world = topology.world();
        let doubling = if world == 2 { DOUBLING_PAIR_BYTES } else { DOUBLING_BYTES };
        let sent = bytes_on_wire(bytes, world, rounding);
        self.all_reduce.unwrap_or(match sent {
            _ if hierarchy_pays(bytes, topology, rounding) => Algorithm::Hierarchy,
            _ if reduces_in_order(world, rounding) && sent <= doubling => Algorithm::Flat,
            _ if reduces_in_order(world, rounding) => Algorithm::Direct,
            _ if sent <= doubling => Algorithm::Doubling,
            _ if uses_direct(sent, DIRECT_BYTES, topology) => Algorithm::Direct,
            _ => Algorithm::Ring,
        })
    }

    /// Returns the algorithm of a broadcast of `bytes` bytes.
    pub(crate) fn broadcast(&self, bytes: usize) -> Algorithm {
        self.broadcast.unwrap_or(Self::rooted_algorithm(bytes))
    }

    /// Returns the algorithm of a reduce of `bytes` bytes.
    pub(crate) fn reduce(&self, bytes: usize, topology: &Topology, rounding: Rounding) -> Algorithm {
        let world = topology.world();
        let sent = bytes_on_wire(bytes, world, rounding);
        self.reduce.unwrap_or(match sent {
            _ if reduces_in_order(world, rounding) && sent <= BINOMIAL_BYTES => Algorithm::Linear,
            _ if reduces_in_order(world, rounding) => Algorithm::Direct,
            _ => Self::rooted_algorithm(sent),
        })
    }

    /// Returns the algorithm of an all-gather of blocks of `bytes` bytes.
    pub(crate) fn all_gather(&self, bytes: usize, topology: &Topology) -> Algorithm {
        let doubles = topology.world() > 2 && topology.world().is_power_of_two();
        match self.all_gather {
            Some(Algorithm::Doubling) if !doubles => Algorithm::Direct,
            None if doubles && bytes.saturating_mul(topology.world()) <= DOUBLING_GATHER_BYTES => {
                Algorithm::Doubling
            }
            chosen => Self::block_algorithm(chosen, bytes, topology, Rounding::Stepwise),
        }
    }

    /// Returns the algorithm of a reduce-scatter of blocks of `bytes` bytes.
    pub(crate) fn reduce_scatter(&self, bytes: usize, topology: &Topology, rounding: Rounding) -> Algorithm {
        Self::block_algorithm(self.reduce_scatter, bytes, topology, rounding)
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
            None if reduces_in_order(world, rounding) => Algorithm::Direct,
            // With two ranks, a direct exchange sends the same data as a ring.
            None if world == 2 => Algorithm::Direct,
            None if uses_direct(bytes_on_wire(all, world, rounding), usize::MAX, topology) => {
                Algorithm::Direct
            }
            None => Algorithm::Ring,
        }
    }
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

/// Formats everything that determines the choice, as one text that ranks compare.
impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |choice: Option<Algorithm>| choice.map_or("table", Algorithm::name);
        write!(
            f,
            "table {TABLE_VERSION}, all_reduce:{}, broadcast:{}, reduce:{}, all_gather:{}, reduce_scatter:{}",
            name(self.all_reduce),
            name(self.broadcast),
            name(self.reduce),
            name(self.all_gather),
            name(self.reduce_scatter)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_are_read_and_shown() {
        let tuning = Tuning::parse(" all_reduce:ring, broadcast:chain").unwrap();
        assert_eq!(
            tuning.to_string(),
            "table 6, all_reduce:ring, broadcast:chain, reduce:table, all_gather:table, reduce_scatter:table"
        );
        assert_eq!(tuning.all_reduce(4, &Topology::one_host(2), Rounding::Stepwise), Algorithm::Ring);
        assert_eq!(tuning.broadcast(4), Algorithm::Chain);
        assert_eq!(Tuning::parse("").unwrap(), Tuning::default());
    }

    #[test]
    fn override_errors_list_the_allowed_values() {
        for (text, message) in [
            ("ring", "\"ring\" is not COLLECTIVE:ALGORITHM"),
            ("barrier:ring", "all_reduce, broadcast, reduce, all_gather, reduce_scatter have"),
            ("all_reduce:fast", "ring, direct, doubling, hierarchy"),
            ("broadcast:ring", "binomial, chain"),
        ] {
            let error = Tuning::parse(text).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn random_overrides_never_cause_a_panic() {
        let test = "random_overrides_never_cause_a_panic";
        let good = ["all_reduce:ring,broadcast:chain", " reduce : binomial ,, all_gather:direct", ""];
        let decode = |bytes: &[u8]| Tuning::parse(&String::from_utf8_lossy(bytes)).ok();
        let encode = |tuning: &Tuning| {
            let shown = tuning.to_string();
            let chosen = shown.split(", ").skip(1).filter(|entry| !entry.ends_with(":table"));
            chosen.collect::<Vec<_>>().join(",").into_bytes()
        };
        convoke_testkit::fuzz(test, &good, 4000, decode, encode);
    }

    #[test]
    fn default_tuning_prefers_few_rounds_for_small_messages() {
        let tuning = Tuning::default();
        let all_reduce =
            |bytes, world| tuning.all_reduce(bytes, &Topology::one_host(world), Rounding::Stepwise);
        assert_eq!(all_reduce(4, 4), Algorithm::Doubling);
        assert_eq!(all_reduce(64 << 10, 4), Algorithm::Direct);
        assert_eq!(all_reduce(64 << 10, 9), Algorithm::Ring);
        assert_eq!(all_reduce(64 << 20, 4), Algorithm::Ring);
        for (world, algorithm) in [(4, Algorithm::Direct), (9, Algorithm::Ring)] {
            let topology = Topology::one_host(world);
            assert_eq!(tuning.all_gather(16 << 20, &topology), algorithm);
            assert_eq!(tuning.reduce_scatter(16 << 20, &topology, Rounding::Stepwise), algorithm);
        }
        assert_eq!(tuning.broadcast(1 << 20), Algorithm::Chain);
    }

    #[test]
    fn small_all_gather_uses_doubling_for_powers_of_two() {
        let (tuning, forced) = (Tuning::default(), Tuning::parse("all_gather:doubling").unwrap());
        let gather = |tuning: &Tuning, bytes, world| tuning.all_gather(bytes, &Topology::one_host(world));
        assert_eq!(gather(&tuning, 16 << 10, 4), Algorithm::Doubling);
        assert_eq!(gather(&tuning, 4, 64), Algorithm::Doubling);
        assert_eq!(gather(&tuning, 17 << 10, 4), Algorithm::Direct);
        assert_eq!((gather(&tuning, 4, 3), gather(&forced, 4, 3)), (Algorithm::Direct, Algorithm::Direct));
        assert_eq!(gather(&forced, 1 << 20, 4), Algorithm::Doubling);
    }

    #[test]
    fn single_rounding_reductions_use_direct_up_to_16_ranks() {
        let tuning = Tuning::default();
        let once = Rounding::Once { wide_inputs: false };
        let all_reduce = |bytes, world| tuning.all_reduce(bytes, &Topology::one_host(world), once);
        let (some, more) = (Topology::one_host(16), Topology::one_host(17));
        assert_eq!(all_reduce(8 << 10, 16), Algorithm::Flat);
        assert_eq!(all_reduce(64 << 20, 16), Algorithm::Direct);
        assert_eq!(all_reduce(4 << 10, 17), Algorithm::Doubling, "as many bytes, twice as long");
        assert_eq!(all_reduce(64 << 20, 17), Algorithm::Ring);
        assert_eq!(tuning.reduce(4, &some, once), Algorithm::Linear);
        assert_eq!(tuning.reduce(1 << 20, &some, once), Algorithm::Direct);
        assert_eq!(tuning.reduce(1 << 20, &more, once), Algorithm::Chain);
        assert_eq!(tuning.reduce_scatter(1 << 20, &some, once), Algorithm::Direct);
        assert_eq!(tuning.reduce_scatter(1 << 20, &more, once), Algorithm::Ring);
        assert_eq!(tuning.reduce_scatter(1 << 20, &some, Rounding::Stepwise), Algorithm::Ring);
    }

    #[test]
    fn large_messages_use_a_hierarchy_on_multi_rank_hosts() {
        let tuning = Tuning::default();
        let all_reduce =
            |hosts: &[usize], bytes| tuning.all_reduce(bytes, &Topology::new(hosts), Rounding::Stepwise);
        assert_eq!(all_reduce(&[0, 0, 1, 1], 4), Algorithm::Doubling);
        assert_eq!(all_reduce(&[0, 0, 1, 1], 1 << 20), Algorithm::Hierarchy);
        assert_eq!(all_reduce(&[0, 0, 0, 1, 1], 1 << 20), Algorithm::Hierarchy);
        assert_eq!(all_reduce(&[0, 1, 0, 1], 1 << 20), Algorithm::Hierarchy);
        // These have one rail for three ranks, and one rank on each host.
        assert_eq!(all_reduce(&[0, 0, 0, 1], 1 << 20), Algorithm::Ring);
        assert_eq!(all_reduce(&[0, 1, 2], 1 << 20), Algorithm::Direct);
        assert_eq!(all_reduce(&[0, 1, 2], 64 << 20), Algorithm::Ring);
        let all_gather = |hosts: &[usize]| tuning.all_gather(1 << 20, &Topology::new(hosts));
        assert_eq!(all_gather(&[0, 0, 1, 1]), Algorithm::Hierarchy);
        assert_eq!(all_gather(&[0, 0, 0, 1, 1]), Algorithm::Ring);
        let forced = Tuning::parse("reduce_scatter:hierarchy,all_reduce:hierarchy").unwrap();
        let uneven = Topology::new([0, 0, 0, 1]);
        assert_eq!(forced.reduce_scatter(4, &uneven, Rounding::Stepwise), Algorithm::Ring);
        assert_eq!(forced.all_reduce(4, &uneven, Rounding::Stepwise), Algorithm::Hierarchy);
    }

    #[test]
    fn single_rounding_reductions_use_a_hierarchy_beyond_16_ranks() {
        let tuning = Tuning::default();
        let of = |hosts: usize| Topology::new((0..8 * hosts).map(|rank| rank / 8));
        for wide_inputs in [false, true] {
            let once = Rounding::Once { wide_inputs };
            assert_eq!(tuning.all_reduce(1 << 20, &of(2), once), Algorithm::Direct, "16 ranks");
            assert_eq!(tuning.reduce_scatter(1 << 20, &of(2), once), Algorithm::Direct);
            assert_eq!(tuning.reduce(1 << 20, &of(2), once), Algorithm::Direct);
            assert_eq!(tuning.all_reduce(1 << 20, &of(3), once), Algorithm::Hierarchy);
            assert_eq!(tuning.all_reduce(32 << 10, &of(3), once), Algorithm::Hierarchy, "twice as long");
            assert_eq!(tuning.reduce_scatter(1 << 20, &of(3), once), Algorithm::Hierarchy);
            assert_eq!(tuning.reduce(1 << 20, &of(3), once), Algorithm::Chain);
        }
    }
}
