//! The algorithms of collectives: their names, the collectives that each can carry out, and overrides for
//! users who measure.
//!
//! An algorithm has its plans in a file of its own, a name in [`Algorithm`], and an entry for each of its
//! collectives below. All else follows from these lists: types, texts and numbers of the algorithms, and
//! tests.

use std::fmt;
use std::str::FromStr;

use super::tuning::TABLE_VERSION;
use super::{Blocks, Input, Plan, chain, direct, doubling, hierarchy, ordered, ring, tree};
use crate::collectives::call::CallKind;
use crate::collectives::named_enum::named_enum;

named_enum! {
    /// The communication pattern of a collective.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Algorithm {
        Ring = "ring",
        Direct = "direct",
        Doubling = "doubling",
        Halving = "halving",
        Binomial = "binomial",
        Chain = "chain",
        Flat = "flat",
        Linear = "star",
        Hierarchy = "hierarchy",
        /// Shared memory ([`crate::shm`]) instead of streams.
        Memory = "shm",
        #[cfg(test)]
        TwoTree = "two_tree",
    }
    /// All algorithms, in the order of their numbers in recordings.
    pub(crate) const ALL: [Self; _];
    pub(crate) const fn name(self) -> &'static str;
}

impl Algorithm {
    /// Returns whether the rank that adds receives every single contribution of a reduction, not partial
    /// sums.
    pub(super) const fn sends_single_contributions(self) -> bool {
        matches!(self, Self::Direct | Self::Flat | Self::Linear)
    }
}

/// Defines for each collective the type of its algorithms, the function that returns a plan, and the override
/// in [`Algorithms`].
macro_rules! collectives {
    ($(
        $(#[$doc:meta])*
        $Choice:ident $collective:ident($input:ident $(, $argument:ident: $Type:ty)*) {
            $($(#[$what:meta])* $Variant:ident => $plan:expr,)*
        }
        $([chosen only by the table] { $($Hidden:ident => $hidden_plan:expr,)* })?
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            #[non_exhaustive]
            pub enum $Choice {
                $($(#[$what])* $Variant,)*
            }

            #[allow(unused_doc_comments)]
            impl $Choice {
                /// The algorithm of each variant, in their order.
                pub(crate) const ALL: &[Algorithm] = &[$($(#[$what])* Algorithm::$Variant,)*];
            }

            /// Returns the plan of one rank for this collective.
            #[allow(unused_doc_comments)]
            pub(crate) fn $collective(
                algorithm: Algorithm,
                $input: &Input<'_>
                $(, $argument: $Type)*
            ) -> Plan {
                let plan = match algorithm {
                    $($(#[$what])* Algorithm::$Variant => $plan,)*
                    $($(Algorithm::$Hidden => $hidden_plan,)*)?
                    other => unreachable!(
                        "neither the table nor the parser chooses {}:{}",
                        stringify!($collective),
                        other.name()
                    ),
                };
                Plan { algorithm: Some(algorithm), wide: $input.rounding.is_wide(algorithm), ..plan }
            }
        )*

        /// The choice of algorithms: a table, which chooses by size, type and hosts, and overrides for
        /// measurements.
        ///
        /// ```
        /// use convoke_comm::algorithms::{Algorithms, AllReduce, Broadcast};
        ///
        /// let overrides = Algorithms::new().all_reduce(AllReduce::Ring).broadcast(Broadcast::Chain);
        /// assert_eq!("all_reduce:ring,broadcast:chain".parse(), Ok(overrides));
        /// ```
        ///
        /// A group logs a warning when it forms if its ranks cannot use an algorithm that was chosen; the
        /// group then uses another.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct Algorithms {
            $(pub(super) $collective: Option<Algorithm>,)*
        }

        /// The collectives that have several algorithms, with those that can override the table.
        const CHOICES: &[(&str, &[Algorithm])] = &[$((stringify!($collective), $Choice::ALL),)*];

        impl Algorithms {
            $(
                #[doc = concat!("Chooses the algorithm of `", stringify!($collective), "`.")]
                #[must_use]
                pub fn $collective(self, choice: $Choice) -> Self {
                    Self { $collective: Some($Choice::ALL[choice as usize]), ..self }
                }
            )*

            /// Returns whether the user has chosen the algorithm for collective calls of this kind.
            pub(crate) fn has_override(&self, kind: CallKind) -> bool {
                match kind {
                    $(CallKind::$Choice => self.$collective.is_some(),)*
                    _ => false,
                }
            }

            /// Returns the overrides, in the order of [`CHOICES`].
            fn overrides(&mut self) -> [&mut Option<Algorithm>; CHOICES.len()] {
                [$(&mut self.$collective,)*]
            }
        }
    };
}

collectives! {
    /// The algorithms of `all_reduce`.
    AllReduce all_reduce(input, count: usize) {
        /// `ring`: around a ring, in blocks.
        Ring => ring::all_reduce(input.rank, input.world(), count, input.chunk(input.world())),
        /// `direct`: every rank exchanges blocks with every other.
        Direct => direct::all_reduce(input.rank, input.world(), count, input.ordered_window()),
        /// `doubling`: recursive doubling, of whole buffers.
        Doubling => doubling::all_reduce(input.rank, input.world(), count),
        /// `hierarchy`: inside the hosts first, then between them.
        Hierarchy => hierarchy::all_reduce(input.rank, input.topology, count, input.rail_chunk()),
    }
    [chosen only by the table] {
        Flat => ordered::all_reduce(input.rank, input.world(), count),
    }

    /// The algorithms of `broadcast`.
    Broadcast broadcast(input, count: usize, root: usize) {
        /// `binomial`: a binomial tree.
        Binomial => tree::broadcast(tree::binomial(input.rank, input.topology, root), count),
        /// `chain`: a pipelined chain.
        Chain => tree::broadcast(chain::neighbours(input.rank, input.topology, root), count),
        /// `two_tree`: two binary trees, each for half of the data.
        #[cfg(test)]
        TwoTree => super::two_tree::broadcast(input.rank, input.world(), count, root),
    }

    /// The algorithms of `reduce`. In the end, buffers of ranks other than the root hold partial sums.
    Reduce reduce(input, count: usize, root: usize) {
        /// `binomial`: a binomial tree.
        Binomial => tree::reduce(tree::binomial(input.rank, input.topology, root), count),
        /// `chain`: a pipelined chain.
        Chain => tree::reduce(chain::neighbours(input.rank, input.topology, root), count),
    }
    [chosen only by the table] {
        Direct => direct::reduce(input.rank, input.world(), count, root, ordered::WINDOW),
        Linear => ordered::reduce(input.rank, input.world(), count, root, ordered::WINDOW),
    }

    /// The algorithms of `all_gather` and `all_gather_v`.
    AllGather all_gather(input, blocks: &Blocks) {
        /// `direct`: every rank exchanges blocks with every other.
        Direct => direct::all_gather(input.rank, blocks),
        /// `ring`: around a ring.
        Ring => ring::all_gather(input.rank, blocks, input.chunk(input.world())),
        /// `hierarchy`: inside the hosts first, then between them; on hosts with equally many ranks.
        Hierarchy => hierarchy::all_gather(input.rank, input.topology, blocks, input.rail_chunk()),
        /// `doubling`: recursive doubling; of 4, 8, 16, ... ranks.
        Doubling => doubling::all_gather(input.rank, blocks),
    }

    /// The algorithms of `reduce_scatter` and `reduce_scatter_v`. The direct exchange only reads the blocks
    /// of other ranks; with other algorithms these end as partial sums.
    ReduceScatter reduce_scatter(input, blocks: &Blocks) {
        /// `direct`: every rank exchanges blocks with every other.
        Direct => direct::reduce_scatter(input.rank, blocks, input.ordered_window()),
        /// `ring`: around a ring.
        Ring => ring::reduce_scatter(input.rank, blocks, input.chunk(input.world())),
        /// `hierarchy`: inside the hosts first, then between them; on hosts with equally many ranks.
        Hierarchy => hierarchy::reduce_scatter(input.rank, input.topology, blocks, input.rail_chunk()),
        /// `halving`: recursive halving; of 4, 8, 16, ... ranks.
        Halving => doubling::reduce_scatter(input.rank, blocks),
    }
}

/// A text that chooses no algorithms; the error of [`Algorithms::from_str`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseAlgorithmsError(String);

impl Algorithms {
    /// Returns the choice of the table for all collectives.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns every possible override, as the names of a collective and of an algorithm that it has.
    /// Joined with a colon, they are a text that [`Self::from_str`] reads.
    pub fn choices() -> impl Iterator<Item = (&'static str, &'static str)> {
        let names = |(collective, known): &'static (&str, &[Algorithm])| {
            known.iter().map(|algorithm| (*collective, algorithm.name()))
        };
        CHOICES.iter().flat_map(names)
    }
}

/// Formats everything that determines the choice, as one text that ranks compare.
impl fmt::Display for Algorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chosen = *self;
        write!(f, "table {TABLE_VERSION}")?;
        CHOICES.iter().zip(chosen.overrides()).try_for_each(|((collective, _), choice)| {
            write!(f, ", {collective}:{}", choice.map_or("table", Algorithm::name))
        })
    }
}

/// Reads choices such as `all_reduce:ring,broadcast:chain`; the empty text chooses nothing.
impl FromStr for Algorithms {
    type Err = ParseAlgorithmsError;

    fn from_str(text: &str) -> Result<Self, ParseAlgorithmsError> {
        let mut algorithms = Self::new();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let error = |what: String| Err(ParseAlgorithmsError(what));
            let Some((collective, name)) = entry.split_once(':') else {
                return error(format!("{entry:?} is not COLLECTIVE:ALGORITHM"));
            };
            let (collective, name) = (collective.trim(), name.trim());
            let Some(index) = CHOICES.iter().position(|(known, _)| *known == collective) else {
                let names = CHOICES.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
                return error(format!("{collective:?} has no choice of algorithms: {names} have"));
            };
            let (_, known) = CHOICES[index];
            let Some(algorithm) = known.iter().find(|known| known.name() == name) else {
                let names: Vec<_> = known.iter().map(|known| known.name()).collect();
                return error(format!("{collective} has no algorithm {name:?}: {}", names.join(", ")));
            };
            *algorithms.overrides()[index] = Some(*algorithm);
        }
        Ok(algorithms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::plan::{Rounding, Topology};

    #[test]
    fn overrides_are_read_and_shown() {
        let tuning = Algorithms::from_str(" all_reduce:ring, broadcast:chain").unwrap();
        assert_eq!(
            tuning.to_string(),
            "table 11, all_reduce:ring, broadcast:chain, reduce:table, all_gather:table, reduce_scatter:table"
        );
        assert_eq!(tuning.for_all_reduce(4, &Topology::one_host(2), Rounding::Stepwise), Algorithm::Ring);
        assert_eq!(tuning.for_broadcast(4), Algorithm::Chain);
        assert_eq!(Algorithms::from_str("").unwrap(), Algorithms::default());
    }

    #[test]
    fn override_errors_list_the_allowed_values() {
        for (text, message) in [
            ("ring", "\"ring\" is not COLLECTIVE:ALGORITHM"),
            ("barrier:ring", "all_reduce, broadcast, reduce, all_gather, reduce_scatter have"),
            ("all_reduce:fast", "ring, direct, doubling, hierarchy"),
            ("reduce:ring", "binomial, chain"),
        ] {
            let error = Algorithms::from_str(text).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn random_overrides_never_cause_a_panic() {
        let test = "random_overrides_never_cause_a_panic";
        let good = ["all_reduce:ring,broadcast:chain", " reduce : binomial ,, all_gather:direct", ""];
        let decode = |bytes: &[u8]| Algorithms::from_str(&String::from_utf8_lossy(bytes)).ok();
        let encode = |tuning: &Algorithms| {
            let shown = tuning.to_string();
            let chosen = shown.split(", ").skip(1).filter(|entry| !entry.ends_with(":table"));
            chosen.collect::<Vec<_>>().join(",").into_bytes()
        };
        convoke_testkit::fuzz(test, &good, 4000, decode, encode);
    }
}
