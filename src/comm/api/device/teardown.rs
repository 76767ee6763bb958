//! The end of a group's device backend: by its own failure, together with the host side, or by an orderly
//! shutdown.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{DriverError, sys};

use super::backend::{Core, DeviceTransport, lock};
use super::driver::bind;
use super::operation::Backoff;
use super::pending::Search;
use crate::collectives::call::Call;
use crate::error::cause::{Cause, Report};
use crate::error::{CallContext, CommError, DeviceError, LossReason};
use crate::nccl::{Communicator, FREE_TIMEOUT, NcclError, Progress};

/// The longest time that an orderly shutdown may take.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why the device backend has ended.
pub(super) enum Failure {
    /// The host side has ended, and knows the reason.
    Group,
    /// A failure that this rank found in the device backend, such as a time-out, with its cause.
    Own(Report),
    /// A failure of the device or NCCL.
    Device(DeviceError),
}

impl Core {
    /// Returns an error if the device backend has ended.
    pub(super) fn check(&self, call: Call, seq: u64) -> Result<(), CommError> {
        match self.failure.get() {
            Some(_) => Err(self.error(call, seq)),
            None => Ok(()),
        }
    }

    /// Ends the group because a call of the CUDA driver failed; returns the error for `call`.
    pub(super) fn driver_failed(&self, error: DriverError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(DeviceError::driver("the device failed")(error)));
        self.error(call, seq)
    }

    pub(super) fn nccl_failed(&self, error: NcclError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(error.into()));
        self.error(call, seq)
    }

    /// Ends the device backend. It also ends the host side, so that all ranks learn of the failure, and wakes
    /// the watchdog, which aborts operations in progress.
    pub(super) fn fail(&self, failure: Failure) {
        let (cause, of_group) = match &failure {
            Failure::Group => (None, true),
            Failure::Own(report) => (Some(report.cause.clone()), false),
            Failure::Device(error) => {
                let reason = format!("the device of rank {} failed: {error}", self.group.rank());
                (Some(Cause::Aborted { reason }), false)
            }
        };
        if self.failure.set(failure).is_err() {
            return;
        }
        if let Some(cause) = cause.filter(|_| !of_group) {
            self.flight.failed(&Report::new(self.group.rank(), cause.clone()));
            self.group.end(cause);
        }
        self.wake_watchdog();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Checks that the host side and NCCL have not failed.
    pub(super) fn check_health(&self) {
        if self.group.check_alive().is_err() {
            self.fail(Failure::Group);
            return;
        }
        let DeviceTransport::Nccl { communicator, .. } = &self.transport else { return };
        // If another thread holds the lock for a call, the next check is early enough: a call that hangs must
        // not block the watchdog.
        let Ok(guard) = communicator.try_lock() else { return };
        let state = guard.as_ref().map(Communicator::progress);
        drop(guard);
        if let Some(Err(error)) = state {
            self.fail(Failure::Device(error.into()));
        }
    }

    /// Ends the group because an operation has timed out.
    pub(super) fn operation_timed_out(&self, timeout: Duration) {
        let after_ms = timeout.as_millis() as u64;
        self.fail(Failure::Own(Report::new(
            self.group.rank(),
            Cause::Timeout { missing: Vec::new(), after_ms },
        )));
    }

    /// Ends the group because rank `rank`, which a pending operation needs, has left.
    pub(super) fn peer_left(&self, rank: usize) {
        self.fail(Failure::Own(Report::new(
            self.group.rank(),
            Cause::PeerLost { rank, how: LossReason::Left },
        )));
    }

    pub(super) fn device_failed(&self, error: DriverError) {
        let ends = error.0 == sys::CUresult::CUDA_ERROR_DEINITIALIZED;
        let failure = Failure::Device(DeviceError::driver("the device failed")(error));
        if ends {
            // The process is exiting and unloads the driver, so the error says nothing about the device.
            let _ = self.failure.set(failure);
        } else {
            self.fail(failure);
        }
    }

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
        if !self.abort_started.swap(true, Ordering::SeqCst) {
            let core = Arc::clone(self);
            let act = move || {
                core.abort_nccl();
                core.abort_finished.store(true, Ordering::SeqCst);
            };
            if thread::Builder::new().name("convoke-abort".to_owned()).spawn(act).is_err() {
                // Without a thread to abort it, the communicator stays until the process ends.
                self.abort_finished.store(true, Ordering::SeqCst);
            }
        }
        Backoff::poll_until(Instant::now() + FREE_TIMEOUT, || {
            self.abort_finished.load(Ordering::SeqCst).then_some(())
        });
    }

    fn abort_nccl(&self) {
        if bind(&self.context).is_err() {
            return;
        }
        // No operation has ended by an abort yet, so operations that are done now have succeeded.
        self.reap(Search::Exact);
        self.aborting.store(true, Ordering::SeqCst);
        if let DeviceTransport::Nccl { communicator, .. } = &self.transport
            && let Some(communicator) = lock(communicator).take()
        {
            communicator.abort_blocking();
        }
    }

    /// The error that a call returns after the device backend has ended.
    pub(super) fn error(&self, call: Call, seq: u64) -> CommError {
        let of_group = || self.group.check(Some(call)).err();
        let own = |report: &Report| {
            let context = CallContext {
                group: self.group.name().to_owned(),
                call: Some(call),
                seq,
                received_bytes: 0,
                expected_bytes: 0,
                reported_by: report.by,
                confirmed: false,
            };
            report.error(context, |_| String::new())
        };
        match self.failure.get() {
            Some(Failure::Device(error)) => error.clone().into(),
            // The host side may have ended before, for another reason; then all ranks report that reason.
            Some(Failure::Own(report)) => of_group().unwrap_or_else(|| own(report)),
            Some(Failure::Group) | None => of_group().unwrap_or_else(|| {
                let reason = "the group has ended".to_owned();
                own(&Report::new(self.group.rank(), Cause::Aborted { reason }))
            }),
        }
    }

    /// Shuts down in good order, if nothing has failed: NCCL carries out enqueued operations, then frees its
    /// resources.
    pub(super) fn shut_down(&self) {
        let DeviceTransport::Nccl { communicator, .. } = &self.transport else { return };
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        let Some(nccl_guard) = self.lock_nccl(until) else { return };
        if self.has_failed() || bind(&self.context).is_err() {
            // After a failure the watchdog aborts NCCL, which may take as long as a kernel.
            return;
        }
        let Some(communicator) = lock(communicator).take() else { return };
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
