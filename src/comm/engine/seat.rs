//! Progress: the thread that waits drives the engine, and a background thread drives operations nobody waits
//! for.
//!
//! A call queues its task and tries to take the progress lock. The thread that has the lock drives all tasks
//! until its own is done. The others sleep until their task is done or the lock is free. The background
//! thread exists from the first nonblocking operation on. It never spins, releases the lock when a caller
//! asks for it, and takes it again when no caller has taken it for a while.

use std::fmt::Debug;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::chores::Chores;
use super::mailbox::{Bell, Mailbox};
use super::sync::{
    AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, SeatGuard, SeatLock, TryLockError,
    park, park_timeout,
};
use super::ticket::Ticket;

/// Time for which the lock must have been free before the background thread takes it. A thread that begins an
/// operation often waits for it next, and a handover of the lock costs two wake-ups.
const QUIET: Duration = Duration::from_micros(300);
const PANICKED: &str = "a callback panicked";

/// The engine, as the progress lock sees it.
pub(crate) trait Drive: Debug + Send + 'static {
    type Task: Debug + Send;
    type Bell: Debug + Bell + Send + Sync;

    /// Runs tasks until `goal` is reached.
    fn drive(&mut self, goal: &Goal<'_>);

    /// Takes all requests from the submission queue.
    fn collect(&mut self);

    /// Takes all requests from the submission queue, and moves data that can move at once.
    fn nudge(&mut self);

    /// Handles a panic of the driving thread: no task may be touched again.
    fn forget_everything(&mut self);
}

/// The condition that ends a drive.
#[derive(Debug)]
pub(crate) struct Goal<'a> {
    /// The drive ends when one of these is done, or, if there are none, when nothing is pending.
    pub(super) tickets: &'a [Arc<Ticket>],
    pub(super) until: Option<Instant>,
    chores: &'a Chores,
    /// Number of callers that wait for the lock.
    callers: &'a AtomicUsize,
    closing: &'a AtomicBool,
}

impl Goal<'_> {
    pub(super) fn is_reached(&self) -> bool {
        self.tickets.iter().any(|ticket| ticket.is_done()) || self.is_unwanted() || self.chores.any()
    }

    /// Returns whether the background thread has no reason to drive.
    pub(super) fn is_unwanted(&self) -> bool {
        let unwanted = || self.callers.load(Ordering::SeqCst) > 0 || self.closing.load(Ordering::SeqCst);
        self.is_background() && (self.chores.pending() == 0 || unwanted())
    }

    /// Returns whether no caller waits for the tasks, so that spinning would only take a core from others.
    pub(super) fn is_background(&self) -> bool {
        self.tickets.is_empty()
    }
}

/// An engine that callers and one background thread share.
#[derive(Debug)]
pub(crate) struct Shared<E: Drive> {
    core: Arc<Core<E>>,
    background: Mutex<Option<JoinHandle<()>>>,
}

impl<E: Drive> Shared<E> {
    pub(crate) fn of(engine: E, mailbox: Arc<Mailbox<E::Task, E::Bell>>) -> Self {
        Self { core: Arc::new(Core::new(engine, mailbox)), background: Mutex::new(None) }
    }

    pub(crate) fn chores(&self) -> &Arc<Chores> {
        self.core.chores()
    }

    /// Queues a task for the driver, without waiting.
    pub(crate) fn post(&self, task: E::Task) {
        self.core.post(task);
    }

    /// Starts the background thread if there is none. It runs nonblocking operations that no caller waits
    /// for.
    pub(crate) fn ensure_background(&self) -> io::Result<()> {
        let mut background = self.background();
        if background.is_none() {
            let core = Arc::clone(&self.core);
            let thread = thread::Builder::new().name("convoke-comm".to_owned());
            *background = Some(thread.spawn(move || core.background())?);
        }
        Ok(())
    }

    /// Begins queued tasks at once, and leaves the rest to the background thread.
    pub(crate) fn nudge(&self) {
        self.core.nudge(|| {
            if let Some(background) = &*self.background() {
                background.thread().unpark();
            }
        });
    }

    /// Waits until one of `tickets` (at least one) is done, at most until `until`.
    pub(crate) fn wait(&self, tickets: &[Arc<Ticket>], until: Option<Instant>) {
        self.core.wait(tickets, until);
    }

    /// Calls `look` with the engine if no other thread has it.
    pub(super) fn if_free<R>(&self, look: impl FnOnce(&mut E) -> R) -> Option<R> {
        self.core.if_free(look)
    }

    /// Ends the group for `reason`; any thread may call it.
    pub(crate) fn abort(&self, reason: String) {
        self.core.abort(reason);
    }

    /// Stops the background thread, and calls `last` with the engine.
    pub(crate) fn close(&self, last: impl FnOnce(&mut E)) {
        let background = self.background().take();
        self.core.close(|| {
            if let Some(background) = &background {
                background.thread().unpark();
            }
        });
        // A callback may drop the last handle. Then this is the background thread itself, which ends next.
        if let Some(background) = background.filter(|other| other.thread().id() != thread::current().id()) {
            let _ = background.join();
        }
        self.core.with_engine(last);
    }

    fn background(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.background.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine, its submission queue, and the state by which threads agree who drives.
#[derive(Debug)]
pub(super) struct Core<E: Drive> {
    seat: SeatLock<E>,
    mailbox: Arc<Mailbox<E::Task, E::Bell>>,
    chores: Arc<Chores>,
    /// Number of callers that wait for the lock.
    callers: AtomicUsize,
    closing: AtomicBool,
    /// Number of times that a caller took the lock.
    taken: AtomicUsize,
    /// The background thread sleeps until it is woken.
    idle: AtomicBool,
}

impl<E: Drive> Core<E> {
    pub(super) fn new(engine: E, mailbox: Arc<Mailbox<E::Task, E::Bell>>) -> Self {
        Self {
            seat: SeatLock::new(engine),
            mailbox,
            chores: Arc::default(),
            callers: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            taken: AtomicUsize::new(0),
            idle: AtomicBool::new(false),
        }
    }

    pub(super) fn chores(&self) -> &Arc<Chores> {
        &self.chores
    }

    pub(super) fn post(&self, task: E::Task) {
        self.mailbox.post(|letters| letters.tasks.push(task));
    }

    pub(super) fn nudge(&self, wake_background: impl FnOnce()) {
        if let Some(mut seat) = self.take_seat() {
            seat.engine.nudge();
        }
        self.run_chores();
        if self.chores.pending() > 0 && self.idle.swap(false, Ordering::SeqCst) {
            wake_background();
        }
    }

    pub(super) fn wait(&self, tickets: &[Arc<Ticket>], until: Option<Instant>) {
        let mut queued = None;
        loop {
            self.run_chores();
            if tickets.iter().any(|ticket| ticket.is_done()) {
                return;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return;
            }
            let seat = self.take_seat().or_else(|| {
                queued.get_or_insert_with(|| Caller::new(self));
                self.queue_for_seat()
            });
            match seat {
                Some(mut seat) => {
                    queued = None;
                    seat.engine.drive(&self.goal(tickets, until));
                }
                // The thread that has the lock wakes this one when its task is done or the lock is free.
                None if tickets.iter().all(|ticket| ticket.unpark_me()) => {
                    left.map_or_else(park, park_timeout)
                }
                None => {}
            }
        }
    }

    pub(super) fn abort(&self, reason: String) {
        self.mailbox.post(|letters| letters.abort = Some(reason));
        if let Some(mut seat) = self.take_seat() {
            seat.engine.collect();
        }
        self.run_chores();
    }

    pub(super) fn close(&self, wake_background: impl FnOnce()) {
        self.closing.store(true, Ordering::SeqCst);
        self.mailbox.rouse();
        wake_background();
    }

    /// The loop of the background thread; it ends when the group is closed.
    pub(super) fn background(&self) {
        let mut taken = None;
        while !self.closing.load(Ordering::SeqCst) {
            self.run_chores();
            // This is a swap, not a store: it must see operations that were begun before another thread found
            // the flag set.
            self.idle.swap(true, Ordering::SeqCst);
            if self.chores.pending() == 0 {
                park();
                continue;
            }
            self.idle.store(false, Ordering::SeqCst);
            let now = Some(self.taken.load(Ordering::Relaxed));
            if taken != now {
                taken = now;
                park_timeout(QUIET);
                continue;
            }
            self.mailbox.queue();
            if self.callers.load(Ordering::SeqCst) > 0 {
                park();
            } else if let Some(mut seat) = self.try_seat() {
                // A panic poisons the lock, and the next thread that takes it ends everything.
                let _ = catch_unwind(AssertUnwindSafe(move || seat.engine.drive(&self.goal(&[], None))));
                continue;
            } else {
                park();
            }
            taken = None;
        }
        // The completions of the last drive run now, because no other thread may come.
        self.run_chores();
    }

    /// Calls `look` with the engine. The caller is the only thread that uses it.
    pub(super) fn with_engine<R>(&self, look: impl FnOnce(&mut E) -> R) -> R {
        look(&mut self.seat.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls `look` with the engine if no other thread has it.
    pub(super) fn if_free<R>(&self, look: impl FnOnce(&mut E) -> R) -> Option<R> {
        let mut seat = self.take_seat()?;
        Some(look(&mut seat.engine))
    }

    fn goal<'a>(&'a self, tickets: &'a [Arc<Ticket>], until: Option<Instant>) -> Goal<'a> {
        Goal { tickets, until, chores: &self.chores, callers: &self.callers, closing: &self.closing }
    }

    fn take_seat(&self) -> Option<Seat<'_, E>> {
        let seat = self.try_seat();
        if seat.is_some() {
            // Only the thread that has the lock counts.
            self.taken.store(self.taken.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
        seat
    }

    fn try_seat(&self) -> Option<Seat<'_, E>> {
        match self.seat.try_lock() {
            Ok(engine) => Some(Seat { engine, _next: Next(self) }),
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut engine = poisoned.into_inner();
                engine.forget_everything();
                Some(Seat { engine, _next: Next(self) })
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Asks to be woken when the lock is free, and tries once more, because it may be free already.
    fn queue_for_seat(&self) -> Option<Seat<'_, E>> {
        self.mailbox.queue();
        self.take_seat()
    }

    fn run_chores(&self) {
        if !self.chores.run() {
            self.mailbox.post(|letters| letters.abort = Some(PANICKED.to_owned()));
            if let Some(mut seat) = self.take_seat() {
                seat.engine.collect();
            }
        }
    }
}

/// A caller that found the lock taken, until it has the lock or needs it no more. The background thread makes
/// room.
struct Caller<'a, E: Drive>(&'a Core<E>);

impl<'a, E: Drive> Caller<'a, E> {
    fn new(core: &'a Core<E>) -> Self {
        core.callers.fetch_add(1, Ordering::SeqCst);
        core.mailbox.rouse();
        Self(core)
    }
}

impl<E: Drive> Drop for Caller<'_, E> {
    fn drop(&mut self) {
        if self.0.callers.fetch_sub(1, Ordering::SeqCst) == 1 {
            // If this caller never took the lock, no other thread wakes the background thread.
            self.0.mailbox.leave();
        }
    }
}

/// The engine, while one thread drives it. Fields are dropped in order: the lock is released first, then the
/// threads that wait for it are woken.
struct Seat<'a, E: Drive> {
    engine: SeatGuard<'a, E>,
    _next: Next<'a, E>,
}

struct Next<'a, E: Drive>(&'a Core<E>);

impl<E: Drive> Drop for Next<'_, E> {
    fn drop(&mut self) {
        // A thread that found the lock taken may have queued an abort after this thread looked last. Nobody
        // waits for an abort, so this thread must take it.
        if self.0.mailbox.leave()
            && let Some(mut seat) = self.0.try_seat()
        {
            seat.engine.collect();
        }
    }
}
