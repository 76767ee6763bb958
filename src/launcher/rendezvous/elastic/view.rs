//! What one node of an elastic job knows from its coordinator.

use std::net::IpAddr;

use super::{Settings, describe_join_status};
use crate::config::is_named;
use crate::membership::{Assignment, Command, JobResult, JoinStatus, Refusal};

/// Latest state that the session has received, by kind.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) join_status: Option<JoinStatus>,
    pub(super) assignment: Option<Assignment>,
    /// Latest round whose workers this node must stop.
    pub(super) stopped: Option<StoppedRound>,
    pub(super) end_reason: Option<EndReason>,
    /// Reason for which this node has no connection to the coordinator, while it has none.
    pub(super) connection_error: Option<String>,
    /// Address of this host on the route to the coordinator.
    pub(super) route_address: Option<IpAddr>,
}

/// A round that is over for this node while the job continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoppedRound {
    pub(super) round: u64,
    pub(super) cause: String,
    /// True if this node must stop its workers because it receives no answers from the coordinator.
    pub(super) partitioned: bool,
}

/// Reason for which this node gets no further orders from the coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EndReason {
    JobEnded(JobResult),
    Refused(Refusal),
    /// The coordinator answered nothing for a time, so the other nodes have continued without this node. The
    /// text says for how long, and the last error of the connection.
    Partitioned(String),
    /// The rendezvous cannot be used. The text is the reason.
    Unusable(String),
}

impl View {
    pub(super) fn apply(&mut self, command: Command) {
        match command {
            Command::Wait(join_status) => self.join_status = Some(join_status),
            Command::Run(assignment) => (self.assignment, self.join_status) = (Some(assignment), None),
            Command::Stop(cause) => self.stop(cause.to_string(), false),
            Command::End(result) => self.end(EndReason::JobEnded(result)),
            Command::Refuse(refusal) => self.end(EndReason::Refused(refusal)),
        }
    }

    /// Records why this node no longer takes part in the job. If a reason is recorded already, that reason
    /// stays.
    pub(super) fn end(&mut self, reason: EndReason) {
        let _ = self.end_reason.get_or_insert(reason);
    }

    /// Records that this node must stop its workers because the coordinator answered nothing for a time. The
    /// node will rejoin the job.
    pub(super) fn stop_partitioned(&mut self, silence: &str) {
        self.stop(format!("the rendezvous answered no heartbeat for {silence}"), true);
    }

    fn stop(&mut self, cause: String, partitioned: bool) {
        let round = self.assignment.as_ref().map_or(0, |run| run.round);
        self.stopped = Some(StoppedRound { round, cause, partitioned });
    }

    /// Returns true if this node must stop its workers of `round`, or of a later round.
    pub(super) fn is_stopped(&self, round: u64) -> bool {
        self.stopped.as_ref().is_some_and(|stopped| stopped.round >= round)
    }

    /// Returns true if the coordinator has ended this round and the job continues.
    pub(super) fn is_round_over(&self, round: u64) -> bool {
        self.end_reason.is_none() && self.stopped.as_ref().is_some_and(|stopped| stopped.round == round)
    }
}

/// Describes for the user why this node gets no further orders from the coordinator.
pub(super) fn describe_end(reason: &EndReason, settings: &Settings) -> String {
    let Settings { endpoint, run_id, .. } = settings;
    let id = if is_named(run_id) { format!("--rdzv-id={run_id}") } else { "no --rdzv-id".to_owned() };
    match reason {
        EndReason::JobEnded(result) => match result {
            JobResult::Succeeded { .. } => "the job has ended".to_owned(),
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
                JobResult::Succeeded { drained: false } => "successfully",
                JobResult::Succeeded { drained: true } => "by a drain",
                JobResult::Failed { .. } => "with a failure",
                JobResult::CoordinatorExited { .. } => "because the launcher of its coordinator exited",
            };
            format!("the job with {id} at {endpoint} has ended {how}\n  try: another --rdzv-id")
        }
        EndReason::Refused(Refusal::Timeout { after_s, join_status }) => {
            let here = describe_join_status(join_status);
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
        // Equal on all nodes that lose the rendezvous. Each of them also prints for how long it was silent.
        EndReason::Partitioned(_) => format!(
            "the rendezvous at {endpoint} is lost: its launcher was killed, or its host or the network is down"
        ),
    }
}
