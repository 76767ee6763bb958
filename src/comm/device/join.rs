//! How the ranks of a group bring their devices together.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use serde::{Deserialize, Serialize};

use super::begun::Poll;
use super::driver::bind;
use super::error::DeviceError;
use super::options::DeviceOptions;
use super::side::{Core, Side, Way};
use super::staged::Staging;
use crate::error::CommError;
use crate::group::Group;
use crate::nccl::{Communicator, Library, NcclError, Progress, UniqueId, Version};

/// What a rank tells the others of its device before NCCL is asked for anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Told {
    /// Of NCCL; `None` if the rank goes through the host.
    version: Option<(u32, u32, u32)>,
    /// The device's UUID.
    device: String,
    /// Why it cannot.
    error: Option<String>,
}

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
        let way = match library {
            Some(library) => {
                let communicator = host.connect(library, options.init_timeout)?;
                Way::Nccl { library, communicator: Mutex::new(Some(communicator)) }
            }
            None => Way::Staged(Mutex::new(Staging::new(Arc::clone(context)))),
        };
        let side = Side::new(host.clone(), Arc::clone(context), options, way);
        // The others have theirs by now.
        let side =
            side.inspect_err(|error| host.abort(&format!("the device of rank {}: {error}", host.rank())))?;
        Ok(self.with_side(side))
    }

    /// Forms the group of NCCL: rank 0 draws its name and tells the others.
    fn connect(&self, library: &'static Library, time: Duration) -> Result<Communicator, CommError> {
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
        let begun = library.begin(self.size(), UniqueId(id), self.rank());
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
                bind(&context).map_err(DeviceError::driver("the device failed"))?;
                let _alone = core.alone_in_nccl();
                let split = core.ask(|parent| parent.begin_split(color, place.unwrap_or_default()));
                let splitting = split.map_err(|error| self.gave_up(error.into()))?;
                self.await_nccl(|| core.ask(Communicator::progress), options.init_timeout)?;
                let child = splitting.take();
                if let Some(child) = &child {
                    self.await_nccl(|| child.progress(), options.init_timeout)?;
                }
                child.map(|child| Way::Nccl { library, communicator: Mutex::new(Some(child)) })
            }
        };
        Ok(way.map(|way| SplitSide { context, options, way }))
    }
}

impl Core {
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
        Ok(group.with_side(Side::new(group.clone(), context, options, way)?))
    }
}

/// Whether what all ranks have told goes together.
fn judge(all: &[Told]) -> Result<(), DeviceError> {
    if let Some((rank, what)) =
        all.iter().enumerate().find_map(|(rank, told)| Some((rank, told.error.clone()?)))
    {
        return Err(DeviceError::Elsewhere { rank, what });
    }
    if all.iter().any(|told| told.version.is_none() != all[0].version.is_none()) {
        let other = all.iter().position(|told| told.version.is_none() != all[0].version.is_none());
        let what =
            "it goes through the host and others do not, or the other way round (DeviceOptions::staged)"
                .to_owned();
        return Err(DeviceError::Elsewhere { rank: other.unwrap_or_default(), what });
    }
    let mut versions = BTreeMap::new();
    for (rank, told) in all.iter().enumerate() {
        if let Some(version) = told.version {
            versions.entry(version).or_insert(rank);
        }
    }
    if versions.len() > 1 {
        let version = |(major, minor, patch)| Version { major, minor, patch };
        let mut ranks: Vec<_> = versions.into_iter().map(|(of, rank)| (rank, version(of))).collect();
        ranks.sort_unstable();
        return Err(DeviceError::Versions { ranks });
    }
    // Through the host several ranks may well be on one.
    let mut devices = BTreeMap::new();
    for (rank, told) in
        all.iter().enumerate().filter(|(_, told)| told.version.is_some() && !told.device.is_empty())
    {
        if let Some(first) = devices.insert(told.device.as_str(), rank) {
            return Err(DeviceError::Shared { ranks: (first, rank), device: told.device.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(version: Option<(u32, u32, u32)>, device: &str) -> Told {
        Told { version, device: device.to_owned(), error: None }
    }

    #[test]
    fn ranks_with_one_version_and_a_device_each_go_together() {
        let new = Some((2, 30, 7));
        assert_eq!(judge(&[told(new, "a"), told(new, "b")]), Ok(()));
        assert_eq!(judge(&[told(None, "a"), told(None, "a")]), Ok(()), "through the host");
        // What the driver does not tell is not compared.
        assert_eq!(judge(&[told(new, ""), told(new, "")]), Ok(()));
    }

    #[test]
    fn what_does_not_go_together_is_named() {
        let (old, new) = (Some((2, 18, 3)), Some((2, 30, 7)));
        let text = |all: &[Told]| judge(all).unwrap_err().to_string();
        assert_eq!(
            text(&[told(new, "a"), told(old, "b"), told(new, "c")]),
            "the ranks have different versions of NCCL: rank 0 has 2.30.7, rank 1 has 2.18.3"
        );
        let shared = text(&[told(new, "a"), told(new, "b"), told(new, "a")]);
        assert!(
            shared.starts_with("ranks 0 and 2 are on the same device, a: each needs its own"),
            "{shared}"
        );
        let broken = Told { error: Some("NCCL was not found".to_owned()), ..told(None, "b") };
        assert_eq!(text(&[told(new, "a"), broken]), "rank 1 has no device for the group: NCCL was not found");
        let mixed = text(&[told(new, "a"), told(None, "b")]);
        assert!(mixed.starts_with("rank 1 has no device for the group: it goes through the host"), "{mixed}");
    }
}
