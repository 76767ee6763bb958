//! The end of a group's device side: by its own failure, together with the host side, or by an orderly
//! shutdown.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{DriverError, sys};

use super::begun::Poll;
use super::driver::bind;
use super::error::DeviceError;
use super::side::{Core, Way, lock};
use crate::call::Call;
use crate::cause::{Cause, Report};
use crate::error::{CommError, Loss, Place};
use crate::nccl::{Communicator, LET_GO, NcclError, Progress};

/// The longest time that an orderly shutdown may take.
const LEAVE: Duration = Duration::from_secs(10);

/// The reason why the device side has ended.
pub(super) enum Failure {
    /// The host side has ended, and knows the reason.
    Group,
    /// A failure that this rank found, and that no other part of the group can report.
    Own(Report),
    /// A failure of the device or NCCL.
    Device(DeviceError),
}

impl Core {
    /// Returns an error if the device side has ended.
    pub(super) fn check(&self, call: Call, seq: u64) -> Result<(), CommError> {
        match self.failure.get() {
            Some(_) => Err(self.error(call, seq)),
            None => Ok(()),
        }
    }

    /// Ends the group because the device does not do what it should.
    pub(super) fn broken(&self, error: DriverError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(DeviceError::driver("the device failed")(error)));
        self.error(call, seq)
    }

    pub(super) fn nccl_failed(&self, error: NcclError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(error.into()));
        self.error(call, seq)
    }

    /// Ends the device side. It also ends the host side, so that all ranks know, and the watchdog aborts
    /// operations under way.
    pub(super) fn fail(&self, failure: Failure) {
        let (cause, of_group) = match &failure {
            Failure::Group => (None, true),
            Failure::Own(report) => (Some(report.cause.clone()), false),
            Failure::Device(error) => {
                let reason = format!("the device of rank {}: {error}", self.group.rank());
                (Some(Cause::Aborted { reason }), false)
            }
        };
        if self.failure.set(failure).is_err() {
            return;
        }
        if let Some(cause) = cause.filter(|_| !of_group) {
            self.track.failed(&Report::new(self.group.rank(), cause.clone()));
            self.group.end(cause);
        }
        self.ring();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Checks that the host side and NCCL have not failed.
    pub(super) fn look_around(&self) {
        if self.group.goes_on().is_err() {
            self.fail(Failure::Group);
            return;
        }
        let Way::Nccl { communicator, .. } = &self.way else { return };
        // If a call is being made now, the next check is early enough. A call that hangs must not block the
        // watchdog.
        let Ok(guard) = communicator.try_lock() else { return };
        let state = guard.as_ref().map(Communicator::progress);
        drop(guard);
        if let Some(Err(error)) = state {
            self.fail(Failure::Device(error.into()));
        }
    }

    /// Ends the group because an operation has timed out.
    pub(super) fn overdue(&self, timeout: Duration) {
        let after_ms = timeout.as_millis() as u64;
        self.fail(Failure::Own(Report::new(
            self.group.rank(),
            Cause::Timeout { missing: Vec::new(), after_ms },
        )));
    }

    /// Ends the group because a rank has left that an operation needs.
    pub(super) fn left(&self, rank: usize) {
        self.fail(Failure::Own(Report::new(self.group.rank(), Cause::PeerLost { rank, how: Loss::Left })));
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

    /// Aborts NCCL, then completes all operations with the error. If the abort takes long, because a kernel
    /// before NCCL's own does not end, they are completed nevertheless.
    pub(super) fn end_everything(self: &Arc<Self>) {
        self.have_let_go();
        // Without the lock: completing runs code of the program, which may hold other locks.
        let ended = self.watched().end();
        for begun in ended {
            begun.ticket.complete(Err(self.error(begun.call, begun.seq)));
        }
    }

    /// Aborts NCCL, once. Returns when that is done, or after a second.
    ///
    /// A thread whose call is under way does not return before. Up to NCCL 2.26 the state of a call belongs
    /// to the thread, and nobody else may use the stream meanwhile.
    pub(super) fn have_let_go(self: &Arc<Self>) {
        if !self.let_go.swap(true, Ordering::SeqCst) {
            let core = Arc::clone(self);
            let act = move || {
                core.let_go();
                core.gone.store(true, Ordering::SeqCst);
            };
            if thread::Builder::new().name("convoke-abort".to_owned()).spawn(act).is_err() {
                // It stays until the process ends.
                self.gone.store(true, Ordering::SeqCst);
            }
        }
        Poll::until(Instant::now() + LET_GO, || self.gone.load(Ordering::SeqCst).then_some(()));
    }

    fn let_go(&self) {
        if bind(&self.context).is_err() {
            return;
        }
        // No operation has ended by an abort yet, so operations that are done now have succeeded.
        self.reap();
        self.aborting.store(true, Ordering::SeqCst);
        if let Way::Nccl { communicator, .. } = &self.way
            && let Some(communicator) = lock(communicator).take()
        {
            communicator.abort_here();
        }
    }

    /// The error that a call returns after the device side has ended.
    pub(super) fn error(&self, call: Call, seq: u64) -> CommError {
        let of_group = || self.group.check(Some(call)).err();
        let own = |report: &Report| {
            let place = Place {
                group: self.group.name().to_owned(),
                call: Some(call),
                seq,
                received_bytes: 0,
                expected_bytes: 0,
                reported_by: report.by,
                confirmed: false,
            };
            report.error(place, |_| String::new())
        };
        match self.failure.get() {
            Some(Failure::Device(error)) => error.clone().into(),
            // The host side may have ended before, for another reason, which all ranks report.
            Some(Failure::Own(report)) => of_group().unwrap_or_else(|| own(report)),
            Some(Failure::Group) | None => of_group().unwrap_or_else(|| {
                let reason = "the group has ended".to_owned();
                own(&Report::new(self.group.rank(), Cause::Aborted { reason }))
            }),
        }
    }

    /// Shuts down in good order, if nothing has failed: NCCL carries out enqueued operations, then frees its
    /// resources.
    pub(super) fn leave(&self) {
        let Way::Nccl { communicator, .. } = &self.way else { return };
        let until = Instant::now() + LEAVE;
        let Some(alone) = self.alone_in_nccl(until) else { return };
        if self.has_failed() || bind(&self.context).is_err() {
            // The watchdog aborts NCCL, which may take as long as a kernel.
            return;
        }
        let Some(communicator) = lock(communicator).take() else { return };
        let mut wait = Poll::default();
        let mut progress = communicator.finalize();
        while let Ok(Progress::UnderWay) = progress {
            if Instant::now() >= until || self.group.goes_on().is_err() {
                // Dropping the communicator aborts it.
                return;
            }
            wait.pause();
            progress = communicator.progress();
        }
        drop(alone);
        if progress.is_ok() {
            communicator.destroy();
        }
    }
}
