//! Messages between agents and their coordinator. Pure.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::formatting;

/// Identifies one agent process. A restarted agent has a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct AgentId(pub(crate) u128);

/// Properties of an agent, which it sends once per connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Profile {
    /// Host name. New nodes get group ranks in the order of their host names, and messages to users contain
    /// the name.
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Minimum of `--nnodes`; `max` is its maximum. All nodes must pass equal values.
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// `--nproc-per-node`, at least 1.
    pub(crate) workers: usize,
    /// `--role`.
    pub(crate) role: String,
}

impl Profile {
    /// Returns true if the numbers of nodes and workers are possible, as those of every launcher are.
    pub(crate) fn is_valid(&self) -> bool {
        0 < self.min && self.min <= self.max && self.workers > 0
    }
}

/// State of a member, as the member reports it to the coordinator. A later report replaces an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// The member has no running workers. It waits for a rendezvous round later than `after`, the last round
    /// that it was in or was told to leave (0: none).
    Ready {
        after: u64,
        /// Number of restarts that the member has used up.
        restarts: u32,
        /// Addresses (`host:port`) at which the member would serve the workers' key-value store. The address
        /// that other hosts most likely reach stands first.
        store: Vec<String>,
        /// The member has stopped its workers of round `after` because it received no answers from the
        /// coordinator.
        partitioned: bool,
    },
    /// The member's workers of this rendezvous round are starting or running.
    Running { round: u64 },
    /// One of the member's workers of this round has failed, and the member is stopping its other workers.
    Failed { round: u64, failure: Failure },
    /// All workers of the member in this round have succeeded, or have stopped because the job is `drained`.
    Succeeded { round: u64, drained: bool },
    /// The member leaves the job and does not come back.
    Left(Departure),
    /// A signal stops the member: it is stopping its workers of this round and then leaves the job.
    Leaving { round: u64, signal: i32 },
}

/// Description of a failed worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// One line: the rank, and how it failed.
    pub(crate) summary: String,
    /// Failure report as JSON.
    pub(crate) report: String,
    /// True if the agent may still restart its workers (`--max-restarts`).
    pub(crate) can_restart: bool,
}

/// Reason for which a member leaves the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Departure {
    /// The job has ended, and the member knows the outcome.
    Ended,
    /// A signal stopped the member's launcher.
    Stopped { signal: i32 },
    /// The member could not continue. The text is the reason.
    Error(String),
}

/// Status message of a member to the coordinator, sent at each change and as a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Sequence number of this status: of all statuses of the member, the highest is the latest.
    pub(crate) seq: u64,
    pub(crate) phase: Phase,
    /// Term and sequence number of the latest order that the member has received.
    pub(crate) last_order: (u64, u64),
    /// Number of the latest probe that the member has received.
    pub(crate) last_probe: u64,
    /// Sequence number of the latest status of this member that the coordinator has answered.
    pub(crate) answered: u64,
}

/// Message of the coordinator to one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OrderMessage {
    /// Term of the coordinator: a successor has a higher term.
    pub(crate) term: u64,
    /// Sequence number of the latest order to this member. Of two orders, the later has the higher term, or
    /// the higher number in the same term.
    pub(crate) seq: u64,
    /// The latest order. It is `None` if there is none yet or the member has received it: the message is then
    /// only a heartbeat.
    pub(crate) order: Option<Order>,
    /// Sequence number of the latest status that the coordinator has received from this member. The message
    /// answers that status.
    pub(crate) last_status: u64,
    /// Number of the latest probe. A member that receives a new number sends a status at once, which proves
    /// that it is alive.
    pub(crate) probe: u64,
}

/// Instruction of the coordinator to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Wait for the next round.
    Wait(JoinStatus),
    /// Run the workers of a round.
    Run(Assignment),
    /// Stop the workers of this round, if any, and get ready for a later round.
    Stop { round: u64, cause: RestartCause },
    /// The job is over on all nodes.
    End(JobResult),
    /// The node cannot take part in the job.
    Refuse(Refusal),
}

/// Ranks of one node in a rendezvous round, and the values that the node needs to start its workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Assignment {
    /// Number of the round within the job, from 1.
    pub(crate) round: u64,
    pub(crate) generation: [u8; 16],
    /// Group rank of this node. `group_world_size` is the number of nodes.
    pub(crate) group_rank: usize,
    pub(crate) group_world_size: usize,
    /// Rank of the first worker of this node. `world_size` is the number of workers of all nodes. The two
    /// fields with `role` in their name count only workers of this node's role.
    pub(crate) base_rank: usize,
    pub(crate) world_size: usize,
    pub(crate) base_role_rank: usize,
    pub(crate) role_world_size: usize,
    /// Addresses of the workers' key-value store, as the node of group rank 0 announced them.
    pub(crate) store: Vec<String>,
    /// Number of restarts that the job has used up. `None` if each node counts its own restarts.
    pub(crate) restarts: Option<u32>,
    /// Heartbeat timeout of the nodes of this round.
    pub(crate) heartbeat_timeout: Duration,
}

/// Reason for which the coordinator ends a rendezvous round before its workers end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum RestartCause {
    /// A worker of the node with group rank `node` failed.
    #[error("node {node} ({host}) failed: {summary}")]
    Failed { node: usize, host: String, summary: String },
    /// A node disappeared (`why` is `None`), or left with the error `why`.
    #[error("node {node} ({host}) {}", describe_loss(why.as_deref()))]
    Lost { node: usize, host: String, why: Option<String> },
    /// A new node joined.
    #[error("a node has joined: {host}")]
    Joined { host: String },
    /// A signal stopped a node.
    #[error("node {node} ({host}) was stopped by {}", formatting::signal(*signal))]
    Stopped { node: usize, host: String, signal: i32 },
    /// A new coordinator does not know the round, because it found no record of the job.
    #[error("the coordinator was replaced, and the new one does not know this round")]
    UnknownRound,
}

fn describe_loss(why: Option<&str>) -> String {
    let killed = || "is lost: its launcher was killed, or its host or the network is down".to_owned();
    why.map_or_else(killed, |why| format!("could not continue: {why}"))
}

/// Outcome of the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum JobResult {
    /// All workers of the last round have succeeded, or have stopped because the job is `drained`.
    Succeeded { drained: bool },
    /// A worker of the node with group rank `node` failed, and no restart was left.
    Failed { node: usize, host: String, summary: String, report: String },
    /// The launcher that serves the coordinator exits, and no other coordinator can take over. `node` is the
    /// group rank of that launcher, if it had one. `why` is the reason for the exit.
    #[serde(rename = "Deserted")]
    CoordinatorExited { node: Option<usize>, host: String, why: String },
}

impl JobResult {
    /// Returns true if another job may start under the run id of a job with this outcome. After a failure or a
    /// drain, the user or a scheduler may start the job again. After success the id stays closed, so that a
    /// late node does not wait for nodes that never come. A job without a run id of its own (`is_named` is
    /// false) always frees the id.
    pub(crate) fn frees_run_id(&self, is_named: bool) -> bool {
        *self != Self::Succeeded { drained: false } || !is_named
    }
}

/// Reason for which a node cannot take part in the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The job has ended with this outcome. If the outcome frees the run id, the node tries again.
    Closed(JobResult),
    /// Too few nodes joined within `after_s` seconds.
    Timeout { after_s: u64, join_status: JoinStatus },
    /// The node has another `--nnodes` (`mine`: minimum, maximum) than the job (`theirs`, from `host`).
    NodeCountMismatch { mine: (usize, usize), theirs: (usize, usize), host: String },
    /// The job continued without the node, because for `silent_s` seconds it sent no status or did not stop
    /// its workers.
    Evicted { silent_s: u64 },
}

/// Join status: the nodes that have joined and those that are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinStatus {
    /// Number of nodes that are ready for the next round.
    pub(crate) joined: usize,
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// Names of nodes that are ready, up to a maximum number.
    pub(crate) names: Vec<String>,
    /// Names of nodes that are still stopping workers of the previous round, up to a maximum number.
    pub(crate) stopping: Vec<String>,
    /// True if a round is running without this node. The node waits as a standby, to replace a lost node.
    pub(crate) standby: bool,
    /// True if a spare node has replaced this one, because its host has ended several rounds.
    pub(crate) is_replaced: bool,
    /// Reason for the end of the previous round, if there was one.
    pub(crate) cause: Option<RestartCause>,
    /// Time until the round starts with the nodes that have joined, in milliseconds from now. `None` while
    /// too few have joined.
    pub(crate) starts_in_ms: Option<u64>,
}
