//! How the ranks of a group bring their devices together.

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
    /// This group with a side on a device: operations on buffers there are those of [`Self::on`]. All ranks call it, each with
    /// its own device; the host's side goes on as it was. The device is that of [`device::of_rank`](crate::device::of_rank), as a rule.
    ///
    /// Groups made from it have sides as well (by `ncclCommSplit`). When the host's side learns that a rank has died, or is
    /// aborted, what is under way on devices ends as well, with the same error. What NCCL finds out ends the host's side.
    ///
    /// # Errors
    /// [`CommError::Device`]: [`DeviceError::Nccl`] if this rank has no NCCL that can be used, [`DeviceError::Elsewhere`] if
    /// another has none, [`DeviceError::Versions`], [`DeviceError::Shared`]; on all ranks, and the group goes on without
    /// devices. [`DeviceError::Init`] and what NCCL says end the group. Else whatever did.
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

    /// Forms the group of NCCL: rank 0 draws its name and tells the others.
    fn connect(
        &self,
        library: &'static Library,
        context: &Arc<CudaContext>,
        time: Duration,
    ) -> Result<Communicator, CommError> {
        let mut id = [0; 128];
        let drawn = if self.rank() == 0 { library.unique_id().map(Some) } else { Ok(None) };
        // A rank 0 that has none sends zeros, so that nobody waits.
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

    /// Waits until NCCL has done what it was asked for, as `progress` says. Ends the group if it fails or takes too long.
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
            // Who is dead does not come: no need to wait for the deadline.
            if now - looked >= super::watch::LOOK {
                self.check(None)?;
                looked = now;
            }
            wait.pause();
        }
    }

    /// Its side. The others have theirs by now: without it the group ends.
    fn new_side(
        &self,
        context: &Arc<CudaContext>,
        options: DeviceOptions,
        way: Way,
    ) -> Result<Side, CommError> {
        let side = Side::new(self.clone(), Arc::clone(context), options, way);
        side.inspect_err(|error| self.abort(&format!("the device of rank {}: {error}", self.rank())))
    }

    /// The group ends, so that no rank waits for this one.
    fn gave_up(&self, error: DeviceError) -> CommError {
        self.abort(&format!("the device of rank {}: {error}", self.rank()));
        error.into()
    }

    /// The side of a group of `ranks`, in this order, which is cut out of this one; `None` if this rank is not among them.
    /// All ranks of this group call it, each for the ranks it will be with.
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
                    // NCCL may be in the middle of it: see there.
                    core.have_let_go();
                })?;
                child.map(|child| Way::Nccl { library, communicator: Mutex::new(Some(child)) })
            }
        };
        Ok(way.map(|way| SplitSide { context, options, way }))
    }
}

impl Core {
    /// Cuts the communicator, with those of the same color.
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
        // It wants nothing else under way meanwhile.
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

    /// Asks the communicator something, unless NCCL was told to let go. It is locked for that only: the watchdog looks
    /// meanwhile.
    fn ask<R>(&self, ask: impl FnOnce(&Communicator) -> Result<R, NcclError>) -> Result<R, NcclError> {
        let aborted = || NcclError::nothing("ncclCommSplit");
        let (_, communicator) = self.nccl().ok_or_else(aborted)?;
        communicator.as_ref().ok_or_else(aborted).and_then(ask)
    }
}

/// A side that waits for its group.
pub(crate) struct SplitSide {
    context: Arc<CudaContext>,
    options: DeviceOptions,
    way: Way,
}

impl SplitSide {
    /// The group with it.
    pub(crate) fn of(self, group: &Group) -> Result<Group, CommError> {
        let Self { context, options, way } = self;
        Ok(group.with_side(group.new_side(&context, options, way)?))
    }
}

/// What a split is in errors.
const SPLIT: Call = Call::new(CallKind::Subgroup, Dtype::U8, None, 0, 0);

/// Whether it is the context that every other library of the process has of this device.
#[allow(unsafe_code)]
fn is_primary(context: &CudaContext) -> bool {
    // SAFETY: retained and released once; `context` has it, or has nothing to do with it.
    unsafe {
        let Ok(primary) = result::primary_ctx::retain(context.cu_device()) else { return true };
        let _ = result::primary_ctx::release(context.cu_device());
        primary == context.cu_ctx()
    }
}
