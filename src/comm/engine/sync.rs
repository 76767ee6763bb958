//! Synchronisation primitives of the engine. In model tests (`engine/models.rs`) those of loom replace them;
//! loom runs a test in all interleavings of its threads.

pub(super) use std::sync::PoisonError;

#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Mutex, MutexGuard},
    thread::{Thread, current, park, park_timeout},
};

#[cfg(loom)]
pub(super) use loom::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Mutex, MutexGuard},
    thread::{Thread, current, park},
};

/// loom has no clock: a timeout is modelled as an event that can happen at any time.
#[cfg(loom)]
pub(super) fn park_timeout(_: std::time::Duration) {
    loom::thread::yield_now();
}

/// A value that the holder of a lock accesses. In model tests, loom checks that no two threads do so at a time.
#[cfg(not(loom))]
#[derive(Debug)]
pub(super) struct ExclusiveCell<T>(std::cell::UnsafeCell<T>);

#[cfg(loom)]
#[derive(Debug)]
pub(super) struct ExclusiveCell<T>(loom::cell::UnsafeCell<T>);

/// An access to an [`ExclusiveCell`], which ends when it is dropped.
#[cfg(not(loom))]
pub(super) struct CellAccess<T>(*mut T);

#[cfg(loom)]
pub(super) struct CellAccess<T>(loom::cell::MutPtr<T>);

impl<T> ExclusiveCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(value.into())
    }

    #[inline]
    pub(super) fn access(&self) -> CellAccess<T> {
        #[cfg(not(loom))]
        return CellAccess(self.0.get());
        #[cfg(loom)]
        return CellAccess(self.0.get_mut());
    }
}

impl<T> CellAccess<T> {
    #[inline]
    pub(super) fn address(&self) -> *mut T {
        #[cfg(not(loom))]
        return self.0;
        #[cfg(loom)]
        return self.0.with(|address| address);
    }
}
