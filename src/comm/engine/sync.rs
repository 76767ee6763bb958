//! The primitives by which threads meet, so that loom can take their place in `engine/models.rs`.

pub(super) use std::sync::PoisonError;

#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Mutex, MutexGuard, TryLockError},
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

/// loom knows no clock: that time is over is one of the things that can happen.
#[cfg(loom)]
pub(super) fn park_timeout(_: std::time::Duration) {
    loom::thread::yield_now();
}
