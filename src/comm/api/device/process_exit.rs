//! The exit of the process: threads of this module stop before CUDA and NCCL end.
//!
//! CUDA's driver frees its state in a handler of `exit`. A thread that is inside the driver or NCCL at that
//! moment accesses freed memory, and the process dies of SIGSEGV although its work succeeded. Watchdogs are
//! such threads, and so are threads that free communicators. `exit` runs handlers in the reverse order of
//! their registration. The handler of this module is registered after the driver's, so it runs first.

use std::process;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::libc;
use nix::unistd::gettid;

use super::backend::Core;
use super::operation::Backoff;

/// The longest time that the exit of the process waits for threads inside CUDA and NCCL.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The device backends of this process.
static BACKENDS: Mutex<Vec<Weak<Core>>> = Mutex::new(Vec::new());
/// The process that registered the handler.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The thread id of a watchdog while it runs, [`STARTING`] before, and [`ENDED`] after.
#[derive(Debug)]
pub(super) struct WatchdogThread(AtomicI32);

const STARTING: i32 = -1;
const ENDED: i32 = 0;

impl Default for WatchdogThread {
    fn default() -> Self {
        Self(AtomicI32::new(STARTING))
    }
}

/// Marks a watchdog as ended when dropped.
pub(super) struct Running<'a>(&'a WatchdogThread);

impl WatchdogThread {
    /// Records the calling thread as the watchdog, until the returned value is dropped.
    pub(super) fn enter(&self) -> Running<'_> {
        self.0.store(gettid().as_raw(), Ordering::SeqCst);
        Running(self)
    }

    /// Returns whether the watchdog runs on another thread: one of its callbacks may have called `exit`.
    fn runs_elsewhere(&self) -> bool {
        ![ENDED, gettid().as_raw()].contains(&self.0.load(Ordering::SeqCst))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.0.store(ENDED, Ordering::SeqCst);
    }
}

/// Stops the watchdog of `core` when the process exits.
pub(super) fn stop_at_exit(core: &Arc<Core>) {
    static REGISTERED: Once = Once::new();
    let mut backends = BACKENDS.lock().unwrap_or_else(PoisonError::into_inner);
    backends.retain(|known| known.strong_count() > 0);
    backends.push(Arc::downgrade(core));
    drop(backends);
    REGISTERED.call_once(|| {
        PROCESS.store(process::id(), Ordering::SeqCst);
        // SAFETY: `stop_all` is a function of this library that does not unwind. A failure (no memory) leaves
        // the exit as it would be without the handler.
        #[allow(unsafe_code)]
        let _ = unsafe { libc::atexit(stop_all) };
    });
}

extern "C" fn stop_all() {
    // A forked child has no such threads, and another thread may have held the lock when it was forked.
    if PROCESS.load(Ordering::SeqCst) != process::id() {
        return;
    }
    let until = Instant::now() + EXIT_TIMEOUT;
    let backends = std::mem::take(&mut *BACKENDS.lock().unwrap_or_else(PoisonError::into_inner));
    let cores: Vec<Arc<Core>> = backends.iter().filter_map(Weak::upgrade).collect();
    cores.iter().for_each(|core| core.closing.store(true, Ordering::SeqCst));
    Backoff::poll_until(until, || {
        let watched = cores.iter().filter(|core| core.watchdog.runs_elsewhere());
        // Repeated, since a watchdog may have checked `closing` just before it was set.
        let running = watched.map(|core| core.wakeup.notify_all()).count();
        (running == 0 && !crate::nccl::is_freeing()).then_some(())
    });
}
