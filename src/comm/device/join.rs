//! The setup of a group's devices.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, result};

use super::begun::Poll;
use super::driver::bind;
use super::ending::Failure;
use super::error::DeviceError;
use super::options::DeviceOptions;
use super::patience::Patience;
use super::side::{Core, Side, Way};
use super::staged::Staging;
use super::told::{Told, judge};
use crate::call::{Call, CallKind};
use crate::dtype::Dtype;
use crate::engine::Limit;
use crate::error::CommError;
use crate::group::Group;
use crate::nccl::{Communicator, Enter, Library, NcclError, Progress, UniqueId, Version};

impl Group {
    /// Returns this group with a device: [`Self::on`] gives the operations on its buffers. All ranks call it,
    /// each with its own device, usually [`device::of_rank`](crate::device::of_rank). The host side of the
    /// group stays usable.
    ///
    /// Groups made from it have devices as well (by `ncclCommSplit`). If the host side learns that a rank has
    /// died, or is aborted, operations on devices end with the same error. If NCCL reports an error, the host
    /// side ends too.
    ///
    /// # Errors
    ///
    /// [`CommError::Device`] on all ranks; the group goes on without devices after these:
    /// [`DeviceError::Nccl`] if this rank has no usable NCCL, [`DeviceError::Elsewhere`] if another rank has
    /// none, [`DeviceError::Versions`], [`DeviceError::Shared`]. [`DeviceError::Init`] and errors of NCCL
    /// calls end the group. Otherwise the error that ended the group.
    ///
    /// # Cost
    /// An all-gather, a broadcast, and what NCCL needs: a few hundred milliseconds as a rule.
    pub fn with_device(&self, context: &Arc<CudaContext>, options: DeviceOptions) -> Result<Self, CommError> {
        let library = if options.staged { Ok(None) } else { Library::load().map(Some) };
        let uuid =
            context.uuid().map(|uuid| uuid.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect());
        let told = Told {
            version: library.as_ref().ok().copied().flatten().map(|library| {
                let Version { major, minor, patch } = library.version();
                (major, minor, patch)
            }),
            device: uuid.unwrap_or_default(),
            error: library.as_ref().err().map(ToString::to_string),
        };
        let host = self.without_device();
        let all = host.all_gather_object(&told)?;
        let library = library.map_err(DeviceError::from)?;
        judge(&all)?;
        let told = |error| host.gave_up(DeviceError::driver("the device failed")(error));
        bind(context).map_err(told)?;
        if !is_primary(context) {
            let what =
                "NCCL uses the primary context of a device (CudaContext::new), and this is another one";
            host.abort(&format!("the device of rank {}: {what}", host.rank()));
            return Err(CommError::InvalidArgument(what.to_owned()));
        }
        let way = match library {
            Some(library) => {
                let communicator = host.connect(library, context, options.init_timeout)?;
                Way::Nccl { library, communicator: Mutex::new(Some(communicator)) }
            }
            None => Way::Staged(Mutex::new(Staging::new(Arc::clone(context)))),
        };
        Ok(self.with_side(host.new_side(context, options, way)?))
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
        // If rank 0 has no id, it sends zeros, so that no rank waits.
        if let Ok(Some(UniqueId(drawn))) = drawn {
            id = drawn;
        }
        self.broadcast(&mut id, 0)?;
        drawn.map_err(DeviceError::from)?;
        if id == [0; 128] {
            return Err(DeviceError::Elsewhere { rank: 0, what: "ncclGetUniqueId failed".to_owned() }.into());
        }
        let context = Arc::clone(context);
        let enter = Enter::new(move || bind(&context).is_ok());
        let begun = library.begin(self.size(), UniqueId(id), self.rank(), enter);
        let (communicator, _) = begun.map_err(|error| self.gave_up(error.into()))?;
        self.await_nccl(|| communicator.progress(), time)?;
        Ok(communicator)
    }

    /// Waits until NCCL has finished the last call, as `progress` reports. Ends the group if it fails or
    /// takes too long.
    fn await_nccl(
        &self,
        mut progress: impl FnMut() -> Result<Progress, NcclError>,
        time: Duration,
    ) -> Result<(), CommError> {
        let (begun, mut wait) = (Instant::now(), Poll::default());
        let mut looked = begun;
        loop {
            match progress() {
                Ok(Progress::Done) => return Ok(()),
                Ok(Progress::UnderWay) => {}
                Err(error) => return Err(self.gave_up(DeviceError::from(error))),
            }
            let now = Instant::now();
            if now - begun >= time {
                return Err(self.gave_up(DeviceError::Init { after: time }));
            }
            // A dead rank does not connect, so check the group instead of waiting for the deadline.
            if now - looked >= super::watch::LOOK {
                self.check(None)?;
                looked = now;
            }
            wait.pause();
        }
    }

    /// Creates the device side. The other ranks have theirs by now, so a failure ends the group.
    fn new_side(
        &self,
        context: &Arc<CudaContext>,
        options: DeviceOptions,
        way: Way,
    ) -> Result<Side, CommError> {
        let side = Side::new(self.clone(), Arc::clone(context), options, way);
        side.inspect_err(|error| self.abort(&format!("the device of rank {}: {error}", self.rank())))
    }

    /// Ends the group, so that no rank waits for this one.
    fn gave_up(&self, error: DeviceError) -> CommError {
        self.abort(&format!("the device of rank {}: {error}", self.rank()));
        error.into()
    }

    /// The device side of a subgroup of `ranks`, in this order; `None` if this rank is not among them. All
    /// ranks of this group call it, each with the ranks of its own subgroup.
    pub(crate) fn split_side(&self, ranks: &[usize]) -> Result<Option<SplitSide>, CommError> {
        let Ok(side) = self.side() else { return Ok(None) };
        let core = &side.core;
        let (context, options) = (Arc::clone(&core.context), core.options.clone());
        let place = ranks.iter().position(|&rank| rank == self.rank());
        let way = match &core.way {
            Way::Staged(_) => place.map(|_| Way::Staged(Mutex::new(Staging::new(Arc::clone(&context))))),
            Way::Nccl { library, .. } => {
                let color = place.and_then(|_| ranks.first().copied());
                let child = core.split(color, place.unwrap_or_default(), self.limit());
                let child = child.inspect_err(|_| {
                    core.fail(Failure::Group);
                    // NCCL may be in the middle of the call; `have_let_go` waits for it.
                    core.have_let_go();
                })?;
                child.map(|child| Way::Nccl { library, communicator: Mutex::new(Some(child)) })
            }
        };
        Ok(way.map(|way| SplitSide { context, options, way }))
    }
}

impl Core {
    /// Splits the communicator: ranks with equal colors are together.
    fn split(
        &self,
        color: Option<usize>,
        key: usize,
        limit: Limit,
    ) -> Result<Option<Communicator>, CommError> {
        let group = &self.group;
        let mut patience = Patience::new(SPLIT, self.calls(), limit);
        let failed = DeviceError::driver("the device failed");
        bind(&self.context).map_err(|error| group.gave_up(failed(error)))?;
        let _alone = self.wait_for(&mut patience, || self.try_alone_in_nccl())?;
        // NCCL wants no other operation under way during a split.
        self.wait_for(&mut patience, || {
            self.reap();
            self.hand_on_chores();
            self.watched().is_empty().then_some(())
        })?;
        let time = self.options.init_timeout.min(patience.rest());
        let split = self.ask(|parent| parent.begin_split(color, key));
        let splitting = split.map_err(|error| group.gave_up(error.into()))?;
        group.await_nccl(|| self.ask(Communicator::progress), time)?;
        let child = splitting.take();
        if let Some(child) = &child {
            group.await_nccl(|| child.progress(), time)?;
        }
        Ok(child)
    }

    /// Calls a function of the communicator, unless NCCL was aborted. The lock is held for the call only, so
    /// that the watchdog can check meanwhile.
    fn ask<R>(&self, ask: impl FnOnce(&Communicator) -> Result<R, NcclError>) -> Result<R, NcclError> {
        let aborted = || NcclError::nothing("ncclCommSplit");
        let (_, communicator) = self.nccl().ok_or_else(aborted)?;
        communicator.as_ref().ok_or_else(aborted).and_then(ask)
    }
}

/// A device side whose group does not exist yet.
pub(crate) struct SplitSide {
    context: Arc<CudaContext>,
    options: DeviceOptions,
    way: Way,
}

impl SplitSide {
    /// The group with this device side.
    pub(crate) fn of(self, group: &Group) -> Result<Group, CommError> {
        let Self { context, options, way } = self;
        Ok(group.with_side(group.new_side(&context, options, way)?))
    }
}

/// The call that errors of a split name.
const SPLIT: Call = Call::new(CallKind::Subgroup, Dtype::U8, None, 0, 0);

/// Returns whether the context is the device's primary one, which other libraries of the process use.
#[allow(unsafe_code)]
fn is_primary(context: &CudaContext) -> bool {
    // SAFETY: retained and released once; `context` is the primary one, or unaffected.
    unsafe {
        let Ok(primary) = result::primary_ctx::retain(context.cu_device()) else { return true };
        let _ = result::primary_ctx::release(context.cu_device());
        primary == context.cu_ctx()
    }
}
