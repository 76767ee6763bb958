//! The interface of a group's device backend to the host side. The module `device` implements these traits:
//! it depends on groups, and groups do not depend on it.

use std::any::Any;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use cudarc::driver::CudaStream;

use super::{CommError, Group};
use crate::collectives::call::Call;
use crate::engine::{Completion, TimeLimit};
use crate::error::DeviceError;
use crate::error::cause::Cause;

/// The device backend of a group's handle. Dropping the last reference shuts it down.
pub(crate) trait GroupDevice: Any + Send + Sync {
    /// Ends the device backend for `reason`, and aborts the operations in progress.
    fn abort(&self, reason: &str);

    /// Shuts down the device backend although group handles still hold it. Operations in progress complete
    /// first.
    fn destroy(&self);

    /// Makes the device backend of a subgroup of `ranks`, in this order, within the time `limit`. Returns
    /// `None` if this rank is not in `ranks`. All ranks of the group call it, each with the ranks of its own
    /// subgroup.
    ///
    /// # Errors
    /// [`CommError::Device`], or the error that ended the group.
    fn split(&self, ranks: &[usize], limit: TimeLimit) -> Result<Option<AttachDevice>, CommError>;
}

/// Function that returns a handle of the new group with the device backend that was made for it.
pub(crate) type AttachDevice = Box<dyn FnOnce(&Group) -> Result<Group, CommError>>;

/// A device operation, as the [`Work`](super::work::Work) that waits for it sees it.
pub(crate) trait DeviceWork: Send + Sync {
    fn completion(&self) -> &Completion;

    /// Waits until the operation is done, or until `until`.
    fn wait(&self, until: Option<Instant>);

    /// Returns whether the operation is done, successfully or not.
    fn poll(&self) -> bool;

    /// Keeps `group` until its operations are done, since its last handle shuts down the device backend. An
    /// operation's handle calls this when it is dropped.
    fn detach(&self, group: Group);

    /// Requests frequent polls of the device, so that a waiter for the completion learns soon that the
    /// operation is done.
    fn request_fast_poll(&self);

    /// Makes `stream`, but not the host, wait until the operation is done.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if a CUDA function fails.
    fn block_stream(&self, stream: &CudaStream) -> Result<(), DeviceError>;
}

impl Group {
    /// Returns true if this handle supports operations on device buffers; [`Self::with_device`] adds a
    /// device backend.
    #[must_use]
    pub fn has_device(&self) -> bool {
        self.device.is_some()
    }

    /// Returns a handle of this group without a device backend.
    pub(crate) fn without_device(&self) -> Self {
        Self { device: None, ..self.clone() }
    }

    pub(crate) fn with_device_backend(&self, backend: Arc<dyn GroupDevice>) -> Self {
        let mut device_backends = self.inner.device_backends.lock().unwrap_or_else(PoisonError::into_inner);
        device_backends.retain(|backend| backend.strong_count() > 0);
        device_backends.push(Arc::downgrade(&backend));
        drop(device_backends);
        Self { device: Some(backend), ..self.clone() }
    }

    pub(super) fn device_backends(&self) -> Vec<Arc<dyn GroupDevice>> {
        let device_backends = self.inner.device_backends.lock().unwrap_or_else(PoisonError::into_inner);
        device_backends.iter().filter_map(Weak::upgrade).collect()
    }

    /// # Errors
    /// [`CommError::Device`] if this handle has no device backend.
    pub(crate) fn device_backend(&self) -> Result<&Arc<dyn GroupDevice>, CommError> {
        let without = || DeviceError::GroupWithoutDevice { group: self.name().to_owned() }.into();
        self.inner.check_caller()?;
        self.device.as_ref().ok_or_else(without)
    }

    /// Makes the device backend of a subgroup ([`GroupDevice::split`]); `None` if this handle has no device
    /// backend.
    pub(super) fn split_device(&self, ranks: &[usize]) -> Result<Option<AttachDevice>, CommError> {
        self.device_backend().map_or(Ok(None), |backend| backend.split(ranks, self.limit()))
    }

    /// Returns the error that ended the group, with the failed call `call`; `Ok` if the group has not ended.
    pub(crate) fn check(&self, call: Option<Call>) -> Result<(), CommError> {
        self.inner.check_caller()?;
        self.inner.shared.as_ref().map_or(Ok(()), |shared| shared.check(call))
    }

    /// Returns an error if the group has ended on all ranks. A call of [`Group::destroy`] on this rank is not
    /// such an end.
    pub(crate) fn check_alive(&self) -> Result<(), CommError> {
        self.inner.shared.as_ref().map_or(Ok(()), |shared| shared.check(None))
    }

    /// Returns the other ranks that have left without an error, or whose loss the group is about to report.
    pub(crate) fn absent_ranks(&self) -> Vec<usize> {
        let Some(shared) = &self.inner.shared else { return Vec::new() };
        let here = shared.live_ranks().live;
        (0..self.size()).filter(|&rank| rank != self.rank() && !here.contains(&rank)).collect()
    }

    /// # Errors
    /// [`CommError::InvalidArgument`] if this process is a fork of the one that made the group.
    pub(crate) fn check_process(&self) -> Result<(), CommError> {
        if self.is_forked() { self.inner.check_caller() } else { Ok(()) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }

    /// Ends the group with `cause` on all ranks, unless it has ended already.
    pub(crate) fn end(&self, cause: Cause) {
        if let Some(shared) = self.inner.shared.as_ref().filter(|_| !self.is_forked()) {
            shared.end(cause);
        }
    }

    /// Checks over the host side that all ranks make the device call `call`, which has number `seq`.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] on all ranks, which ends the group.
    pub(crate) fn compare_on_host(&self, call: Call, seq: u64) -> Result<(), CommError> {
        let (ours, mut all) = (call.encode(), vec![0_u8; 16 * self.size()]);
        self.all_gather(&ours, &mut all)?;
        let (all, _) = all.as_chunks::<16>();
        let Some(rank) = all.iter().position(|theirs| *theirs != ours) else { return Ok(()) };
        let theirs = Call::try_from(all[rank]).map_err(CommError::InvalidArgument)?;
        self.end(Cause::Mismatch { rank, theirs, theirs_seq: seq, ours: call, ours_seq: seq });
        self.check(Some(call))?;
        Err(CommError::InvalidArgument(format!("rank {rank} called {theirs}, this rank called {call}")))
    }
}
