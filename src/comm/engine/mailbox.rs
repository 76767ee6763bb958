//! The submission queue: requests of other threads to the one that drives the engine.

use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Task;
use super::sync::{
    AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, Thread, current, fence,
};

/// Wakes a driver that sleeps.
pub(crate) trait Bell {
    fn ring(&self);
}

impl Bell for EventFd {
    fn ring(&self) {
        let _ = self.write(1);
    }
}

#[derive(Debug)]
pub(crate) struct Mailbox<T = Task, B = EventFd> {
    letters: Mutex<Letters<T>>,
    /// Flags for the content of `letters`, so that readers need no lock: tasks or an abort ([`LETTERS`]),
    /// threads that wait for the progress lock ([`QUEUED`]). The higher bits count how often the lock was
    /// released.
    notes: AtomicUsize,
    /// The driver sleeps, so the doorbell must be rung.
    asleep: AtomicBool,
    bell: B,
}

const LETTERS: usize = 1;
const QUEUED: usize = 2;
const LEFT: usize = 4;

#[derive(Debug)]
pub(super) struct Letters<T> {
    pub(super) tasks: Vec<T>,
    pub(super) abort: Option<String>,
    /// Threads that wait for the progress lock.
    waiting: Vec<Thread>,
}

impl Mailbox {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self::with_bell(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(super) fn silence(&self) {
        let _ = self.bell.read();
    }
}

impl<T, B: Bell> Mailbox<T, B> {
    pub(super) fn with_bell(bell: B) -> Self {
        let letters = Letters { tasks: Vec::new(), abort: None, waiting: Vec::new() };
        let (notes, asleep) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { letters: Mutex::new(letters), notes, asleep, bell }
    }

    pub(super) fn letters(&self) -> MutexGuard<'_, Letters<T>> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request for the driver.
    pub(super) fn post(&self, write: impl FnOnce(&mut Letters<T>)) {
        write(&mut self.letters());
        self.notes.fetch_or(LETTERS, Ordering::SeqCst);
        self.rouse();
    }

    /// Wakes a driver that sleeps.
    pub(super) fn rouse(&self) {
        // This fence pairs with that of `fall_asleep`: either this thread sees that the driver sleeps, or the
        // driver sees the request.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.bell.ring();
        }
    }

    /// Returns whether a request is queued.
    pub(super) fn has_letters(&self) -> bool {
        self.notes.load(Ordering::SeqCst) & LETTERS != 0
    }

    /// Takes the queued tasks and the reason of an abort, if there are any.
    pub(super) fn collect(&self) -> Option<(Vec<T>, Option<String>)> {
        if !self.has_letters() || self.notes.fetch_and(!LETTERS, Ordering::SeqCst) & LETTERS == 0 {
            return None;
        }
        let mut letters = self.letters();
        Some((std::mem::take(&mut letters.tasks), letters.abort.take()))
    }

    /// Announces that the driver is about to sleep. Returns whether it may. `wanted` is evaluated after the
    /// announcement, so a thread that changes its result and then [rouses](Self::rouse) is not missed.
    pub(super) fn fall_asleep(&self, wanted: impl FnOnce() -> bool) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        !self.has_letters() && !wanted()
    }

    pub(super) fn wake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Queues this thread to be woken when the progress lock is free. The caller must try the lock once more
    /// after this: it may be free already. (If the thread that released it did not see the flag, it released
    /// it before the flag was set, so this thread sees the lock free.)
    pub(super) fn queue(&self) {
        self.letters().waiting.push(current());
        self.notes.fetch_or(QUEUED, Ordering::SeqCst);
    }

    /// Announces that the progress lock is free: wakes a thread that waits for it. Returns whether requests
    /// are queued. From now on, a thread that queues a request finds the lock free.
    pub(super) fn leave(&self) -> bool {
        // The counter changes each time, so that no fence is needed; this costs less.
        let notes = self.notes.fetch_add(LEFT, Ordering::SeqCst);
        if notes & QUEUED != 0 {
            self.call_next();
        }
        notes & LETTERS != 0
    }

    #[cold]
    fn call_next(&self) {
        let mut letters = self.letters();
        self.notes.fetch_and(!QUEUED, Ordering::SeqCst);
        let waiting = std::mem::take(&mut letters.waiting);
        drop(letters);
        waiting.iter().for_each(Thread::unpark);
    }
}
