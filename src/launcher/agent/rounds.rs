//! The current round of this node: its workers and their output, and what is known of earlier rounds.

use std::time::{Instant, SystemTime};

use convoke_env::ExitCause;

use super::workers::Workers;
use crate::cause::Evidence;
use crate::guard::WorkerId;
use crate::logs::Tee;
use crate::rendezvous::Assignment;
use crate::supervise::Supervisor;

#[derive(Default)]
pub(super) struct Rounds {
    pub(super) current: Option<Round>,
    /// Number of restarts that have been used up.
    pub(super) restarts: u32,
    /// Number of the latest round that other nodes have ended.
    pub(super) ended: Option<u64>,
    /// Number of the latest round that this node ended because it was cut off from the other nodes.
    partitioned: Option<u64>,
    /// True if this node's workers succeeded in the last round.
    pub(super) succeeded: bool,
    pub(super) next_worker_id: u64,
}

/// State of one round.
pub(super) struct Round {
    pub(super) assignment: Assignment,
    pub(super) supervisor: Supervisor,
    pub(super) workers: Workers,
    pub(super) tee: Option<Tee>,
    pub(super) began: Instant,
    /// Time at which the first worker failed.
    pub(super) first_failed: Option<Instant>,
    /// True if no process of any worker was left when the latest worker exited.
    pub(super) no_process_left: bool,
}

impl Rounds {
    pub(super) fn assignment(&self) -> Option<&Assignment> {
        self.current.as_ref().map(|round| &round.assignment)
    }

    pub(super) fn tee(&self) -> Option<&Tee> {
        self.current.as_ref()?.tee.as_ref()
    }

    /// Returns the current round and the local rank of worker `id`, unless the worker belongs to an earlier
    /// round.
    pub(super) fn of_worker(&mut self, id: WorkerId) -> Option<(&mut Round, usize)> {
        let round = self.current.as_mut()?;
        let local_rank = round.workers.local_rank(id)?;
        Some((round, local_rank))
    }

    /// Records that other nodes have ended a round. Returns true if it is the current one.
    pub(super) fn note_end(&mut self, round: u64, partitioned: bool) -> bool {
        self.ended = self.ended.max(Some(round));
        let is_current = self.assignment().is_some_and(|current| current.round == round);
        if is_current && partitioned {
            self.partitioned = Some(round);
        }
        is_current
    }

    /// Returns true if this node was cut off from the other nodes in the current round.
    pub(super) fn is_partitioned(&self) -> bool {
        let round = self.assignment().map(|assignment| assignment.round);
        self.partitioned.is_some() && self.partitioned == round
    }

    /// Records the end of a worker that this process reaped after the loss of the guard.
    pub(super) fn record_reaped(&mut self, pid: i32, cause: ExitCause) {
        if let Some(round) = &mut self.current
            && let Some(local_rank) = round.workers.running_with_pid(pid)
        {
            round.workers.record_exit(local_rank, SystemTime::now(), cause, Evidence::default());
        }
    }
}
