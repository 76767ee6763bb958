//! The outcome of an operation, and the threads, futures and callbacks that are notified when it is set.

use std::mem::take;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use smallvec::SmallVec;

use super::callbacks::{Callback, CallbackQueue};
use super::sync::{AtomicBool, Mutex, MutexGuard, Ordering, PoisonError, Thread, current};
use crate::collectives::call::Status;
use crate::error::CommError;
use crate::flight::CallRecord;

/// Time before a call's deadline at which this rank asks the other ranks which calls they wait in. It is a
/// quarter of the call's timeout if that is less.
pub(super) const QUERY_LEAD_TIME: Duration = Duration::from_millis(500);

/// The result of an operation; a receive or a probe also returns the status of its message.
pub(crate) type Outcome = Result<Option<Status>, CommError>;

/// The timeout of an operation, and its start time if the clock has been read. An operation that need not
/// wait does not read the clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeLimit {
    timeout: Duration,
    since: Option<Instant>,
}

impl From<Duration> for TimeLimit {
    fn from(timeout: Duration) -> Self {
        Self { timeout, since: None }
    }
}

impl TimeLimit {
    /// Returns the limit with a start time: now, if it has none.
    pub(crate) fn started(self) -> Self {
        Self { since: Some(self.started_at()), ..self }
    }

    /// Returns the start time: now, if none is set.
    pub(crate) fn started_at(self) -> Instant {
        self.since.unwrap_or_else(Instant::now)
    }

    /// Returns the timeout.
    #[cfg(feature = "nccl")]
    pub(crate) fn timeout(self) -> Duration {
        self.timeout
    }

    /// Returns the time at which the timeout expires.
    pub(crate) fn deadline(self) -> Instant {
        // A timeout of "for ever" is cut to 100 years, so that the clock does not overflow.
        self.started_at() + self.timeout.min(Duration::from_secs(100 * 365 * 86_400))
    }
}

/// The completion state of an operation: the driving thread sets the outcome once, the caller takes it once.
#[derive(Debug)]
pub(crate) struct Completion {
    pub(crate) timeout: Duration,
    pub(crate) started_at: Instant,
    pub(crate) deadline: Instant,
    done: AtomicBool,
    state: Mutex<State>,
    /// A descriptor that becomes readable when the operation is done; made when a caller first asks for it.
    descriptor: OnceLock<EventFd>,
    /// The callback queue of a nonblocking operation. Callbacks run outside the engine's lock.
    callback_queue: Option<Arc<CallbackQueue>>,
    /// The flight recorder's entry of the operation; it is set when the engine has recorded the operation.
    pub(crate) step: OnceLock<CallRecord>,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    /// Threads that wait for the operation. There may be two if its handle was moved out of the
    /// `Group::scope` that began it.
    waiters: SmallVec<[Thread; 1]>,
    waker: Option<Waker>,
    callbacks: Vec<Callback>,
    /// The operation's handle was dropped: any other owner of the completion may take the outcome.
    detached: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

impl Completion {
    /// Makes a completion for an operation that a caller waits for.
    pub(crate) fn new(limit: impl Into<TimeLimit>) -> Self {
        Self::of(limit.into(), None)
    }

    /// Makes a completion for a nonblocking operation, for which no caller need wait.
    pub(crate) fn nonblocking(limit: impl Into<TimeLimit>, callback_queue: Arc<CallbackQueue>) -> Self {
        callback_queue.add_operation();
        Self::of(limit.into(), Some(callback_queue))
    }

    fn of(limit: TimeLimit, callback_queue: Option<Arc<CallbackQueue>>) -> Self {
        let limit = limit.started();
        let (done, state) = (AtomicBool::new(false), Mutex::new(State::default()));
        let (descriptor, step) = (OnceLock::new(), OnceLock::new());
        let (timeout, started_at, deadline) = (limit.timeout, limit.started_at(), limit.deadline());
        Self { timeout, started_at, deadline, done, state, descriptor, callback_queue, step }
    }

    pub(super) fn query_lead_time(&self) -> Duration {
        QUERY_LEAD_TIME.min(self.timeout / 4)
    }

    /// Returns when to ask the other ranks which calls they wait in, if this call is still pending then.
    pub(super) fn query_at(&self) -> Instant {
        self.deadline - self.query_lead_time()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the outcome and notifies all waiters; later calls do nothing. The engine must no longer use the
    /// operation's memory.
    pub(crate) fn complete(&self, outcome: Outcome) {
        let mut state = self.state();
        if self.is_done() {
            return;
        }
        if let Some(step) = self.step.get() {
            step.end(outcome.is_ok());
        }
        state.outcome = Some(outcome);
        let State { waiters, waker, callbacks, .. } = &mut *state;
        let (waiters, waker, callbacks) = (take(waiters), take(waker), take(callbacks));
        self.done.store(true, Ordering::SeqCst);
        drop(state);
        for waiter in waiters {
            waiter.unpark();
        }
        if let Some(descriptor) = self.descriptor.get() {
            let _ = descriptor.write(1);
        }
        if let Some(callback_queue) = &self.callback_queue {
            let waker = waker.map(|waker| Box::new(move || waker.wake()) as Callback);
            callback_queue.finish_operation(callbacks.into_iter().chain(waker));
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    /// Returns whether the operation is done and its outcome was taken.
    pub(crate) fn is_taken(&self) -> bool {
        self.is_done() && self.state().outcome.is_none()
    }

    /// Takes the outcome; `None` if the operation is not done or its outcome was taken before.
    pub(crate) fn take(&self) -> Option<Outcome> {
        if self.is_done() { self.state().outcome.take() } else { None }
    }

    /// Registers this thread to be unparked on completion. Returns `false` if the operation is done already.
    pub(crate) fn register_thread(&self) -> bool {
        let (mut state, me) = (self.state(), current());
        if state.waiters.iter().all(|known| known.id() != me.id()) {
            state.waiters.push(me);
        }
        !self.is_done()
    }

    /// Returns whether a thread has waited for the operation, or a future for it was polled.
    pub(super) fn is_awaited(&self) -> bool {
        let state = self.state();
        !state.waiters.is_empty() || state.waker.is_some()
    }

    /// Registers `waker` to be woken on completion. Returns `false` if the operation is done already.
    pub(crate) fn register_waker(&self, waker: &Waker) -> bool {
        // The waker is cloned, and the old one dropped, outside the lock, because that is code of the user.
        let waker = waker.clone();
        let mut state = self.state();
        let (_before, waits) = (state.waker.replace(waker), !self.is_done());
        drop(state);
        waits
    }

    /// Registers `callback` to be called on completion. Returns the callback if the operation is done
    /// already. The buffers of an operation whose handle was dropped are kept by a callback that drops them.
    pub(crate) fn on_complete(&self, callback: Callback) -> Result<(), Callback> {
        let mut state = self.state();
        if self.is_done() {
            return Err(callback);
        }
        state.callbacks.push(callback);
        Ok(())
    }

    /// Records that the operation's handle was dropped.
    pub(crate) fn detach(&self) {
        self.state().detached = true;
    }

    /// Takes the outcome if the operation's handle was dropped: no owner of the handle will take it.
    pub(crate) fn take_if_detached(&self) -> Option<Outcome> {
        if self.state().detached { self.take() } else { None }
    }

    /// Returns a descriptor that is readable as soon as the operation is done.
    pub(crate) fn descriptor(&self) -> Result<BorrowedFd<'_>, CommError> {
        let descriptor = match self.descriptor.get() {
            Some(descriptor) => descriptor,
            None => {
                let made = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                    .map_err(|error| CommError::system("cannot make an eventfd", error))?;
                self.descriptor.get_or_init(|| made)
            }
        };
        // This needs the lock: either `complete` finds the descriptor, or this thread finds that the
        // operation is done.
        let _state = self.state();
        if self.is_done() {
            let _ = descriptor.write(1);
        }
        Ok(descriptor.as_fd())
    }
}
