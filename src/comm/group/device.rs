//! The device side of a group, as the host side uses it.

use std::sync::{Arc, PoisonError, Weak};

use super::{CommError, Group};
use crate::call::Call;
use crate::cause::Cause;
use crate::device::DeviceError;
use crate::device::side::Side;

impl Group {
    /// Returns true if this handle supports operations on device buffers; [`Self::with_device`] adds a
    /// device side.
    #[must_use]
    pub fn has_device(&self) -> bool {
        self.device.is_some()
    }

    /// Returns a handle of this group without a device side.
    pub(crate) fn without_device(&self) -> Self {
        Self { device: None, ..self.clone() }
    }

    pub(crate) fn with_side(&self, side: Side) -> Self {
        let side = Arc::new(side);
        let mut sides = self.inner.sides.lock().unwrap_or_else(PoisonError::into_inner);
        sides.retain(|side| side.strong_count() > 0);
        sides.push(Arc::downgrade(&side));
        drop(sides);
        Self { device: Some(side), ..self.clone() }
    }

    /// Returns the device sides of all handles of this group.
    pub(super) fn sides(&self) -> Vec<Arc<Side>> {
        let sides = self.inner.sides.lock().unwrap_or_else(PoisonError::into_inner);
        sides.iter().filter_map(Weak::upgrade).collect()
    }

    /// # Errors
    /// [`CommError::Device`] if this handle has no device side.
    pub(crate) fn side(&self) -> Result<&Arc<Side>, CommError> {
        let without = || DeviceError::Without { group: self.name().to_owned() }.into();
        self.inner.check_caller()?;
        self.device.as_ref().ok_or_else(without)
    }

    /// Returns the error for `call` if the group has ended.
    pub(crate) fn check(&self, call: Option<Call>) -> Result<(), CommError> {
        self.inner.check_caller()?;
        self.inner.shared.as_ref().map_or(Ok(()), |shared| shared.check(call))
    }

    /// Returns an error if the group has ended for all ranks; that this rank destroyed its handle does not
    /// count.
    pub(crate) fn goes_on(&self) -> Result<(), CommError> {
        self.inner.shared.as_ref().map_or(Ok(()), |shared| shared.check(None))
    }

    /// Returns the ranks that have left in good order, or whose loss is about to be reported.
    pub(crate) fn absent(&self) -> Vec<usize> {
        let Some(shared) = &self.inner.shared else { return Vec::new() };
        let here = shared.look().here;
        (0..self.size()).filter(|&rank| rank != self.rank() && !here.contains(&rank)).collect()
    }

    /// # Errors
    /// [`CommError::InvalidArgument`] if this process is a fork of the one that made the group.
    pub(crate) fn of_this_process(&self) -> Result<(), CommError> {
        if self.is_forked() { self.inner.check_caller() } else { Ok(()) }
    }

    /// Returns true if this process is a fork of the one that made the group.
    pub(crate) fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }

    /// Ends the group, unless it has ended: all ranks learn the cause.
    pub(crate) fn end(&self, cause: Cause) {
        if let Some(shared) = self.inner.shared.as_ref().filter(|_| !self.is_forked()) {
            shared.end(cause);
        }
    }

    /// Compares the device calls of all ranks.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] on all ranks, which ends the group.
    pub(crate) fn compare_on_host(&self, call: Call, seq: u64) -> Result<(), CommError> {
        let mut all = vec![0_u8; 16 * self.size()];
        self.all_gather(&call.encode(), &mut all)?;
        let ours = call.encode();
        let (all, _) = all.as_chunks::<16>();
        let Some(rank) = all.iter().position(|theirs| *theirs != ours) else { return Ok(()) };
        let theirs = Call::decode(all[rank]).map_err(CommError::InvalidArgument)?;
        self.end(Cause::Mismatch { rank, theirs, theirs_seq: seq, ours: call, ours_seq: seq });
        match self.check(Some(call)) {
            Err(error) => Err(error),
            Ok(()) => Err(CommError::InvalidArgument(format!(
                "rank {rank} called {theirs}, this rank called {call}"
            ))),
        }
    }
}
