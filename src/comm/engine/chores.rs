//! What is to be done for the owners of nonblocking operations, outside the engine's lock.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};

/// Calls a callback, wakes a task, drops a buffer: code that is not ours.
pub(crate) type Chore = Box<dyn FnOnce() + Send>;

/// The chores of one group, and how many of its nonblocking operations are not done.
#[derive(Default)]
pub(crate) struct Chores {
    pending: AtomicUsize,
    any: AtomicBool,
    list: Mutex<Vec<Chore>>,
}

impl Chores {
    /// One more nonblocking operation.
    pub(super) fn begin(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
    }

    /// One less, and what is to be done now.
    pub(super) fn end(&self, chores: impl Iterator<Item = Chore>) {
        let mut list = self.list();
        list.extend(chores);
        let any = !list.is_empty();
        drop(list);
        if any {
            self.any.store(true, Ordering::SeqCst);
        }
        self.pending.fetch_sub(1, Ordering::SeqCst);
    }

    /// Number of nonblocking operations that are not done.
    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::SeqCst)
    }

    /// Whether somebody should leave the engine and do them.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Does them; whether all went well. One that panics harms nobody else.
    pub(crate) fn run(&self) -> bool {
        if !self.any() || !self.any.swap(false, Ordering::SeqCst) {
            return true;
        }
        let chores = std::mem::take(&mut *self.list());
        let panics = chores.into_iter().filter_map(|chore| catch_unwind(AssertUnwindSafe(chore)).err());
        panics.count() == 0
    }

    fn list(&self) -> MutexGuard<'_, Vec<Chore>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Chores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chores").field("pending", &self.pending()).finish_non_exhaustive()
    }
}
