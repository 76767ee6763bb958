//! What a rank has of its group on a device: the communicator, what is under way there, and why it has ended.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError, sys};

use super::element::Of;
use super::error::DeviceError;
use super::events::{Events, Recorded};
use super::options::DeviceOptions;
use super::staged::Staging;
use super::watch::Watch;
use super::words::{By, in_nccl};
use crate::call::Call;
use crate::cause::{Cause, Report};
use crate::engine::chores::Chores;
use crate::engine::{Limit, Ticket};
use crate::error::{CommError, Loss, Place};
use crate::flight::{Recorder, Told, Track};
use crate::group::Group;
use crate::nccl::{Communicator, Library, NcclError, Progress, Step};

/// How long a group may take to end in good order.
const LEAVE: Duration = Duration::from_secs(10);

/// A group's side on a device, on this rank. Dropped with its last handle, it takes leave.
pub(crate) struct Side {
    pub(super) core: Arc<Core>,
    watchdog: Option<JoinHandle<()>>,
}

/// What the watchdog has of it as well.
pub(super) struct Core {
    /// The host's side.
    pub(super) group: Group,
    pub(super) context: Arc<CudaContext>,
    pub(super) options: DeviceOptions,
    way: Way,
    failure: OnceLock<Failure>,
    events: Arc<Events>,
    pub(super) watch: Mutex<Watch<Arc<Begun>>>,
    /// Rings when `watch` has changed so that the watchdog should look.
    pub(super) bell: Condvar,
    pub(super) closing: AtomicBool,
    pub(super) chores: Arc<Chores>,
    /// What a barrier is about.
    token: Mutex<CudaSlice<u8>>,
    seq: AtomicU64,
    track: Track,
}

/// How bytes go from device to device.
pub(super) enum Way {
    Nccl {
        library: &'static Library,
        /// Locked while a call is made; `None` when it has been aborted.
        communicator: Mutex<Option<Communicator>>,
    },
    Staged(Mutex<Staging>),
}

/// Why it has ended.
enum Failure {
    /// The host's side has, and says why.
    Group,
    /// For what this rank found, in a group that has nobody else to tell it.
    Own(Report),
    /// The device or NCCL.
    Device(DeviceError),
}

/// An operation that was enqueued.
pub(crate) struct Begun {
    pub(super) ticket: Arc<Ticket>,
    pub(super) call: Call,
    seq: u64,
    recorded: Recorded,
    core: std::sync::Weak<Core>,
}

impl Side {
    pub(super) fn new(
        group: Group,
        context: Arc<CudaContext>,
        options: DeviceOptions,
        way: Way,
    ) -> Result<Self, CommError> {
        let token = context.default_stream().alloc_zeros(1);
        let token = token.map_err(DeviceError::driver("there is no memory on the device"))?;
        let name = format!("{}/device", group.name());
        let place = (group.rank(), group.size());
        let recorder = Recorder::of_process();
        let track = recorder.group(&name, 0, Some(group.generation()), place, group.global_ranks());
        track.formed(group.generation());
        let core = Arc::new(Core {
            events: Events::new(Arc::clone(&context)),
            group,
            context,
            options,
            way,
            failure: OnceLock::new(),
            watch: Mutex::default(),
            bell: Condvar::new(),
            closing: AtomicBool::new(false),
            chores: Arc::default(),
            token: Mutex::new(token),
            seq: AtomicU64::new(0),
            track,
        });
        let watched = Arc::clone(&core);
        let watchdog =
            thread::Builder::new().name("convoke-device".to_owned()).spawn(move || watched.watch_over());
        let watchdog =
            watchdog.map_err(|error| CommError::system("cannot start the watchdog of a device", error))?;
        Ok(Self { core, watchdog: Some(watchdog) })
    }

    /// Ends the group's side on this device for `reason`, and what is under way there.
    pub(crate) fn abort(&self, reason: &str) {
        self.core.fail(Failure::Own(Report::new(
            self.core.group.rank(),
            Cause::Aborted { reason: reason.to_owned() },
        )));
    }

    /// Takes leave now, though there are handles left. What is under way is carried out.
    pub(crate) fn destroy(&self) {
        self.core.leave();
        let _ = self.core.failure.set(Failure::Group);
        self.core.ring();
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if self.core.group.is_forked() {
            // The thread is not here, and what NCCL has is the parent's.
            std::mem::forget(Arc::clone(&self.core));
            std::mem::forget(self.watchdog.take());
            return;
        }
        self.core.closing.store(true, Ordering::SeqCst);
        self.core.ring();
        // The last handle may have been dropped by a callback: then this is that thread, which ends next.
        if let Some(watchdog) =
            self.watchdog.take().filter(|other| other.thread().id() != thread::current().id())
        {
            let _ = watchdog.join();
        }
        self.core.leave();
    }
}

impl Core {
    /// Carries out the steps of one call on a stream, behind what is there: NCCL's, or all of it if it goes through the
    /// host.
    ///
    /// # Safety
    /// As [`Communicator::enqueue`], of a stream of this side's context.
    #[allow(unsafe_code)]
    pub(super) unsafe fn enqueue(
        self: &Arc<Self>,
        call: Call,
        steps: &[Step<Of, By>],
        stream: &CudaStream,
        limit: Limit,
    ) -> Result<Option<Arc<Begun>>, CommError> {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        self.check(call, seq)?;
        let limit = limit.begun();
        self.context.bind_to_thread().map_err(|error| self.broken(error, call, seq))?;
        let ticket = Arc::new(Ticket::nonblocking(limit, Arc::clone(&self.chores)));
        let _ = ticket.step.set(self.track.begin(&Told::device(call, seq, self.track.ns(ticket.made))));
        let enqueued = match &self.way {
            // SAFETY: the caller's.
            Way::Nccl { library, communicator } => unsafe {
                self.enqueue_nccl(call, seq, (*library, communicator), steps, stream, ticket.deadline)
            },
            Way::Staged(staging) => {
                let group =
                    self.group.with_timeout(ticket.deadline.saturating_duration_since(Instant::now()));
                let mut staging = staging.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: the caller's.
                unsafe { staging.carry_out(&group, steps, stream) }
            }
        };
        if let Err(error) = enqueued {
            ticket.complete(Ok(None));
            if let Some(step) = ticket.step.get() {
                step.end(false);
            }
            return Err(error);
        }
        // Events of what is captured in a graph tell of the graph, which nobody has launched.
        let status = stream.capture_status().map_err(|error| self.broken(error, call, seq))?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            ticket.complete(Ok(None));
            return Ok(None);
        }
        let recorded = self.events.record(stream).map_err(|error| self.broken(error, call, seq))?;
        let (deadline, key) = (ticket.deadline, stream.cu_stream() as usize);
        let begun = Arc::new(Begun { ticket, call, seq, recorded, core: Arc::downgrade(self) });
        let mut watch = self.watched();
        let (first, many) = (watch.is_empty(), watch.add(Arc::clone(&begun), key, deadline));
        let done = if many { watch.reap(|begun| begun.recorded.is_over()).0 } else { Vec::new() };
        drop(watch);
        if first {
            self.bell.notify_all();
        }
        done.iter().for_each(|begun| begun.ticket.complete(Ok(None)));
        Ok(Some(begun))
    }

    /// # Safety
    /// As [`Self::enqueue`].
    #[allow(unsafe_code)]
    unsafe fn enqueue_nccl(
        &self,
        call: Call,
        seq: u64,
        (library, communicator): (&'static Library, &Mutex<Option<Communicator>>),
        steps: &[Step<Of, By>],
        stream: &CudaStream,
        deadline: Instant,
    ) -> Result<(), CommError> {
        let version = library.version();
        let steps: Result<smallvec::SmallVec<[Step; 2]>, String> =
            steps.iter().map(|step| in_nccl(*step, version)).collect();
        let steps = steps.map_err(CommError::Unsupported)?;
        let raw = stream.cu_stream().cast();
        let guard = lock(communicator);
        let Some(known) = &*guard else { return Err(self.error(call, seq)) };
        // SAFETY: the caller's.
        let mut progress = unsafe { known.enqueue(&steps, raw) };
        drop(guard);
        let mut wait = Poll::default();
        // Only what is enqueued is before the event that is recorded next.
        while let Ok(Progress::UnderWay) = progress {
            self.check(call, seq)?;
            if Instant::now() >= deadline {
                let after_ms = self.group.timeout().as_millis() as u64;
                self.fail(Failure::Own(Report::new(
                    self.group.rank(),
                    Cause::Timeout { missing: Vec::new(), after_ms },
                )));
            }
            wait.pause();
            let guard = lock(communicator);
            let Some(known) = &*guard else { return Err(self.error(call, seq)) };
            progress = known.progress();
        }
        progress.map(drop).map_err(|error| self.nccl_failed(error, call, seq))
    }

    /// Calls that were made so far.
    pub(super) fn calls(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    /// Waits until an operation is done, or until `until`.
    pub(super) fn wait(&self, begun: &Begun, until: Option<Instant>) {
        let mut wait = Poll::default();
        while !self.look_at(begun) {
            if until.is_some_and(|until| Instant::now() >= until) {
                return;
            }
            // The watchdog wakes it if the group ends.
            if begun.ticket.unpark_me() {
                wait.park(until);
            }
        }
    }

    /// Whether an operation is done, well or not.
    pub(super) fn look_at(&self, begun: &Begun) -> bool {
        if begun.ticket.is_done() {
            return true;
        }
        match begun.recorded.is_over() {
            // What has ended because it was aborted has not ended well.
            Ok(true) if self.failure.get().is_none() => begun.ticket.complete(Ok(None)),
            Ok(_) => return false,
            Err(error) => begun.ticket.complete(Err(self.broken(error, begun.call, begun.seq))),
        }
        true
    }

    /// An error if it has ended.
    fn check(&self, call: Call, seq: u64) -> Result<(), CommError> {
        match self.failure.get() {
            Some(_) => Err(self.error(call, seq)),
            None => Ok(()),
        }
    }

    /// The device does not do what it should.
    fn broken(&self, error: DriverError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(DeviceError::driver("the device failed")(error)));
        self.error(call, seq)
    }

    fn nccl_failed(&self, error: NcclError, call: Call, seq: u64) -> CommError {
        self.fail(Failure::Device(error.into()));
        self.error(call, seq)
    }

    /// It has ended: the host's side as well, so that all ranks know, and the watchdog ends what is under way.
    fn fail(&self, failure: Failure) {
        let (cause, of_group) = match &failure {
            Failure::Group => (None, true),
            Failure::Own(report) => (Some(report.cause.clone()), false),
            Failure::Device(error) => {
                let reason = format!("the device of rank {}: {error}", self.group.rank());
                (Some(Cause::Aborted { reason }), false)
            }
        };
        if self.failure.set(failure).is_err() {
            return;
        }
        if let Some(cause) = cause.filter(|_| !of_group) {
            self.track.failed(&Report::new(self.group.rank(), cause.clone()));
            self.group.end(cause);
        }
        self.ring();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Whether the host's side goes on, and NCCL with it.
    pub(super) fn look_around(&self) {
        if self.group.check(None).is_err() {
            self.fail(Failure::Group);
            return;
        }
        let Way::Nccl { communicator, .. } = &self.way else { return };
        let state = lock(communicator).as_ref().map(Communicator::progress);
        if let Some(Err(error)) = state {
            self.fail(Failure::Device(error.into()));
        }
    }

    /// The time of an operation is over.
    pub(super) fn overdue(&self, begun: &Begun) {
        let after_ms = begun.ticket.timeout.as_millis() as u64;
        self.fail(Failure::Own(Report::new(
            self.group.rank(),
            Cause::Timeout { missing: Vec::new(), after_ms },
        )));
    }

    /// A rank has left that what is under way needs.
    pub(super) fn left(&self, rank: usize) {
        self.fail(Failure::Own(Report::new(self.group.rank(), Cause::PeerLost { rank, how: Loss::Left })));
    }

    pub(super) fn device_failed(&self, error: DriverError) {
        self.fail(Failure::Device(DeviceError::driver("the device failed")(error)));
    }

    /// Answers everybody who waits, and has NCCL let go of its streams.
    pub(super) fn end_everything(&self) {
        for begun in self.watched().end() {
            begun.ticket.complete(Err(self.error(begun.call, begun.seq)));
        }
        if let Way::Nccl { communicator, .. } = &self.way {
            let taken = lock(communicator).take();
            drop(taken);
        }
    }

    /// What a call returns after it has ended.
    fn error(&self, call: Call, seq: u64) -> CommError {
        let of_group = || self.group.check(Some(call)).err();
        let own = |report: &Report| {
            let place = Place {
                group: self.group.name().to_owned(),
                call: Some(call),
                seq,
                received_bytes: 0,
                expected_bytes: 0,
                reported_by: report.by,
                confirmed: false,
            };
            report.error(place, |_| String::new())
        };
        match self.failure.get() {
            Some(Failure::Device(error)) => error.clone().into(),
            // The host's side may have ended before, for another reason: then that is the one of all ranks.
            Some(Failure::Own(report)) => of_group().unwrap_or_else(|| own(report)),
            Some(Failure::Group) | None => of_group().unwrap_or_else(|| {
                let reason = "the group has ended".to_owned();
                own(&Report::new(self.group.rank(), Cause::Aborted { reason }))
            }),
        }
    }

    /// Ends in good order, if it has not ended: what was enqueued is carried out, then NCCL frees what it has.
    fn leave(&self) {
        let Way::Nccl { communicator, .. } = &self.way else { return };
        let Some(communicator) = lock(communicator).take() else { return };
        if self.has_failed() || self.context.bind_to_thread().is_err() {
            return;
        }
        let (until, mut wait) = (Instant::now() + LEAVE, Poll::default());
        let mut progress = communicator.finalize();
        while let Ok(Progress::UnderWay) = progress {
            if Instant::now() >= until || self.group.check(None).is_err() {
                // Dropped, it is aborted.
                return;
            }
            wait.pause();
            progress = communicator.progress();
        }
        if progress.is_ok() {
            communicator.destroy();
        }
    }

    /// What a barrier is about.
    pub(super) fn token(&self) -> MutexGuard<'_, CudaSlice<u8>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The communicator, and what made it.
    pub(super) fn nccl(&self) -> Option<(&'static Library, MutexGuard<'_, Option<Communicator>>)> {
        match &self.way {
            Way::Nccl { library, communicator } => Some((library, lock(communicator))),
            Way::Staged(_) => None,
        }
    }

    pub(super) fn watched(&self) -> MutexGuard<'_, Watch<Arc<Begun>>> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ring(&self) {
        // With the lock: the watchdog has seen what was before, or sleeps and hears it.
        let _watch = self.watched();
        self.bell.notify_all();
    }

    /// Takes out and completes what is done.
    pub(super) fn reap(&self) {
        let (done, failed) = self.watched().reap(|begun| begun.recorded.is_over());
        if !self.has_failed() {
            done.iter().for_each(|begun| begun.ticket.complete(Ok(None)));
        } else {
            done.iter().for_each(|begun| begun.ticket.complete(Err(self.error(begun.call, begun.seq))));
        }
        if let Some(error) = failed {
            self.device_failed(error);
        }
    }
}

impl Begun {
    /// Waits until it is done, or until `until`.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        if let Some(core) = self.core.upgrade() {
            core.wait(self, until);
        }
    }

    /// Whether it is done, well or not.
    pub(crate) fn look(&self) -> bool {
        self.core.upgrade().is_none_or(|core| core.look_at(self))
    }

    /// Sees to it that who waits for its ticket is told soon.
    pub(crate) fn hurry(&self) {
        if let Some(core) = self.core.upgrade() {
            core.watched().hurry();
            core.bell.notify_all();
        }
    }

    /// Has `stream` wait until it is done; the host does not.
    pub(crate) fn hold(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.recorded.hold(stream).map_err(DeviceError::driver("a stream cannot wait"))
    }

    pub(crate) fn ticket(&self) -> &Arc<Ticket> {
        &self.ticket
    }
}

/// How a thread waits for what only asking tells: at once, then more and more seldom.
#[derive(Default)]
pub(super) struct Poll {
    asked: u32,
}

impl Poll {
    const SPINS: u32 = 100;
    const LONGEST: Duration = Duration::from_millis(10);

    fn next(&mut self) -> Option<Duration> {
        self.asked += 1;
        let beyond = self.asked.checked_sub(Self::SPINS)?;
        Some(Self::LONGEST.min(Duration::from_micros(20) * (1 + beyond / 16)))
    }

    pub(super) fn pause(&mut self) {
        match self.next() {
            Some(time) => thread::sleep(time),
            None => std::hint::spin_loop(),
        }
    }

    fn park(&mut self, until: Option<Instant>) {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        match self.next() {
            Some(time) => thread::park_timeout(left.unwrap_or(time).min(time)),
            None => std::hint::spin_loop(),
        }
    }
}

fn lock(communicator: &Mutex<Option<Communicator>>) -> MutexGuard<'_, Option<Communicator>> {
    communicator.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Side").field("core", &self.core).finish_non_exhaustive()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("device", &self.context.ordinal()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Begun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Begun").field("call", &self.call).field("seq", &self.seq).finish_non_exhaustive()
    }
}
