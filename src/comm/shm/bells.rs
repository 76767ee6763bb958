//! Waking who sleeps: a bit in shared memory says that a rank does, its doorbell ends that.
//!
//! Who wants to sleep sets its bit, then looks once more for what it waits for. Who writes something for others does
//! so first, then looks at the bits. Both writes are exchanges in the one order of all sequentially consistent steps, so
//! at least one sees the other. (An exchange, not a store and a fence: the fence of x86-64 costs four times as much.)

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::layout::Layout;
use super::segment::{Segment, full_fence};

/// The doorbells of the ranks of a host.
#[derive(Debug)]
pub(crate) struct Bells {
    segment: Arc<Segment>,
    layout: Layout,
    me: usize,
    /// By rank of the host; event descriptors.
    bells: Vec<OwnedFd>,
}

impl Bells {
    pub(crate) fn new(segment: Arc<Segment>, layout: Layout, me: usize, bells: Vec<OwnedFd>) -> Self {
        Self { segment, layout, me, bells }
    }

    /// Writes `value` to the word at `at`, for all others: wakes those who sleep.
    #[inline]
    pub(crate) fn tell_all(&self, at: usize, value: u64) {
        self.segment.word(at).swap(value, Ordering::SeqCst);
        self.ring();
    }

    /// Wakes all others that sleep, after what they wait for was written some time before: the exchange would wait until
    /// this core has the line, the write alone does not, and by now it is through.
    #[inline]
    pub(crate) fn ring_later(&self) {
        full_fence();
        self.ring();
    }

    #[inline]
    fn ring(&self) {
        for (index, at) in self.layout.sleepers().enumerate() {
            let mut asleep = self.segment.word(at).load(Ordering::SeqCst);
            while asleep != 0 {
                self.wake(index * 64 + asleep.trailing_zeros() as usize);
                asleep &= asleep - 1;
            }
        }
    }

    /// Writes `value` to the word at `at`, for `rank`: wakes it if it sleeps.
    #[inline]
    pub(crate) fn tell(&self, rank: usize, at: usize, value: u64) {
        self.segment.word(at).swap(value, Ordering::SeqCst);
        let (sleeper, bit) = Layout::sleeper(rank);
        if self.segment.word(sleeper).load(Ordering::SeqCst) & bit != 0 {
            self.wake(rank);
        }
    }

    #[cold]
    fn wake(&self, rank: usize) {
        let (at, bit) = Layout::sleeper(rank);
        // One ring is enough: who takes the bit away rings.
        let first = rank != self.me && self.segment.word(at).fetch_and(!bit, Ordering::SeqCst) & bit != 0;
        if let Some(bell) = self.bells.get(rank).filter(|_| first) {
            // Full is as good: it is readable.
            let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
        }
    }

    /// Says that this rank sleeps from now on, unless it finds at once what it waits for.
    pub(crate) fn fall_asleep(&self) {
        let (at, bit) = Layout::sleeper(self.me);
        self.segment.word(at).fetch_or(bit, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether this rank has fallen asleep and nobody has rung since.
    pub(crate) fn is_asleep(&self) -> bool {
        let (at, bit) = Layout::sleeper(self.me);
        self.segment.word(at).load(Ordering::SeqCst) & bit != 0
    }

    pub(crate) fn wake_up(&self) {
        let (at, bit) = Layout::sleeper(self.me);
        self.segment.word(at).fetch_and(!bit, Ordering::SeqCst);
    }
}
