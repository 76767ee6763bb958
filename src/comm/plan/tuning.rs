//! Which algorithm when: one table, and the overrides of people who measure.
//!
//! Every rank must decide alike, so only what all ranks know decides: size, number of ranks, and the
//! overrides, whose text is compared when the ranks meet.

use std::fmt;

use super::{Rounding, WIDER};

/// Version of the table below: ranks with different tables refuse each other.
pub(crate) const TABLE_VERSION: u32 = 3;

/// Largest all-reduce by recursive doubling, in bytes: two ranks, more, and where folding is needed.
const DOUBLING_PAIR_BYTES: usize = 128 << 10;
const DOUBLING_BYTES: usize = 8 << 10;
/// Largest all-reduce by direct exchange, in bytes, and most ranks for it.
const DIRECT_BYTES: usize = 256 << 10;
const DIRECT_RANKS: usize = 8;
/// Most ranks among which every share of what is rounded once goes to who adds it: those that are all connected from
/// the start. Beyond, fewer connections are worth more than bytes, and partial sums travel as wide elements.
const FOLD_RANKS: usize = 16;
/// Largest broadcast and reduce by the binomial tree, in bytes.
const BINOMIAL_BYTES: usize = 64 << 10;

/// A communication pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Ring,
    Direct,
    Doubling,
    Binomial,
    Chain,
    Flat,
    Star,
}

impl Algorithm {
    const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Direct => "direct",
            Self::Doubling => "doubling",
            Self::Binomial => "binomial",
            Self::Chain => "chain",
            Self::Flat => "flat",
            Self::Star => "star",
        }
    }
}

const ALL_REDUCE: [Algorithm; 3] = [Algorithm::Ring, Algorithm::Direct, Algorithm::Doubling];
const BROADCAST: [Algorithm; 2] = [Algorithm::Binomial, Algorithm::Chain];
const BLOCKS: [Algorithm; 2] = [Algorithm::Direct, Algorithm::Ring];

/// The choice of algorithms: the table, and what overrides it.
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
                "all_gather" => (&mut tuning.all_gather, &BLOCKS),
                "reduce_scatter" => (&mut tuning.reduce_scatter, &BLOCKS),
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

    /// Algorithm of an all-reduce of `bytes` over `world` ranks.
    pub(crate) fn all_reduce(&self, bytes: usize, world: usize, rounding: Rounding) -> Algorithm {
        let doubling = if world == 2 { DOUBLING_PAIR_BYTES } else { DOUBLING_BYTES };
        let bytes = travelling(bytes, world, rounding);
        self.all_reduce.unwrap_or(match bytes {
            _ if folds(world, rounding) => {
                if bytes <= doubling {
                    Algorithm::Flat
                } else {
                    Algorithm::Direct
                }
            }
            _ if bytes <= doubling => Algorithm::Doubling,
            _ if bytes <= DIRECT_BYTES && world <= DIRECT_RANKS => Algorithm::Direct,
            _ => Algorithm::Ring,
        })
    }

    /// Algorithm of a broadcast of `bytes`.
    pub(crate) fn broadcast(&self, bytes: usize) -> Algorithm {
        self.broadcast.unwrap_or(Self::rooted(bytes))
    }

    /// Algorithm of a reduce of `bytes` over `world` ranks.
    pub(crate) fn reduce(&self, bytes: usize, world: usize, rounding: Rounding) -> Algorithm {
        let bytes = travelling(bytes, world, rounding);
        self.reduce.unwrap_or(match bytes {
            _ if folds(world, rounding) => {
                if bytes <= BINOMIAL_BYTES {
                    Algorithm::Star
                } else {
                    Algorithm::Direct
                }
            }
            _ => Self::rooted(bytes),
        })
    }

    /// Algorithm of an all-gather of blocks of `bytes` of `world` ranks.
    pub(crate) fn all_gather(&self, bytes: usize, world: usize) -> Algorithm {
        self.all_gather.unwrap_or(Self::of_blocks(bytes, world))
    }

    /// Algorithm of a reduce-scatter of blocks of `bytes` of `world` ranks.
    pub(crate) fn reduce_scatter(&self, bytes: usize, world: usize, rounding: Rounding) -> Algorithm {
        self.reduce_scatter.unwrap_or(match rounding {
            _ if folds(world, rounding) => Algorithm::Direct,
            _ => Self::of_blocks(travelling(bytes, world, rounding), world),
        })
    }

    fn rooted(bytes: usize) -> Algorithm {
        if bytes <= BINOMIAL_BYTES { Algorithm::Binomial } else { Algorithm::Chain }
    }

    fn of_blocks(bytes: usize, world: usize) -> Algorithm {
        // Two ranks have nobody to pass on to: one exchange is the whole ring.
        let all = bytes.saturating_mul(world);
        if world == 2 || all <= DIRECT_BYTES && world <= DIRECT_RANKS {
            Algorithm::Direct
        } else {
            Algorithm::Ring
        }
    }
}

/// Whether all shares go to who adds them.
fn folds(world: usize, rounding: Rounding) -> bool {
    rounding != Rounding::Stepwise && world <= FOLD_RANKS
}

/// Bytes that `bytes` of elements are on their way.
fn travelling(bytes: usize, world: usize, rounding: Rounding) -> usize {
    let wide = match rounding {
        Rounding::Stepwise => false,
        Rounding::Once { wide_shares } => wide_shares || !folds(world, rounding),
    };
    if wide { bytes.saturating_mul(WIDER) } else { bytes }
}

/// Everything that decides, as one comparable text.
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
            "table 3, all_reduce:ring, broadcast:chain, reduce:table, all_gather:table, reduce_scatter:table"
        );
        assert_eq!(tuning.all_reduce(4, 2, Rounding::Stepwise), Algorithm::Ring);
        assert_eq!(tuning.broadcast(4), Algorithm::Chain);
        assert_eq!(Tuning::parse("").unwrap(), Tuning::default());
    }

    #[test]
    fn wrong_overrides_say_what_is_allowed() {
        for (text, message) in [
            ("ring", "\"ring\" is not COLLECTIVE:ALGORITHM"),
            ("barrier:ring", "all_reduce, broadcast, reduce, all_gather, reduce_scatter have"),
            ("all_reduce:fast", "ring, direct, doubling"),
            ("broadcast:ring", "binomial, chain"),
        ] {
            let error = Tuning::parse(text).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn the_table_goes_from_few_rounds_to_few_bytes() {
        let tuning = Tuning::default();
        let all_reduce = |bytes, world| tuning.all_reduce(bytes, world, Rounding::Stepwise);
        assert_eq!(all_reduce(4, 4), Algorithm::Doubling);
        assert_eq!(all_reduce(64 << 10, 4), Algorithm::Direct);
        assert_eq!(all_reduce(64 << 10, 9), Algorithm::Ring);
        assert_eq!(all_reduce(64 << 20, 4), Algorithm::Ring);
        assert_eq!(tuning.broadcast(1 << 20), Algorithm::Chain);
    }

    #[test]
    fn what_is_rounded_once_is_added_in_one_place_up_to_16_ranks() {
        let tuning = Tuning::default();
        let once = Rounding::Once { wide_shares: false };
        let all_reduce = |bytes, world| tuning.all_reduce(bytes, world, once);
        assert_eq!(all_reduce(8 << 10, 16), Algorithm::Flat);
        assert_eq!(all_reduce(64 << 20, 16), Algorithm::Direct);
        assert_eq!(all_reduce(4 << 10, 17), Algorithm::Doubling, "as many bytes, twice as long");
        assert_eq!(all_reduce(64 << 20, 17), Algorithm::Ring);
        assert_eq!(tuning.reduce(4, 16, once), Algorithm::Star);
        assert_eq!(tuning.reduce(1 << 20, 16, once), Algorithm::Direct);
        assert_eq!(tuning.reduce(1 << 20, 17, once), Algorithm::Chain);
        assert_eq!(tuning.reduce_scatter(1 << 20, 16, once), Algorithm::Direct);
        assert_eq!(tuning.reduce_scatter(1 << 20, 17, once), Algorithm::Ring);
        assert_eq!(tuning.reduce_scatter(1 << 20, 16, Rounding::Stepwise), Algorithm::Ring);
    }
}
