//! How a group gets its side on GPUs.

use std::time::Duration;

/// How a group gets its side on GPUs; all ranks pass the same.
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

impl DeviceOptions {
    /// How long the devices may take to find together; 10 minutes by default.
    #[must_use]
    pub fn init_timeout(mut self, timeout: Duration) -> Self {
        self.init_timeout = timeout;
        self
    }

    /// Without NCCL: each operation copies its buffers to pinned host memory, goes the way of buffers in host memory, and
    /// copies back. The calling thread does all that before the call returns. For devices that NCCL cannot connect, and
    /// to find out whether it is to blame; never chosen by itself.
    #[must_use]
    pub fn staged(mut self, staged: bool) -> Self {
        self.staged = staged;
        self
    }

    /// Before each operation the ranks compare what they call, over the host's side: a rank that calls something else is
    /// [`CommError::Mismatch`](crate::CommError::Mismatch) on all instead of a time-out or wrong numbers. Costs an
    /// exchange between hosts for each operation, and has the caller wait for the others. Off by default.
    #[must_use]
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }
}
