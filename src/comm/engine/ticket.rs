//! The outcome of a task, and the thread that waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::error::CommError;

/// Set once by whoever drives the engine, taken once by the caller.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(super) timeout: Duration,
    pub(super) deadline: Instant,
    done: AtomicBool,
    outcome: Mutex<Option<Result<(), CommError>>>,
    owner: Thread,
}

impl Ticket {
    /// A ticket of the calling thread, which waits at most `timeout` from now.
    pub(super) fn new(timeout: Duration) -> Self {
        let now = Instant::now();
        // "For ever" is far enough away, but must not overflow the clock.
        let deadline = now + timeout.min(Duration::from_secs(100 * 365 * 86_400));
        let (done, outcome) = (AtomicBool::new(false), Mutex::new(None));
        Self { timeout, deadline, done, outcome, owner: std::thread::current() }
    }

    /// Sets the outcome; later ones are ignored. The engine must have let go of the task's memory.
    pub(super) fn complete(&self, outcome: Result<(), CommError>) {
        let mut slot = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_done() {
            return;
        }
        *slot = Some(outcome);
        drop(slot);
        self.done.store(true, Ordering::Release);
        if self.owner.id() != std::thread::current().id() {
            self.owner.unpark();
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(super) fn take(&self) -> Option<Result<(), CommError>> {
        if !self.is_done() {
            return None;
        }
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
