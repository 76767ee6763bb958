//! The outcome of an operation, and who is told of it.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use smallvec::SmallVec;

use super::chores::{Chore, Chores};
use super::sync::{AtomicBool, Mutex, MutexGuard, Ordering, PoisonError, Thread, current};
use crate::call::Envelope;
use crate::error::CommError;
use crate::flight::Step;

/// How an operation ended; a message tells what it was.
pub(crate) type Outcome = Result<Option<Envelope>, CommError>;

/// How long an operation may take, and since when, if that is known yet: one that waits for nothing need not
/// read the clock for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    timeout: Duration,
    since: Option<Instant>,
}

impl From<Duration> for Limit {
    fn from(timeout: Duration) -> Self {
        Self { timeout, since: None }
    }
}

impl Limit {
    /// The same, from now on if it has not begun.
    pub(crate) fn begun(self) -> Self {
        Self { since: Some(self.made()), ..self }
    }

    /// When it began: now, if it had not yet.
    fn made(self) -> Instant {
        self.since.unwrap_or_else(Instant::now)
    }

    /// How long it is.
    #[cfg(feature = "nccl")]
    pub(crate) fn timeout(self) -> Duration {
        self.timeout
    }

    /// When it is over.
    pub(crate) fn deadline(self) -> Instant {
        // "For ever" is far enough away, but must not overflow the clock.
        self.made() + self.timeout.min(Duration::from_secs(100 * 365 * 86_400))
    }
}

/// Set once by whoever drives the engine, taken once by the caller.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) timeout: Duration,
    pub(crate) made: Instant,
    pub(crate) deadline: Instant,
    done: AtomicBool,
    state: Mutex<State>,
    /// Becomes readable when it is done, once somebody has asked for it.
    descriptor: OnceLock<EventFd>,
    /// Of a nonblocking operation: what is to be done for its owner outside the engine's lock.
    chores: Option<Arc<Chores>>,
    /// What the flight recorder knows it by, once the engine has it.
    pub(crate) step: OnceLock<Step>,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    /// Of a handle that was moved out of its scope, there may be two.
    waiters: SmallVec<[Thread; 1]>,
    waker: Option<Waker>,
    callbacks: Vec<Chore>,
    /// What nobody waits for any more, but the engine still works on.
    keep: Option<Box<dyn Any + Send>>,
    /// Its handle was dropped: whoever else has it may take the outcome.
    dropped: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

impl Ticket {
    /// A ticket for an operation that somebody waits for.
    pub(crate) fn new(limit: impl Into<Limit>) -> Self {
        Self::of(limit.into(), None)
    }

    /// A ticket for an operation that nobody need wait for.
    pub(crate) fn nonblocking(limit: impl Into<Limit>, chores: Arc<Chores>) -> Self {
        chores.begin();
        Self::of(limit.into(), Some(chores))
    }

    fn of(limit: Limit, chores: Option<Arc<Chores>>) -> Self {
        let limit = limit.begun();
        let (done, state) = (AtomicBool::new(false), Mutex::new(State::default()));
        let (descriptor, step) = (OnceLock::new(), OnceLock::new());
        let (timeout, made, deadline) = (limit.timeout, limit.made(), limit.deadline());
        Self { timeout, made, deadline, done, state, descriptor, chores, step }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the outcome; later ones are ignored. The engine must have let go of the operation's memory.
    pub(crate) fn complete(&self, outcome: Outcome) {
        let mut state = self.state();
        if self.is_done() {
            return;
        }
        if let Some(step) = self.step.get() {
            step.end(outcome.is_ok());
        }
        state.outcome = Some(outcome);
        let (waiters, waker) = (std::mem::take(&mut state.waiters), state.waker.take());
        let (callbacks, keep) = (std::mem::take(&mut state.callbacks), state.keep.take());
        self.done.store(true, Ordering::SeqCst);
        drop(state);
        for waiter in waiters {
            waiter.unpark();
        }
        if let Some(descriptor) = self.descriptor.get() {
            let _ = descriptor.write(1);
        }
        if let Some(chores) = &self.chores {
            let waker = waker.map(|waker| Box::new(move || waker.wake()) as Chore);
            let keep = keep.map(|keep| Box::new(move || drop(keep)) as Chore);
            chores.end(callbacks.into_iter().chain(waker).chain(keep));
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    /// Whether it is done and somebody has its outcome.
    pub(crate) fn is_taken(&self) -> bool {
        self.is_done() && self.state().outcome.is_none()
    }

    /// The outcome, once.
    pub(crate) fn take(&self) -> Option<Outcome> {
        if self.is_done() { self.state().outcome.take() } else { None }
    }

    /// Has this thread unparked when it is done; `false` if it is.
    pub(crate) fn unpark_me(&self) -> bool {
        let (mut state, me) = (self.state(), current());
        if state.waiters.iter().all(|known| known.id() != me.id()) {
            state.waiters.push(me);
        }
        !self.is_done()
    }

    /// Whether a thread sleeps for it, or a future was polled.
    pub(super) fn is_awaited(&self) -> bool {
        let state = self.state();
        !state.waiters.is_empty() || state.waker.is_some()
    }

    /// Has `waker` woken when it is done; `false` if it is.
    pub(crate) fn wake(&self, waker: &Waker) -> bool {
        // Copied, and the one before dropped, outside the lock: that is code which is not ours.
        let waker = waker.clone();
        let (before, waits) = {
            let mut state = self.state();
            (state.waker.replace(waker), !self.is_done())
        };
        drop(before);
        waits
    }

    /// Has `callback` called when it is done; gives it back if it is.
    pub(crate) fn call(&self, callback: Chore) -> Result<(), Chore> {
        let mut state = self.state();
        if self.is_done() {
            return Err(callback);
        }
        state.callbacks.push(callback);
        Ok(())
    }

    /// Its handle was dropped.
    pub(crate) fn drop_handle(&self) {
        self.state().dropped = true;
    }

    /// The outcome that nobody else will ask for, once.
    pub(crate) fn take_dropped(&self) -> Option<Outcome> {
        if self.state().dropped { self.take() } else { None }
    }

    /// Keeps what the operation works on until it is done; gives it back if it is.
    pub(crate) fn keep(&self, what: Box<dyn Any + Send>) -> Result<(), Box<dyn Any + Send>> {
        let mut state = self.state();
        if self.is_done() {
            return Err(what);
        }
        state.keep = Some(what);
        Ok(())
    }

    /// A descriptor that is readable as soon as it is done.
    pub(crate) fn descriptor(&self) -> Result<BorrowedFd<'_>, CommError> {
        let descriptor = match self.descriptor.get() {
            Some(descriptor) => descriptor,
            None => {
                let made = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                    .map_err(|error| CommError::system("cannot make an eventfd", error))?;
                self.descriptor.get_or_init(|| made)
            }
        };
        // With the lock: either `complete` finds the descriptor, or we find that it is done.
        let state = self.state();
        if self.is_done() {
            let _ = descriptor.write(1);
        }
        drop(state);
        Ok(descriptor.as_fd())
    }
}
