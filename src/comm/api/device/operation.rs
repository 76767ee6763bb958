//! Enqueued operations, and how threads wait for them.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use smallvec::SmallVec;

use super::backend::Core;
use super::events::RecordedEvent;
use crate::api::group::Group;
use crate::api::group::device::DeviceWork;
use crate::collectives::call::Call;
use crate::engine::Completion;
use crate::error::DeviceError;

/// An operation that was enqueued.
pub(super) struct DeviceOperation {
    pub(super) completion: Completion,
    pub(super) call: Call,
    pub(super) seq: u64,
    pub(super) recorded: RecordedEvent,
    /// The ranks with which the operation exchanges messages; `None` if it needs all ranks.
    pub(super) peers: Option<SmallVec<[usize; 2]>>,
    pub(super) core: Weak<Core>,
}

impl DeviceOperation {
    /// Returns whether the operation needs rank `rank` to take part.
    pub(super) fn needs(&self, rank: usize) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.contains(&rank))
    }

    /// The device backend of the operation. A forked child has none, and its operations can only fail.
    fn core(&self) -> Option<Arc<Core>> {
        let core = self.core.upgrade()?;
        match core.group.check_process() {
            Ok(()) => Some(core),
            Err(error) => {
                self.completion.complete(Err(error));
                None
            }
        }
    }
}

impl DeviceWork for DeviceOperation {
    fn completion(&self) -> &Completion {
        &self.completion
    }

    fn wait(&self, until: Option<Instant>) {
        if let Some(core) = self.core() {
            core.wait(self, until);
        }
    }

    fn poll(&self) -> bool {
        self.core().is_none_or(|core| core.poll_operation(self))
    }

    fn detach(&self, group: Group) {
        match self.core.upgrade() {
            // In a forked child the operation never ends, and another thread may have held the locks.
            Some(core) if !core.group.is_forked() => core.keep_while_pending(group),
            Some(_) | None => drop(group),
        }
    }

    /// Makes the watchdog poll often, to report soon that the operation is done.
    fn request_fast_poll(&self) {
        if let Some(core) = self.core() {
            core.pending().request_fast_poll();
            core.wakeup.notify_all();
        }
    }

    fn block_stream(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.recorded.block_stream(stream).map_err(DeviceError::driver("cannot make a CUDA stream wait"))
    }
}

/// Pauses between a thread's polls: first it spins, then it yields, then it sleeps for growing times.
#[derive(Default)]
pub(super) struct Backoff {
    polls: u32,
    yields_since: Option<Instant>,
}

impl Backoff {
    const SPINS: u32 = 100;
    /// How long the thread yields before it sleeps: a sleeping thread would wake too late for a short wait.
    const YIELDS: Duration = Duration::from_micros(200);
    const MAX_SLEEP: Duration = Duration::from_millis(10);

    /// Returns how long to sleep. `None` if it spun or yielded instead, because it is too early to sleep.
    fn next(&mut self) -> Option<Duration> {
        self.polls += 1;
        let Some(beyond) = self.polls.checked_sub(Self::SPINS) else {
            std::hint::spin_loop();
            return None;
        };
        if self.yields_since.get_or_insert_with(Instant::now).elapsed() < Self::YIELDS {
            self.polls = Self::SPINS;
            thread::yield_now();
            return None;
        }
        Some(Self::MAX_SLEEP.min(Duration::from_micros(20) * (1 + beyond / 16)))
    }

    pub(super) fn pause(&mut self) {
        if let Some(time) = self.next() {
            thread::sleep(time);
        }
    }

    /// Calls `ask` until it returns a value or `until` has passed; at least once.
    pub(super) fn poll_until<T>(until: Instant, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
        let mut wait = Self::default();
        loop {
            let answer = ask();
            if answer.is_some() || Instant::now() >= until {
                return answer;
            }
            wait.pause();
        }
    }

    fn park(&mut self, until: Option<Instant>) {
        if let Some(time) = self.next() {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            thread::park_timeout(left.unwrap_or(time).min(time));
        }
    }
}

impl Core {
    /// Waits until an operation is done, or until `until`.
    pub(super) fn wait(&self, operation: &DeviceOperation, until: Option<Instant>) {
        let mut wait = Backoff::default();
        while !self.poll_operation(operation) {
            if until.is_some_and(|until| Instant::now() >= until) {
                return;
            }
            // The watchdog wakes this thread if the group ends.
            if operation.completion.register_thread() {
                wait.park(until);
            }
        }
    }

    /// Returns whether an operation is done, successfully or not.
    pub(super) fn poll_operation(&self, operation: &DeviceOperation) -> bool {
        // After a failure only the watchdog completes operations: one whose event passed because of an abort
        // has not succeeded. While NCCL aborts, a query of the driver may have to wait for a kernel.
        if operation.completion.is_done() || self.has_failed() {
            return operation.completion.is_done();
        }
        match operation.recorded.is_complete() {
            Ok(true) if !self.aborting.load(Ordering::SeqCst) => operation.completion.complete(Ok(None)),
            Ok(_) => return false,
            Err(error) => {
                operation.completion.complete(Err(self.driver_failed(error, operation.call, operation.seq)))
            }
        }
        self.notify_callbacks();
        true
    }
}

impl fmt::Debug for DeviceOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceOperation")
            .field("call", &self.call)
            .field("seq", &self.seq)
            .finish_non_exhaustive()
    }
}
