//! Memory of programs that all ranks of the host have mapped, so that an all-reduce of it needs no copies.
//!
//! When a rank announces a call, it publishes the allocation and offset that hold its elements
//! ([`PublishedLocation`]). If all ranks name one allocation, the rank that owns a piece of the sum reads the
//! contributions in place. It writes the sum to the elements of all ranks.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::region::Region;
use super::segment::{Segment, View};

/// The allocations that this rank shares with the other ranks of its host.
#[derive(Debug, Default)]
pub(crate) struct Allocations {
    list: Mutex<Vec<Weak<Allocation>>>,
    made: AtomicU64,
}

/// Memory of all ranks of a host, with a region for the program of each rank.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// The number of this allocation: equal on all ranks, different for every other allocation.
    pub(crate) id: u64,
    /// The region of each rank of the host.
    pub(crate) regions: Vec<MappedRegion>,
    /// This rank's region, as its program uses it.
    pub(crate) own: Arc<Region>,
}

/// The region of one rank, in a segment that may have the regions of several ranks.
#[derive(Debug)]
pub(crate) struct MappedRegion {
    pub(crate) segment: Arc<Segment>,
    pub(crate) range: Range<usize>,
}

/// The location of a call's elements, as published in the rank's slot: the id of the allocation, 0 for none,
/// and the offset in the publishing rank's region. Or [`Self::IN_PROCESS`] and the address in the rank's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PublishedLocation {
    pub(super) id: u64,
    pub(super) at: u64,
}

/// This rank's own elements in an allocation, which other ranks may write to until the call has ended on all
/// ranks.
#[derive(Debug)]
pub(super) struct Exposure {
    allocation: Arc<Allocation>,
    at: usize,
    pub(super) bytes: usize,
    /// Set when no rank writes to the elements any more.
    pub(super) ended: bool,
}

/// The elements of all ranks in one collective call that reduces in place.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) exposure: Exposure,
    /// The offset in its segment at which each rank's elements begin, by local rank.
    starts: Vec<usize>,
}

impl Allocations {
    /// Returns the id of the next allocation. Only the rank that creates the memory for all ranks calls this.
    pub(crate) fn next_id(&self) -> u64 {
        self.made.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn add(&self, allocation: &Arc<Allocation>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(allocation));
    }

    /// Returns the allocation in which this rank's region has the `bytes` bytes at `address`, and their
    /// offset in the region.
    pub(crate) fn find(&self, address: usize, bytes: usize) -> Option<(Arc<Allocation>, usize)> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let mut allocations = list.iter().filter_map(Weak::upgrade);
        allocations.find_map(|allocation| {
            let at = allocation.own.offset_of(address, bytes)?;
            Some((allocation, at))
        })
    }

    /// Returns an exposure of the `bytes` bytes at `address`, if they are in an allocation.
    pub(super) fn expose(&self, address: usize, bytes: usize) -> Option<Exposure> {
        let (allocation, at) = self.find(address, bytes)?;
        Some(Exposure { allocation, at, bytes, ended: false })
    }
}

impl PublishedLocation {
    pub(super) const BYTES: usize = 16;
    const IN_PROCESS: u64 = u64::MAX;

    /// The location of elements that other ranks read in the memory of this process.
    pub(super) fn in_process(address: usize) -> Self {
        Self { id: Self::IN_PROCESS, at: address as u64 }
    }

    /// Returns the address of the elements, if other ranks may read them in the memory of the process.
    pub(super) fn address(self) -> Option<u64> {
        (self.id == Self::IN_PROCESS).then_some(self.at)
    }

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        bytemuck::cast([self.id.to_le(), self.at.to_le()])
    }

    pub(super) fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let [id, at] = bytemuck::cast::<_, [u64; 2]>(bytes).map(u64::from_le);
        Self { id, at }
    }
}

impl Exposure {
    pub(super) fn location(&self) -> PublishedLocation {
        PublishedLocation { id: self.allocation.id, at: self.at as u64 }
    }

    /// Returns the elements of all ranks if all have published this allocation, else `None`. The error is the
    /// local rank whose published location is invalid.
    pub(super) fn into_direct(mut self, locations: &[PublishedLocation]) -> Result<Option<Direct>, usize> {
        if locations.iter().any(|location| location.id != self.allocation.id) {
            // Every rank reads the same locations, so no rank will write to these elements.
            self.ended = true;
            return Ok(None);
        }
        let start = |(local_rank, location): (usize, &PublishedLocation)| {
            let region = &self.allocation.regions.get(local_rank).ok_or(local_rank)?.range;
            let fits = |at: &usize| at.checked_add(self.bytes).is_some_and(|end| end <= region.len());
            let at = usize::try_from(location.at).ok().filter(fits);
            at.map(|at| region.start + at).ok_or(local_rank)
        };
        let starts = locations.iter().enumerate().map(start).collect::<Result<_, _>>()?;
        Ok(Some(Direct { exposure: self, starts }))
    }
}

impl Drop for Exposure {
    fn drop(&mut self) {
        // The call has failed, and a rank that does not know this yet may still write to the elements.
        if !self.ended {
            self.allocation.own.make_private(self.at, self.bytes);
        }
    }
}

impl Direct {
    /// Returns the `bytes` bytes from offset `at` of the elements of the rank `local_rank` of the host.
    pub(super) fn view(&self, local_rank: usize, at: usize, bytes: usize) -> View<'_> {
        debug_assert!(at + bytes <= self.exposure.bytes);
        let region = &self.exposure.allocation.regions[local_rank];
        region.segment.view(self.starts[local_rank] + at, bytes)
    }
}
