//! The measured collectives: their sizes, roots and bus bandwidth. Pure.

use std::fmt;
use std::ops::Range;

use clap::ValueEnum;
use convoke_comm::{Dtype, ReduceOp};

/// A collective, or `SendRecv`: a message and its reply between ranks 2k and 2k+1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Collective {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Scan,
    ExclusiveScan,
    Barrier,
    SendRecv,
    AllGatherV,
    ReduceScatterV,
    AllToAllV,
    GatherV,
    ScatterV,
}

impl Collective {
    /// Returns the collective whose choice of algorithms this one uses. Forms with unequal blocks use the
    /// choice of the equal form.
    pub(crate) const fn tuned_as(self) -> Self {
        match self {
            Self::AllGatherV => Self::AllGather,
            Self::ReduceScatterV => Self::ReduceScatter,
            _ => self,
        }
    }

    /// Ratio of bus bandwidth to algorithm bandwidth, as nccl-tests define it.
    pub(crate) fn bus_factor(self, ranks: usize) -> f64 {
        let share = (ranks as f64 - 1.0) / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * share,
            _ if self.has_blocks() => share,
            _ => 1.0,
        }
    }

    /// Returns the form with equal blocks of a collective with unequal ones; other collectives themselves.
    pub(crate) const fn equal_form(self) -> Self {
        match self {
            Self::AllGatherV => Self::AllGather,
            Self::ReduceScatterV => Self::ReduceScatter,
            Self::AllToAllV => Self::AllToAll,
            Self::GatherV => Self::Gather,
            Self::ScatterV => Self::Scatter,
            _ => self,
        }
    }

    /// Returns whether the measured size is the sum of the sizes of one block for each rank.
    pub(crate) const fn has_blocks(self) -> bool {
        use Collective::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self.equal_form(), AllGather | ReduceScatter | AllToAll | Gather | Scatter)
    }

    pub(crate) fn is_unequal(self) -> bool {
        self != self.equal_form()
    }

    pub(crate) const fn reduces(self) -> bool {
        use Collective::{AllReduce, ExclusiveScan, Reduce, ReduceScatter, Scan};
        matches!(self.equal_form(), AllReduce | Reduce | ReduceScatter | Scan | ExclusiveScan)
    }

    pub(crate) const fn accepts(self, op: ReduceOp, dtype: Dtype) -> bool {
        let is_scan = matches!(self, Self::Scan | Self::ExclusiveScan);
        op.accepts(dtype) && !(is_scan && matches!(op, ReduceOp::Avg))
    }

    pub(crate) const fn has_root(self) -> bool {
        matches!(self.equal_form(), Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    pub(crate) const fn min_ranks(self) -> usize {
        if matches!(self, Self::SendRecv) { 2 } else { 1 }
    }

    /// Number of ranks that take part. With an odd number of ranks, the last one has no peer in `send_recv`.
    pub(crate) const fn participants(self, ranks: usize) -> usize {
        if matches!(self, Self::SendRecv) { ranks - ranks % 2 } else { ranks }
    }

    /// Number of elements to measure for a requested size of `bytes`. Blocks are whole and average at least
    /// one element.
    pub(crate) fn count(self, bytes: usize, element_bytes: usize, ranks: usize) -> usize {
        match self {
            Self::Barrier => 0,
            _ if self.has_blocks() => (bytes / element_bytes / ranks).max(1).saturating_mul(ranks),
            _ => (bytes / element_bytes).max(1),
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().expect("no collective is skipped").get_name())
    }
}

/// The numbers of elements of one collective call on one rank. The rank sends from buffer `a`; the result
/// goes to `b`, or to `a`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) collective: Collective,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Number of elements of the whole vector, or of all ranks' blocks together.
    pub(crate) count: usize,
    /// Lengths of the blocks; their sum is `count`.
    lens: Vec<usize>,
}

impl Shape {
    pub(crate) fn new(collective: Collective, count: usize, rank: usize, ranks: usize) -> Self {
        // Blocks of unequal lengths grow with the rank; the last is almost twice the mean.
        let weight = |rank: usize| if collective.is_unequal() { rank + 1 } else { 1 };
        let total: u128 = (0..ranks).map(|rank| weight(rank) as u128).sum();
        let (mut weights, mut start) = (0, 0);
        let lens = (0..ranks).map(|rank| {
            weights += weight(rank) as u128;
            let end = (count as u128 * weights / total) as usize;
            end - std::mem::replace(&mut start, end)
        });
        Self { collective, rank, ranks, count, lens: lens.collect() }
    }

    /// Lengths of the blocks in a buffer of rank `rank`. All ranks have equal lengths, except in an unequal
    /// all-to-all: in that call each rank must send the length that its receiver expects.
    pub(crate) fn block_lens(&self, rank: usize) -> Vec<usize> {
        let mut lens = self.lens.clone();
        if self.collective == Collective::AllToAllV {
            lens.rotate_left(rank);
        }
        lens
    }

    /// Positions of the blocks in a buffer of rank `rank`.
    pub(crate) fn block_ranges(&self, rank: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let position = |len| {
            let end = start + len;
            std::mem::replace(&mut start, end)..end
        };
        self.block_lens(rank).into_iter().map(position).collect()
    }

    pub(crate) fn own_block_len(&self) -> usize {
        self.lens[self.rank]
    }

    pub(crate) fn buffer_lens(&self) -> (usize, usize) {
        match self.collective.equal_form() {
            Collective::Barrier => (0, 0),
            Collective::AllToAll | Collective::SendRecv => (self.count, self.count),
            Collective::AllGather | Collective::Gather => (self.own_block_len(), self.count),
            Collective::ReduceScatter | Collective::Scatter => (self.count, self.own_block_len()),
            // The others work in place.
            _ => (self.count, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_bandwidth_factors_match_nccl_tests() {
        assert_eq!(Collective::AllReduce.bus_factor(4), 1.5);
        for collective in [Collective::AllGather, Collective::ReduceScatterV, Collective::Scatter] {
            assert_eq!(collective.bus_factor(4), 0.75, "{collective}");
        }
        for collective in [Collective::Broadcast, Collective::Reduce, Collective::SendRecv, Collective::Scan]
        {
            assert_eq!(collective.bus_factor(4), 1.0, "{collective}");
        }
        assert_eq!(Collective::AllReduce.bus_factor(1), 0.0);
    }

    #[test]
    fn element_counts_are_whole_blocks_and_never_zero() {
        assert_eq!(Collective::AllReduce.count(4, 4, 3), 1);
        assert_eq!(Collective::AllReduce.count(4, 16, 3), 1);
        assert_eq!(Collective::AllGather.count(64, 4, 3), 15);
        assert_eq!(Collective::AllGather.count(4, 4, 3), 3);
        assert_eq!(Collective::Barrier.count(64, 4, 3), 0);
    }

    #[test]
    fn collectives_have_the_names_of_their_calls() {
        let names =
            [Collective::AllReduce, Collective::SendRecv, Collective::AllToAllV].map(|c| c.to_string());
        assert_eq!(names, ["all_reduce", "send_recv", "all_to_all_v"]);
    }

    #[test]
    fn blocks_fill_the_buffer_and_sent_equals_expected() {
        for (collective, count) in
            Collective::value_variants().iter().flat_map(|&c| [0, 1, 3, 15, 1000].map(|n| (c, n)))
        {
            let shapes: Vec<_> = (0..3).map(|rank| Shape::new(collective, count, rank, 3)).collect();
            for (rank, shape) in shapes.iter().enumerate() {
                assert_eq!(shape.block_ranges(rank).last().unwrap().end, count, "{collective} {count}");
                assert_eq!(shape.own_block_len(), shape.block_lens(0)[rank]);
            }
            let exchanged = |from: usize, to: usize| shapes[from].block_lens(from)[to];
            if matches!(collective, Collective::AllToAll | Collective::AllToAllV) && count % 3 == 0 {
                assert!((0..9).all(|i| exchanged(i / 3, i % 3) == shapes[i % 3].block_lens(i % 3)[i / 3]));
            }
        }
        let lens = Shape::new(Collective::AllGatherV, 600, 0, 3).block_lens(2);
        assert_eq!(lens, [100, 200, 300]);
    }
}
