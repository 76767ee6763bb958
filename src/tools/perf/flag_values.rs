//! Parsers for the values of the flags of `convoke-perf`. Pure.

use std::sync::LazyLock;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use convoke_comm::{Dtype, ReduceOp};

use super::collective::Collective;

/// A value of the positional argument: a collective, `all` or `pairs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Selection {
    All,
    Pairs,
    One(Collective),
}

static SELECTIONS: LazyLock<Vec<Selection>> = LazyLock::new(|| {
    let each = Collective::value_variants().iter().map(|&collective| Selection::One(collective));
    [Selection::All].into_iter().chain(each).chain([Selection::Pairs]).collect()
});

impl ValueEnum for Selection {
    fn value_variants<'a>() -> &'a [Self] {
        &SELECTIONS
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::All => Some(PossibleValue::new("all")),
            Self::Pairs => Some(PossibleValue::new("pairs")),
            Self::One(collective) => collective.to_possible_value(),
        }
    }
}

/// The memory that holds the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceKind {
    /// Memory of the host
    Cpu,
    /// Memory of each rank's GPU, through NCCL
    Cuda,
    /// Memory of each rank's GPU, through pinned memory of the host
    Staged,
}

/// The items in the comma-separated list of a flag, or `all` items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum List<T> {
    All(Vec<T>),
    Named(Vec<T>),
}

impl<T: Copy> List<T> {
    pub(super) fn items(&self) -> &[T] {
        match self {
            Self::All(items) | Self::Named(items) => items,
        }
    }
}

fn list<T: Copy + ToString>(text: &str, known: &[T], other_names: &[(&str, T)]) -> Result<List<T>, String> {
    if text == "all" {
        return Ok(List::All(known.to_vec()));
    }
    let one = |name: &str| {
        let known_by = |item: &&T| item.to_string() == name;
        let other = || other_names.iter().find(|(other, _)| *other == name).map(|(_, item)| item);
        known.iter().find(known_by).or_else(other).copied().ok_or_else(|| {
            let names: Vec<_> = known.iter().map(ToString::to_string).collect();
            format!("{name:?} is unknown: choose {}, or all", names.join(", "))
        })
    };
    text.split(',').map(|name| one(name.trim())).collect::<Result<_, _>>().map(List::Named)
}

pub(super) fn dtypes(text: &str) -> Result<List<Dtype>, String> {
    list(text, &Dtype::ALL, &[])
}

pub(super) fn ops(text: &str) -> Result<List<ReduceOp>, String> {
    let known: Vec<_> = ReduceOp::ALL.into_iter().filter(|op| *op != ReduceOp::Custom).collect();
    list(text, &known, &[("prod", ReduceOp::Product)])
}

pub(super) fn at_least<const LEAST: usize>(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|&number| number >= LEAST);
    number.ok_or_else(|| format!("it must be a whole number of at least {LEAST}"))
}

pub(super) fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "it must be a number above 0".to_owned())
}

pub(super) fn zero_or_one(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("0 or 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_and_operation_has_its_name() {
        for dtype in Dtype::ALL {
            assert_eq!(dtypes(&dtype.to_string()), Ok(List::Named(vec![dtype])));
        }
        assert_eq!(ops("sum, prod"), Ok(List::Named(vec![ReduceOp::Sum, ReduceOp::Product])));
        assert_eq!(ops("all").unwrap().items().len(), ReduceOp::ALL.len() - 1);
        assert!(ops("custom").is_err(), "nobody could say which function");
    }

    #[test]
    fn numeric_flags_are_within_their_bounds() {
        assert_eq!((at_least::<2>("2"), at_least::<2>("1").is_err()), (Ok(2), true));
        assert_eq!(
            ["0.5", "0", "-1", "NaN", "inf", "x"].map(|text| positive(text).is_ok()),
            [true, false, false, false, false, false]
        );
        assert_eq!(
            (zero_or_one("0"), zero_or_one("1"), zero_or_one("yes").is_err()),
            (Ok(false), Ok(true), true)
        );
    }
}
