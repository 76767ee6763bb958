//! The nodes of an elastic job report failures to each other through the coordinator.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::membership_view::{EndReason, MembershipView};
use super::thread::RendezvousThread;
use crate::config::is_named;
use crate::membership::{Departure, Failure, JobResult, Phase, Refusal};
use crate::rendezvous::termination::{
    JobOutcome, OutcomeKind, OutcomeWaiter, RemoteEvent, TerminationChannel,
};

/// Termination channel of one node of an elastic job. It gets failures and the outcome from the coordinator.
#[derive(Debug)]
pub(super) struct ElasticTerminationChannel {
    thread: Arc<RendezvousThread>,
    /// Group rank of this node, and number of the rendezvous round that it is in.
    position: Mutex<(usize, u64)>,
    host: String,
    endpoint: String,
    run_id: String,
    /// Latest end of a round that `recv` has returned: number of the round, and whether this node was
    /// partitioned.
    ended: Mutex<(u64, bool)>,
}

impl ElasticTerminationChannel {
    pub(super) fn new(
        thread: Arc<RendezvousThread>,
        (node, host): (usize, String),
        (endpoint, run_id): (String, String),
        round: u64,
    ) -> Self {
        Self { thread, position: Mutex::new((node, round)), host, endpoint, run_id, ended: Mutex::default() }
    }

    /// Records the group rank of this node and the number of the round that it has entered.
    pub(super) fn set_round(&self, node: usize, round: u64) {
        *self.position.lock().unwrap_or_else(PoisonError::into_inner) = (node, round);
    }

    fn position(&self) -> (usize, u64) {
        *self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the job or `round` is over. The inner value is `None` if only the round is over. The outer
    /// value is `None` if `deadline` passes first.
    fn wait_for_outcome(&self, round: u64, deadline: Option<Instant>) -> Option<Option<JobOutcome>> {
        self.thread.view.wait(deadline, |state: &MembershipView| {
            let again = state.stopped.as_ref().is_some_and(|stopped| stopped.round >= round);
            match &state.end_reason {
                _ if again => Some(None),
                Some(reason) => Some(Some(self.outcome(reason))),
                None => None,
            }
        })
    }

    fn outcome(&self, reason: &EndReason) -> JobOutcome {
        let (mine, _) = self.position();
        match reason {
            EndReason::JobEnded(JobResult::Failed { node, host, summary, report }) => JobOutcome::new(
                *node,
                host,
                OutcomeKind::Failed { summary: summary.clone(), report: report.clone() },
            ),
            EndReason::JobEnded(JobResult::CoordinatorExited { node: Some(node), host, why }) => {
                JobOutcome::new(*node, host, OutcomeKind::Error { text: why.clone() })
            }
            reason => {
                let text = describe_end(reason, &self.endpoint, &self.run_id);
                JobOutcome::new(mine, &self.host, OutcomeKind::Partitioned { text })
            }
        }
    }
}

impl TerminationChannel for ElasticTerminationChannel {
    fn recv(&self) -> Option<RemoteEvent> {
        let ended = || self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let known = *ended();
        let update = self.thread.view.wait(None, |state: &MembershipView| {
            if let Some(stopped) = state.stopped.as_ref().filter(|stopped| stopped.sort_key() > known) {
                let (round, cause, partitioned) = (stopped.round, stopped.cause.clone(), stopped.partitioned);
                return Some(Some(RemoteEvent::NewRound { round, cause, partitioned }));
            }
            match &state.end_reason {
                Some(EndReason::JobEnded(JobResult::Succeeded)) => Some(None),
                Some(reason) => Some(Some(RemoteEvent::JobEnded(self.outcome(reason)))),
                None => None,
            }
        });
        let update = update.flatten();
        if let Some(RemoteEvent::NewRound { round, partitioned, .. }) = &update {
            *ended() = (*round, *partitioned);
        }
        update
    }

    fn report_failure(
        self: Arc<Self>,
        kind: OutcomeKind,
        restarts: bool,
        grace_until: Option<Instant>,
    ) -> Option<OutcomeWaiter> {
        let (_, round) = self.position();
        let (summary, report) = match kind {
            OutcomeKind::Failed { summary, report } => (summary, report),
            OutcomeKind::Error { text } | OutcomeKind::Partitioned { text } => (text, String::new()),
            OutcomeKind::Stopped { .. } | OutcomeKind::Lost | OutcomeKind::Succeeded => {
                (String::new(), String::new())
            }
        };
        let phase = Phase::Failed { round, failure: Failure { summary, report, can_restart: restarts } };
        // A node with a restart left reports at once and waits for no outcome, because it enters the next
        // round.
        let Some(grace_until) = grace_until.filter(|_| !restarts) else {
            self.thread.enter(phase);
            return (!restarts).then(|| -> OutcomeWaiter {
                Box::new(move || self.wait_for_outcome(round, None).flatten())
            });
        };
        Some(Box::new(move || {
            self.wait_for_outcome(round, Some(grace_until)).unwrap_or_else(|| {
                self.thread.enter(phase);
                self.wait_for_outcome(round, None).flatten()
            })
        }))
    }

    fn propose_outcome(&self, kind: OutcomeKind, _others_first: Option<Instant>) -> JobOutcome {
        let mine = JobOutcome::new(self.position().0, &self.host, kind);
        let departure = match &mine.kind {
            OutcomeKind::Stopped { signal } => Departure::Stopped { signal: *signal },
            OutcomeKind::Error { text } | OutcomeKind::Partitioned { text } => Departure::Error(text.clone()),
            // The coordinator has already told the other nodes of such an outcome.
            OutcomeKind::Failed { .. } | OutcomeKind::Lost | OutcomeKind::Succeeded => return mine,
        };
        self.thread.leave(departure);
        mine
    }

    fn report_signal(&self, signal: i32) {
        if self.thread.is_host {
            // No other node can take over the coordinator of this process, so the job ends at once.
            self.propose_outcome(OutcomeKind::Stopped { signal }, None);
        } else {
            self.thread.enter(Phase::Leaving { round: self.position().1, signal });
        }
    }

    fn leave(&self) {
        self.thread.leave(Departure::Ended);
    }

    fn is_own(&self, outcome: &JobOutcome) -> bool {
        outcome.node == self.position().0 && !matches!(outcome.kind, OutcomeKind::Partitioned { .. })
    }

    fn defers_final_failure(&self) -> bool {
        true
    }
}

/// Describes for the user why this node gets no further orders from the coordinator.
pub(super) fn describe_end(reason: &EndReason, endpoint: &str, run_id: &str) -> String {
    let id = if is_named(run_id) { format!("--rdzv-id={run_id}") } else { "no --rdzv-id".to_owned() };
    match reason {
        EndReason::JobEnded(result) => match result {
            JobResult::Succeeded => "the job has ended".to_owned(),
            JobResult::Failed { node, host, summary, .. } => {
                format!("node {node} ({host}) failed: {summary}")
            }
            JobResult::CoordinatorExited { node: Some(node), host, why } => {
                format!(
                    "node {node} ({host}) could not continue: {why}; it served the rendezvous at {endpoint}"
                )
            }
            JobResult::CoordinatorExited { node: None, host, why } => {
                format!("the launcher on {host} that served the rendezvous at {endpoint} has ended: {why}")
            }
        },
        EndReason::Refused(Refusal::Closed(result)) => {
            let how = match result {
                JobResult::Succeeded => "successfully",
                JobResult::Failed { .. } => "with a failure",
                JobResult::CoordinatorExited { .. } => "because the launcher of its coordinator exited",
            };
            format!("the job with {id} at {endpoint} has ended {how}\n  try: another --rdzv-id")
        }
        EndReason::Refused(Refusal::Timeout { after_s, join_status }) => {
            let here = super::describe_join_status(join_status);
            format!(
                "no round within {after_s} s (join_timeout) with {id}: {here}\n  try: start more nodes, or a smaller --nnodes"
            )
        }
        EndReason::Refused(Refusal::NodeCountMismatch { mine, theirs, host }) => format!(
            "--nnodes is {}:{} here and {}:{} on {host}, both with {id}\n  try: the same --nnodes on all nodes, or a \
             --rdzv-id for each job",
            mine.0, mine.1, theirs.0, theirs.1
        ),
        EndReason::Refused(Refusal::Evicted { silent_s }) => {
            format!(
                "no heartbeat of this node arrived for {silent_s} s, and the other nodes continued without it"
            )
        }
        EndReason::Unusable(why) => why.clone(),
        EndReason::Partitioned { silent, last } => {
            let last = if last.is_empty() { String::new() } else { format!(" ({last})") };
            let silent = silent.as_secs_f64();
            format!(
                "the rendezvous at {endpoint} is lost: it answered no heartbeat for {silent:.1} s{last}; its host or the network is down"
            )
        }
    }
}
