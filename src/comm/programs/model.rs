//! The memory of each rank before a collective, and the expected memory afterwards. Pure.

use std::ops::Range;

use crate::ReduceOp;

use super::random_program::{Collective, CollectiveKind};
use super::values::{Value, hash};

/// One rank's memory of one operation. The buffers of a list follow each other.
#[derive(Debug, Clone)]
pub(crate) struct Case<T> {
    pub(crate) send: Vec<T>,
    pub(crate) recv: Vec<T>,
    /// The expected values of `recv`, in the part that is specified.
    pub(crate) expected: Vec<T>,
    pub(crate) specified: Range<usize>,
    rounded: bool,
}

impl<T: Value> Case<T> {
    /// The case of an operation that is no reduction.
    pub(crate) fn new(send: Vec<T>, recv: Vec<T>, expected: Vec<T>) -> Self {
        let specified = 0..expected.len();
        Self { send, recv, expected, specified, rounded: false }
    }

    /// Checks the result of the operation: `send` unchanged, and `recv` as expected.
    pub(crate) fn check(&self, send: &[T], recv: &[T]) -> Result<(), String> {
        compare("what is sent has changed", send, &self.send, T::equals)?;
        let (got, expected) = (recv.get(self.specified.clone()), &self.expected[self.specified.clone()]);
        compare(
            "wrong",
            got.unwrap_or_default(),
            expected,
            if self.rounded { T::is_close } else { T::equals },
        )
    }
}

fn compare<T: Value>(what: &str, got: &[T], expected: &[T], same: fn(T, T) -> bool) -> Result<(), String> {
    if got.len() != expected.len() {
        return Err(format!("{what}: {} elements, not {}", got.len(), expected.len()));
    }
    let mut pairs = got.iter().zip(expected).enumerate();
    match pairs.find(|(_, (got, expected))| !same(**got, **expected)) {
        Some((index, (got, expected))) => Err(format!(
            "{what}: element {index} of {} is {got:?}, not {expected:?}",
            pairs.len() + index + 1
        )),
        None => Ok(()),
    }
}

/// Arbitrary values for memory that an operation fills.
pub(crate) fn arbitrary<T: Value>(len: usize) -> Vec<T> {
    (0..len).map(|index| T::rounded(hash(7, len, index))).collect()
}

/// The case of `call` for rank `me` of `size`.
pub(crate) fn case<T: Value>(call: &Collective, me: usize, size: usize) -> Case<T> {
    Model { call, me, size }.case()
}

struct Model<'a> {
    call: &'a Collective,
    me: usize,
    size: usize,
}

impl Model<'_> {
    /// The value of a rank at an index of its row.
    fn value<T: Value>(&self, rank: usize, index: usize) -> T {
        let random = hash(self.call.seed, rank, index);
        if self.call.rounded { T::rounded(random) } else { T::exact(random) }
    }

    fn row<T: Value>(&self, rank: usize, range: Range<usize>) -> Vec<T> {
        range.map(|index| self.value(rank, index)).collect()
    }

    /// The reduction over `ranks` at one index of their rows.
    fn sum<T: Value>(&self, ranks: Range<usize>, index: usize) -> T {
        let op = self.call.op;
        let count = ranks.len();
        let share = |rank: usize| {
            let value = self.value::<T>(rank, index);
            if op == ReduceOp::PremulSum { value.scaled(self.call.factor(rank)) } else { value }
        };
        let values = ranks.map(share);
        let sum = values.reduce(|a, b| T::reduce(op, a, b)).expect("at least one rank");
        if op == ReduceOp::Avg { sum.divided_by(count) } else { sum }
    }

    fn sums<T: Value>(&self, ranks: Range<usize>, range: Range<usize>) -> Vec<T> {
        range.map(|index| self.sum(ranks.clone(), index)).collect()
    }

    fn case<T: Value>(&self) -> Case<T> {
        let Self { call: Collective { kind, root, lens, .. }, me, size } = *self;
        let (len, everybody, is_root) = (lens.iter().sum::<usize>(), 0..size, me == *root);
        let at = |rank: usize| lens[..rank].iter().sum::<usize>();
        let mut case = match kind {
            CollectiveKind::Barrier => Case::new(vec![], vec![], vec![]),
            CollectiveKind::AllReduce | CollectiveKind::AllReduceList => {
                Case::new(vec![], self.row(me, 0..len), self.sums(everybody, 0..len))
            }
            CollectiveKind::AllReduceInto => {
                Case::new(self.row(me, 0..len), arbitrary(len), self.sums(everybody, 0..len))
            }
            CollectiveKind::Broadcast | CollectiveKind::BroadcastList => {
                Case::new(vec![], self.row(me, 0..len), self.row(*root, 0..len))
            }
            CollectiveKind::Reduce | CollectiveKind::ReduceList => {
                Case::new(vec![], self.row(me, 0..len), self.sums(everybody, 0..len))
            }
            CollectiveKind::ReduceInto => {
                let expected = if is_root { self.sums(everybody, 0..len) } else { arbitrary(len) };
                Case::new(self.row(me, 0..len), arbitrary(len), expected)
            }
            CollectiveKind::Scan => Case::new(vec![], self.row(me, 0..len), self.sums(0..me + 1, 0..len)),
            CollectiveKind::ExclusiveScan => {
                let expected = if me == 0 { self.row(me, 0..len) } else { self.sums(0..me, 0..len) };
                Case::new(vec![], self.row(me, 0..len), expected)
            }
            CollectiveKind::AllGather
            | CollectiveKind::AllGatherInPlace
            | CollectiveKind::AllGatherV
            | CollectiveKind::Gather
            | CollectiveKind::GatherV => {
                let lens: Vec<usize> = if lens.len() == 1 { vec![len; size] } else { lens.clone() };
                let expected = (0..size).flat_map(|rank| self.row(rank, 0..lens[rank])).collect::<Vec<T>>();
                let (before, mine) = (lens[..me].iter().sum::<usize>(), self.row(me, 0..lens[me]));
                let mut recv = arbitrary(expected.len());
                match kind {
                    CollectiveKind::AllGatherInPlace => {
                        recv[before..before + lens[me]].copy_from_slice(&mine);
                        Case::new(vec![], recv, expected)
                    }
                    CollectiveKind::Gather | CollectiveKind::GatherV if !is_root => {
                        Case::new(mine, vec![], vec![])
                    }
                    _ => Case::new(mine, recv, expected),
                }
            }
            CollectiveKind::AllGatherList => {
                let piece = |(index, &len): (usize, &usize)| -> Vec<T> {
                    let start = at(index);
                    (0..size).flat_map(|rank| self.row(rank, start..start + len)).collect()
                };
                let expected: Vec<T> = lens.iter().enumerate().flat_map(piece).collect();
                Case::new(self.row(me, 0..len), arbitrary(expected.len()), expected)
            }
            CollectiveKind::ReduceScatter
            | CollectiveKind::ReduceScatterInPlace
            | CollectiveKind::ReduceScatterV => {
                let lens: Vec<usize> = if lens.len() == 1 { vec![len; size] } else { lens.clone() };
                let (before, all) = (lens[..me].iter().sum::<usize>(), lens.iter().sum::<usize>());
                let own = before..before + lens[me];
                if *kind == CollectiveKind::ReduceScatterInPlace {
                    let expected = self.sums(everybody, 0..all);
                    Case { specified: own, ..Case::new(vec![], self.row(me, 0..all), expected) }
                } else {
                    Case::new(self.row(me, 0..all), arbitrary(own.len()), self.sums(everybody, own))
                }
            }
            CollectiveKind::ReduceScatterList => {
                let piece = |(index, &len): (usize, &usize)| -> Vec<T> {
                    let start = size * at(index) + me * len;
                    self.sums(0..size, start..start + len)
                };
                let expected: Vec<T> = lens.iter().enumerate().flat_map(piece).collect();
                Case::new(self.row(me, 0..size * len), arbitrary(len), expected)
            }
            CollectiveKind::Scatter | CollectiveKind::ScatterV => {
                let lens: Vec<usize> = if lens.len() == 1 { vec![len; size] } else { lens.clone() };
                let (before, all) = (lens[..me].iter().sum::<usize>(), lens.iter().sum::<usize>());
                let send = self.row(me, 0..if is_root { all } else { 0 });
                Case::new(send, arbitrary(lens[me]), self.row(*root, before..before + lens[me]))
            }
            CollectiveKind::AllToAll | CollectiveKind::AllToAllInPlace => {
                let from = |rank: usize| self.row(rank, me * len..(me + 1) * len);
                let expected: Vec<T> = (0..size).flat_map(from).collect();
                let mine = self.row(me, 0..size * len);
                match kind {
                    CollectiveKind::AllToAllInPlace => Case::new(vec![], mine, expected),
                    _ => Case::new(mine, arbitrary(expected.len()), expected),
                }
            }
            CollectiveKind::AllToAllV => {
                let from = |rank: usize| {
                    let row = &lens[rank * size..(rank + 1) * size];
                    let before = row[..me].iter().sum::<usize>();
                    self.row(rank, before..before + row[me])
                };
                let expected: Vec<T> = (0..size).flat_map(from).collect();
                let sent = lens[me * size..(me + 1) * size].iter().sum();
                Case::new(self.row(me, 0..sent), arbitrary(expected.len()), expected)
            }
        };
        if matches!(kind, CollectiveKind::Reduce | CollectiveKind::ReduceList) && !is_root {
            case.specified = 0..0;
        }
        case.rounded = self.call.rounded;
        case
    }
}
