//! Enqueued operations, and how threads wait for them.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use smallvec::SmallVec;

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
    /// The ranks that it exchanges messages with; `None` if it needs all ranks.
    pub(super) peers: Option<SmallVec<[usize; 2]>>,
    pub(super) core: Weak<Core>,
}

impl Begun {
    /// Waits until the operation is done, or until `until`.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        if let Some(core) = self.core() {
            core.wait(self, until);
        }
    }

    /// Returns whether the operation is done, successfully or not.
    pub(crate) fn look(&self) -> bool {
        self.core().is_none_or(|core| core.look_at(self))
    }

    /// Returns whether the operation needs a rank.
    pub(super) fn needs(&self, rank: usize) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.contains(&rank))
    }

    /// The device side of the operation. A forked child has none, and its operations can only fail.
    fn core(&self) -> Option<Arc<Core>> {
        let core = self.core.upgrade()?;
        match core.group.of_this_process() {
            Ok(()) => Some(core),
            Err(error) => {
                self.ticket.complete(Err(error));
                None
            }
        }
    }

    /// Makes the watchdog poll often, so that a waiter for the ticket learns soon that it is done.
    pub(crate) fn hurry(&self) {
        if let Some(core) = self.core() {
            core.watched().hurry();
            core.bell.notify_all();
        }
    }

    /// Makes `stream`, but not the host, wait until the operation is done.
    pub(crate) fn hold(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.recorded.hold(stream).map_err(DeviceError::driver("a stream cannot wait"))
    }

    pub(crate) fn ticket(&self) -> &Arc<Ticket> {
        &self.ticket
    }
}

/// A poll loop of a thread: it begins without pauses and polls less and less often.
#[derive(Default)]
pub(super) struct Poll {
    asked: u32,
    yields_since: Option<Instant>,
}

impl Poll {
    const SPINS: u32 = 100;
    /// A shorter wait is over before a sleeping thread would have woken.
    const YIELDS: Duration = Duration::from_micros(200);
    const LONGEST: Duration = Duration::from_millis(10);

    /// Returns how long to sleep. `None` if it spun or yielded instead, because it is too early to sleep.
    fn next(&mut self) -> Option<Duration> {
        self.asked += 1;
        let Some(beyond) = self.asked.checked_sub(Self::SPINS) else {
            std::hint::spin_loop();
            return None;
        };
        if self.yields_since.get_or_insert_with(Instant::now).elapsed() < Self::YIELDS {
            self.asked = Self::SPINS;
            thread::yield_now();
            return None;
        }
        Some(Self::LONGEST.min(Duration::from_micros(20) * (1 + beyond / 16)))
    }

    pub(super) fn pause(&mut self) {
        if let Some(time) = self.next() {
            thread::sleep(time);
        }
    }

    /// Polls until there is an answer, or until `until`; at least once.
    pub(super) fn until<T>(until: Instant, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
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

    /// Returns whether an operation is done, successfully or not.
    pub(super) fn look_at(&self, begun: &Begun) -> bool {
        // After a failure the watchdog decides: an operation that ended by an abort has not succeeded. While
        // NCCL aborts, a query of the driver may have to wait for a kernel.
        if begun.ticket.is_done() || self.has_failed() {
            return begun.ticket.is_done();
        }
        match begun.recorded.is_over() {
            Ok(true) if !self.aborting.load(Ordering::SeqCst) => begun.ticket.complete(Ok(None)),
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
