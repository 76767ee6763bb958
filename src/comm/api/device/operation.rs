//! Operations in progress: the detection that they are done, and threads that wait for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cudarc::driver::CudaStream;

use super::backoff::Backoff;
use super::core::{Core, EnqueuedOperation};
use super::pending::{CHECK_INTERVAL, Search};
use crate::api::group::Group;
use crate::api::group::device::DeviceWork;
use crate::engine::Completion;
use crate::error::DeviceError;

impl EnqueuedOperation {
    /// Returns whether the operation needs rank `rank` to take part.
    pub(super) fn needs(&self, rank: usize) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.contains(&rank))
    }

    /// The device backend of the operation. A forked child has none, and its operations can only fail.
    fn core(&self) -> Option<Arc<Core>> {
        let core = self.core.upgrade()?;
        if let Err(error) = core.group.check_process() {
            self.completion.complete(Err(error));
            return None;
        }
        Some(core)
    }
}

impl DeviceWork for EnqueuedOperation {
    fn completion(&self) -> &Completion {
        &self.completion
    }

    fn wait(&self, until: Option<Instant>) {
        if let Some(core) = self.core() {
            core.wait(self, until);
        }
    }

    fn poll(&self) -> bool {
        self.core().is_none_or(|core| core.poll_operation(self))
    }

    fn detach(&self, group: Group) {
        match self.core.upgrade() {
            // In a forked child the operation never ends, and another thread may have held the locks.
            Some(core) if !core.group.is_forked() => core.keep_while_pending(group),
            Some(_) | None => drop(group),
        }
    }

    /// Makes the watchdog poll often, to report soon that the operation is done.
    fn request_fast_poll(&self) {
        if let Some(core) = self.core() {
            core.pending().request_fast_poll();
            core.watchdog.wake();
        }
    }

    fn block_stream(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.recorded.block_stream(stream).map_err(DeviceError::driver("cannot make a CUDA stream wait"))
    }
}

impl Core {
    /// Waits until an operation is done, or until `until`.
    fn wait(&self, operation: &EnqueuedOperation, until: Option<Instant>) {
        let mut wait = Backoff::default();
        while !self.poll_operation(operation) {
            if until.is_some_and(|until| Instant::now() >= until) {
                return;
            }
            // The watchdog wakes this thread if the group ends.
            if operation.completion.register_thread() {
                wait.park(until);
            }
        }
    }

    /// Returns whether an operation is done, successfully or not.
    fn poll_operation(&self, operation: &EnqueuedOperation) -> bool {
        // After a failure only the watchdog completes operations: one whose event passed because of an abort
        // has not succeeded. While NCCL aborts, a query of the driver may have to wait for a kernel.
        if operation.completion.is_done() || self.has_failed() {
            return operation.completion.is_done();
        }
        match operation.recorded.is_complete() {
            Ok(true) if !self.abort.ends_operations.load(Ordering::SeqCst) => {
                operation.completion.complete(Ok(None))
            }
            Ok(_) => return false,
            Err(error) => {
                operation.completion.complete(Err(self.driver_failed(error, operation.call, operation.seq)))
            }
        }
        self.notify_callbacks();
        true
    }

    /// Removes and completes the operations that are done.
    pub(super) fn reap(&self, search: Search) {
        let (done, failed) = self.pending().reap(search, |operation| operation.recorded.is_complete());
        // Operations found done before an abort began have succeeded.
        let aborted = self.abort.ends_operations.load(Ordering::SeqCst);
        for operation in done {
            let error = aborted.then(|| self.error(operation.call, operation.seq));
            operation.completion.complete(error.map_or(Ok(None), Err));
        }
        if let Some(error) = failed {
            self.query_failed(error);
        }
    }

    /// Waits until no operation is in progress or the device backend has failed. Returns false if `until`
    /// passes before. Operations are still subject to their own timeouts.
    pub(super) fn finish_all(&self, until: Instant) -> bool {
        let mut last_check = Instant::now();
        Backoff::poll_until(until, || {
            if self.pending().is_empty() || self.has_failed() {
                return Some(());
            }
            self.reap(Search::Exact);
            self.check_timeouts();
            if last_check.elapsed() >= CHECK_INTERVAL {
                self.check_health();
                last_check = Instant::now();
            }
            None
        })
        .is_some()
    }

    /// Ends the group if an operation has timed out.
    pub(super) fn check_timeouts(&self) {
        let timed_out = self.pending().first_timed_out(Instant::now()).map(|late| late.completion.timeout);
        if let Some(timeout) = timed_out {
            self.operation_timed_out(timeout);
        }
    }
}
