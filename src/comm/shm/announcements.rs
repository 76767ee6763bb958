//! Announcements of collective calls between the ranks of a host: a description of each call, and counters of
//! the steps that are done.

use std::sync::atomic::Ordering;

use super::allocations::PublishedLocation;
use super::layout::{CALL_OFFSET, Counter, HISTORY_OFFSET, INLINE_OFFSET, SLOTS};
use super::numbering::{Header, reaches};
use super::schedule::Peers;
use super::{AwaitedRanks, HostMemory};
use crate::collectives::call::Call;
use crate::error::ExecutionError;

/// The progress of the ranks when this rank last read it, by local rank.
#[derive(Debug)]
pub(super) struct PeerProgress {
    /// The latest call that each other rank had started.
    started: Vec<u32>,
    counters: [Vec<u64>; Counter::COUNT],
}

impl PeerProgress {
    pub(super) fn new(ranks: usize) -> Self {
        Self { started: vec![0; ranks], counters: std::array::from_fn(|_| vec![0; ranks]) }
    }
}

impl HostMemory {
    /// Returns the ranks that may still read the earlier call in the slot of call `number`: those that have
    /// not started the call after the earlier one.
    pub(super) fn slot_readers(&mut self, number: u32) -> AwaitedRanks {
        let needed = number.wrapping_sub(SLOTS - 1);
        let mut late = AwaitedRanks::new();
        for local_rank in 0..self.ranks.len() {
            if local_rank != self.me && !self.has_started(local_rank, needed) {
                late.push(self.ranks[local_rank]);
            }
        }
        late
    }

    /// Returns whether no other rank still reads the slot that the next call uses.
    #[inline(always)]
    pub(super) fn is_next_slot_free(&mut self) -> bool {
        let needed = self.calls.next().wrapping_sub(SLOTS - 1);
        (0..self.ranks.len()).all(|local_rank| local_rank == self.me || self.has_started(local_rank, needed))
    }

    pub(super) fn has_started(&mut self, rank: usize, number: u32) -> bool {
        if reaches(self.peers.started[rank], number) {
            return true;
        }
        let stamp = self.segment.word(self.layout.slot(rank, number)).load(Ordering::Acquire);
        if reaches(stamp as u32, number) {
            self.peers.started[rank] = stamp as u32;
        }
        reaches(stamp as u32, number)
    }

    /// Publishes the description of a call and its stamp, after all data of its slot was written. The stamp
    /// tells other ranks that the slot is complete. The caller must then [wake](Doorbells::wake_all) sleeping
    /// ranks.
    #[inline(always)]
    pub(super) fn announce(&self, number: u32, header: &Header, location: Option<PublishedLocation>) {
        let slot = self.layout.slot(self.me, number);
        if let Some(location) = location {
            self.segment.view(slot + INLINE_OFFSET, PublishedLocation::BYTES).write(&location.encode());
        }
        self.segment.view(slot + CALL_OFFSET, 16).write(&header.call);
        self.segment.view(slot + HISTORY_OFFSET, 8).write(&header.history.to_le_bytes());
        let stamp = u64::from(header.seq) << 32 | u64::from(number);
        self.segment.word(slot).store(stamp, Ordering::Release);
    }

    /// Compares call `number` of `rank` with this rank's call, described by `ours`. `seq` is the sequence
    /// number of this rank's call among the group's collectives. Returns false if `rank` has not made the
    /// call yet, and an error if its call `number`, or an earlier one, differs from this rank's.
    #[inline(always)]
    pub(super) fn match_call(
        &mut self,
        rank: usize,
        number: u32,
        ours: &Header,
        seq: u64,
    ) -> Result<bool, ExecutionError> {
        match self.header(rank, number) {
            None => Ok(false),
            Some(theirs) if theirs == *ours => Ok(true),
            Some(theirs) => Err(self.mismatch(rank, number, theirs, seq)),
        }
    }

    #[cold]
    fn mismatch(&mut self, rank: usize, number: u32, theirs: Header, seq: u64) -> ExecutionError {
        let peer = self.ranks[rank];
        let theirs = self.first_difference(rank, number).unwrap_or(theirs);
        match Call::decode(theirs.call) {
            Ok(call) => {
                let seq = seq & !u64::from(u32::MAX) | u64::from(theirs.seq);
                ExecutionError::Mismatch { peer, theirs: call, seq }
            }
            Err(error) => ExecutionError::Protocol { peer, what: error.into() },
        }
    }

    /// Returns the description that `rank` published of call `number`. `None` if the rank has not made the
    /// call yet, or has reused the slot for a later call.
    #[inline(always)]
    fn header(&mut self, rank: usize, number: u32) -> Option<Header> {
        let slot = self.layout.slot(rank, number);
        let stamp = self.segment.word(slot).load(Ordering::Acquire);
        if stamp as u32 != number {
            return None;
        }
        if reaches(number, self.peers.started[rank]) {
            self.peers.started[rank] = number;
        }
        let (mut call, mut history) = ([0; 16], [0; 8]);
        self.segment.view(slot + CALL_OFFSET, 16).read(&mut call);
        self.segment.view(slot + HISTORY_OFFSET, 8).read(&mut history);
        Some(Header { call, seq: (stamp >> 32) as u32, history: u64::from_le_bytes(history) })
    }

    /// Returns the earliest call of `rank`, up to `number`, that differs from this rank's call of the same
    /// number. Only calls whose slots were not reused can be compared.
    fn first_difference(&mut self, rank: usize, number: u32) -> Option<Header> {
        (0..SLOTS).rev().map(|back| number.wrapping_sub(back)).find_map(|number| {
            if !self.has_slots(number) {
                return None;
            }
            let (theirs, ours) = (self.header(rank, number)?, self.header(self.me, number)?);
            (theirs.call != ours.call || theirs.seq != ours.seq).then_some(theirs)
        })
    }

    /// Returns the location of its elements that `rank` published for call `number`, which the rank has made.
    pub(super) fn published_location(&self, rank: usize, number: u32) -> PublishedLocation {
        let mut bytes = [0; PublishedLocation::BYTES];
        let at = self.layout.slot(rank, number) + INLINE_OFFSET;
        self.segment.view(at, PublishedLocation::BYTES).read(&mut bytes);
        PublishedLocation::decode(bytes)
    }

    pub(super) fn set_counter(&self, counter: Counter, count: u64) {
        self.store_counter(counter, count);
        self.doorbells.wake_all();
    }

    /// Publishes the count of bytes of a round of which more follow. [`Self::set_counter`] for the whole round must follow:
    /// its fence wakes a rank that goes to sleep now.
    #[inline(always)]
    pub(super) fn set_published(&self, count: u64) {
        self.store_counter(Counter::Published, count);
        self.doorbells.wake_all_marked();
    }

    /// Publishes a counter. The caller must then [wake](Doorbells::wake_all) sleeping ranks.
    #[inline(always)]
    pub(super) fn store_counter(&self, counter: Counter, count: u64) {
        self.segment.word(self.layout.counter(self.me, counter)).store(count, Ordering::Release);
    }

    fn has_reached(&mut self, rank: usize, counter: Counter, count: u64) -> bool {
        let known = &mut self.peers.counters[counter as usize][rank];
        if *known < count {
            *known = self.segment.word(self.layout.counter(rank, counter)).load(Ordering::Acquire);
        }
        *known >= count
    }

    /// Returns the first of `peers` whose counter has not reached `count`, by local rank.
    pub(super) fn first_behind(&mut self, peers: Peers, counter: Counter, count: u64) -> Option<usize> {
        match peers {
            Peers::One(rank) => (!self.has_reached(rank, counter, count)).then_some(rank),
            Peers::All => {
                let me = self.me;
                (0..self.ranks.len()).find(|&rank| rank != me && !self.has_reached(rank, counter, count))
            }
        }
    }
}
