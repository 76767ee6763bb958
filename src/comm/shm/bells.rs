//! Waking who sleeps: a bit in shared memory says that a rank does, its doorbell ends that.
//!
//! Who wants to sleep sets its bit, then looks once more for what it waits for. Who writes something for others does
//! so first, then looks at the bits. Between the two steps of each stands a fence, so at least one sees the other.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::layout::Layout;
use super::segment::Segment;

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

    /// Wakes all others that sleep; to be called after what they wait for was written.
    #[inline]
    pub(crate) fn ring_all(&self) {
        fence(Ordering::SeqCst);
        for (index, at) in self.layout.sleepers().enumerate() {
            let mut asleep = self.segment.word(at).load(Ordering::Relaxed);
            while asleep != 0 {
                self.wake(index * 64 + asleep.trailing_zeros() as usize);
                asleep &= asleep - 1;
            }
        }
    }

    /// Wakes `rank` if it sleeps; to be called after what it waits for was written.
    #[inline]
    pub(crate) fn ring(&self, rank: usize) {
        fence(Ordering::SeqCst);
        let (at, bit) = Layout::sleeper(rank);
        if self.segment.word(at).load(Ordering::Relaxed) & bit != 0 {
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
