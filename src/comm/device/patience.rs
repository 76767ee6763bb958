//! What a thread does while NCCL or a stream keeps a call: it waits no longer than the call may take, and no longer than the
//! group goes on.

use std::time::{Duration, Instant};

use super::begun::Poll;
use super::side::Core;
use super::watch::LOOK;
use crate::call::Call;
use crate::engine::Limit;
use crate::error::CommError;

/// Of one call.
pub(super) struct Patience {
    pub(super) call: Call,
    pub(super) seq: u64,
    /// It has begun.
    limit: Limit,
    looked: Instant,
    wait: Poll,
}

impl Patience {
    pub(super) fn new(call: Call, seq: u64, limit: Limit) -> Self {
        Self { call, seq, limit: limit.begun(), looked: Instant::now(), wait: Poll::default() }
    }

    /// What is left of its time.
    pub(super) fn rest(&self) -> Duration {
        self.limit.deadline().saturating_duration_since(Instant::now())
    }
}

impl Core {
    /// Waits a little, or has an error: the group has ended, or does so now because the time is over. It may be the
    /// watchdog that waits, in a callback: so it is also looked whether the group goes on.
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

    /// Asks for something until it is to be had.
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
