//! Membership state of this node, which the rendezvous thread publishes to threads that wait for changes.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::membership::{Assignment, JobResult, JoinStatus, Refusal};

/// Latest state that the rendezvous thread has received, by kind.
#[derive(Debug, Default)]
pub(super) struct MembershipView {
    pub(super) join_status: Option<JoinStatus>,
    pub(super) assignment: Option<Assignment>,
    /// Latest round whose workers this node must stop.
    pub(super) stopped: Option<StoppedRound>,
    pub(super) end_reason: Option<EndReason>,
    /// Reason for which this node has no connection to the coordinator, while it has none.
    pub(super) connection_error: Option<String>,
    /// Number of other jobs that still use the rendezvous server of this node, after this node has left its
    /// own job.
    pub(super) other_jobs: usize,
    /// True if the thread that publishes this state has ended.
    pub(super) closed: bool,
}

/// A round that is over for this node while the job continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoppedRound {
    pub(super) round: u64,
    pub(super) cause: String,
    /// True if this node must stop its workers because it receives no answers from the coordinator.
    pub(super) partitioned: bool,
}

impl StoppedRound {
    /// Returns a key that increases with each end of a round that must be reported to the agent. For the same
    /// round, `partitioned` has the higher key and is reported even after an order to stop. A node that is
    /// cut off from the coordinator has less time to stop its workers than a node with such an order.
    pub(super) fn sort_key(&self) -> (u64, bool) {
        (self.round, self.partitioned)
    }
}

/// Reason for which this node gets no further orders from the coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EndReason {
    JobEnded(JobResult),
    Refused(Refusal),
    Partitioned {
        silent: Duration,
        last: String,
    },
    /// The rendezvous cannot be used. The text is the reason.
    Unusable(String),
}

#[derive(Debug, Default)]
pub(super) struct SharedView {
    state: Mutex<MembershipView>,
    changed: Condvar,
}

impl SharedView {
    pub(super) fn lock(&self) -> MutexGuard<'_, MembershipView> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut MembershipView)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until the thread that publishes this state has ended.
    pub(super) fn wait_until_closed(&self) {
        let closed = self.changed.wait_while(self.lock(), |state| !state.closed);
        drop(closed.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until `condition` returns a value, `deadline` passes, or this node no longer takes part in the
    /// job. Returns `None` in the last two cases.
    pub(super) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut condition: impl FnMut(&MembershipView) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = condition(&state) {
                return Some(found);
            }
            if state.closed || state.other_jobs > 0 {
                return None;
            }
            state = match deadline {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
