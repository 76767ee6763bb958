//! The transport between the devices of a group: NCCL, or copies through host memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use cudarc::driver::CudaContext;

use super::backoff::Backoff;
use super::staged::Staging;
use crate::nccl::{Communicator, Library, NcclError};

pub(super) enum DeviceTransport {
    Nccl(NcclTransport),
    Staged(Mutex<Staging>),
}

/// This rank's communicator of the group.
pub(super) struct NcclTransport {
    pub(super) library: &'static Library,
    /// Locked only during a call of NCCL, so that the watchdog can check and abort it. `None` when NCCL was
    /// aborted or shut down.
    communicator: Mutex<Option<Communicator>>,
    /// Held by a caller of NCCL until the call is finished: a communicator takes one call at a time.
    calls: Mutex<()>,
}

impl DeviceTransport {
    pub(super) fn new_nccl(library: &'static Library, communicator: Communicator) -> Self {
        let communicator = Mutex::new(Some(communicator));
        Self::Nccl(NcclTransport { library, communicator, calls: Mutex::default() })
    }

    pub(super) fn new_staged(context: &Arc<CudaContext>) -> Self {
        Self::Staged(Mutex::new(Staging::new(Arc::clone(context))))
    }

    /// Returns `None` if the group is staged through the host.
    pub(super) fn nccl(&self) -> Option<&NcclTransport> {
        match self {
            Self::Nccl(nccl) => Some(nccl),
            Self::Staged(_) => None,
        }
    }
}

impl NcclTransport {
    /// Returns a guard that keeps other calls out of NCCL, if it is free. Lock it before
    /// [`Self::communicator`].
    pub(super) fn try_lock_calls(&self) -> Option<MutexGuard<'_, ()>> {
        try_lock(&self.calls)
    }

    /// Waits until `until` for the guard that keeps other calls out of NCCL.
    pub(super) fn lock_calls(&self, until: Instant) -> Option<MutexGuard<'_, ()>> {
        Backoff::poll_until(until, || self.try_lock_calls())
    }

    /// The communicator, locked; `None` in it if NCCL was aborted or shut down.
    pub(super) fn communicator(&self) -> MutexGuard<'_, Option<Communicator>> {
        self.communicator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Aborts the communicator, however long that takes. Other threads wait for the lock meanwhile, so that
    /// no registered buffer is freed before the abort is done.
    pub(super) fn abort(&self) {
        let mut communicator = self.communicator();
        if let Some(communicator) = communicator.take() {
            communicator.abort_blocking();
        }
    }

    /// The error that NCCL reports. It does not wait for another thread's call, which may hang: then it
    /// returns `None`.
    pub(super) fn error(&self) -> Option<NcclError> {
        self.communicator.try_lock().ok()?.as_ref()?.progress().err()
    }
}

pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
