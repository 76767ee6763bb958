//! The device side of a group on one rank: the communicator, and the operations under way.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice};

use super::begun::{Begun, Poll};
use super::driver::bind;
use super::ending::Failure;
use super::error::DeviceError;
use super::events::Events;
use super::options::DeviceOptions;
use super::staged::Staging;
use super::watch::{LOOK, Watch};
use crate::cause::{Cause, Report};
use crate::engine::Limit;
use crate::engine::chores::Chores;
use crate::error::{CommError, Loss};
use crate::flight::{Recorder, Track};
use crate::group::Group;
use crate::nccl::{Communicator, Library};

/// A group's device side on this rank. Dropping its last handle shuts it down.
pub(crate) struct Side {
    pub(super) core: Arc<Core>,
    watchdog: Option<JoinHandle<()>>,
}

/// The state that the side shares with its watchdog.
pub(super) struct Core {
    /// The host side.
    pub(super) group: Group,
    pub(super) context: Arc<CudaContext>,
    pub(super) options: DeviceOptions,
    pub(super) way: Way,
    pub(super) failure: OnceLock<Failure>,
    pub(super) events: Arc<Events>,
    pub(super) watch: Mutex<Watch<Arc<Begun>>>,
    /// Notified when `watch` has changed so that the watchdog should check it.
    pub(super) bell: Condvar,
    pub(super) closing: AtomicBool,
    /// Set when NCCL was aborted, or need not be.
    pub(super) let_go: AtomicBool,
    /// Once set, operations that end may have been aborted.
    pub(super) aborting: AtomicBool,
    /// Set when the abort of NCCL is done.
    pub(super) gone: AtomicBool,
    /// Held by a caller of NCCL until the call is finished: a communicator takes one call at a time.
    in_nccl: Mutex<()>,
    pub(super) chores: Arc<Chores>,
    /// The one-byte buffer of barriers.
    token: Mutex<CudaSlice<u8>>,
    pub(super) seq: AtomicU64,
    pub(super) track: Track,
}

/// The transport between devices.
pub(super) enum Way {
    Nccl {
        library: &'static Library,
        /// Locked only during a call, so that the watchdog can check and abort. `None` when it has been
        /// aborted.
        communicator: Mutex<Option<Communicator>>,
    },
    Staged(Mutex<Staging>),
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
            let_go: AtomicBool::new(false),
            aborting: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            in_nccl: Mutex::default(),
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

    /// Ends the group's device side for `reason`, and aborts the operations under way.
    pub(crate) fn abort(&self, reason: &str) {
        self.core.fail(Failure::Own(Report::new(
            self.core.group.rank(),
            Cause::Aborted { reason: reason.to_owned() },
        )));
    }

    /// Shuts down now, though handles exist. Operations under way are carried out.
    pub(crate) fn destroy(&self) {
        self.core.finish_all(Limit::from(Duration::MAX).deadline());
        self.core.leave();
        let _ = self.core.failure.set(Failure::Group);
        self.core.ring();
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if self.core.group.is_forked() {
            // In a forked child the thread does not exist, and NCCL's resources are the parent's.
            std::mem::forget(Arc::clone(&self.core));
            std::mem::forget(self.watchdog.take());
            return;
        }
        let _ = bind(&self.core.context);
        if thread::panicking() {
            // The host side does this too: the others must not wait for this rank.
            let rank = self.core.group.rank();
            let cause = Cause::PeerLost { rank, how: Loss::Panicked };
            self.core.fail(Failure::Own(Report::new(rank, cause)));
        }
        self.core.closing.store(true, Ordering::SeqCst);
        self.core.ring();
        // If a callback dropped the last handle, this is the watchdog thread itself, which ends next.
        if let Some(watchdog) =
            self.watchdog.take().filter(|other| other.thread().id() != thread::current().id())
        {
            let _ = watchdog.join();
        }
        self.core.leave();
    }
}

impl Core {
    /// The number of calls so far.
    pub(super) fn calls(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    /// The one-byte buffer of barriers.
    pub(super) fn token(&self) -> MutexGuard<'_, CudaSlice<u8>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The communicator, and its library.
    pub(super) fn nccl(&self) -> Option<(&'static Library, MutexGuard<'_, Option<Communicator>>)> {
        match &self.way {
            Way::Nccl { library, communicator } => Some((library, lock(communicator))),
            Way::Staged(_) => None,
        }
    }

    /// Returns a guard that keeps other calls out of NCCL, if it is free. Lock it before [`Self::nccl`].
    pub(super) fn try_alone_in_nccl(&self) -> Option<MutexGuard<'_, ()>> {
        try_lock(&self.in_nccl)
    }

    /// Waits until `until` for the guard that keeps other calls out of NCCL.
    pub(super) fn alone_in_nccl(&self, until: Instant) -> Option<MutexGuard<'_, ()>> {
        Poll::until(until, || self.try_alone_in_nccl())
    }

    pub(super) fn watched(&self) -> MutexGuard<'_, Watch<Arc<Begun>>> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves callbacks of operations that this thread completed to the watchdog, since they are the
    /// program's code.
    pub(super) fn hand_on_chores(&self) {
        if self.chores.any() {
            self.ring();
        }
    }

    pub(super) fn ring(&self) {
        // With the lock held, the watchdog has either seen the change or sleeps and is woken.
        let _watch = self.watched();
        self.bell.notify_all();
    }

    /// Waits until no operation is under way, or until `until`. Returns whether that is so. Operations are
    /// still subject to their own timeouts.
    pub(super) fn finish_all(&self, until: Instant) -> bool {
        let mut looked = Instant::now();
        let finished = Poll::until(until, || {
            if self.watched().is_empty() || self.has_failed() {
                return Some(());
            }
            self.reap();
            self.end_overdue();
            if looked.elapsed() >= LOOK {
                self.look_around();
                looked = Instant::now();
            }
            None
        });
        finished.is_some()
    }

    /// Ends the group if an operation has timed out.
    pub(super) fn end_overdue(&self) {
        let overdue = self.watched().overdue(Instant::now()).map(|begun| begun.ticket.timeout);
        if let Some(timeout) = overdue {
            self.overdue(timeout);
        }
    }

    /// Removes and completes the operations that are done.
    pub(super) fn reap(&self) {
        let (done, failed) = self.watched().reap(|begun| begun.recorded.is_over());
        // Operations found done before an abort began have succeeded.
        if !self.aborting.load(Ordering::SeqCst) {
            done.iter().for_each(|begun| begun.ticket.complete(Ok(None)));
        } else {
            done.iter().for_each(|begun| begun.ticket.complete(Err(self.error(begun.call, begun.seq))));
        }
        if let Some(error) = failed {
            self.device_failed(error);
        }
    }
}

/// Locks a mutex if it is free.
pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

pub(super) fn lock(communicator: &Mutex<Option<Communicator>>) -> MutexGuard<'_, Option<Communicator>> {
    communicator.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Core {
    fn drop(&mut self) {
        if !self.group.is_forked() {
            // The token's memory is freed next, on any thread.
            let _ = bind(&self.context);
        }
    }
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
