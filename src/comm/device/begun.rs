//! Operations that were enqueued, and how threads wait for them.

use std::fmt;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::error::DeviceError;
use super::events::Recorded;
use super::side::Core;
use crate::call::Call;
use crate::engine::Ticket;

/// An operation that was enqueued.
pub(crate) struct Begun {
    pub(super) ticket: Arc<Ticket>,
    pub(super) call: Call,
    pub(super) seq: u64,
    pub(super) recorded: Recorded,
    pub(super) core: Weak<Core>,
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

impl Core {
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
        self.hand_on_chores();
        true
    }
}

impl fmt::Debug for Begun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Begun").field("call", &self.call).field("seq", &self.seq).finish_non_exhaustive()
    }
}
