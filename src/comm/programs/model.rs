//! The memory of each rank before a collective, and the expected memory afterwards. Pure.

use std::ops::Range;

use crate::ReduceOp;

use super::program::{Collective, Kind};
use super::values::{Value, hash};

/// One rank's memory of one operation. The buffers of a list follow each other.
#[derive(Debug, Clone)]
pub(crate) struct Case<T> {
    pub(crate) send: Vec<T>,
    pub(crate) recv: Vec<T>,
    /// The expected values of `recv`, in the part that is specified.
    pub(crate) want: Vec<T>,
    pub(crate) specified: Range<usize>,
    rounded: bool,
}

impl<T: Value> Case<T> {
    /// The case of an operation that is no reduction.
    pub(crate) fn of(send: Vec<T>, recv: Vec<T>, want: Vec<T>) -> Self {
        let specified = 0..want.len();
        Self { send, recv, want, specified, rounded: false }
    }

    /// Checks the result of the operation: `send` unchanged, and `recv` as expected.
    pub(crate) fn check(&self, send: &[T], recv: &[T]) -> Result<(), String> {
        compare("what is sent has changed", send, &self.send, T::is)?;
        let (got, want) = (recv.get(self.specified.clone()), &self.want[self.specified.clone()]);
        compare("wrong", got.unwrap_or_default(), want, if self.rounded { T::is_near } else { T::is })
    }
}

fn compare<T: Value>(what: &str, got: &[T], want: &[T], same: fn(T, T) -> bool) -> Result<(), String> {
    if got.len() != want.len() {
        return Err(format!("{what}: {} elements, not {}", got.len(), want.len()));
    }
    let mut pairs = got.iter().zip(want).enumerate();
    match pairs.find(|(_, (got, want))| !same(**got, **want)) {
        Some((index, (got, want))) => {
            Err(format!("{what}: element {index} of {} is {got:?}, not {want:?}", pairs.len() + index + 1))
        }
        None => Ok(()),
    }
}

/// Arbitrary values for memory that an operation fills.
pub(crate) fn junk<T: Value>(len: usize) -> Vec<T> {
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
            Kind::Barrier => Case::of(vec![], vec![], vec![]),
            Kind::AllReduce | Kind::AllReduceList => {
                Case::of(vec![], self.row(me, 0..len), self.sums(everybody, 0..len))
            }
            Kind::AllReduceInto => Case::of(self.row(me, 0..len), junk(len), self.sums(everybody, 0..len)),
            Kind::Broadcast | Kind::BroadcastList => {
                Case::of(vec![], self.row(me, 0..len), self.row(*root, 0..len))
            }
            Kind::Reduce | Kind::ReduceList => {
                Case::of(vec![], self.row(me, 0..len), self.sums(everybody, 0..len))
            }
            Kind::ReduceInto => {
                let want = if is_root { self.sums(everybody, 0..len) } else { junk(len) };
                Case::of(self.row(me, 0..len), junk(len), want)
            }
            Kind::Scan => Case::of(vec![], self.row(me, 0..len), self.sums(0..me + 1, 0..len)),
            Kind::ExclusiveScan => {
                let want = if me == 0 { self.row(me, 0..len) } else { self.sums(0..me, 0..len) };
                Case::of(vec![], self.row(me, 0..len), want)
            }
            Kind::AllGather | Kind::AllGatherInPlace | Kind::AllGatherV | Kind::Gather | Kind::GatherV => {
                let lens: Vec<usize> = if lens.len() == 1 { vec![len; size] } else { lens.clone() };
                let want = (0..size).flat_map(|rank| self.row(rank, 0..lens[rank])).collect::<Vec<T>>();
                let (before, mine) = (lens[..me].iter().sum::<usize>(), self.row(me, 0..lens[me]));
                let mut recv = junk(want.len());
                match kind {
                    Kind::AllGatherInPlace => {
                        recv[before..before + lens[me]].copy_from_slice(&mine);
                        Case::of(vec![], recv, want)
                    }
                    Kind::Gather | Kind::GatherV if !is_root => Case::of(mine, vec![], vec![]),
                    _ => Case::of(mine, recv, want),
                }
            }
            Kind::AllGatherList => {
                let piece = |(index, &len): (usize, &usize)| -> Vec<T> {
                    let start = at(index);
                    (0..size).flat_map(|rank| self.row(rank, start..start + len)).collect()
                };
                let want: Vec<T> = lens.iter().enumerate().flat_map(piece).collect();
                Case::of(self.row(me, 0..len), junk(want.len()), want)
            }
            Kind::ReduceScatter | Kind::ReduceScatterInPlace | Kind::ReduceScatterV => {
                let lens: Vec<usize> = if lens.len() == 1 { vec![len; size] } else { lens.clone() };
                let (before, all) = (lens[..me].iter().sum::<usize>(), lens.iter().sum::<usize>());
                let own = before..before + lens[me];
                if *kind == Kind::ReduceScatterInPlace {
                    let want = self.sums(everybody, 0..all);
                    Case { specified: own, ..Case::of(vec![], self.row(me, 0..all), want) }
                } else {
                    Case::of(self.row(me, 0..all), junk(own.len()), self.sums(everybody, own))
                }
            }
            Kind::ReduceScatterList => {
                let piece = |(index, &len): (usize, &usize)| -> Vec<T> {
                    let start = size * at(index) + me * len;
                    self.sums(0..size, start..start + len)
                };
                let want: Vec<T> = lens.iter().enumerate().flat_map(piece).collect();
                Case::of(self.row(me, 0..size * len), junk(len), want)
            }
            Kind::Scatter | Kind::ScatterV => {
                let lens: Vec<usize> = if lens.len() == 1 { vec![len; size] } else { lens.clone() };
                let (before, all) = (lens[..me].iter().sum::<usize>(), lens.iter().sum::<usize>());
                let send = self.row(me, 0..if is_root { all } else { 0 });
                Case::of(send, junk(lens[me]), self.row(*root, before..before + lens[me]))
            }
            Kind::AllToAll | Kind::AllToAllInPlace => {
                let from = |rank: usize| self.row(rank, me * len..(me + 1) * len);
                let want: Vec<T> = (0..size).flat_map(from).collect();
                let mine = self.row(me, 0..size * len);
                match kind {
                    Kind::AllToAllInPlace => Case::of(vec![], mine, want),
                    _ => Case::of(mine, junk(want.len()), want),
                }
            }
            Kind::AllToAllV => {
                let from = |rank: usize| {
                    let row = &lens[rank * size..(rank + 1) * size];
                    let before = row[..me].iter().sum::<usize>();
                    self.row(rank, before..before + row[me])
                };
                let want: Vec<T> = (0..size).flat_map(from).collect();
                let sent = lens[me * size..(me + 1) * size].iter().sum();
                Case::of(self.row(me, 0..sent), junk(want.len()), want)
            }
        };
        if matches!(kind, Kind::Reduce | Kind::ReduceList) && !is_root {
            case.specified = 0..0;
        }
        case.rounded = self.call.rounded;
        case
    }
}
