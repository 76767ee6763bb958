//! A value that one thread at a time accesses, behind a lock that shares a word with other flags.
//!
//! A thread that finds the lock taken may set a flag in this word. The thread that releases the lock sees the flag,
//! or the other thread finds the lock free. So a short call needs no fence and no atomic operations besides those of
//! the lock, each of which takes several nanoseconds.

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::sync::{AtomicUsize, CellAccess, ExclusiveCell, Ordering};

/// The lock, and up to `usize::BITS` - 1 other flags.
#[derive(Debug)]
pub(super) struct Flags(AtomicUsize);

const LOCKED: usize = 1;

impl Flags {
    /// The first bit that is free for another flag.
    pub(super) const FIRST: usize = 2;

    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(0)))
    }

    /// Returns the flags that are set.
    #[inline]
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn set(&self, flag: usize) {
        self.0.fetch_or(flag, Ordering::SeqCst);
    }

    /// Clears a flag. Returns whether it was set.
    pub(super) fn clear(&self, flag: usize) -> bool {
        self.0.fetch_and(!flag, Ordering::SeqCst) & flag != 0
    }
}

/// A value that only the thread accesses that has set the lock.
#[derive(Debug)]
pub(super) struct Exclusive<T> {
    flags: Arc<Flags>,
    value: ExclusiveCell<T>,
}

// SAFETY: only the holder of the lock accesses the value. The lock is taken with acquire and released with release
// order. So threads access the value one after the other, as if it were moved between them, which `T: Send` allows.
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    /// Makes a value that is not locked. No other value may use `flags`.
    pub(super) fn new(value: T, flags: Arc<Flags>) -> Self {
        Self { flags, value: ExclusiveCell::new(value) }
    }

    /// Takes the lock; `None` if it is taken.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<ExclusiveGuard<'_, T>> {
        let is_taken =
            self.flags.get() & LOCKED != 0 || self.flags.0.fetch_or(LOCKED, Ordering::SeqCst) & LOCKED != 0;
        if is_taken {
            return None;
        }
        Some(ExclusiveGuard { access: self.value.access(), _unlock: Unlock(&self.flags) })
    }
}

/// Access to the value of an [`Exclusive`]. Its fields are dropped in order, so the lock is released last.
pub(super) struct ExclusiveGuard<'a, T> {
    access: CellAccess<T>,
    _unlock: Unlock<'a>,
}

struct Unlock<'a>(&'a Flags);

impl Drop for Unlock<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.0.fetch_and(!LOCKED, Ordering::SeqCst);
    }
}

impl<T> Deref for ExclusiveGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread has the lock until the guard is dropped, and the guard is borrowed.
        unsafe { &*self.access.address() }
    }
}

impl<T> DerefMut for ExclusiveGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread has the lock until the guard is dropped, and the guard is borrowed exclusively.
        unsafe { &mut *self.access.address() }
    }
}
