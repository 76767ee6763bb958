//! Memory of programs that all ranks of the host can reach: an all-reduce in it copies nothing.
//!
//! When a rank announces a call, it publishes the allocation and offset that hold its elements ([`Offer`]).
//! If all ranks name one allocation, the owner of each piece of the sum reads the shares in place and writes
//! the sum to all ranks.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::part::Part;
use super::segment::{Segment, View};

/// The allocations that a rank knows together with the others.
#[derive(Debug, Default)]
pub(crate) struct Allocations {
    list: Mutex<Vec<Weak<Allocation>>>,
    made: AtomicU64,
}

/// Memory that was made by all ranks of a host together.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// The number of this allocation: equal on all ranks, different for every other allocation.
    pub(crate) id: u64,
    pub(crate) all: Segment,
    /// The byte range that belongs to each rank.
    pub(crate) regions: Vec<Range<usize>>,
    /// This rank's range.
    pub(crate) own: Arc<Part>,
}

/// The location of a call's elements, as published in the rank's slot: the allocation, 0 for none, and the
/// offset in the publishing rank's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Told {
    pub(super) id: u64,
    pub(super) at: u64,
}

/// A rank's own elements, which it lets others write to until the call is over on all ranks.
#[derive(Debug)]
pub(super) struct Offer {
    allocation: Arc<Allocation>,
    at: usize,
    bytes: usize,
    taken_back: bool,
}

/// The elements of all ranks.
#[derive(Debug)]
pub(super) struct Direct {
    offer: Offer,
    /// The offsets at which the elements begin, by place on the host.
    starts: Vec<usize>,
}

impl Allocations {
    /// The number of the next; for the rank that makes it for all.
    pub(crate) fn next_id(&self) -> u64 {
        self.made.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn add(&self, allocation: &Arc<Allocation>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(allocation));
    }

    /// Returns an offer of the `bytes` bytes at an address, if an allocation can lend them.
    pub(super) fn offer(&self, address: usize, bytes: usize) -> Option<Offer> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().filter_map(Weak::upgrade).find_map(|allocation| {
            let at = allocation.own.place(address, bytes)?;
            Some(Offer { allocation, at, bytes, taken_back: false })
        })
    }
}

impl Told {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..].copy_from_slice(&self.at.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let (id, at) = bytes.split_at(8);
        let [id, at] = [id, at].map(|half| half.try_into().map_or(0, u64::from_le_bytes));
        Self { id, at }
    }
}

impl Offer {
    pub(super) fn told(&self) -> Told {
        Told { id: self.allocation.id, at: self.at as u64 }
    }

    /// Returns the elements of all ranks if all have published this allocation. The error names the rank
    /// whose data is invalid.
    pub(super) fn with(mut self, told: &[Told]) -> Result<Option<Direct>, usize> {
        if told.iter().any(|told| told.id != self.allocation.id) {
            // Every rank finds that.
            self.taken_back = true;
            return Ok(None);
        }
        let start = |(place, told): (usize, &Told)| {
            let region = self.allocation.regions.get(place).ok_or(place)?;
            let at = usize::try_from(told.at)
                .ok()
                .filter(|at| at.checked_add(self.bytes).is_some_and(|end| end <= region.len()));
            at.map(|at| region.start + at).ok_or(place)
        };
        let starts = told.iter().enumerate().map(start).collect::<Result<_, _>>()?;
        Ok(Some(Direct { offer: self, starts }))
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        // The call has failed, and a rank that does not know it yet may still write.
        if !self.taken_back {
            self.allocation.own.make_private(self.at, self.bytes);
        }
    }
}

impl Direct {
    /// Bytes of each rank's elements.
    pub(super) fn bytes(&self) -> usize {
        self.offer.bytes
    }

    /// The `bytes` bytes at `at` of the elements of the rank at `place`.
    pub(super) fn view(&self, place: usize, at: usize, bytes: usize) -> View<'_> {
        debug_assert!(at + bytes <= self.offer.bytes);
        self.offer.allocation.all.view(self.starts[place] + at, bytes)
    }

    /// Marks the call as over on all ranks.
    pub(super) fn take_back(&mut self) {
        self.offer.taken_back = true;
    }
}
