//! The exit of the process: threads of this module stop before CUDA and NCCL end.
//!
//! CUDA's driver frees its state in a handler of `exit`. A thread that is inside the driver or NCCL at that
//! moment accesses freed memory, and the process dies of SIGSEGV although its work succeeded. Watchdogs are
//! such threads, and so are threads that free communicators. `exit` runs handlers in the reverse order of
//! their registration. The handler of this module is registered after the driver's, so it runs first.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::libc;
use nix::unistd::gettid;

use super::backoff::Backoff;

/// The longest time that the exit of the process waits for threads inside CUDA and NCCL.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

static WATCHDOGS: Mutex<Vec<Weak<WatchdogThread>>> = Mutex::new(Vec::new());
/// The process that registered the handler.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The sleep and the end of a watchdog thread. The exit of the process ends it too.
pub(super) struct WatchdogThread {
    /// The thread id while the watchdog runs, [`STARTING`] before, and [`ENDED`] after.
    id: AtomicI32,
    /// Set when the watchdog is to end when it wakes.
    pub(super) closing: AtomicBool,
    /// Notified when the watchdog has something to check, or must end.
    wakeup: Condvar,
}

const STARTING: i32 = -1;
const ENDED: i32 = 0;

/// Marks a watchdog as ended when dropped.
pub(super) struct Running<'a>(&'a WatchdogThread);

impl WatchdogThread {
    /// For a watchdog that starts next. CUDA's driver must be initialised.
    pub(super) fn new() -> Arc<Self> {
        static REGISTERED: Once = Once::new();
        let (id, closing) = (AtomicI32::new(STARTING), AtomicBool::new(false));
        let this = Arc::new(Self { id, closing, wakeup: Condvar::new() });
        let mut watchdogs = WATCHDOGS.lock().unwrap_or_else(PoisonError::into_inner);
        watchdogs.retain(|known| known.strong_count() > 0);
        watchdogs.push(Arc::downgrade(&this));
        drop(watchdogs);
        REGISTERED.call_once(|| {
            PROCESS.store(process::id(), Ordering::SeqCst);
            // SAFETY: `stop_all` is a function of this library that does not unwind. A failure (no memory)
            // leaves the exit as it would be without the handler.
            #[allow(unsafe_code)]
            let _ = unsafe { libc::atexit(stop_all) };
        });
        this
    }

    /// Records the calling thread as the watchdog, until the returned value is dropped.
    pub(super) fn enter(&self) -> Running<'_> {
        self.id.store(gettid().as_raw(), Ordering::SeqCst);
        Running(self)
    }

    /// Sleeps until it is woken, at most for `time`, with the mutex of `guard` unlocked.
    pub(super) fn sleep<T>(&self, guard: MutexGuard<'_, T>, time: Option<Duration>) {
        match time {
            Some(time) => drop(self.wakeup.wait_timeout(guard, time).unwrap_or_else(PoisonError::into_inner)),
            None => drop(self.wakeup.wait(guard).unwrap_or_else(PoisonError::into_inner)),
        }
    }

    pub(super) fn wake(&self) {
        self.wakeup.notify_all();
    }

    /// Returns whether the watchdog runs on another thread: one of its callbacks may have called `exit`.
    fn runs_elsewhere(&self) -> bool {
        ![ENDED, gettid().as_raw()].contains(&self.id.load(Ordering::SeqCst))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.id.store(ENDED, Ordering::SeqCst);
    }
}

extern "C" fn stop_all() {
    // A forked child has no such threads, and another thread may have held the lock when it was forked.
    if PROCESS.load(Ordering::SeqCst) != process::id() {
        return;
    }
    let until = Instant::now() + EXIT_TIMEOUT;
    let watchdogs = std::mem::take(&mut *WATCHDOGS.lock().unwrap_or_else(PoisonError::into_inner));
    let watchdogs: Vec<_> = watchdogs.iter().filter_map(Weak::upgrade).collect();
    watchdogs.iter().for_each(|watchdog| watchdog.closing.store(true, Ordering::SeqCst));
    Backoff::poll_until(until, || {
        let running = watchdogs.iter().filter(|watchdog| watchdog.runs_elsewhere());
        // Repeated, since a watchdog may have checked `closing` just before it was set.
        let running = running.map(|watchdog| watchdog.wake()).count();
        (running == 0 && !crate::nccl::is_freeing()).then_some(())
    });
}
