//! The waiting of a thread while NCCL or a stream delays a call. It ends when the call times out or the group
//! fails.

use std::time::{Duration, Instant};

use super::begun::Poll;
use super::side::Core;
use super::watch::LOOK;
use crate::call::Call;
use crate::engine::Limit;
use crate::error::CommError;

/// The wait state of one call.
pub(super) struct Patience {
    pub(super) call: Call,
    pub(super) seq: u64,
    /// The time limit, which has begun.
    limit: Limit,
    looked: Instant,
    wait: Poll,
}

impl Patience {
    pub(super) fn new(call: Call, seq: u64, limit: Limit) -> Self {
        Self { call, seq, limit: limit.begun(), looked: Instant::now(), wait: Poll::default() }
    }

    /// The time that is left.
    pub(super) fn rest(&self) -> Duration {
        self.limit.deadline().saturating_duration_since(Instant::now())
    }
}

impl Core {
    /// Waits a little. Returns an error if the group has ended, or if the time is over, which ends the group.
    /// The waiting thread may be the watchdog in a callback, so this also checks the group.
    pub(super) fn pause(&self, patience: &mut Patience) -> Result<(), CommError> {
        let now = Instant::now();
        if now - patience.looked >= LOOK {
            self.look_around();
            patience.looked = now;
        }
        if now >= patience.limit.deadline() {
            self.overdue(patience.limit.timeout());
        }
        self.check(patience.call, patience.seq)?;
        patience.wait.pause();
        Ok(())
    }

    /// Polls until `ask` returns a value.
    pub(super) fn wait_for<T>(
        &self,
        patience: &mut Patience,
        mut ask: impl FnMut() -> Option<T>,
    ) -> Result<T, CommError> {
        patience.wait = Poll::default();
        loop {
            if let Some(had) = ask() {
                return Ok(had);
            }
            self.pause(patience)?;
        }
    }
}
