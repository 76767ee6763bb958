//! The failure of a group's device backend: by itself, or together with the host side.

use std::time::Duration;

use cudarc::driver::{DriverError, sys};

use super::core::{Core, Failure};
use super::transport::NcclTransport;
use crate::collectives::call::Call;
use crate::error::cause::{Cause, Report};
use crate::error::{CallContext, CommError, DeviceError};

impl Core {
    /// Returns an error if the device backend has ended.
    pub(super) fn check(&self, call: Call, seq: u64) -> Result<(), CommError> {
        if self.has_failed() { Err(self.error(call, seq)) } else { Ok(()) }
    }

    /// Ends the group because a call of the CUDA driver failed; returns the error for `call`.
    pub(super) fn driver_failed(&self, error: DriverError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(DeviceError::driver("the device failed")(error)));
        self.error(call, seq)
    }

    /// Ends the device backend. It also ends the host side, so that all ranks learn of the failure, and wakes
    /// the watchdog, which aborts operations in progress.
    pub(super) fn fail(&self, failure: Failure) {
        let cause = match &failure {
            Failure::Group => None,
            Failure::Own(cause) => Some(cause.clone()),
            Failure::Device(error) => {
                let reason = format!("the device of rank {} failed: {error}", self.group.rank());
                Some(Cause::Aborted { reason })
            }
        };
        if self.failure.set(failure).is_err() {
            return;
        }
        if let Some(cause) = cause {
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
        if let Some(error) = self.transport.nccl().and_then(NcclTransport::error) {
            self.fail(Failure::Device(error.into()));
        }
    }

    pub(super) fn operation_timed_out(&self, timeout: Duration) {
        let after_ms = timeout.as_millis() as u64;
        self.fail(Failure::Own(Cause::Timeout { missing: Vec::new(), after_ms }));
    }

    pub(super) fn query_failed(&self, error: DriverError) {
        let exiting = error.0 == sys::CUresult::CUDA_ERROR_DEINITIALIZED;
        let failure = Failure::Device(DeviceError::driver("the device failed")(error));
        if exiting {
            // The process is exiting and unloads the driver, so the error says nothing about the device.
            let _ = self.failure.set(failure);
        } else {
            self.fail(failure);
        }
    }

    /// The error that a call returns after the device backend has ended.
    pub(super) fn error(&self, call: Call, seq: u64) -> CommError {
        let of_group = || self.group.check(Some(call)).err();
        let own = |cause: Cause| {
            let report = Report::new(self.group.rank(), cause);
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
            Some(Failure::Own(cause)) => of_group().unwrap_or_else(|| own(cause.clone())),
            Some(Failure::Group) | None => {
                of_group().unwrap_or_else(|| own(Cause::Aborted { reason: "the group has ended".to_owned() }))
            }
        }
    }
}
