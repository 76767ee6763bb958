//! Synchronisation primitives of the engine, which `engine/models.rs` replaces by those of loom.

pub(super) use std::sync::PoisonError;

#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Mutex, Mutex as SeatLock, MutexGuard, MutexGuard as SeatGuard, TryLockError},
    thread::{Thread, current, park, park_timeout},
};

#[cfg(loom)]
pub(super) use loom::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Mutex, MutexGuard},
    thread::{Thread, current, park},
};
#[cfg(loom)]
pub(super) use std::sync::TryLockError;

/// loom has no clock: a timeout is modelled as an event that can happen at any time.
#[cfg(loom)]
pub(super) fn park_timeout(_: std::time::Duration) {
    loom::thread::yield_now();
}

/// A lock that threads mostly try and seldom wait for. loom's own lock does not explore a try just before the
/// release. This one uses an atomic, so that loom explores it.
#[cfg(loom)]
#[derive(Debug)]
pub(super) struct SeatLock<T> {
    held: AtomicBool,
    inner: Mutex<T>,
}

#[cfg(loom)]
#[derive(Debug)]
pub(super) struct SeatGuard<'a, T> {
    held: &'a AtomicBool,
    inner: Option<MutexGuard<'a, T>>,
}

#[cfg(loom)]
impl<T> SeatLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), inner: Mutex::new(value) }
    }

    pub(super) fn try_lock(&self) -> Result<SeatGuard<'_, T>, TryLockError<SeatGuard<'_, T>>> {
        let taken = self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.map_err(|_| TryLockError::WouldBlock)?;
        Ok(SeatGuard { held: &self.held, inner: self.inner.lock().ok() })
    }

    /// Locks without waiting. The caller is the only thread that uses the lock.
    pub(super) fn lock(&self) -> std::sync::LockResult<SeatGuard<'_, T>> {
        Ok(self.try_lock().expect("somebody else holds it"))
    }
}

#[cfg(loom)]
impl<T> std::ops::Deref for SeatGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held until it is dropped")
    }
}

#[cfg(loom)]
impl<T> std::ops::DerefMut for SeatGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("held until it is dropped")
    }
}

#[cfg(loom)]
impl<T> Drop for SeatGuard<'_, T> {
    fn drop(&mut self) {
        self.inner = None;
        self.held.store(false, Ordering::Release);
    }
}
