//! Synchronisation primitives of the engine. In model tests (`engine/models.rs`) those of loom replace them;
//! loom runs a test in all interleavings of its threads.

pub(super) use std::sync::PoisonError;

#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Mutex, Mutex as ProgressLock, MutexGuard, MutexGuard as ProgressLockGuard, TryLockError},
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

/// The progress lock in model tests. loom's own lock does not explore that a thread tries it just before its
/// release. This lock uses an atomic, so that loom explores that case.
#[cfg(loom)]
#[derive(Debug)]
pub(super) struct ProgressLock<T> {
    held: AtomicBool,
    inner: Mutex<T>,
}

#[cfg(loom)]
#[derive(Debug)]
pub(super) struct ProgressLockGuard<'a, T> {
    held: &'a AtomicBool,
    inner: Option<MutexGuard<'a, T>>,
}

#[cfg(loom)]
impl<T> ProgressLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), inner: Mutex::new(value) }
    }

    pub(super) fn try_lock(
        &self,
    ) -> Result<ProgressLockGuard<'_, T>, TryLockError<ProgressLockGuard<'_, T>>> {
        let taken = self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.map_err(|_| TryLockError::WouldBlock)?;
        Ok(ProgressLockGuard { held: &self.held, inner: self.inner.lock().ok() })
    }

    /// Locks without waiting. The caller is the only thread that uses the lock.
    pub(super) fn lock(&self) -> std::sync::LockResult<ProgressLockGuard<'_, T>> {
        Ok(self.try_lock().expect("somebody else holds it"))
    }
}

#[cfg(loom)]
impl<T> std::ops::Deref for ProgressLockGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held until it is dropped")
    }
}

#[cfg(loom)]
impl<T> std::ops::DerefMut for ProgressLockGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("held until it is dropped")
    }
}

#[cfg(loom)]
impl<T> Drop for ProgressLockGuard<'_, T> {
    fn drop(&mut self) {
        self.inner = None;
        self.held.store(false, Ordering::Release);
    }
}
