//! The options of a group's device backend.

use std::time::Duration;

use crate::bootstrap::options::setters;

/// Options of a group's device backend; all ranks pass equal values.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    pub(super) init_timeout: Duration,
    pub(super) staged: bool,
    pub(super) checked: bool,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self { init_timeout: Duration::from_secs(10 * 60), staged: false, checked: false }
    }
}

setters! { DeviceOptions {
    /// Sets the time that the devices may take to connect; 10 minutes by default.
    init_timeout(timeout: Duration) = timeout;

    /// Does without NCCL: each operation copies its buffers to pinned host memory, runs on the host side, and
    /// copies the results back. The calling thread does all that before the call returns. Use it for devices
    /// that NCCL cannot connect, or to find out whether NCCL causes a problem. It is never chosen
    /// automatically.
    staged(staged: bool) = staged;

    /// Compares the calls of all ranks over the host side before each operation. A rank that makes another
    /// call leads to [`CommError::Mismatch`](crate::CommError::Mismatch) on all ranks instead of a time-out
    /// or wrong numbers. The check costs an exchange between hosts for each operation and makes the caller
    /// wait for the other ranks. Off by default.
    checked(checked: bool) = checked;
} }
