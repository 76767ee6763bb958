//! The device backend of a group on one rank: the communicator, and the operations under way.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice};

use super::driver::bind;
use super::events::EventPool;
use super::operation::{Backoff, DeviceOperation};
use super::options::DeviceOptions;
use super::pending::{CHECK_INTERVAL, PendingOperations, Search};
use super::process_exit::{WatchdogThread, stop_at_exit};
use super::staged::Staging;
use super::teardown::Failure;
use crate::api::group::Group;
use crate::api::group::device::{AttachDevice, GroupDevice};
use crate::engine::TimeLimit;
use crate::engine::callbacks::CallbackQueue;
use crate::error::cause::{Cause, Report};
use crate::error::{CommError, DeviceError, LossReason};
use crate::flight::{FlightRecorder, GroupRecorder};
use crate::nccl::{Communicator, Library};

/// A group's device backend on this rank. Dropping the last group handle that holds it shuts it down.
pub(super) struct DeviceBackend {
    pub(super) core: Arc<Core>,
    watchdog: Option<JoinHandle<()>>,
}

type Pending = PendingOperations<Arc<DeviceOperation>, Group>;

/// The state that the backend shares with its watchdog.
pub(super) struct Core {
    /// The host side of the group.
    pub(super) group: Group,
    pub(super) context: Arc<CudaContext>,
    pub(super) options: DeviceOptions,
    pub(super) transport: DeviceTransport,
    pub(super) failure: OnceLock<Failure>,
    pub(super) events: Arc<EventPool>,
    /// The operations in progress. A handle of the group is kept with them.
    pub(super) pending: Mutex<Pending>,
    /// Notified when the watchdog has something to check in `pending`, or must end.
    pub(super) wakeup: Condvar,
    pub(super) closing: AtomicBool,
    /// The state of the watchdog thread.
    pub(super) watchdog: WatchdogThread,
    /// Set when the abort after a failure has started; a thread that finds it set need not start one.
    pub(super) abort_started: AtomicBool,
    /// Set before NCCL is aborted: an operation that ends later may have been aborted, so it has failed.
    pub(super) aborting: AtomicBool,
    /// Set when the abort of NCCL is done.
    pub(super) abort_finished: AtomicBool,
    /// Held by a caller of NCCL until the call is finished: a communicator takes one call at a time.
    nccl_calls: Mutex<()>,
    pub(super) callback_queue: Arc<CallbackQueue>,
    /// The one-byte buffer that a barrier all-reduces.
    barrier_buffer: Mutex<CudaSlice<u8>>,
    pub(super) seq: AtomicU64,
    pub(super) flight: GroupRecorder,
}

/// The transport between devices.
pub(super) enum DeviceTransport {
    Nccl {
        library: &'static Library,
        /// Locked only during a call of NCCL, so that the watchdog can check and abort it. `None` when NCCL
        /// was aborted or shut down.
        communicator: Mutex<Option<Communicator>>,
    },
    Staged(Mutex<Staging>),
}

impl DeviceBackend {
    pub(super) fn new(
        group: Group,
        context: Arc<CudaContext>,
        options: DeviceOptions,
        transport: DeviceTransport,
    ) -> Result<Self, CommError> {
        let barrier_buffer = context.default_stream().alloc_zeros(1);
        let barrier_buffer =
            barrier_buffer.map_err(DeviceError::driver("cannot allocate memory on the device"))?;
        let name = format!("{}/device", group.name());
        let place = (group.rank(), group.size());
        let recorder = FlightRecorder::for_process();
        let flight = recorder.group(&name, 0, Some(group.generation()), place, group.global_ranks());
        flight.formed(group.generation());
        let core = Arc::new(Core {
            events: EventPool::new(Arc::clone(&context)),
            group,
            context,
            options,
            transport,
            failure: OnceLock::new(),
            pending: Mutex::default(),
            wakeup: Condvar::new(),
            closing: AtomicBool::new(false),
            watchdog: WatchdogThread::default(),
            abort_started: AtomicBool::new(false),
            aborting: AtomicBool::new(false),
            abort_finished: AtomicBool::new(false),
            nccl_calls: Mutex::default(),
            callback_queue: Arc::default(),
            barrier_buffer: Mutex::new(barrier_buffer),
            seq: AtomicU64::new(0),
            flight,
        });
        let shared = Arc::clone(&core);
        stop_at_exit(&core);
        let watchdog =
            thread::Builder::new().name("convoke-device".to_owned()).spawn(move || shared.run_watchdog());
        let watchdog =
            watchdog.map_err(|error| CommError::system("cannot start the watchdog of a device", error))?;
        Ok(Self { core, watchdog: Some(watchdog) })
    }

    /// Returns the device backend of a group's handle.
    ///
    /// # Errors
    /// [`CommError::Device`] if the handle has none.
    pub(super) fn of(group: &Group) -> Result<&Self, CommError> {
        let backend: &dyn Any = &**group.device_backend()?;
        match backend.downcast_ref() {
            Some(backend) => Ok(backend),
            None => unreachable!("no other type is a device backend"),
        }
    }
}

impl GroupDevice for DeviceBackend {
    fn abort(&self, reason: &str) {
        self.core.fail(Failure::Own(Report::new(
            self.core.group.rank(),
            Cause::Aborted { reason: reason.to_owned() },
        )));
    }

    fn destroy(&self) {
        self.core.finish_all(TimeLimit::from(Duration::MAX).deadline());
        self.core.shut_down();
        let _ = self.core.failure.set(Failure::Group);
        self.core.wake_watchdog();
    }

    fn split(&self, ranks: &[usize], limit: TimeLimit) -> Result<Option<AttachDevice>, CommError> {
        self.core.split(ranks, limit)
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
            let cause = Cause::PeerLost { rank, how: LossReason::Panicked };
            self.core.fail(Failure::Own(Report::new(rank, cause)));
        }
        self.core.closing.store(true, Ordering::SeqCst);
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

impl Core {
    /// The number of device operations that this rank has started.
    pub(super) fn calls(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    /// The one-byte buffer that a barrier all-reduces.
    pub(super) fn barrier_buffer(&self) -> MutexGuard<'_, CudaSlice<u8>> {
        self.barrier_buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The communicator, and its library; `None` if the group is staged through the host.
    pub(super) fn nccl(&self) -> Option<(&'static Library, MutexGuard<'_, Option<Communicator>>)> {
        match &self.transport {
            DeviceTransport::Nccl { library, communicator } => Some((library, lock(communicator))),
            DeviceTransport::Staged(_) => None,
        }
    }

    /// Returns a guard that keeps other calls out of NCCL, if it is free. Lock it before [`Self::nccl`].
    pub(super) fn try_lock_nccl(&self) -> Option<MutexGuard<'_, ()>> {
        try_lock(&self.nccl_calls)
    }

    /// Waits until `until` for the guard that keeps other calls out of NCCL.
    pub(super) fn lock_nccl(&self, until: Instant) -> Option<MutexGuard<'_, ()>> {
        Backoff::poll_until(until, || self.try_lock_nccl())
    }

    pub(super) fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the watchdog if this thread completed operations with callbacks: the watchdog runs callbacks,
    /// since they are the program's code.
    pub(super) fn notify_callbacks(&self) {
        if self.callback_queue.has_queued() {
            self.wake_watchdog();
        }
    }

    pub(super) fn wake_watchdog(&self) {
        // Once this thread has the lock, the watchdog has either seen the change or sleeps and is woken.
        let _pending = self.pending();
        self.wakeup.notify_all();
    }

    /// Waits until no operation is in progress or the device backend has failed. Returns false if `until`
    /// passes before. Operations are still subject to their own timeouts.
    pub(super) fn finish_all(&self, until: Instant) -> bool {
        let mut last_check = Instant::now();
        let finished = Backoff::poll_until(until, || {
            if self.pending().is_empty() || self.has_failed() {
                return Some(());
            }
            self.reap(Search::Exact);
            self.check_timeouts();
            if last_check.elapsed() >= CHECK_INTERVAL {
                self.check_health();
                last_check = Instant::now();
            }
            None
        });
        finished.is_some()
    }

    /// Ends the group if an operation has timed out.
    pub(super) fn check_timeouts(&self) {
        let timed_out =
            self.pending().first_timed_out(Instant::now()).map(|operation| operation.completion.timeout);
        if let Some(timeout) = timed_out {
            self.operation_timed_out(timeout);
        }
    }

    /// Keeps `group`, a handle of this backend's group, until no operation is pending.
    pub(super) fn keep_while_pending(&self, group: Group) {
        // Dropping a handle may shut down this backend, so the lock is released first.
        let unneeded = self.pending().keep(group);
        drop(unneeded);
    }

    /// Drops the kept handle of the group if no operation is pending. Only the watchdog calls this, since the
    /// drop may shut down this backend.
    pub(super) fn release_group(&self) {
        let group = self.pending().release();
        drop(group);
    }

    /// Removes and completes the operations that are done.
    pub(super) fn reap(&self, search: Search) {
        let (done, failed) = self.pending().reap(search, |operation| operation.recorded.is_complete());
        // Operations found done before an abort began have succeeded.
        if !self.aborting.load(Ordering::SeqCst) {
            done.iter().for_each(|operation| operation.completion.complete(Ok(None)));
        } else {
            done.iter().for_each(|operation| {
                operation.completion.complete(Err(self.error(operation.call, operation.seq)))
            });
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
            // The barrier buffer is dropped next, on any thread; freeing its memory needs the context on that
            // thread.
            let _ = bind(&self.context);
        }
    }
}

impl fmt::Debug for DeviceBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBackend").field("core", &self.core).finish_non_exhaustive()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("device", &self.context.ordinal()).finish_non_exhaustive()
    }
}
