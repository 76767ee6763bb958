//! Callbacks of nonblocking operations, such as waking a future. They must run outside the engine's lock.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};

/// Code of the user: it calls a callback, wakes an async task or drops a buffer.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// The callbacks of one group, and the number of its nonblocking operations that are pending.
#[derive(Default)]
pub(crate) struct CallbackQueue {
    pending_operations: AtomicUsize,
    has_queued: AtomicBool,
    list: Mutex<Vec<Callback>>,
}

impl CallbackQueue {
    /// Counts one more pending nonblocking operation.
    pub(super) fn add_operation(&self) {
        self.pending_operations.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one pending nonblocking operation less, and queues its callbacks.
    pub(super) fn finish_operation(&self, callbacks: impl Iterator<Item = Callback>) {
        let mut callbacks = callbacks.peekable();
        if callbacks.peek().is_some() {
            self.list().extend(callbacks);
            self.has_queued.store(true, Ordering::SeqCst);
        }
        self.pending_operations.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns the number of nonblocking operations that are pending.
    pub(super) fn pending_operations(&self) -> usize {
        self.pending_operations.load(Ordering::SeqCst)
    }

    /// Returns whether callbacks are queued: the thread that drives the engine should stop and run them.
    pub(crate) fn has_queued(&self) -> bool {
        self.has_queued.load(Ordering::Relaxed)
    }

    /// Runs the queued callbacks. Returns whether none panicked. If one panics, the rest still run.
    pub(crate) fn run(&self) -> bool {
        if !self.has_queued() || !self.has_queued.swap(false, Ordering::SeqCst) {
            return true;
        }
        let callbacks = std::mem::take(&mut *self.list());
        let panics =
            callbacks.into_iter().filter_map(|callback| catch_unwind(AssertUnwindSafe(callback)).err());
        panics.count() == 0
    }

    fn list(&self) -> MutexGuard<'_, Vec<Callback>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for CallbackQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallbackQueue").field("pending", &self.pending_operations()).finish_non_exhaustive()
    }
}
