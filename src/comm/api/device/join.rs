//! The setup of a group's devices: the exchange of their capabilities, and the connection by NCCL.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, DriverError, result};

use super::backoff::Backoff;
use super::call_wait::CallWait;
use super::capabilities::{Capabilities, check_compatible};
use super::core::{Core, Failure};
use super::driver::bind;
use super::options::DeviceOptions;
use super::pending::{CHECK_INTERVAL, Search};
use super::transport::{DeviceTransport, NcclTransport};
use crate::api::group::Group;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::Dtype;
use crate::engine::TimeLimit;
use crate::error::{CommError, DeviceError};
use crate::nccl::{Communicator, Library, NcclError, Progress, SetDevice, UniqueId, Version};

impl Group {
    /// Connects the devices of all ranks of the group, a handle without a device. For its errors see
    /// [`Group::with_device`].
    pub(super) fn connect_devices(
        &self,
        context: &Arc<CudaContext>,
        options: &DeviceOptions,
    ) -> Result<DeviceTransport, CommError> {
        let prepared = prepare(context, options);
        let version = |library: &Library| {
            let Version { major, minor, patch } = library.version();
            (major, minor, patch)
        };
        let capabilities = Capabilities {
            version: prepared.as_ref().ok().and_then(|(library, _)| library.map(version)),
            device: prepared.as_ref().map_or_else(|_| String::new(), |(_, device)| device.clone()),
            error: prepared.as_ref().err().map(ToString::to_string),
        };
        let all = self.all_gather_object(&capabilities)?;
        let (library, _) = prepared?;
        check_compatible(&all)?;
        bind(context).map_err(|error| self.driver_failed(error))?;
        if !is_primary(context) {
            let what = "NCCL needs the primary context of a device, and this is another one: create it with \
                        CudaContext::new";
            self.abort(&format!("rank {} cannot use its device: {what}", self.rank()));
            return Err(CommError::InvalidArgument(what.to_owned()));
        }
        Ok(match library {
            Some(library) => {
                let communicator = self.connect(library, context, options.init_timeout)?;
                DeviceTransport::new_nccl(library, communicator)
            }
            None => DeviceTransport::new_staged(context),
        })
    }

    /// Creates the communicator: rank 0 draws the unique id and broadcasts it.
    fn connect(
        &self,
        library: &'static Library,
        context: &Arc<CudaContext>,
        time: Duration,
    ) -> Result<Communicator, CommError> {
        // If rank 0 has no id, it broadcasts zeros, so that no other rank waits for it.
        let none = UniqueId([0; 128]);
        let drawn = if self.rank() == 0 { library.unique_id() } else { Ok(none) };
        let UniqueId(mut id) = *drawn.as_ref().unwrap_or(&none);
        self.broadcast(&mut id, 0)?;
        drawn.map_err(DeviceError::from)?;
        if id == none.0 {
            let what = "ncclGetUniqueId failed".to_owned();
            return Err(DeviceError::PeerUnavailable { rank: 0, what }.into());
        }
        let context = Arc::clone(context);
        let set_device: SetDevice = Arc::new(move || bind(&context).is_ok());
        let started = library.begin(self.size(), UniqueId(id), self.rank(), set_device);
        let (communicator, _) = started.map_err(|error| self.device_failed(DeviceError::from(error)))?;
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
        let mut last_check = Instant::now();
        let finished = Backoff::poll_until(TimeLimit::from(time).deadline(), || match progress() {
            Ok(Progress::Done) => Some(Ok(())),
            // A dead rank does not connect, so check the group instead of waiting for the deadline.
            Ok(Progress::InProgress) if last_check.elapsed() >= CHECK_INTERVAL => {
                last_check = Instant::now();
                self.check(None).err().map(Err)
            }
            Ok(Progress::InProgress) => None,
            Err(error) => Some(Err(self.device_failed(DeviceError::from(error)))),
        });
        finished.unwrap_or_else(|| Err(self.device_failed(DeviceError::InitTimeout { after: time })))
    }

    /// Ends the group because of a failure of the device, so that no other rank waits for this rank.
    pub(super) fn device_failed<E: Display + Into<CommError>>(&self, error: E) -> CommError {
        self.abort(&format!("the device of rank {} failed: {error}", self.rank()));
        error.into()
    }

    fn driver_failed(&self, error: DriverError) -> CommError {
        self.device_failed(DeviceError::driver("the device failed")(error))
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
    /// Connects the devices of a subgroup of `ranks`, in this order; `None` if this rank is not in `ranks`.
    pub(super) fn split(
        self: &Arc<Self>,
        ranks: &[usize],
        limit: TimeLimit,
    ) -> Result<Option<DeviceTransport>, CommError> {
        let place = ranks.iter().position(|&rank| rank == self.group.rank());
        let DeviceTransport::Nccl(nccl) = &self.transport else {
            return Ok(place.map(|_| DeviceTransport::new_staged(&self.context)));
        };
        let child = self.split_communicator(nccl, place.map(|place| (ranks[0], place)), limit);
        let child = child.inspect_err(|_| {
            self.fail(Failure::Group);
            // NCCL may still be splitting the communicator; `ensure_aborted` aborts that and waits for its
            // end.
            self.ensure_aborted();
        })?;
        Ok(child.map(|child| DeviceTransport::new_nccl(nccl.library, child)))
    }

    /// Splits the NCCL communicator: ranks with equal colors get one new communicator, in the order of their
    /// keys. A rank that passes `None` gets no communicator.
    fn split_communicator(
        &self,
        nccl: &NcclTransport,
        color_and_key: Option<(usize, usize)>,
        limit: TimeLimit,
    ) -> Result<Option<Communicator>, CommError> {
        let group = &self.group;
        let mut call_wait = CallWait::new(SPLIT, self.calls(), limit);
        bind(&self.context).map_err(|error| group.driver_failed(error))?;
        let _nccl_guard = self.wait_for(&mut call_wait, || nccl.try_lock_calls())?;
        // NCCL allows no other operation in progress during a split.
        self.wait_for(&mut call_wait, || {
            self.reap(Search::Exact);
            self.notify_callbacks();
            self.pending().is_empty().then_some(())
        })?;
        let time = self.options.init_timeout.min(call_wait.remaining());
        // The lock is released between two calls, so that the watchdog can use the communicator.
        let splitting = with_communicator(nccl, |parent| parent.begin_split(color_and_key));
        let splitting = splitting.map_err(|error| group.device_failed(DeviceError::from(error)))?;
        group.wait_for_nccl(|| with_communicator(nccl, Communicator::progress), time)?;
        let child = splitting.into_communicator();
        if let Some(child) = &child {
            group.wait_for_nccl(|| child.progress(), time)?;
        }
        Ok(child)
    }
}

/// Calls `call` with the communicator, unless NCCL was aborted.
fn with_communicator<R>(
    nccl: &NcclTransport,
    call: impl FnOnce(&Communicator) -> Result<R, NcclError>,
) -> Result<R, NcclError> {
    nccl.communicator().as_ref().ok_or_else(|| NcclError::empty_result("ncclCommSplit")).and_then(call)
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
