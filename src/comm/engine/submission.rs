//! The submission queue: tasks and abort requests for the thread that drives the engine.

use std::sync::Arc;

use super::exclusive::Flags;
use super::mux::Doorbell;
use super::sync::{AtomicBool, Mutex, MutexGuard, Ordering, PoisonError, Thread, current, fence};

#[derive(Debug)]
pub(crate) struct SubmissionQueue<T, B> {
    entries: Mutex<Submissions<T>>,
    /// The progress lock, and flags that describe `entries`, so that readers need no other lock. `entries` may have
    /// tasks or an abort ([`HAS_SUBMISSIONS`]), and threads that wait for the progress lock ([`HAS_LOCK_WAITERS`]).
    flags: Arc<Flags>,
    /// The thread that drives the engine sleeps, so a new request must ring the doorbell.
    asleep: AtomicBool,
    doorbell: B,
}

const HAS_SUBMISSIONS: usize = Flags::FIRST;
const HAS_LOCK_WAITERS: usize = 2 * Flags::FIRST;

/// Why a thread asks to end the group.
#[derive(Debug)]
pub(super) enum AbortReason {
    Given(String),
    /// The program of a thread that waits was [interrupted](convoke_store::interrupt).
    Interrupted,
}

#[derive(Debug)]
pub(super) struct Submissions<T> {
    pub(super) tasks: Vec<T>,
    pub(super) abort: Option<AbortReason>,
    /// Threads that wait for the progress lock.
    lock_waiters: Vec<Thread>,
}

impl<T, B: Doorbell> SubmissionQueue<T, B> {
    pub(super) fn with_doorbell(doorbell: B) -> Self {
        let entries = Submissions { tasks: Vec::new(), abort: None, lock_waiters: Vec::new() };
        Self { entries: Mutex::new(entries), flags: Flags::new(), asleep: AtomicBool::new(false), doorbell }
    }

    /// Returns the flags, which have the progress lock.
    pub(super) fn flags(&self) -> Arc<Flags> {
        Arc::clone(&self.flags)
    }

    pub(super) fn entries(&self) -> MutexGuard<'_, Submissions<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request, which `write` adds, and wakes the thread that drives the engine.
    pub(super) fn post(&self, write: impl FnOnce(&mut Submissions<T>)) {
        write(&mut self.entries());
        self.flags.set(HAS_SUBMISSIONS);
        self.wake_driver();
    }

    /// Wakes the thread that drives the engine, if it sleeps.
    pub(super) fn wake_driver(&self) {
        // This fence pairs with that of `prepare_sleep`: this thread sees that the driving thread sleeps, or
        // the driving thread sees the request.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.doorbell.ring();
        }
    }

    /// Returns whether a task or an abort request is queued.
    pub(super) fn has_submissions(&self) -> bool {
        self.flags.get() & HAS_SUBMISSIONS != 0
    }

    /// Takes the queued tasks and the reason of an abort, if there are any.
    pub(super) fn collect(&self) -> Option<(Vec<T>, Option<AbortReason>)> {
        if !self.has_submissions() || !self.flags.clear(HAS_SUBMISSIONS) {
            return None;
        }
        let mut entries = self.entries();
        Some((std::mem::take(&mut entries.tasks), entries.abort.take()))
    }

    /// Announces that the driving thread is about to sleep. Returns whether it may: no request is queued, and
    /// `wanted` returns `false`. `wanted` is evaluated after the announcement. So a thread that changes its
    /// result and then calls [`Self::wake_driver`] wakes the driving thread.
    pub(super) fn prepare_sleep(&self, wanted: impl FnOnce() -> bool) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        !self.has_submissions() && !wanted()
    }

    pub(super) fn end_sleep(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Queues this thread to be woken when the progress lock is free. The caller must try the lock once more
    /// after this call: the lock may be free already. (If the thread that released it did not see the flag,
    /// it released it before the flag was set, so this thread sees the lock free.)
    pub(super) fn queue_for_lock(&self) {
        self.entries().lock_waiters.push(current());
        self.flags.set(HAS_LOCK_WAITERS);
    }

    /// Announces that the progress lock is free: wakes the threads that wait for it. Returns whether requests
    /// are queued. From now on, a thread that queues a request finds the lock free.
    pub(super) fn lock_released(&self) -> bool {
        // The release of the lock changed this word. So a flag that was set before is seen here, and a thread that sets
        // one later finds the lock free.
        let flags = self.flags.get();
        if flags & HAS_LOCK_WAITERS != 0 {
            self.unpark_lock_waiters();
        }
        flags & HAS_SUBMISSIONS != 0
    }

    #[cold]
    fn unpark_lock_waiters(&self) {
        let mut entries = self.entries();
        self.flags.clear(HAS_LOCK_WAITERS);
        let lock_waiters = std::mem::take(&mut entries.lock_waiters);
        drop(entries);
        lock_waiters.iter().for_each(Thread::unpark);
    }
}
