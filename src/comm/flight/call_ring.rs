//! The words of a recording, which several threads write and other processes read concurrently.
//!
//! Each group and each call begins with a lock word (see [`layout`]). A writer of a call makes its lock odd,
//! and even again when it is done. If the lock is odd already, or the slot has another call, the writer gives
//! up, so nobody waits. A reader that copies a slot twice with equal contents and an even lock has read one
//! state. The lock alone is not enough: it has one even value before and after a change. Groups are written
//! under a mutex.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use convoke_env::flight::layout::{self, Entry, Group, Header, entry_at, group_at, lock};
use nix::unistd::gettid;

use crate::links::fork;

/// The number of attempts to copy a group or a call that others change meanwhile.
const MAX_COPY_ATTEMPTS: u32 = 100;

/// The ring of calls, and the other parts of a recording.
#[derive(Debug)]
pub(super) struct CallRing {
    words: &'static [AtomicU64],
    /// The number of forks before the process that made it. A child shares the memory and must not write to
    /// it.
    forks: u32,
}

/// The slot of a call.
pub(super) struct Slot<'a>(&'a [AtomicU64; layout::ENTRY_LEN]);

impl Slot<'_> {
    pub(super) fn set(&self, index: usize, word: u64) {
        self.0[index].store(word, Ordering::Relaxed);
    }

    pub(super) fn get(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::Relaxed)
    }
}

impl CallRing {
    /// A ring in `words`, which are zero and [`layout::FILE_LEN`] in number.
    pub(super) fn new(words: &'static [AtomicU64], header: &Header) -> Self {
        let ring = Self { words, forks: fork::fork_count() };
        // The first word is written last: it marks a valid recording.
        for (word, value) in ring.words.iter().zip(header.encode().iter()).skip(1) {
            word.store(*value, Ordering::Relaxed);
        }
        ring.words[0].store(layout::MAGIC, Ordering::Release);
        ring
    }

    /// Returns whether this process made the ring, and is not a fork of that one.
    pub(super) fn is_own_process(&self) -> bool {
        self.forks == fork::fork_count()
    }

    /// Returns the kernel's id of this thread, as debuggers show it, in the process that made the ring.
    pub(super) fn thread_id(&self) -> u32 {
        // The thread that forks has another id in the child.
        thread_local!(static ID: Cell<Option<(u32, u32)>> = const { Cell::new(None) });
        ID.with(|id| match id.get() {
            Some((forks, id)) if forks == self.forks => id,
            _ => {
                let new = gettid().as_raw().cast_unsigned();
                id.set(Some((self.forks, new)));
                new
            }
        })
    }

    /// Adds a call and returns its number; `None` if another thread is writing to its slot.
    #[inline]
    pub(super) fn add(&self, entry: &Entry) -> Option<u64> {
        if !self.is_own_process() {
            return None;
        }
        let number = self.words[layout::header::CALL_COUNT].fetch_add(1, Ordering::Relaxed) + 1;
        let slot = self.slot(number)?;
        let before = slot.0[layout::entry::LOCK].load(Ordering::Relaxed);
        // A thread may be delayed until the ring has wrapped around, and find a later call in its slot.
        if before & 1 == 1 || before >= lock(number) || !slot.lock(before, number) {
            self.words[layout::header::LOST].fetch_add(1, Ordering::Relaxed);
            return None;
        }
        // All words but the lock, which is the first. (Both skip it in this way so that the compiler knows
        // the length.)
        for (place, word) in slot.0[1..].iter().zip(&entry.encode()[1..]) {
            place.store(*word, Ordering::Relaxed);
        }
        slot.unlock(number);
        Some(number)
    }

    /// Changes the call with this number, if it is still there.
    pub(super) fn change(&self, number: u64, change: impl FnOnce(&Slot<'_>)) {
        let Some(slot) = self.slot(number).filter(|_| self.is_own_process()) else { return };
        if slot.lock(lock(number), number) {
            change(&slot);
            slot.unlock(number);
        }
    }

    /// Writes a group; two threads must not do so at once.
    pub(super) fn set_group(&self, slot: usize, group: &Group) {
        let places = &self.words[group_at(slot)..][..layout::GROUP_LEN];
        places[0].store(1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (place, word) in places.iter().zip(group.encode()).skip(1) {
            place.store(word, Ordering::Relaxed);
        }
        places[0].store(lock(u64::from(group.number)), Ordering::Release);
    }

    /// Returns a copy of the recording. Slots that others keep changing during the copy are marked as being
    /// written.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut words: Vec<u64> = self.words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        for (at, count) in layout::slots() {
            copy(&self.words[at..][..count], &mut words[at..][..count]);
        }
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    /// The slot of a call, which always exists.
    fn slot(&self, number: u64) -> Option<Slot<'_>> {
        self.words[entry_at(number)..].first_chunk().map(Slot)
    }
}

/// Copies a consistent state of a group or a call, or one with an odd lock.
fn copy(from: &[AtomicU64], into: &mut [u64]) {
    for _ in 0..MAX_COPY_ATTEMPTS {
        let mut same = true;
        for (into, from) in into.iter_mut().zip(from) {
            let word = from.load(Ordering::Acquire);
            same &= std::mem::replace(into, word) == word;
        }
        if same && into[0] & 1 == 0 {
            return;
        }
    }
    into[0] |= 1;
}

impl Slot<'_> {
    /// Makes the lock odd if it is `before`. Returns whether it was.
    fn lock(&self, before: u64, number: u64) -> bool {
        let lock = &self.0[layout::entry::LOCK];
        let locked =
            lock.compare_exchange(before, layout::lock(number) | 1, Ordering::Acquire, Ordering::Relaxed);
        // Later stores must not be visible before the odd lock.
        fence(Ordering::Release);
        locked.is_ok()
    }

    fn unlock(&self, number: u64) {
        self.0[layout::entry::LOCK].store(lock(number), Ordering::Release);
    }
}
