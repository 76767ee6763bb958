//! The device backend of a group's handle: its setup, and its end.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cudarc::driver::CudaContext;

use super::core::{Core, Failure};
use super::driver::bind;
use super::options::DeviceOptions;
use super::transport::DeviceTransport;
use crate::api::group::Group;
use crate::api::group::device::{AttachDevice, GroupDevice};
use crate::engine::TimeLimit;
#[cfg(doc)]
use crate::error::DeviceError;
use crate::error::cause::Cause;
use crate::error::{CommError, LossReason};

/// A group's device backend on this rank. Dropping the last group handle that holds it shuts it down.
pub(super) struct DeviceBackend {
    pub(super) core: Arc<Core>,
    watchdog: Option<JoinHandle<()>>,
}

impl Group {
    /// Returns a handle of this group with a device; [`Self::on`] gives the operations on device buffers. All
    /// ranks call `with_device`, each with its own device, usually
    /// [`device::open_for_rank`](crate::api::device::open_for_rank). The host side of the group stays usable.
    ///
    /// Subgroups made from the returned handle have devices as well (by `ncclCommSplit`). If the host side
    /// learns that a rank has died, or is aborted, operations on devices end with the same error. If NCCL
    /// reports an error, the host side ends too.
    ///
    /// # Errors
    /// [`CommError::Device`] on all ranks. The group stays usable without devices after these errors:
    /// [`DeviceError::Nccl`] if this rank has no usable NCCL, [`DeviceError::PeerUnavailable`] if another
    /// rank has none, [`DeviceError::VersionMismatch`], [`DeviceError::DeviceShared`].
    /// [`DeviceError::InitTimeout`] and errors of NCCL calls end the group. Otherwise the error that ended
    /// the group.
    ///
    /// # Cost
    /// An all-gather, a broadcast, and what NCCL needs: a few hundred milliseconds as a rule.
    pub fn with_device(&self, context: &Arc<CudaContext>, options: DeviceOptions) -> Result<Self, CommError> {
        let transport = self.without_device().connect_devices(context, &options)?;
        self.attach_device(Arc::clone(context), options, transport)
    }

    /// Returns a handle with a new device backend. Other ranks may have created theirs already, so a failure
    /// ends the group.
    fn attach_device(
        &self,
        context: Arc<CudaContext>,
        options: DeviceOptions,
        transport: DeviceTransport,
    ) -> Result<Self, CommError> {
        let host = self.without_device();
        let backend = DeviceBackend::new(host.clone(), context, options, transport);
        let backend = backend.map_err(|error| host.device_failed(error))?;
        Ok(self.with_device_backend(Arc::new(backend)))
    }
}

impl DeviceBackend {
    fn new(
        group: Group,
        context: Arc<CudaContext>,
        options: DeviceOptions,
        transport: DeviceTransport,
    ) -> Result<Self, CommError> {
        let core = Core::new(group, context, options, transport)?;
        let shared = Arc::clone(&core);
        let failed = |error| CommError::system("cannot start the watchdog of a device", error);
        let builder = thread::Builder::new().name("convoke-device".to_owned());
        let watchdog = builder.spawn(move || shared.run_watchdog()).map_err(failed)?;
        Ok(Self { core, watchdog: Some(watchdog) })
    }

    /// Returns the device backend of a group's handle, or [`CommError::Device`] if it has none.
    pub(super) fn of(group: &Group) -> Result<&Self, CommError> {
        let backend: &dyn Any = &**group.device_backend()?;
        Ok(backend.downcast_ref().expect("no other type is a device backend"))
    }
}

impl GroupDevice for DeviceBackend {
    fn abort(&self, reason: &str) {
        self.core.fail(Failure::Own(Cause::Aborted { reason: reason.to_owned() }));
    }

    fn destroy(&self) {
        self.core.finish_all(TimeLimit::from(Duration::MAX).deadline());
        self.core.shut_down();
        let _ = self.core.failure.set(Failure::Group);
        self.core.wake_watchdog();
    }

    fn split(&self, ranks: &[usize], limit: TimeLimit) -> Result<Option<AttachDevice>, CommError> {
        let (context, options) = (Arc::clone(&self.core.context), self.core.options.clone());
        let transport = self.core.split(ranks, limit)?;
        Ok(transport.map(|transport| -> AttachDevice {
            Box::new(move |group| group.attach_device(context, options, transport))
        }))
    }
}

impl Drop for DeviceBackend {
    fn drop(&mut self) {
        if self.core.group.is_forked() {
            // In a forked child the watchdog thread does not exist, and NCCL's resources are the parent's.
            std::mem::forget(Arc::clone(&self.core));
            std::mem::forget(self.watchdog.take());
            return;
        }
        let _ = bind(&self.core.context);
        if thread::panicking() {
            // As on the host side, a panic ends the group, so that other ranks do not wait for this rank.
            let rank = self.core.group.rank();
            self.core.fail(Failure::Own(Cause::PeerLost { rank, how: LossReason::Panicked }));
        }
        self.core.watchdog.closing.store(true, Ordering::SeqCst);
        self.core.wake_watchdog();
        // If a callback dropped the last handle, this is the watchdog thread itself, which ends next.
        if let Some(watchdog) =
            self.watchdog.take().filter(|other| other.thread().id() != thread::current().id())
        {
            let _ = watchdog.join();
        }
        self.core.shut_down();
    }
}
