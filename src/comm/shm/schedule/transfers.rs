//! The copies between a rank's buffer and the areas of ranks in shared memory. Pure.

use std::ops::Range;

/// The bytes `range` of this rank's buffer, at offset `at` of the area of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// The rank whose area it is, or the rank for which this rank publishes the bytes in its own area.
    pub(crate) rank: usize,
    pub(crate) at: usize,
    pub(crate) range: Range<usize>,
}

/// Transfers of equal length with one rank, or with several in turn. The one with rank r has the `len` bytes from
/// `start` + r * `step` on, at offset `at` + r * `at_step` of an area.
///
/// It is an iterator of numbers, and no list, because a short call takes a tenth longer with a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transfers {
    pub(super) next: usize,
    pub(super) left: usize,
    /// The rank after the last one is rank 0.
    pub(super) ranks: usize,
    pub(super) at: usize,
    pub(super) at_step: usize,
    pub(super) start: usize,
    pub(super) step: usize,
    pub(super) len: usize,
}

/// The data that a rank takes from the areas of other ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Results {
    Fetched(Transfers),
    /// The contributions of all ranks, at one offset of each area, are reduced into one range. There may be no bytes.
    Reduced(Transfer),
}

impl Transfers {
    pub(super) const NONE: Self =
        Self { next: 0, left: 0, ranks: 0, at: 0, at_step: 0, start: 0, step: 0, len: 0 };

    /// Returns the transfer of the `len` bytes from `start` on, if there are any.
    #[inline(always)]
    pub(super) fn one(rank: usize, at: usize, start: usize, len: usize) -> Self {
        let left = usize::from(len > 0);
        Self { next: rank, left, ranks: 0, at, at_step: 0, start, step: 0, len }
    }
}

impl Iterator for Transfers {
    type Item = Transfer;

    #[inline(always)]
    fn next(&mut self) -> Option<Transfer> {
        self.left = self.left.checked_sub(1)?;
        let rank = self.next;
        self.next = if rank + 1 == self.ranks { 0 } else { rank + 1 };
        let start = self.start + rank * self.step;
        Some(Transfer { rank, at: self.at + rank * self.at_step, range: start..start + self.len })
    }
}
