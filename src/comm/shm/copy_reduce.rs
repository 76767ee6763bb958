//! Copies and reductions between a rank's own buffers and the memory that the ranks of its host share.

use std::ops::Range;

use super::HostMemory;
use super::allocations::Direct;
use super::layout::{INLINE_BYTES, INLINE_OFFSET, ROUND_BYTES, SLOT_HEADER};
use super::numbering::CallNumber;
use super::schedule::{Area, CACHED_BYTES, Schedule};
use super::segment::View;
use super::store_policy::StorePolicy;
use crate::buffer::{BorrowedBuffer, BytesMut, PlanBuffer, SendRecvBuffers};
use crate::collectives::kernels::{Contributors, Kernel, Scratch, store_fence};

/// The elements of a collective call, possibly in several pieces of memory, and the kernel that reduces them.
pub(super) trait Elements {
    /// Returns the bytes at the beginning of the byte range `range` that are contiguous in memory.
    fn bytes(&self, range: Range<usize>) -> &[u8];
    /// Returns the contiguous bytes at the beginning of `range` for writing, and the kernel that reduces into
    /// them, if the call reduces.
    fn operands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>);
}

/// The buffers of a call that uses the caller's memory as it is, without scaling or copying it first.
pub(crate) trait Buffers {
    /// Returns the bytes at the beginning of the byte range `range` that are contiguous in memory.
    fn sent(&self, range: Range<usize>) -> &[u8];
    /// Returns the contiguous bytes at the beginning of `range` for writing.
    fn received(&mut self, range: Range<usize>) -> BytesMut<'_>;
    /// Copies the blocks that this rank sends to itself.
    fn copy_own(&mut self);
}

impl Buffers for BorrowedBuffer<'_> {
    fn sent(&self, range: Range<usize>) -> &[u8] {
        self.bytes(range)
    }

    fn received(&mut self, range: Range<usize>) -> BytesMut<'_> {
        self.bytes_mut(range)
    }

    fn copy_own(&mut self) {
        self.copy_some(usize::MAX);
    }
}

impl Buffers for SendRecvBuffers<'_> {
    #[inline(always)]
    fn sent(&self, range: Range<usize>) -> &[u8] {
        self.sent(range)
    }

    #[inline(always)]
    fn received(&mut self, range: Range<usize>) -> BytesMut<'_> {
        self.received(range)
    }

    #[inline(always)]
    fn copy_own(&mut self) {
        self.copy_own();
    }
}

/// The elements of a call that uses the caller's buffers as they are.
pub(super) struct PlainElements<'a, B> {
    pub(super) buffers: &'a mut B,
    pub(super) kernel: Option<&'a Kernel>,
}

impl<B: Buffers> Elements for PlainElements<'_, B> {
    #[inline(always)]
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.buffers.sent(range)
    }

    #[inline(always)]
    fn operands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        (self.buffers.received(range), self.kernel)
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

/// A position in shared memory: byte `at` of an area in which `rank` publishes data. `reader` reads it, and others may.
#[derive(Debug, Clone, Copy)]
pub(super) struct Location {
    pub(super) rank: usize,
    pub(super) reader: usize,
    pub(super) at: usize,
    pub(super) area: AreaAddress,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum AreaAddress {
    /// The slot for the call with this number. If `inline`, the data is in the header of the slot, in the
    /// cache line of the stamp that announces the call.
    Slot { number: u32, inline: bool },
    /// The memory of a round, as its distance in bytes from the first round of all collective calls.
    Round(u64),
    /// Offset `at` of the exchange area in which the lower rank of each pair publishes, and of that of the higher rank.
    /// `is_warm`: a core writes the lines there [fast](super::exchange::CallAreas::is_warm).
    Exchange { areas: [u8; 2], at: u32, is_warm: bool },
}

impl AreaAddress {
    /// Returns the address of an area of a call.
    #[inline(always)]
    pub(super) fn of(call: &CallNumber, schedule: &Schedule, area: Area) -> Self {
        match (area, call.exchange) {
            (Area::Slot, _) => Self::Slot { number: call.number, inline: schedule.fits_in(INLINE_BYTES) },
            (Area::Round(round), Some(exchange)) => {
                let (areas, position) = exchange.of_round(round);
                let is_warm = exchange.is_warm(position);
                Self::Exchange { areas, at: (position * call.round_bytes) as u32, is_warm }
            }
            (Area::Round(round) | Area::Sums(round), _) => {
                Self::Round(call.position + round * call.round_bytes)
            }
        }
    }
}

impl Location {
    #[inline(always)]
    pub(super) fn view(self, memory: &HostMemory, bytes: usize) -> View<'_> {
        let start = match self.area {
            AreaAddress::Slot { number, inline } => {
                memory.layout.slot(self.rank, number) + if inline { INLINE_OFFSET } else { SLOT_HEADER }
            }
            AreaAddress::Round(position) => {
                debug_assert!(self.at + bytes <= ROUND_BYTES);
                memory.layout.round(self.rank, position)
            }
            AreaAddress::Exchange { areas, at, .. } => {
                let (rank, reader) = (self.rank, self.reader);
                debug_assert!(at as usize + self.at + bytes <= memory.layout.exchange_bytes());
                let area = areas[usize::from(rank > reader)];
                memory.layout.exchange(rank.min(reader), rank.max(reader), area.into()) + at as usize
            }
        };
        memory.segment.view(start + self.at, bytes)
    }

    /// Returns the policy for stores to the memory of this location.
    #[inline(always)]
    fn store_policy(self, memory: &HostMemory) -> &StorePolicy {
        match self.area {
            AreaAddress::Exchange { is_warm: true, .. } => &memory.warm_policy,
            AreaAddress::Exchange { .. } => &memory.area_policy,
            AreaAddress::Slot { .. } | AreaAddress::Round(_) => &memory.store_policy,
        }
    }

    #[inline(always)]
    fn at_rank(self, rank: usize, further: usize) -> Self {
        Self { rank, at: self.at + further, ..self }
    }
}

/// Copies `range` of `elements` to `location` in shared memory. Returns the number of bytes.
#[inline(always)]
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
        let into = location.at_rank(location.rank, range.start - start).view(memory, bytes.len());
        into.write_with(location.store_policy(memory), bytes);
        range.start += bytes.len();
    }
    range.start - start
}

/// Copies from `location` in shared memory to `range` of `elements`. Returns the number of bytes. If `uncached` is set, it uses
/// non-temporal stores, and the caller must call [`store_fence`] before another thread can use the elements.
#[inline(always)]
pub(super) fn fetch(
    memory: &HostMemory,
    elements: &mut impl Elements,
    mut range: Range<usize>,
    location: Location,
    uncached: bool,
) -> usize {
    let start = range.start;
    while !range.is_empty() {
        let (mut into, _) = elements.operands(range.clone());
        let bytes = into.len();
        if bytes == 0 {
            break;
        }
        location
            .at_rank(location.rank, range.start - start)
            .view(memory, bytes)
            .read_part(&mut into, uncached);
        range.start += bytes;
    }
    range.start - start
}

/// Reduces the contributions of all ranks: those of other ranks at `location` in each rank's shared memory,
/// this rank's own in `range` of `elements`. The result replaces `range`. If `sums` is set, it is also
/// written there in this rank's shared memory. Returns the bytes of one contribution, or the error of
/// the program's reduction function.
pub(super) fn reduce(
    memory: &mut HostMemory,
    elements: &mut impl Elements,
    mut range: Range<usize>,
    location: Location,
    sums: Option<Location>,
) -> Result<usize, String> {
    let start = range.start;
    let mut scratch = Scratch::default();
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
        let publish_sums = |at: usize, result: &[u8]| {
            if let Some(into) = sums {
                let policy = into.store_policy(host);
                let into = into.at_rank(host.me, range.start - start + at).view(host, result.len());
                non_temporal |= into.write_part(policy, result);
            }
        };
        result = kernel.reduce_all(ranks, &mut own, &mut scratch, contribution, publish_sums);
        range.start += bytes;
    }
    if non_temporal {
        store_fence();
    }
    result.map(|()| range.start - start)
}

/// Reduces as [`reduce`] does, without sums in shared memory. If only one other rank has contributed, and its elements can
/// be combined with this rank's in place, it calls the kernel at once.
#[inline(always)]
pub(super) fn reduce_small(
    memory: &mut HostMemory,
    elements: &mut impl Elements,
    range: Range<usize>,
    location: Location,
) -> Result<usize, String> {
    let bytes = range.len();
    if memory.ranks.len() == 2
        && let (mut own, Some(kernel)) = elements.operands(range.clone())
        && let Some(combine) = kernel.in_place()
        && own.len() == bytes
    {
        let theirs = location.at_rank(1 - memory.me, 0).view(memory, bytes).source();
        combine(&mut own, theirs);
        return Ok(bytes);
    }
    reduce(memory, elements, range, location, None)
}

/// Reduces `range` of the elements of all ranks, which are in one shared allocation, and writes the result to
/// the elements of every rank. Returns what [`reduce`] returns.
pub(super) fn reduce_direct(
    memory: &mut HostMemory,
    elements: &mut impl Elements,
    range: Range<usize>,
    direct: &Direct,
) -> Result<usize, String> {
    let ranks = Contributors { count: memory.ranks.len(), me: memory.me };
    let (policies, mut non_temporal) = (&memory.rank_policies, false);
    let (mut own, Some(kernel)) = elements.operands(range.clone()) else { return Ok(0) };
    debug_assert_eq!(own.len(), range.len());
    let contribution = |rank: usize, at: usize, len: usize| direct.view(rank, range.start + at, len).source();
    let publish_sums = |at: usize, sums: &[u8]| {
        for rank in (0..ranks.count).filter(|&rank| rank != ranks.me) {
            let into = direct.view(rank, range.start + at, sums.len());
            if direct.exposure.bytes <= CACHED_BYTES {
                non_temporal |= into.write_part(&policies[rank], sums);
            } else {
                into.write_without_prefetch(sums);
            }
        }
    };
    let mut scratch = Scratch::default();
    let result = kernel.reduce_all(ranks, &mut own, &mut scratch, contribution, publish_sums);
    if non_temporal {
        store_fence();
    }
    result.map(|()| range.len())
}
