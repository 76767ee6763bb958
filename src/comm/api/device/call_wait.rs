//! The waiting of a thread while NCCL or a stream delays a call. It ends when the call times out or the group
//! fails.

use std::time::{Duration, Instant};

use super::backoff::Backoff;
use super::core::Core;
use super::pending::CHECK_INTERVAL;
use crate::collectives::call::Call;
use crate::engine::TimeLimit;
use crate::error::CommError;

pub(super) struct CallWait {
    pub(super) call: Call,
    pub(super) seq: u64,
    /// The time limit of the call, counted from its start.
    limit: TimeLimit,
    last_check: Instant,
    backoff: Backoff,
}

impl CallWait {
    pub(super) fn new(call: Call, seq: u64, limit: TimeLimit) -> Self {
        let limit = limit.started();
        Self { call, seq, limit, last_check: limit.started_at(), backoff: Backoff::default() }
    }

    /// The time that is left until the time limit.
    pub(super) fn remaining(&self) -> Duration {
        self.limit.deadline().saturating_duration_since(Instant::now())
    }
}

impl Core {
    /// Pauses between two polls. Returns an error if the group has ended, or if the time limit has passed,
    /// which ends the group. It also checks the health of the group: the waiting thread may be the watchdog
    /// itself, in a callback.
    pub(super) fn pause(&self, call_wait: &mut CallWait) -> Result<(), CommError> {
        let now = Instant::now();
        if now - call_wait.last_check >= CHECK_INTERVAL {
            self.check_health();
            call_wait.last_check = now;
        }
        if now >= call_wait.limit.deadline() {
            self.operation_timed_out(call_wait.limit.timeout());
        }
        self.check(call_wait.call, call_wait.seq)?;
        call_wait.backoff.pause();
        Ok(())
    }

    /// Calls `ask` until it returns a value; between the calls it waits and fails like [`Self::pause`].
    pub(super) fn wait_for<T>(
        &self,
        call_wait: &mut CallWait,
        mut ask: impl FnMut() -> Option<T>,
    ) -> Result<T, CommError> {
        call_wait.backoff = Backoff::default();
        loop {
            if let Some(value) = ask() {
                return Ok(value);
            }
            self.pause(call_wait)?;
        }
    }
}
