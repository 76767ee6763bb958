//! The setup of a group's devices.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, result};

use super::backend::{Core, DeviceBackend, DeviceTransport};
use super::call_wait::CallWait;
use super::capabilities::{Capabilities, check_compatible};
use super::driver::bind;
use super::operation::Backoff;
use super::options::DeviceOptions;
use super::pending::Search;
use super::staged::Staging;
use super::teardown::Failure;
use crate::api::group::Group;
use crate::api::group::device::{AttachDevice, GroupDevice};
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::Dtype;
use crate::engine::TimeLimit;
use crate::error::{CommError, DeviceError};
use crate::nccl::{Communicator, Library, NcclError, Progress, SetDevice, UniqueId, Version};

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
    ///
    /// [`CommError::Device`] on all ranks. The group stays usable without devices after these errors:
    /// [`DeviceError::Nccl`] if this rank has no usable NCCL, [`DeviceError::PeerUnavailable`] if another
    /// rank has none, [`DeviceError::VersionMismatch`], [`DeviceError::DeviceShared`].
    /// [`DeviceError::InitTimeout`] and errors of NCCL calls end the group. Otherwise the error that ended
    /// the group.
    ///
    /// # Cost
    /// An all-gather, a broadcast, and what NCCL needs: a few hundred milliseconds as a rule.
    pub fn with_device(&self, context: &Arc<CudaContext>, options: DeviceOptions) -> Result<Self, CommError> {
        let prepared = prepare(context, &options);
        let capabilities = match &prepared {
            Ok((library, device)) => Capabilities {
                version: library.map(|library| {
                    let Version { major, minor, patch } = library.version();
                    (major, minor, patch)
                }),
                device: device.clone(),
                error: None,
            },
            Err(error) => {
                Capabilities { version: None, device: String::new(), error: Some(error.to_string()) }
            }
        };
        let host = self.without_device();
        let all = host.all_gather_object(&capabilities)?;
        let (library, _) = prepared?;
        check_compatible(&all)?;
        let failed = |error| host.abort_with(DeviceError::driver("the device failed")(error));
        bind(context).map_err(failed)?;
        if !is_primary(context) {
            let what = "NCCL needs the primary context of a device, and this is another one: create it with \
                        CudaContext::new";
            host.abort(&format!("rank {} cannot use its device: {what}", host.rank()));
            return Err(CommError::InvalidArgument(what.to_owned()));
        }
        let transport = match library {
            Some(library) => {
                let communicator = host.connect(library, context, options.init_timeout)?;
                DeviceTransport::Nccl { library, communicator: Mutex::new(Some(communicator)) }
            }
            None => DeviceTransport::Staged(Mutex::new(Staging::new(Arc::clone(context)))),
        };
        Ok(self.with_device_backend(host.new_device_backend(context, options, transport)?))
    }

    /// Creates the communicator: rank 0 draws the unique id and broadcasts it.
    fn connect(
        &self,
        library: &'static Library,
        context: &Arc<CudaContext>,
        time: Duration,
    ) -> Result<Communicator, CommError> {
        let mut id = [0; 128];
        let drawn = if self.rank() == 0 { library.unique_id().map(Some) } else { Ok(None) };
        // If rank 0 has no id, it broadcasts zeros, so that no other rank waits for it.
        if let Ok(Some(UniqueId(drawn))) = drawn {
            id = drawn;
        }
        self.broadcast(&mut id, 0)?;
        drawn.map_err(DeviceError::from)?;
        if id == [0; 128] {
            return Err(
                DeviceError::PeerUnavailable { rank: 0, what: "ncclGetUniqueId failed".to_owned() }.into()
            );
        }
        let context = Arc::clone(context);
        let set_device = SetDevice::new(move || bind(&context).is_ok());
        let started = library.begin(self.size(), UniqueId(id), self.rank(), set_device);
        let (communicator, _) = started.map_err(|error| self.abort_with(error.into()))?;
        self.wait_for_nccl(|| communicator.progress(), time)?;
        Ok(communicator)
    }

    /// Waits until NCCL has finished its last call, as `progress` reports. Ends the group if that call fails
    /// or takes longer than the limit.
    fn wait_for_nccl(
        &self,
        mut progress: impl FnMut() -> Result<Progress, NcclError>,
        time: Duration,
    ) -> Result<(), CommError> {
        let (start, mut wait) = (Instant::now(), Backoff::default());
        let mut last_check = start;
        loop {
            match progress() {
                Ok(Progress::Done) => return Ok(()),
                Ok(Progress::InProgress) => {}
                Err(error) => return Err(self.abort_with(DeviceError::from(error))),
            }
            let now = Instant::now();
            if now - start >= time {
                return Err(self.abort_with(DeviceError::InitTimeout { after: time }));
            }
            // A dead rank does not connect, so check the group instead of waiting for the deadline.
            if now - last_check >= super::pending::CHECK_INTERVAL {
                self.check(None)?;
                last_check = now;
            }
            wait.pause();
        }
    }

    /// Creates the device backend. Other ranks may have created theirs already, so a failure ends the group.
    fn new_device_backend(
        &self,
        context: &Arc<CudaContext>,
        options: DeviceOptions,
        transport: DeviceTransport,
    ) -> Result<Arc<dyn GroupDevice>, CommError> {
        match DeviceBackend::new(self.clone(), Arc::clone(context), options, transport) {
            Ok(backend) => Ok(Arc::new(backend)),
            Err(error) => {
                self.abort(&format!("the device of rank {} failed: {error}", self.rank()));
                Err(error)
            }
        }
    }

    /// Ends the group with `error`, so that no other rank waits for this rank.
    fn abort_with(&self, error: DeviceError) -> CommError {
        self.abort(&format!("the device of rank {} failed: {error}", self.rank()));
        error.into()
    }
}

/// Loads NCCL, unless the group is staged through the host, and returns the UUID of the device.
fn prepare(
    context: &CudaContext,
    options: &DeviceOptions,
) -> Result<(Option<&'static Library>, String), DeviceError> {
    let library = if options.staged { None } else { Some(Library::load()?) };
    let uuid = context.uuid().map_err(DeviceError::driver("the UUID of the device could not be read"))?;
    Ok((library, uuid.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect()))
}

impl Core {
    /// Makes the device backend of a subgroup; see [`GroupDevice::split`].
    pub(super) fn split(
        self: &Arc<Self>,
        ranks: &[usize],
        limit: TimeLimit,
    ) -> Result<Option<AttachDevice>, CommError> {
        let (context, options) = (Arc::clone(&self.context), self.options.clone());
        let place = ranks.iter().position(|&rank| rank == self.group.rank());
        let transport = match &self.transport {
            DeviceTransport::Staged(_) => {
                place.map(|_| DeviceTransport::Staged(Mutex::new(Staging::new(Arc::clone(&context)))))
            }
            DeviceTransport::Nccl { library, .. } => {
                let child = self.split_communicator(place.map(|place| (ranks[0], place)), limit);
                let child = child.inspect_err(|_| {
                    self.fail(Failure::Group);
                    // NCCL may still be splitting the communicator; `ensure_aborted` aborts that and waits
                    // for its end.
                    self.ensure_aborted();
                })?;
                child.map(|child| DeviceTransport::Nccl { library, communicator: Mutex::new(Some(child)) })
            }
        };
        Ok(transport.map(|transport| -> AttachDevice {
            Box::new(move |group| {
                Ok(group.with_device_backend(group.new_device_backend(&context, options, transport)?))
            })
        }))
    }

    /// Splits the NCCL communicator: ranks with equal colors get one new communicator, in the order of their
    /// keys. A rank that passes `None` gets no communicator.
    fn split_communicator(
        &self,
        color_and_key: Option<(usize, usize)>,
        limit: TimeLimit,
    ) -> Result<Option<Communicator>, CommError> {
        let group = &self.group;
        let mut call_wait = CallWait::new(SPLIT, self.calls(), limit);
        let failed = DeviceError::driver("the device failed");
        bind(&self.context).map_err(|error| group.abort_with(failed(error)))?;
        let _nccl_guard = self.wait_for(&mut call_wait, || self.try_lock_nccl())?;
        // NCCL allows no other operation in progress during a split.
        self.wait_for(&mut call_wait, || {
            self.reap(Search::Exact);
            self.notify_callbacks();
            self.pending().is_empty().then_some(())
        })?;
        let time = self.options.init_timeout.min(call_wait.remaining());
        let split = self.with_communicator(|parent| parent.begin_split(color_and_key));
        let splitting = split.map_err(|error| group.abort_with(error.into()))?;
        group.wait_for_nccl(|| self.with_communicator(Communicator::progress), time)?;
        let child = splitting.into_communicator();
        if let Some(child) = &child {
            group.wait_for_nccl(|| child.progress(), time)?;
        }
        Ok(child)
    }

    /// Calls `call` with the NCCL communicator, unless NCCL was aborted. The lock is released when `call`
    /// returns, so that the watchdog can use the communicator between two calls.
    fn with_communicator<R>(
        &self,
        call: impl FnOnce(&Communicator) -> Result<R, NcclError>,
    ) -> Result<R, NcclError> {
        let aborted = || NcclError::empty_result("ncclCommSplit");
        let (_, communicator) = self.nccl().ok_or_else(aborted)?;
        communicator.as_ref().ok_or_else(aborted).and_then(call)
    }
}

/// The call that an error during a communicator split names.
const SPLIT: Call = Call::new(CallKind::Subgroup, Dtype::U8, None, 0, 0);

/// Returns whether the context is the device's primary context, which other libraries of the process use.
#[allow(unsafe_code)]
fn is_primary(context: &CudaContext) -> bool {
    // SAFETY: retained and released once; `context` is the primary one, or unaffected.
    unsafe {
        let Ok(primary) = result::primary_ctx::retain(context.cu_device()) else { return true };
        let _ = result::primary_ctx::release(context.cu_device());
        primary == context.cu_ctx()
    }
}
