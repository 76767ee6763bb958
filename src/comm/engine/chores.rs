//! Completions: work for the owners of nonblocking operations that must run outside the engine's lock.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};

/// Code of the user: it calls a callback, wakes a task or drops a buffer.
pub(crate) type Chore = Box<dyn FnOnce() + Send>;

/// The completions of one group, and the number of its nonblocking operations that are pending.
#[derive(Default)]
pub(crate) struct Chores {
    pending: AtomicUsize,
    any: AtomicBool,
    list: Mutex<Vec<Chore>>,
}

impl Chores {
    /// Counts one more pending nonblocking operation.
    pub(super) fn begin(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one pending operation less, and queues its completions.
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

    /// Returns the number of nonblocking operations that are pending.
    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::SeqCst)
    }

    /// Returns whether completions are queued, so that a thread should leave the engine and run them.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Runs the queued completions. Returns whether none panicked. The others run even if one panics.
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
