//! The end of a group's communicator: the abort after a failure, and the orderly shutdown.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::backoff::Backoff;
use super::core::Core;
use super::driver::bind;
use super::pending::Search;
use crate::nccl::{FREE_TIMEOUT, Progress};

/// The longest time that an orderly shutdown may take.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

impl Core {
    /// Aborts NCCL, then completes all operations with the error. If the abort takes longer than a second,
    /// because an earlier kernel does not end, the operations are completed nevertheless.
    pub(super) fn abort_all(self: &Arc<Self>) {
        self.ensure_aborted();
        // The lock is released first: completing an operation runs code of the program, which may hold other
        // locks.
        let ended = self.pending().drain();
        for operation in ended {
            operation.completion.complete(Err(self.error(operation.call, operation.seq)));
        }
    }

    /// Aborts NCCL, once. Returns when the abort is done, or after a second.
    ///
    /// A thread whose NCCL call is in progress waits here before it returns. Up to NCCL 2.26 the state of a
    /// call belongs to the calling thread, and nobody else may use the stream until the call has ended.
    pub(super) fn ensure_aborted(self: &Arc<Self>) {
        if !self.abort.started.swap(true, Ordering::SeqCst) {
            let core = Arc::clone(self);
            let act = move || {
                core.abort_nccl();
                core.abort.finished.store(true, Ordering::SeqCst);
            };
            if thread::Builder::new().name("convoke-abort".to_owned()).spawn(act).is_err() {
                // Without a thread to abort it, the communicator stays until the process ends.
                self.abort.finished.store(true, Ordering::SeqCst);
            }
        }
        Backoff::poll_until(Instant::now() + FREE_TIMEOUT, || {
            self.abort.finished.load(Ordering::SeqCst).then_some(())
        });
    }

    fn abort_nccl(&self) {
        if bind(&self.context).is_err() {
            return;
        }
        // No operation has ended by an abort yet, so operations that are done now have succeeded.
        self.reap(Search::Exact);
        self.abort.ends_operations.store(true, Ordering::SeqCst);
        if let Some(nccl) = self.transport.nccl() {
            nccl.abort();
        }
    }

    /// Shuts down in good order, if nothing has failed: NCCL carries out enqueued operations, then frees its
    /// resources.
    pub(super) fn shut_down(&self) {
        let Some(nccl) = self.transport.nccl() else { return };
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        let Some(nccl_guard) = nccl.lock_calls(until) else { return };
        if self.has_failed() || bind(&self.context).is_err() {
            // After a failure the watchdog aborts NCCL, which may take as long as a kernel.
            return;
        }
        let Some(communicator) = nccl.communicator().take() else { return };
        let mut wait = Backoff::default();
        let mut progress = communicator.finalize();
        while let Ok(Progress::InProgress) = progress {
            if Instant::now() >= until || self.group.check_alive().is_err() {
                // Dropping the communicator aborts it.
                return;
            }
            wait.pause();
            progress = communicator.progress();
        }
        drop(nccl_guard);
        if progress.is_ok() {
            communicator.destroy();
        }
    }
}
