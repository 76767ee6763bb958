//! The state of a group's device backend on one rank, and of its operations.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaSlice};
use smallvec::SmallVec;

use super::driver::bind;
use super::events::{EventPool, RecordedEvent};
use super::options::DeviceOptions;
use super::pending::PendingOperations;
use super::process_exit::WatchdogThread;
use super::transport::DeviceTransport;
use crate::api::group::Group;
use crate::collectives::call::Call;
use crate::engine::Completion;
use crate::engine::callbacks::CallbackQueue;
use crate::error::cause::Cause;
use crate::error::{CommError, DeviceError};
use crate::flight::{FlightRecorder, GroupRecorder};

/// The state that the backend shares with its watchdog.
pub(super) struct Core {
    /// The host side of the group.
    pub(super) group: Group,
    pub(super) context: Arc<CudaContext>,
    pub(super) options: DeviceOptions,
    pub(super) transport: DeviceTransport,
    pub(super) failure: OnceLock<Failure>,
    pub(super) abort: Abort,
    pub(super) events: Arc<EventPool>,
    /// The operations in progress. A handle of the group is kept with them.
    pending: Mutex<Pending>,
    pub(super) watchdog: Arc<WatchdogThread>,
    pub(super) callback_queue: Arc<CallbackQueue>,
    /// The one-byte buffer that a barrier all-reduces.
    barrier_buffer: Mutex<CudaSlice<u8>>,
    pub(super) seq: AtomicU64,
    pub(super) flight: GroupRecorder,
}

type Pending = PendingOperations<Arc<EnqueuedOperation>, Group>;

/// The reason why the device backend has ended.
pub(super) enum Failure {
    /// The host side has ended, and knows the reason.
    Group,
    /// A failure that this rank found in the device backend, such as a time-out.
    Own(Cause),
    /// A failure of the device or NCCL.
    Device(DeviceError),
}

/// The progress of the abort of NCCL after a failure.
#[derive(Default)]
pub(super) struct Abort {
    /// Set when the abort has started; a thread that finds it set need not start one.
    pub(super) started: AtomicBool,
    /// Set before NCCL is aborted: an operation that ends later may have been aborted, so it has failed.
    pub(super) ends_operations: AtomicBool,
    pub(super) finished: AtomicBool,
}

pub(super) struct EnqueuedOperation {
    pub(super) completion: Completion,
    pub(super) call: Call,
    pub(super) seq: u64,
    pub(super) recorded: RecordedEvent,
    /// The ranks with which the operation exchanges messages; `None` if it needs all ranks.
    pub(super) peers: Option<SmallVec<[usize; 2]>>,
    pub(super) core: Weak<Core>,
}

impl Core {
    pub(super) fn new(
        group: Group,
        context: Arc<CudaContext>,
        options: DeviceOptions,
        transport: DeviceTransport,
    ) -> Result<Arc<Self>, CommError> {
        let failed = DeviceError::driver("cannot allocate memory on the device");
        let barrier_buffer = context.default_stream().alloc_zeros(1).map_err(failed)?;
        let name = format!("{}/device", group.name());
        let place = (group.rank(), group.size());
        let recorder = FlightRecorder::for_process();
        let flight = recorder.group(&name, 0, Some(group.generation()), place, group.global_ranks());
        flight.formed(group.generation());
        Ok(Arc::new(Self {
            events: Arc::new(EventPool { context: Arc::clone(&context), free: Mutex::default() }),
            group,
            context,
            options,
            transport,
            failure: OnceLock::new(),
            abort: Abort::default(),
            pending: Mutex::default(),
            watchdog: WatchdogThread::new(),
            callback_queue: Arc::default(),
            barrier_buffer: Mutex::new(barrier_buffer),
            seq: AtomicU64::new(0),
            flight,
        }))
    }

    /// The number of device operations that this rank has started.
    pub(super) fn calls(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    pub(super) fn barrier_buffer(&self) -> MutexGuard<'_, CudaSlice<u8>> {
        self.barrier_buffer.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.watchdog.wake();
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

    /// Checks that a stream or buffer, named `what`, belongs to the context of the group's device. Two
    /// contexts that cudarc made separately for one device do not match, since each orders only its own
    /// streams.
    pub(super) fn check_context(&self, what: &str, theirs: &Arc<CudaContext>) -> Result<(), CommError> {
        if Arc::ptr_eq(theirs, &self.context) {
            return Ok(());
        }
        Err(CommError::InvalidArgument(match (theirs.ordinal(), self.context.ordinal()) {
            (theirs, ours) if theirs == ours => format!(
                "{what} belongs to another CudaContext of device {ours} than the group: create one, and share \
                 it as an Arc"
            ),
            (theirs, ours) => format!("{what} is on device {theirs}; the group is on device {ours}"),
        }))
    }
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

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("device", &self.context.ordinal()).finish_non_exhaustive()
    }
}
