//! Frees communicators with a bounded wait.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use super::types::Comm;

/// The longest time to wait for NCCL to free a communicator.
pub(crate) const FREE_TIMEOUT: Duration = Duration::from_secs(1);

static FREEING: AtomicUsize = AtomicUsize::new(0);

/// Returns whether a thread of this process frees a communicator.
pub(crate) fn is_freeing() -> bool {
    FREEING.load(Ordering::SeqCst) > 0
}

/// Makes the communicator's device the current one of a thread. Returns whether it could.
pub(crate) type SetDevice = Arc<dyn Fn() -> bool + Send + Sync>;

/// The call that frees a communicator: `ncclCommDestroy` or `ncclCommAbort`.
pub(super) struct FreeCall {
    pub(super) call: unsafe extern "C" fn(*mut Comm) -> c_int,
    pub(super) handle: NonNull<Comm>,
    pub(super) set_device: SetDevice,
}

// SAFETY: NCCL's communicators are not bound to a thread, and nobody else has this one any more.
#[allow(unsafe_code)]
unsafe impl Send for FreeCall {}

impl FreeCall {
    /// Frees the communicator on this thread, however long that takes. It does nothing if the device is gone,
    /// as in a process that exits, since NCCL cannot free a communicator then.
    pub(super) fn run_here(self) {
        FREEING.fetch_add(1, Ordering::SeqCst);
        if (self.set_device)() {
            // SAFETY: the handle is valid, and used for the last time.
            #[allow(unsafe_code)]
            let _ = unsafe { (self.call)(self.handle.as_ptr()) };
        }
        FREEING.fetch_sub(1, Ordering::SeqCst);
    }

    /// Frees the communicator on a new thread, and waits a second at most. NCCL waits for the other ranks of
    /// the host to close their connections, or for a kernel to end. If no thread can be started, the
    /// communicator stays until the process ends.
    pub(super) fn run_on_thread(self) {
        let (done, finished) = sync_channel::<()>(1);
        let act = move || {
            self.run_here();
            drop(done);
        };
        if thread::Builder::new().name("convoke-free".to_owned()).spawn(act).is_ok() {
            let _ = finished.recv_timeout(FREE_TIMEOUT);
        }
    }
}
