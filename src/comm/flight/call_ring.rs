//! The words of a recording, which several threads write and other processes read concurrently.
//!
//! Each group record and each call record begins with a lock word (see [`layout`]). The writer of a call
//! record makes the lock odd, and even again when the record is written. If the lock is odd already, or the
//! slot has another call, the writer gives up, so no thread waits. A reader copies a slot twice: equal
//! contents and an even lock mean that the copy is consistent. The lock alone is not enough, since it has the
//! same even value before and after a change. Group records are written under a mutex.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use convoke_recorder::layout::{self, Entry, Group, Header, entry_at, group_at, lock};
use nix::unistd::gettid;

use crate::transport::links::fork;

/// Most attempts to copy a group record or call record that other threads are changing.
const MAX_COPY_ATTEMPTS: u32 = 100;
/// Most slots that a thread looks at to find the next call's: all slots of the ring twice.
const MAX_TAKEN_NUMBERS: usize = 2 * layout::ENTRIES;

/// The ring of calls, and the other parts of a recording.
#[derive(Debug)]
pub(super) struct CallRing {
    words: &'static [AtomicU64],
    /// The fork count of the process that made the ring. A forked child shares the memory and must not write
    /// to it.
    forks: u32,
}

/// The words of one slot of the ring, which hold the record of one call.
pub(super) struct Slot<'a>(&'a [AtomicU64; layout::ENTRY_LEN]);

impl Slot<'_> {
    pub(super) fn set(&self, index: usize, word: u64) {
        self.0[index].store(word, Ordering::Relaxed);
    }

    pub(super) fn get(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::Relaxed)
    }

    /// Makes the lock odd, for call `number`, if the lock has the value `before`. Returns true if it had.
    #[inline(always)]
    fn lock(&self, before: u64, number: u64) -> bool {
        let lock = &self.0[layout::entry::LOCK];
        // SeqCst, as `AtomicUpdate` requires. It takes no longer here.
        let locked =
            lock.compare_exchange(before, layout::lock(number) | 1, Ordering::SeqCst, Ordering::Relaxed);
        // Later memory writes must not be visible before the odd lock.
        fence(Ordering::Release);
        locked.is_ok()
    }

    fn unlock(&self, number: u64) {
        self.0[layout::entry::LOCK].store(lock(number), Ordering::Release);
    }
}

impl CallRing {
    /// Makes a ring in `words`, which must be [`layout::FILE_LEN`] words, all zero.
    pub(super) fn new(words: &'static [AtomicU64], header: &Header) -> Self {
        let ring = Self { words, forks: fork::fork_count() };
        // The first word is written last, because readers take it as the mark of a valid recording.
        for (word, value) in ring.words.iter().zip(header.encode().iter()).skip(1) {
            word.store(*value, Ordering::Relaxed);
        }
        ring.words[0].store(layout::MAGIC, Ordering::Release);
        ring
    }

    /// Returns false in a forked child of the process that made the ring.
    pub(super) fn is_own_process(&self) -> bool {
        self.forks == fork::fork_count()
    }

    /// Returns the kernel's id of this thread, as debuggers show it, in the process that made the ring.
    pub(super) fn thread_id(&self) -> u32 {
        // In a forked child, the forking thread has another id, so the id is cached with the fork count.
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

    /// Adds a call and returns its number; `None` if other threads are writing to the call's slot, or if this
    /// process is a forked child.
    #[inline(always)]
    pub(super) fn add(&self, entry: &Entry) -> Option<u64> {
        if !self.is_own_process() {
            return None;
        }
        let Some((slot, number)) = self.take_slot() else {
            self.words[layout::header::LOST].fetch_add(1, Ordering::SeqCst);
            return None;
        };
        // Writes all words except the first, which is the lock. Slicing both arrays in the same way lets the
        // compiler know the length.
        for (place, word) in slot.0[1..].iter().zip(&entry.encode()[1..]) {
            place.store(*word, Ordering::Relaxed);
        }
        slot.unlock(number);
        Some(number)
    }

    /// Locks the slot of the next call, and returns it with the number of the call. `None` if other threads took the
    /// slots of too many numbers, or change the slot.
    ///
    /// The lock of a slot decides which thread gets a number, so the count of calls needs no atomic increment. A slow
    /// thread may set the count back. The next thread then finds that the following numbers are taken.
    #[inline(always)]
    fn take_slot(&self) -> Option<(Slot<'_>, u64)> {
        let count = &self.words[layout::header::CALL_COUNT];
        let mut number = count.load(Ordering::Relaxed) + 1;
        for _ in 0..MAX_TAKEN_NUMBERS {
            let slot = self.slot(number)?;
            let before = slot.0[layout::entry::LOCK].load(Ordering::Relaxed);
            let is_taken = before >= lock(number);
            if !is_taken && before & 1 == 0 && slot.lock(before, number) {
                count.store(number, Ordering::Relaxed);
                return Some((slot, number));
            }
            if !is_taken && before & 1 == 1 {
                // A thread changes the record of an older call.
                return None;
            }
            // The slot has this call, or one of a later round of the ring.
            number = number.max(before >> 1) + 1;
        }
        None
    }

    /// Applies `change` to the record of call `number`, if the ring still has that call.
    pub(super) fn change(&self, number: u64, change: impl FnOnce(&Slot<'_>)) {
        let Some(slot) = self.slot(number).filter(|_| self.is_own_process()) else { return };
        if slot.lock(lock(number), number) {
            change(&slot);
            slot.unlock(number);
        }
    }

    /// Sets the count of calls, as a thread does that was delayed after it took a slot.
    #[cfg(test)]
    pub(super) fn set_count(&self, count: u64) {
        self.words[layout::header::CALL_COUNT].store(count, Ordering::Relaxed);
    }

    /// Writes the record of a group into `slot`; two threads must not do so at once.
    pub(super) fn set_group(&self, slot: usize, group: &Group) {
        let places = &self.words[group_at(slot)..][..layout::GROUP_LEN];
        places[0].store(1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (place, word) in places.iter().zip(group.encode()).skip(1) {
            place.store(word, Ordering::Relaxed);
        }
        places[0].store(lock(u64::from(group.number)), Ordering::Release);
    }

    /// Returns a copy of the recording. Slots that other threads keep changing are marked in the copy as
    /// being written (odd lock).
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut words: Vec<u64> = self.words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        for (at, count) in layout::slots() {
            copy(&self.words[at..][..count], &mut words[at..][..count]);
        }
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    /// Returns the slot for the record of call `number`. The result is never `None`: every number has a slot.
    fn slot(&self, number: u64) -> Option<Slot<'_>> {
        self.words[entry_at(number)..].first_chunk().map(Slot)
    }
}

/// Copies a group record or call record. If no attempt gives a consistent copy, the lock of the copy is made
/// odd.
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
