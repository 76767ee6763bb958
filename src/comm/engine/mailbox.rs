//! What threads tell the one that drives the engine.

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
    /// What `letters` holds, which saves the lock: tasks or an abort ([`LETTERS`]), threads that wait for the seat
    /// ([`QUEUED`]). Above these bits: how often the seat was left.
    notes: AtomicUsize,
    /// Whether the driver sleeps and the bell must be rung.
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
    /// Threads that wait for the seat.
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

    /// Leaves something for the driver.
    pub(super) fn post(&self, write: impl FnOnce(&mut Letters<T>)) {
        write(&mut self.letters());
        self.notes.fetch_or(LETTERS, Ordering::SeqCst);
        self.rouse();
    }

    /// Has a driver that sleeps look around.
    pub(super) fn rouse(&self) {
        // Together with that of `fall_asleep`: either we see that it sleeps, or it sees what we have written.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.bell.ring();
        }
    }

    /// Whether anything was left that nobody has taken.
    pub(super) fn has_letters(&self) -> bool {
        self.notes.load(Ordering::SeqCst) & LETTERS != 0
    }

    /// Tasks and the reason of an abort, if any came.
    pub(super) fn collect(&self) -> Option<(Vec<T>, Option<String>)> {
        if !self.has_letters() || self.notes.fetch_and(!LETTERS, Ordering::SeqCst) & LETTERS == 0 {
            return None;
        }
        let mut letters = self.letters();
        Some((std::mem::take(&mut letters.tasks), letters.abort.take()))
    }

    /// Announces that the driver is about to sleep; whether it may. `wanted` is looked at after the
    /// announcement, so whoever changes what it says and then [rouses](Self::rouse) is not missed.
    pub(super) fn fall_asleep(&self, wanted: impl FnOnce() -> bool) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        !self.has_letters() && !wanted()
    }

    pub(super) fn wake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Has this thread woken when the seat is free. It must look once more after this: it may be free already. (If who
    /// has left it did not see the note, it changed it before this thread did, which so sees the seat free.)
    pub(super) fn queue(&self) {
        self.letters().waiting.push(current());
        self.notes.fetch_or(QUEUED, Ordering::SeqCst);
    }

    /// Tells that the seat is free: wakes the threads that wait for it. Whether there are letters that nobody has
    /// taken: from now on who leaves one finds the seat free.
    pub(super) fn leave(&self) -> bool {
        // Always a change, which costs less than a fence.
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
