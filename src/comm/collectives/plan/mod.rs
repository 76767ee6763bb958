//! Plans: which rank sends what to whom, in which order. Pure arithmetic, no socket and no clock.
//!
//! A [`Plan`] is what one rank does in one collective: a graph of [`Stream`]s. A stream moves the elements of
//! parts of the buffer, in order, to or from one peer rank. Its dependency limits by how many elements it may
//! be ahead of another stream of the same rank. Dependencies are the only synchronisation, so all streams are
//! pipelined at the granularity of received bytes.
//!
//! Streams of one rank to (or from) one peer follow each other in the order of the plan. Both ends agree on
//! this order, so the bytes need no further framing. All inputs of a plan except the rank must be equal on
//! all ranks. Otherwise the ranks would choose different plans and wait for each other.
//!
//! The tests of each algorithm run all ranks' plans against each other symbolically ([`check`]).

pub(crate) mod algorithms;
mod blocks;
mod chain;
#[cfg(test)]
pub(crate) mod check;
mod direct;
mod dissemination;
mod doubling;
mod hierarchy;
mod linear;
mod ordered;
mod ring;
mod topology;
mod tree;
mod tuning;
#[cfg(test)]
mod two_tree;

use std::ops::Range;

use crate::collectives::call::Call;
use crate::collectives::dtype::ReduceOp;
use crate::collectives::kernels::OrderedReduceStep;
pub(crate) use algorithms::{
    Algorithm, Algorithms, all_gather, all_reduce, broadcast, reduce, reduce_scatter,
};
pub(crate) use blocks::{Blocks, fingerprint};
pub(crate) use chain::{exclusive_scan, scan};
pub(crate) use direct::all_to_all;
pub(crate) use dissemination::{MOST_BARRIER_ELEMENTS, barrier, barrier_elements};
pub(crate) use linear::{gather, scatter};
pub(crate) use topology::Topology;

/// The size of a wide element (`f32`) divided by that of the half-precision element to which it is rounded.
const WIDE_FACTOR: usize = 2;

/// Bytes of a block in ring and hierarchical algorithms, which process a chunk of one block of each rank at a
/// time.
///
/// A block is small enough to be in the cache still when it is forwarded. It is large enough that sending the
/// first block of each chunk, which waits for no data, covers the round trip of a fast network.
const BLOCK_BYTES: usize = 128 << 10;

/// What one rank sends and receives in one collective.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plan {
    /// The algorithm, if the collective has several; for the flight recorder.
    pub(crate) algorithm: Option<Algorithm>,
    /// The streams, in an order that both ends of each pair agree on.
    pub(crate) streams: Vec<Stream>,
    /// If set, contributions and partial sums are sent, and kept in the buffer, as wide elements (`f32`).
    pub(crate) wide: bool,
    /// Maximum number of elements whose sums are incomplete at a time in an ordered reduction.
    pub(crate) window: usize,
}

/// An ordered sequence of elements that a rank sends to one peer or receives from one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stream {
    pub(crate) peer: usize,
    pub(crate) direction: Direction,
    /// Parts of the buffer, in the order in which they are sent or received.
    pub(crate) parts: Vec<BufferPart>,
    pub(crate) dependency: Option<Dependency>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Send,
    Recv,
}

/// A part of the buffer, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BufferPart {
    pub(crate) range: Range<usize>,
    /// What is done with received elements; [`Apply::Copy`] in streams that send.
    pub(crate) apply: Apply,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Apply {
    /// The received elements replace the elements in the buffer.
    Copy,
    /// The received elements are reduced into the elements in the buffer.
    Reduce,
    /// The received elements are reduced as by `Reduce`, and no more are to come for these elements. So an
    /// average is divided by the number of ranks now.
    ReduceLast,
    /// The received elements are added to sums outside the buffer. The buffer keeps this rank's own
    /// contribution until the result replaces it.
    ReduceOrdered(OrderedReduceStep),
}

/// The time at which a reduction rounds to the precision of its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// Rounds after each addition, or never for integers: the elements are added in their own type.
    Stepwise,
    /// Rounds once, when all contributions are added, as wide elements (`f32`).
    Once {
        /// The ranks multiply their contributions by a factor before they add them, so even the contributions
        /// are wide elements.
        wide_inputs: bool,
    },
}

impl Rounding {
    /// Returns when the results of a call are rounded: once at the end for 16-bit floating-point sums and
    /// products, else stepwise.
    pub(crate) fn of(call: &Call) -> Self {
        match call.op {
            Some(op) if op.accumulates_in_f32(call.dtype) => {
                Self::Once { wide_inputs: op == ReduceOp::PremulSum }
            }
            Some(_) | None => Self::Stepwise,
        }
    }

    /// Returns whether `algorithm` sends contributions and partial sums as wide elements.
    fn is_wide(self, algorithm: Algorithm) -> bool {
        match self {
            Self::Stepwise => false,
            Self::Once { wide_inputs } => wide_inputs || !algorithm.sends_single_contributions(),
        }
    }
}

/// The inputs of a plan besides the number of elements and the root. Except for `rank`, they are equal on all
/// ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) rank: usize,
    pub(crate) topology: &'a Topology,
    /// [`Rounding::Stepwise`] if the collective does not reduce.
    pub(crate) rounding: Rounding,
    pub(crate) element_bytes: usize,
}

impl Input<'_> {
    fn world(&self) -> usize {
        self.topology.world()
    }

    /// Returns the elements of a chunk, which an algorithm that sends partial sums or blocks processes at a
    /// time: [`BLOCK_BYTES`] for each of `owners` ranks that own a part.
    fn chunk(&self, owners: usize) -> usize {
        let wide = if self.rounding == Rounding::Stepwise { 1 } else { WIDE_FACTOR };
        owners * BLOCK_BYTES / (wide * self.element_bytes)
    }

    /// Returns the elements of a chunk of which the rails of each host own parts.
    fn rail_chunk(&self) -> usize {
        self.chunk(self.topology.hosts().len() * self.topology.rails())
    }

    /// Returns the window in elements if the reduction is ordered: the adding rank receives every single
    /// contribution and rounds once.
    fn ordered_window(&self) -> Option<usize> {
        (self.rounding != Rounding::Stepwise).then_some(ordered::WINDOW)
    }
}

/// Limits a stream: it may have moved at most `lead` elements more than the stream `stream`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dependency {
    /// Index, in the same plan, of the stream that limits this one.
    pub(crate) stream: usize,
    /// The number of elements by which the limited stream may be ahead. It is negative if its first element
    /// needs one that the other stream does not move first.
    pub(crate) lead: isize,
}

impl Stream {
    fn send(peer: usize, ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let parts = ranges.into_iter().map(|range| BufferPart { range, apply: Apply::Copy }).collect();
        Self { peer, direction: Direction::Send, parts, dependency: None }
    }

    fn recv(peer: usize, parts: impl IntoIterator<Item = (Range<usize>, Apply)>) -> Self {
        let parts = parts.into_iter().map(|(range, apply)| BufferPart { range, apply }).collect();
        Self { peer, direction: Direction::Recv, parts, dependency: None }
    }

    fn after(mut self, stream: Option<usize>, lead: isize) -> Self {
        self.dependency = stream.map(|stream| Dependency { stream, lead });
        self
    }

    /// Returns the number of elements that the stream moves.
    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.range.len()).sum()
    }
}

impl Plan {
    /// Adds `stream` and returns its index.
    fn push(&mut self, stream: Stream) -> usize {
        self.streams.push(stream);
        self.streams.len() - 1
    }
}

/// Returns the elements of block `index` if `count` elements are cut in `blocks` nearly equal parts.
pub(crate) fn block(index: usize, blocks: usize, count: usize) -> Range<usize> {
    let (size, longer) = (count / blocks, count % blocks);
    let start = index * size + index.min(longer);
    start..start + size + usize::from(index < longer)
}

/// Returns `inner`, which counts from the beginning of `outer`, as a range of the buffer.
fn subrange(outer: &Range<usize>, inner: &Range<usize>) -> Range<usize> {
    outer.start + inner.start..outer.start + inner.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_everything_once_and_differ_by_at_most_one() {
        for blocks in 1..20 {
            for count in 0..50 {
                let parts: Vec<_> = (0..blocks).map(|i| block(i, blocks, count)).collect();
                assert_eq!(
                    parts.iter().flat_map(Clone::clone).collect::<Vec<_>>(),
                    (0..count).collect::<Vec<_>>()
                );
                let sizes = parts.iter().map(ExactSizeIterator::len);
                assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
        }
    }
}
