//! Wake-ups of sleeping ranks: a bit in shared memory says that a rank sleeps, its doorbell (eventfd) wakes
//! it.
//!
//! A rank that is about to sleep sets its bit, then checks once more for the data it waits for. A writer
//! writes its data first, then checks the bits. Each of them executes a fence between its two steps, or an atomic
//! update that is a fence. So the rank sees the data, or the writer sees the bit (tested in `models.rs`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::Layout;
use super::peer_memory::PeerMemory;
use super::segment::Segment;
use crate::fence::{AtomicUpdate, full_fence};

#[derive(Debug)]
pub(crate) struct Doorbells {
    pub(super) segment: Arc<Segment>,
    pub(super) layout: Layout,
    pub(super) me: usize,
    pub(super) host: HostProcesses,
}

/// The processes of a host, as the ranks of one group see them. All groups of a process share the
/// descriptors.
#[derive(Debug, Clone)]
pub(crate) struct HostProcesses {
    /// The eventfd of each process.
    pub(crate) doorbells: Arc<[OwnedFd]>,
    /// The memory of these processes.
    pub(crate) memory: Arc<PeerMemory>,
    /// The process of each rank of the group, by local rank.
    pub(crate) of_rank: Arc<[usize]>,
}

impl Doorbells {
    /// Wakes all other ranks that sleep. Call it after writing the data they wait for. It waits until this
    /// data is visible to other cores, so it takes less time if the caller does other work in between.
    #[inline]
    pub(crate) fn wake_all(&self) {
        full_fence();
        self.wake_all_marked();
    }

    /// Does what [`Self::wake_all`] does, with `update` as its fence where that is one. The caller made this atomic
    /// update after it wrote the data.
    #[inline(always)]
    pub(crate) fn wake_all_after(&self, update: AtomicUpdate) {
        update.complete();
        self.wake_all_marked();
    }

    /// Wakes all other ranks whose sleep bits are set. A bit that a rank sets now may be missed, so [`Self::wake_all`] must
    /// follow.
    #[inline(always)]
    pub(crate) fn wake_all_marked(&self) {
        for (index, at) in self.layout.sleep_masks().enumerate() {
            let mut sleeping = self.segment.word(at).load(Ordering::Relaxed);
            while sleeping != 0 {
                self.signal(index * 64 + sleeping.trailing_zeros() as usize);
                sleeping &= sleeping - 1;
            }
        }
    }

    /// Wakes `rank` if it sleeps. Call it after writing the data that `rank` waits for.
    #[inline]
    pub(crate) fn wake(&self, rank: usize) {
        let (at, bit) = Layout::sleep_bit(rank);
        if sleeping_ranks(self.segment.word(at)) & bit != 0 {
            self.signal(rank);
        }
    }

    /// Wakes `rank` if its sleep bit is set. A bit that `rank` sets now may be missed, so [`Self::wake`] must follow.
    #[inline]
    pub(crate) fn wake_marked(&self, rank: usize) {
        let (at, bit) = Layout::sleep_bit(rank);
        if self.segment.word(at).load(Ordering::Relaxed) & bit != 0 {
            self.signal(rank);
        }
    }

    #[cold]
    fn signal(&self, rank: usize) {
        let (at, bit) = Layout::sleep_bit(rank);
        // One signal is enough: the rank that clears the bit sends it.
        if rank != self.me && clear_sleep_bit(self.segment.word(at), bit) {
            let doorbell = &self.host.doorbells[self.host.of_rank[rank]];
            // A full eventfd is readable already, so the error does not matter.
            let _ = rustix::io::write(doorbell, &1_u64.to_ne_bytes());
        }
    }

    /// Sets this rank's sleep bit. Before it sleeps, the caller must check once more for the data that it
    /// waits for.
    pub(crate) fn mark_sleeping(&self) {
        let (at, bit) = Layout::sleep_bit(self.me);
        set_sleep_bit(self.segment.word(at), bit);
    }

    /// Returns whether this rank's sleep bit is set and no other rank has woken this rank since.
    pub(crate) fn is_marked_sleeping(&self) -> bool {
        let (at, bit) = Layout::sleep_bit(self.me);
        is_sleep_bit_set(self.segment.word(at), bit)
    }

    pub(crate) fn clear_sleeping(&self) {
        let (at, bit) = Layout::sleep_bit(self.me);
        clear_sleep_bit(self.segment.word(at), bit);
    }
}

/// A word with the bits of the sleeping ranks: an atomic integer, or loom's model of one in a test.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            #[inline(always)]
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }

            fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
                self.fetch_or(bits, order)
            }

            fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
                self.fetch_and(bits, order)
            }
        }
    };
}

word!(AtomicU64);
#[cfg(all(test, loom))]
word!(loom::sync::atomic::AtomicU64);

/// Returns the bits of the ranks that may have gone to sleep without seeing what this rank wrote before.
#[inline(always)]
pub(super) fn sleeping_ranks(sleepers: &impl Word) -> u64 {
    full_fence();
    sleepers.load(Ordering::Relaxed)
}

/// Sets the sleep bit `bit`. A writer that does not see the bit wrote its data earlier, so a check after this
/// call sees the data.
pub(super) fn set_sleep_bit(sleepers: &impl Word, bit: u64) {
    sleepers.fetch_or(bit, Ordering::SeqCst);
    full_fence();
}

pub(super) fn is_sleep_bit_set(sleepers: &impl Word, bit: u64) -> bool {
    sleepers.load(Ordering::SeqCst) & bit != 0
}

/// Clears the sleep bit `bit`. Returns whether it was set.
pub(super) fn clear_sleep_bit(sleepers: &impl Word, bit: u64) -> bool {
    sleepers.fetch_and(!bit, Ordering::SeqCst) & bit != 0
}
