//! State that the node's thread publishes to threads that wait for it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::membership::{Assignment, Ending, Muster, Refusal};

/// Latest value of each kind.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) muster: Option<Muster>,
    pub(super) run: Option<Assignment>,
    /// Latest round whose workers must stop.
    pub(super) stopped: Option<Stopped>,
    pub(super) over: Option<Over>,
    /// Reason for which there is no connection, while there is none.
    pub(super) trouble: Option<String>,
    /// Number of other jobs that use the server of this node, which has left.
    pub(super) guests: usize,
    /// True if the thread that publishes this state has ended.
    pub(super) closed: bool,
}

/// A round that is over for this node while the job continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stopped {
    pub(super) round: u64,
    pub(super) cause: String,
    /// True if this node is cut off from the others.
    pub(super) alone: bool,
}

impl Stopped {
    /// Returns a key by which a higher value is news: a node that is cut off has less time than one that is
    /// only told to stop.
    pub(super) fn order(&self) -> (u64, bool) {
        (self.round, self.alone)
    }
}

/// Reason for which no further orders will come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Over {
    End(Ending),
    Refused(Refusal),
    Alone {
        silent: Duration,
        last: String,
    },
    /// The rendezvous cannot be used. The text is the reason.
    Unusable(String),
}

#[derive(Debug, Default)]
pub(super) struct Board {
    told: Mutex<Told>,
    changed: Condvar,
}

impl Board {
    pub(super) fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until the thread that publishes this state has ended.
    pub(super) fn wait_until_closed(&self) {
        let closed = self.changed.wait_while(self.lock(), |told| !told.closed);
        drop(closed.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until `look` returns a value, `deadline` passes, or this node no longer takes part.
    pub(super) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut look: impl FnMut(&Told) -> Option<T>,
    ) -> Option<T> {
        let mut told = self.lock();
        loop {
            if let Some(found) = look(&told) {
                return Some(found);
            }
            if told.closed || told.guests > 0 {
                return None;
            }
            told = match deadline {
                None => self.changed.wait(told).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.changed.wait_timeout(told, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
