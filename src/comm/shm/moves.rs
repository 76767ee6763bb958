//! Copies and sums between a rank's own memory and what the ranks of its host share.

use std::ops::Range;

use super::allocations::Direct;
use super::program::CACHED_BYTES;
use super::segment::View;
use super::{Node, put};
use crate::engine::buffer::{BytesMut, Lent};
use crate::engine::row::Row;
use crate::kernels::{Kernel, Ranks};

/// The elements that a call works on, possibly in several pieces, and the kernel that adds them.
pub(super) trait Elements {
    /// The bytes at the beginning of `range` that are contiguous.
    fn bytes(&self, range: Range<usize>) -> &[u8];
    /// The contiguous bytes at the beginning of `range`, writable, and the kernel that adds them.
    fn summands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>);
}

/// Elements that are added as they are.
pub(super) struct Plain<'a, 'm> {
    pub(super) lent: &'a mut Lent<'m>,
    pub(super) kernel: Option<&'a Kernel>,
}

impl Elements for Plain<'_, '_> {
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.lent.bytes(range)
    }

    fn summands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        (self.lent.bytes_mut(range), self.kernel)
    }
}

impl Elements for Row<'_> {
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.bytes(range)
    }

    fn summands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        self.summands(range)
    }
}

/// A place in shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    pub(super) rank: usize,
    pub(super) at: usize,
    pub(super) of: Of,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Of {
    /// The slot of a call; `inline` if the data is in the line of the stamp.
    Slot { number: u32, inline: bool },
    /// Bytes after the first round of all calls.
    Round(u64),
}

impl Spot {
    fn view(self, node: &Node, bytes: usize) -> View<'_> {
        match self.of {
            Of::Slot { number, inline } => node.in_slot(self.rank, number, inline, self.at, bytes),
            Of::Round(position) => node.in_round(self.rank, position, self.at, bytes),
        }
    }

    fn of(self, rank: usize, further: usize) -> Self {
        Self { rank, at: self.at + further, of: self.of }
    }
}

/// Copies `row` of `elements` to `spot`. Returns the number of bytes.
#[inline]
pub(super) fn give(node: &Node, elements: &impl Elements, mut row: Range<usize>, spot: Spot) -> usize {
    let start = row.start;
    while !row.is_empty() {
        let bytes = elements.bytes(row.clone());
        if bytes.is_empty() {
            break;
        }
        spot.of(spot.rank, row.start - start).view(node, bytes.len()).put_at(&node.to_all, bytes);
        row.start += bytes.len();
    }
    row.start - start
}

/// Copies from `spot` to `row` of `elements`. Returns the number of bytes.
#[inline]
pub(super) fn take(node: &Node, elements: &mut impl Elements, mut row: Range<usize>, spot: Spot) -> usize {
    let start = row.start;
    while !row.is_empty() {
        let (mut into, _) = elements.summands(row.clone());
        let bytes = into.len();
        if bytes == 0 {
            break;
        }
        spot.of(spot.rank, row.start - start).view(node, bytes).take(&mut into);
        row.start += bytes;
    }
    row.start - start
}

/// Adds up the shares of all ranks: the others' at `spot` in the memory of each, this one's in `row` of
/// `elements`. Returns the bytes of each share. The sums are left in `row`; if it `tells`, also at `spot` in
/// its own memory.
///
/// # Errors
///
/// The error of the program's reduction function.
pub(super) fn add_up(
    node: &mut Node,
    elements: &mut impl Elements,
    mut row: Range<usize>,
    spot: Spot,
    tells: bool,
) -> Result<usize, String> {
    let start = row.start;
    let mut scratch = std::mem::take(&mut node.scratch);
    let (host, mut result, mut past_caches) = (&*node, Ok(()), false);
    let ranks = Ranks { count: host.ranks.len(), me: host.me };
    while !row.is_empty() && result.is_ok() {
        let (mut own, Some(kernel)) = elements.summands(row.clone()) else { break };
        let bytes = own.len();
        if bytes == 0 {
            break;
        }
        let place = |rank: usize, at: usize| spot.of(rank, row.start - start + at);
        let share = |rank: usize, at: usize, len: usize| place(rank, at).view(host, len).source();
        let tell = |at: usize, sums: &[u8]| {
            if tells {
                past_caches |= place(host.me, at).view(host, sums.len()).put_part_at(&host.to_all, sums);
            }
        };
        result = kernel.add_up(ranks, &mut own, &mut scratch, share, tell);
        row.start += bytes;
    }
    if past_caches {
        put::arrive();
    }
    node.scratch = scratch;
    result.map(|()| row.start - start)
}

/// Adds up the shares of all ranks in place and leaves the sums there. Returns the bytes of each share.
///
/// # Errors
///
/// The error of the program's reduction function.
pub(super) fn add_up_direct(
    node: &mut Node,
    elements: &mut impl Elements,
    row: Range<usize>,
    direct: &Direct,
) -> Result<usize, String> {
    let ranks = Ranks { count: node.ranks.len(), me: node.me };
    let (paces, mut past_caches) = (&node.to_each, false);
    let (mut own, Some(kernel)) = elements.summands(row.clone()) else { return Ok(0) };
    debug_assert_eq!(own.len(), row.len());
    let share = |rank: usize, at: usize, len: usize| direct.view(rank, row.start + at, len).source();
    let tell = |at: usize, sums: &[u8]| {
        for rank in (0..ranks.count).filter(|&rank| rank != ranks.me) {
            let into = direct.view(rank, row.start + at, sums.len());
            if direct.bytes() <= CACHED_BYTES {
                past_caches |= into.put_part_at(&paces[rank], sums);
            } else {
                into.put_far(sums);
            }
        }
    };
    let result = kernel.add_up(ranks, &mut own, &mut node.scratch, share, tell);
    if past_caches {
        put::arrive();
    }
    result.map(|()| row.len())
}
