//! How a group's side on a device ends: for what it finds itself, or with the host's side; and in good order.

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

/// How long a group may take to end in good order.
const LEAVE: Duration = Duration::from_secs(10);

/// Why it has ended.
pub(super) enum Failure {
    /// The host's side has, and says why.
    Group,
    /// For what this rank found, in a group that has nobody else to tell it.
    Own(Report),
    /// The device or NCCL.
    Device(DeviceError),
}

impl Core {
    /// An error if it has ended.
    pub(super) fn check(&self, call: Call, seq: u64) -> Result<(), CommError> {
        match self.failure.get() {
            Some(_) => Err(self.error(call, seq)),
            None => Ok(()),
        }
    }

    /// The device does not do what it should.
    pub(super) fn broken(&self, error: DriverError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(DeviceError::driver("the device failed")(error)));
        self.error(call, seq)
    }

    pub(super) fn nccl_failed(&self, error: NcclError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(error.into()));
        self.error(call, seq)
    }

    /// It has ended: the host's side as well, so that all ranks know, and the watchdog ends what is under way.
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

    /// Whether the host's side goes on, and NCCL with it.
    pub(super) fn look_around(&self) {
        if self.group.goes_on().is_err() {
            self.fail(Failure::Group);
            return;
        }
        let Way::Nccl { communicator, .. } = &self.way else { return };
        // If a call is being made now, the next look will do: one that hangs must not keep the watchdog.
        let Ok(guard) = communicator.try_lock() else { return };
        let state = guard.as_ref().map(Communicator::progress);
        drop(guard);
        if let Some(Err(error)) = state {
            self.fail(Failure::Device(error.into()));
        }
    }

    /// The time that an operation had is over.
    pub(super) fn overdue(&self, timeout: Duration) {
        let after_ms = timeout.as_millis() as u64;
        self.fail(Failure::Own(Report::new(
            self.group.rank(),
            Cause::Timeout { missing: Vec::new(), after_ms },
        )));
    }

    /// A rank has left that what is under way needs.
    pub(super) fn left(&self, rank: usize) {
        self.fail(Failure::Own(Report::new(self.group.rank(), Cause::PeerLost { rank, how: Loss::Left })));
    }

    pub(super) fn device_failed(&self, error: DriverError) {
        let ends = error.0 == sys::CUresult::CUDA_ERROR_DEINITIALIZED;
        let failure = Failure::Device(DeviceError::driver("the device failed")(error));
        if ends {
            // The driver goes with this process, which says nothing of the device.
            let _ = self.failure.set(failure);
        } else {
            self.fail(failure);
        }
    }

    /// Has NCCL let go of its streams and of the memory, then answers everybody who waits. If NCCL takes long, because a
    /// kernel before its own does not end, they are answered nevertheless.
    pub(super) fn end_everything(self: &Arc<Self>) {
        self.have_let_go();
        // Without the lock: what is told may be asked for by somebody who has others.
        let ended = self.watched().end();
        for begun in ended {
            begun.ticket.complete(Err(self.error(begun.call, begun.seq)));
        }
    }

    /// Has NCCL let go, once. Returns when it has, after a second at most.
    ///
    /// A thread whose call is under way does not return before: up to NCCL 2.26 the call's state is the thread's, and what
    /// is done with the stream next should find nobody there.
    pub(super) fn have_let_go(self: &Arc<Self>) {
        if !self.let_go.swap(true, Ordering::SeqCst) {
            let core = Arc::clone(self);
            let act = move || {
                core.let_go();
                core.gone.store(true, Ordering::SeqCst);
            };
            if thread::Builder::new().name("convoke-abort".to_owned()).spawn(act).is_err() {
                // It is left to the end of the process.
                self.gone.store(true, Ordering::SeqCst);
            }
        }
        Poll::until(Instant::now() + LET_GO, || self.gone.load(Ordering::SeqCst).then_some(()));
    }

    fn let_go(&self) {
        if bind(&self.context).is_err() {
            return;
        }
        // Nothing has ended by being aborted yet: what is done is done well, whatever came after.
        self.reap();
        self.aborting.store(true, Ordering::SeqCst);
        if let Way::Nccl { communicator, .. } = &self.way
            && let Some(communicator) = lock(communicator).take()
        {
            communicator.abort_here();
        }
    }

    /// What a call returns after it has ended.
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
            // The host's side may have ended before, for another reason: then that is the one of all ranks.
            Some(Failure::Own(report)) => of_group().unwrap_or_else(|| own(report)),
            Some(Failure::Group) | None => of_group().unwrap_or_else(|| {
                let reason = "the group has ended".to_owned();
                own(&Report::new(self.group.rank(), Cause::Aborted { reason }))
            }),
        }
    }

    /// Ends in good order, if it has not ended: what was enqueued is carried out, then NCCL frees what it has.
    pub(super) fn leave(&self) {
        let Way::Nccl { communicator, .. } = &self.way else { return };
        let until = Instant::now() + LEAVE;
        let Some(alone) = self.alone_in_nccl(until) else { return };
        if self.has_failed() || bind(&self.context).is_err() {
            // The watchdog has NCCL let go, which may take as long as a kernel.
            return;
        }
        let Some(communicator) = lock(communicator).take() else { return };
        let mut wait = Poll::default();
        let mut progress = communicator.finalize();
        while let Ok(Progress::UnderWay) = progress {
            if Instant::now() >= until || self.group.goes_on().is_err() {
                // Dropped, it is aborted.
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
