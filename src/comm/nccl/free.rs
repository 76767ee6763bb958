//! Frees communicators with a bounded wait.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use super::types::Comm;

/// The longest time to wait for NCCL to free a communicator.
pub(crate) const LET_GO: Duration = Duration::from_secs(1);

/// Makes the communicator's device the current one of a thread. Returns whether it could.
#[derive(Clone)]
pub(crate) struct Enter(Arc<dyn Fn() -> bool + Send + Sync>);

impl Enter {
    pub(crate) fn new(enter: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(enter))
    }
}

impl fmt::Debug for Enter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Enter")
    }
}

/// The last call of a communicator.
pub(super) struct Free {
    pub(super) call: unsafe extern "C" fn(*mut Comm) -> c_int,
    pub(super) handle: NonNull<Comm>,
    pub(super) enter: Enter,
}

// SAFETY: NCCL's communicators are not bound to a thread, and nobody else has this one any more.
#[allow(unsafe_code)]
unsafe impl Send for Free {}

impl Free {
    /// Frees it on this thread, however long that takes. It does nothing if the device is gone, as in a
    /// process that exits, since NCCL cannot free it then.
    pub(super) fn here(self) {
        if (self.enter.0)() {
            // SAFETY: the handle is valid, and used for the last time.
            #[allow(unsafe_code)]
            let _ = unsafe { (self.call)(self.handle.as_ptr()) };
        }
    }

    /// Frees it on a new thread, and waits a second at most. NCCL waits for the other ranks of the host to
    /// close their connections, or for a kernel to end. If no thread can be started, it stays until the
    /// process ends.
    pub(super) fn apart(self) {
        let (told, gone) = sync_channel::<()>(1);
        let act = move || {
            self.here();
            drop(told);
        };
        if thread::Builder::new().name("convoke-free".to_owned()).spawn(act).is_ok() {
            let _ = gone.recv_timeout(LET_GO);
        }
    }
}
