//! The progress lock. Only the thread that holds it drives the engine: it runs tasks, moves data and sleeps.
//! That is a thread that waits for an operation, or else a background thread.
//!
//! A call queues its task and tries to take the progress lock. The thread that has the lock drives all tasks
//! until its own is done. Other callers sleep until their task is done or the lock is free. The background
//! thread exists from the first nonblocking operation on. It never spins, but may yield
//! ([`wait_policy`](super::wait_policy)). It releases the lock when a caller asks for it, and takes it again when
//! no caller has taken it for a while.

use std::fmt::Debug;
use std::io;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::callbacks::CallbackQueue;
use super::completion::Completion;
use super::exclusive::{Exclusive, ExclusiveGuard};
use super::mux::Doorbell;
use super::submission::{AbortReason, SubmissionQueue};
use super::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, park, park_timeout};

/// Time during which no caller may have taken the progress lock before the background thread takes it. A
/// thread that begins an operation often waits for it next, and a handover of the lock costs two wake-ups.
const BACKGROUND_DELAY: Duration = Duration::from_micros(300);
const PANICKED: &str = "a callback panicked";

/// What the progress lock needs of an engine. Model tests use a simple engine instead of the real one.
pub(crate) trait Drive: Debug + Send + 'static {
    type Task: Debug + Send;
    type Doorbell: Debug + Doorbell + Send + Sync;

    /// Runs tasks until `goal` is reached.
    fn drive(&mut self, goal: &Goal<'_>);

    /// Takes all tasks and abort requests from the submission queue, and starts the tasks.
    fn collect(&mut self);

    /// Takes all tasks and abort requests from the submission queue, and moves data without waiting.
    fn poll_once(&mut self);

    /// Handles a panic of the thread that drove the engine: ends all tasks, whose memory must not be touched
    /// again. It may be called more than once.
    fn on_panic(&mut self);
}

/// The condition at which a thread stops driving (running) the engine and releases the progress lock.
#[derive(Debug)]
pub(crate) struct Goal<'a> {
    /// The thread stops driving when one of these is done. The list of the background thread is empty: it
    /// stops when no nonblocking operation is pending.
    pub(super) completions: &'a [Arc<Completion>],
    pub(super) until: Option<Instant>,
    callback_queue: &'a CallbackQueue,
    /// Number of callers that wait for the progress lock.
    callers: &'a AtomicUsize,
    closing: &'a AtomicBool,
}

impl Goal<'_> {
    pub(super) fn is_reached(&self) -> bool {
        self.completions.iter().any(|completion| completion.is_done())
            || self.should_release()
            || self.callback_queue.has_queued()
    }

    /// Returns whether the background thread drives the engine and must release the progress lock: no
    /// operation is pending, a caller waits for the lock, or the group is being closed.
    pub(super) fn should_release(&self) -> bool {
        let requested = || self.callers.load(Ordering::SeqCst) > 0 || self.closing.load(Ordering::SeqCst);
        self.is_background() && (self.callback_queue.pending_operations() == 0 || requested())
    }

    /// Returns whether the thread that drives (runs) the engine is the background thread. Then no caller
    /// waits for an operation, and spinning would only take a core from other threads.
    pub(super) fn is_background(&self) -> bool {
        self.completions.is_empty()
    }
}

/// An engine that callers and one background thread share.
#[derive(Debug)]
pub(crate) struct Shared<E: Drive> {
    inner: Arc<Inner<E>>,
    background: Mutex<Option<JoinHandle<()>>>,
}

impl<E: Drive> Shared<E> {
    pub(crate) fn of(engine: E, submissions: Arc<SubmissionQueue<E::Task, E::Doorbell>>) -> Self {
        Self { inner: Arc::new(Inner::new(engine, submissions)), background: Mutex::new(None) }
    }

    /// Starts the background thread if there is none, for operations that no caller waits for.
    pub(crate) fn ensure_background(&self) -> io::Result<()> {
        let mut background = self.background();
        if background.is_none() {
            let inner = Arc::clone(&self.inner);
            let thread = thread::Builder::new().name("convoke-comm".to_owned());
            *background = Some(thread.spawn(move || inner.background())?);
        }
        Ok(())
    }

    /// Starts the queued tasks and moves data that can move without waiting, unless another thread holds the
    /// progress lock. Leaves the rest to the background thread.
    pub(crate) fn poll_once(&self) {
        self.inner.poll_once(|| self.background().iter().for_each(|background| background.thread().unpark()));
    }

    /// Stops the background thread, and then calls `last` with the engine.
    pub(crate) fn close(&self, last: impl FnOnce(&mut E)) {
        let background = self.background().take();
        self.inner.close(|| background.iter().for_each(|background| background.thread().unpark()));
        // If a callback drops the last handle of the group, this is the background thread. It cannot join
        // itself, and ends after the callback.
        if let Some(background) = background.filter(|other| other.thread().id() != thread::current().id()) {
            let _ = background.join();
        }
        self.inner.with_engine(last);
    }

    fn background(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.background.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E: Drive> Deref for Shared<E> {
    type Target = Inner<E>;

    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

/// The engine, its submission queue, and the state by which threads agree which of them runs the engine.
#[derive(Debug)]
pub(crate) struct Inner<E: Drive> {
    progress_lock: Exclusive<E>,
    submissions: Arc<SubmissionQueue<E::Task, E::Doorbell>>,
    callback_queue: Arc<CallbackQueue>,
    /// Number of callers that wait for the progress lock.
    callers: AtomicUsize,
    closing: AtomicBool,
    /// The number of times that callers took the progress lock. By it the background thread sees whether they
    /// drive.
    acquisitions: AtomicUsize,
    /// True while the background thread sleeps without a timeout because no nonblocking operation is pending.
    idle: AtomicBool,
}

impl<E: Drive> Inner<E> {
    pub(super) fn new(engine: E, submissions: Arc<SubmissionQueue<E::Task, E::Doorbell>>) -> Self {
        Self {
            progress_lock: Exclusive::new(engine, submissions.flags()),
            submissions,
            callback_queue: Arc::default(),
            callers: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            acquisitions: AtomicUsize::new(0),
            idle: AtomicBool::new(false),
        }
    }

    pub(crate) fn callback_queue(&self) -> &Arc<CallbackQueue> {
        &self.callback_queue
    }

    /// Queues a task for the thread that drives the engine, without waiting.
    pub(crate) fn post(&self, task: E::Task) {
        self.submissions.post(|entries| entries.tasks.push(task));
    }

    pub(super) fn poll_once(&self, wake_background: impl FnOnce()) {
        if let Some(mut driver) = self.try_drive() {
            driver.run(E::poll_once);
        }
        self.run_callbacks();
        if self.callback_queue.pending_operations() > 0 && self.idle.swap(false, Ordering::SeqCst) {
            wake_background();
        }
    }

    /// Waits until one of `completions` (at least one) is done, at most until `until` if that is given.
    pub(crate) fn wait(&self, completions: &[Arc<Completion>], until: Option<Instant>) {
        let mut queued = None;
        loop {
            self.run_callbacks();
            if completions.iter().any(|completion| completion.is_done()) {
                return;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return;
            }
            let driver = self.try_drive().or_else(|| {
                queued.get_or_insert_with(|| WaitingCaller::new(self));
                self.submissions.queue_for_lock();
                self.try_drive()
            });
            match driver {
                Some(mut driver) => {
                    queued = None;
                    driver.run(|engine| engine.drive(&self.goal(completions, until)));
                }
                // The thread that has the lock wakes this one when its task is done or the lock is free.
                None if completions.iter().all(|completion| completion.register_thread()) => {
                    left.map_or_else(park, park_timeout)
                }
                None => {}
            }
        }
    }

    /// Ends the group for `reason`; any thread may call it.
    pub(crate) fn abort(&self, reason: String) {
        self.end_for(AbortReason::Given(reason));
    }

    /// Ends the group because the program of the calling thread was interrupted.
    pub(super) fn interrupt(&self) {
        self.end_for(AbortReason::Interrupted);
    }

    fn end_for(&self, reason: AbortReason) {
        self.request_end(reason);
        self.run_callbacks();
    }

    /// Queues the request to end the group. Carries it out unless another thread drives the engine.
    fn request_end(&self, reason: AbortReason) {
        self.submissions.post(|entries| entries.abort = Some(reason));
        if let Some(mut driver) = self.try_drive() {
            driver.run(E::collect);
        }
    }

    pub(super) fn close(&self, wake_background: impl FnOnce()) {
        self.closing.store(true, Ordering::SeqCst);
        self.submissions.wake_driver();
        wake_background();
    }

    /// The loop of the background thread; it ends when the group is closed.
    pub(super) fn background(&self) {
        let mut taken = None;
        while !self.closing.load(Ordering::SeqCst) {
            self.run_callbacks();
            // This is a swap, not a store. If it reads the `false` that another thread set in `poll_once`, it
            // also sees the operations that this other thread began before.
            self.idle.swap(true, Ordering::SeqCst);
            if self.callback_queue.pending_operations() == 0 {
                park();
                continue;
            }
            self.idle.store(false, Ordering::SeqCst);
            let now = Some(self.acquisitions.load(Ordering::Relaxed));
            if taken != now {
                taken = now;
                park_timeout(BACKGROUND_DELAY);
                continue;
            }
            self.submissions.queue_for_lock();
            if self.callers.load(Ordering::SeqCst) > 0 {
                park();
            } else if let Some(mut driver) = self.try_lock_engine() {
                // A panic has ended all tasks, so nothing is left to drive.
                let drive = move || driver.run(|engine| engine.drive(&self.goal(&[], None)));
                let _ = catch_unwind(AssertUnwindSafe(drive));
                continue;
            } else {
                park();
            }
            taken = None;
        }
        // Callbacks that were queued while this thread last drove run now: no other thread may come.
        self.run_callbacks();
    }

    /// Calls `function` with the engine, when no other thread holds the progress lock.
    pub(super) fn with_engine<R>(&self, function: impl FnOnce(&mut E) -> R) -> R {
        loop {
            if let Some(mut driver) = self.try_lock_engine() {
                return driver.run(function);
            }
            self.submissions.queue_for_lock();
            if let Some(mut driver) = self.try_lock_engine() {
                return driver.run(function);
            }
            park();
        }
    }

    /// Calls `function` with the engine if no other thread holds the progress lock; else returns `None`.
    pub(super) fn try_with_engine<R>(&self, function: impl FnOnce(&mut E) -> R) -> Option<R> {
        let mut driver = self.try_drive()?;
        Some(driver.run(function))
    }

    fn goal<'a>(&'a self, completions: &'a [Arc<Completion>], until: Option<Instant>) -> Goal<'a> {
        Goal {
            completions,
            until,
            callback_queue: &self.callback_queue,
            callers: &self.callers,
            closing: &self.closing,
        }
    }

    fn try_drive(&self) -> Option<DriverGuard<'_, E>> {
        let driver = self.try_lock_engine();
        if driver.is_some() {
            // Only the holder of the progress lock writes this counter, so a load and a store suffice.
            self.acquisitions
                .store(self.acquisitions.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
        driver
    }

    fn try_lock_engine(&self) -> Option<DriverGuard<'_, E>> {
        Some(DriverGuard { engine: self.progress_lock.try_lock()?, _wake_next: WakeNext(self) })
    }

    fn run_callbacks(&self) {
        if !self.callback_queue.run() {
            self.request_end(AbortReason::Given(PANICKED.to_owned()));
        }
    }
}

/// Counts a caller that found the progress lock taken, until it has the lock or needs it no more. While a
/// caller is counted, the background thread releases the lock.
struct WaitingCaller<'a, E: Drive>(&'a Inner<E>);

impl<'a, E: Drive> WaitingCaller<'a, E> {
    fn new(inner: &'a Inner<E>) -> Self {
        inner.callers.fetch_add(1, Ordering::SeqCst);
        inner.submissions.wake_driver();
        Self(inner)
    }
}

impl<E: Drive> Drop for WaitingCaller<'_, E> {
    fn drop(&mut self) {
        if self.0.callers.fetch_sub(1, Ordering::SeqCst) == 1 {
            // If this caller never took the lock, no other thread wakes the background thread, which waits
            // for the callers to finish.
            self.0.submissions.lock_released();
        }
    }
}

/// The engine, while this thread holds the progress lock and drives it. Fields are dropped in order: the lock
/// is released first, then the threads that wait for it are woken.
struct DriverGuard<'a, E: Drive> {
    engine: ExclusiveGuard<'a, E>,
    _wake_next: WakeNext<'a, E>,
}

impl<E: Drive> DriverGuard<'_, E> {
    /// Calls `function` with the engine. If it panics, the engine forgets all tasks before the unwinding
    /// frees their memory.
    fn run<R>(&mut self, function: impl FnOnce(&mut E) -> R) -> R {
        let on_unwind = ForgetTasks(&mut *self.engine);
        let result = function(&mut *on_unwind.0);
        std::mem::forget(on_unwind);
        result
    }
}

/// Makes the engine end all tasks when it is dropped, which happens only if the driving thread panics.
struct ForgetTasks<'a, E: Drive>(&'a mut E);

impl<E: Drive> Drop for ForgetTasks<'_, E> {
    fn drop(&mut self) {
        self.0.on_panic();
    }
}

/// Wakes the threads that wait for the progress lock when it is dropped, after the lock was released.
struct WakeNext<'a, E: Drive>(&'a Inner<E>);

impl<E: Drive> Drop for WakeNext<'_, E> {
    fn drop(&mut self) {
        // A thread that found the lock taken may have queued an abort after this thread last took requests.
        // No thread waits for an abort, so this thread must take it.
        if self.0.submissions.lock_released()
            && let Some(mut driver) = self.0.try_lock_engine()
        {
            driver.run(E::collect);
        }
    }
}
