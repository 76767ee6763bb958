//! Copies and sums between a rank's own memory and what the ranks of its host share.

use std::ops::Range;

use super::allocations::Direct;
use super::schedule::CACHED_BYTES;
use super::segment::View;
use super::{HostMemory, write};
use crate::buffer::{BorrowedBuffer, BytesMut, PlanBuffer};
use crate::kernels::{Contributors, Kernel};

/// The elements that a call works on, possibly in several pieces, and the kernel that adds them.
pub(super) trait Elements {
    /// The bytes at the beginning of `range` that are contiguous.
    fn bytes(&self, range: Range<usize>) -> &[u8];
    /// The contiguous bytes at the beginning of `range`, writable, and the kernel that adds them.
    fn operands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>);
}

/// Elements that are added as they are.
pub(super) struct PlainElements<'a, 'm> {
    pub(super) buffer: &'a mut BorrowedBuffer<'m>,
    pub(super) kernel: Option<&'a Kernel>,
}

impl Elements for PlainElements<'_, '_> {
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.buffer.bytes(range)
    }

    fn operands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        (self.buffer.bytes_mut(range), self.kernel)
    }
}

impl Elements for PlanBuffer<'_> {
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.bytes(range)
    }

    fn operands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        self.operands(range)
    }
}

/// A location in shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Location {
    pub(super) rank: usize,
    pub(super) at: usize,
    pub(super) area: AreaAddress,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum AreaAddress {
    /// The slot of a call; `inline` if the data is in the line of the stamp.
    Slot { number: u32, inline: bool },
    /// Bytes after the first round of all calls.
    Round(u64),
}

impl Location {
    fn view(self, memory: &HostMemory, bytes: usize) -> View<'_> {
        match self.area {
            AreaAddress::Slot { number, inline } => {
                memory.slot_view(self.rank, number, inline, self.at, bytes)
            }
            AreaAddress::Round(position) => memory.round_view(self.rank, position, self.at, bytes),
        }
    }

    fn at_rank(self, rank: usize, further: usize) -> Self {
        Self { rank, at: self.at + further, area: self.area }
    }
}

/// Copies `range` of `elements` to `location`. Returns the number of bytes.
#[inline]
pub(super) fn publish(
    memory: &HostMemory,
    elements: &impl Elements,
    mut range: Range<usize>,
    location: Location,
) -> usize {
    let start = range.start;
    while !range.is_empty() {
        let bytes = elements.bytes(range.clone());
        if bytes.is_empty() {
            break;
        }
        location
            .at_rank(location.rank, range.start - start)
            .view(memory, bytes.len())
            .write_with(&memory.policy_for_all, bytes);
        range.start += bytes.len();
    }
    range.start - start
}

/// Copies from `location` to `range` of `elements`. Returns the number of bytes.
#[inline]
pub(super) fn fetch(
    memory: &HostMemory,
    elements: &mut impl Elements,
    mut range: Range<usize>,
    location: Location,
) -> usize {
    let start = range.start;
    while !range.is_empty() {
        let (mut into, _) = elements.operands(range.clone());
        let bytes = into.len();
        if bytes == 0 {
            break;
        }
        location.at_rank(location.rank, range.start - start).view(memory, bytes).read(&mut into);
        range.start += bytes;
    }
    range.start - start
}

/// Adds up the contributions of all ranks: the others' at `location` in the memory of each, this one's in
/// `range` of `elements`. Returns the bytes of each contribution. The sums are left in `range`; if it
/// `publishes` them, also at `location` in its own memory.
///
/// # Errors
///
/// The error of the program's reduction function.
pub(super) fn reduce(
    memory: &mut HostMemory,
    elements: &mut impl Elements,
    mut range: Range<usize>,
    location: Location,
    publishes: bool,
) -> Result<usize, String> {
    let start = range.start;
    let mut scratch = std::mem::take(&mut memory.scratch);
    let (host, mut result, mut non_temporal) = (&*memory, Ok(()), false);
    let ranks = Contributors { count: host.ranks.len(), me: host.me };
    while !range.is_empty() && result.is_ok() {
        let (mut own, Some(kernel)) = elements.operands(range.clone()) else { break };
        let bytes = own.len();
        if bytes == 0 {
            break;
        }
        let location_at = |rank: usize, at: usize| location.at_rank(rank, range.start - start + at);
        let contribution =
            |rank: usize, at: usize, len: usize| location_at(rank, at).view(host, len).source();
        let publish_sums = |at: usize, sums: &[u8]| {
            if publishes {
                non_temporal |=
                    location_at(host.me, at).view(host, sums.len()).write_part(&host.policy_for_all, sums);
            }
        };
        result = kernel.reduce_all(ranks, &mut own, &mut scratch, contribution, publish_sums);
        range.start += bytes;
    }
    if non_temporal {
        write::store_fence();
    }
    memory.scratch = scratch;
    result.map(|()| range.start - start)
}

/// Adds up the contributions of all ranks in place and leaves the sums there. Returns the bytes of each
/// contribution.
///
/// # Errors
///
/// The error of the program's reduction function.
pub(super) fn reduce_direct(
    memory: &mut HostMemory,
    elements: &mut impl Elements,
    range: Range<usize>,
    direct: &Direct,
) -> Result<usize, String> {
    let ranks = Contributors { count: memory.ranks.len(), me: memory.me };
    let (policies, mut non_temporal) = (&memory.policy_for_rank, false);
    let (mut own, Some(kernel)) = elements.operands(range.clone()) else { return Ok(0) };
    debug_assert_eq!(own.len(), range.len());
    let contribution = |rank: usize, at: usize, len: usize| direct.view(rank, range.start + at, len).source();
    let publish_sums = |at: usize, sums: &[u8]| {
        for rank in (0..ranks.count).filter(|&rank| rank != ranks.me) {
            let into = direct.view(rank, range.start + at, sums.len());
            if direct.bytes() <= CACHED_BYTES {
                non_temporal |= into.write_part(&policies[rank], sums);
            } else {
                into.write_without_prefetch(sums);
            }
        }
    };
    let result = kernel.reduce_all(ranks, &mut own, &mut memory.scratch, contribution, publish_sums);
    if non_temporal {
        write::store_fence();
    }
    result.map(|()| range.len())
}
