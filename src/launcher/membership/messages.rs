//! Messages between agents and their coordinator. Pure.

use std::fmt;
use std::time::Duration;

use convoke_env::Generation;
use serde::{Deserialize, Serialize};

use crate::formatting;

/// Identifies one agent process. A restarted agent has a new id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct AgentId(pub(crate) u128);

impl fmt::Debug for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "agent {:x}", self.0)
    }
}

/// Properties of an agent, which it sends once per connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Profile {
    /// Host name. Ranks are ordered by it, and messages to users contain it.
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// `--nnodes`: all nodes must pass equal values.
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// `--nproc-per-node`, at least 1.
    pub(crate) workers: usize,
    /// `--role`.
    pub(crate) role: String,
}

impl Profile {
    /// Returns true if a launcher can have sent this profile.
    pub(crate) fn is_valid(&self) -> bool {
        0 < self.min && self.min <= self.max && self.workers > 0
    }

    /// Returns the name of the agent for messages to users.
    pub(crate) fn name(&self) -> String {
        format!("{} (pid {})", self.host, self.pid)
    }
}

/// State of a member. Each is complete: a later one replaces it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// None of its workers lives. It waits for a round later than `after`, the last that it was in or
    /// was told to leave (0: none).
    Ready {
        after: u64,
        /// Restarts that the member has used up.
        restarts: u32,
        /// Addresses at which the member would serve the store of the workers: most likely first, each
        /// `host:port`.
        store: Vec<String>,
        /// The member has stopped its workers of round `after` because it received no answers.
        partitioned: bool,
    },
    /// The workers of this round are starting or running.
    Running { round: u64 },
    /// A worker of this round has failed; the others are being stopped.
    Failed { round: u64, failure: Failure },
    /// All workers of the member in this round have succeeded.
    Succeeded { round: u64 },
    /// The member leaves and does not come back.
    Left(Departure),
    /// A signal stops the member: it is stopping its workers of this round and then leaves.
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

/// Reason for which a member leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Departure {
    /// The member knows how the job ended.
    Ended,
    /// A signal stopped it.
    Stopped { signal: i32 },
    /// The member could not continue. The text is the reason.
    Error(String),
}

/// Status message of a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Sequence number: the highest is the latest.
    pub(crate) seq: u64,
    pub(crate) phase: Phase,
    /// Term and sequence number of the latest order that the member has received.
    pub(crate) last_order: (u64, u64),
    /// Number of the latest probe that the member has received.
    pub(crate) last_probe: u64,
    /// Sequence number of its latest status that was answered.
    pub(crate) answered: u64,
}

/// Message of the coordinator to one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OrderMessage {
    /// Term of the coordinator: a successor has a higher term.
    pub(crate) term: u64,
    /// Sequence number of the order to this member: the highest of the highest term is the latest.
    pub(crate) seq: u64,
    /// `None` if the member has received the order. The message is then only a heartbeat.
    pub(crate) order: Option<Order>,
    /// Sequence number of the latest status that the coordinator has received.
    pub(crate) last_status: u64,
    /// Number of a probe: a member that receives a new one answers at once.
    pub(crate) probe: u64,
}

/// Instruction to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Wait for a round.
    Wait(JoinStatus),
    /// Run the workers of a round.
    Run(Assignment),
    /// Stop the workers of this round, if any, and get ready for a later one.
    Stop { round: u64, cause: RestartCause },
    /// The job is over on all nodes.
    End(JobResult),
    /// This node cannot take part.
    Refuse(Refusal),
}

/// Properties of a round for one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Assignment {
    /// Number of the round within the job, from 1.
    pub(crate) round: u64,
    pub(crate) generation: [u8; 16],
    /// Rank of this node. `group_world_size` is the number of nodes.
    pub(crate) group_rank: usize,
    pub(crate) group_world_size: usize,
    /// Rank of the first worker of this node. `world_size` is the number of workers of all nodes. The fields
    /// with `role` count only workers of this node's role.
    pub(crate) base_rank: usize,
    pub(crate) world_size: usize,
    pub(crate) base_role_rank: usize,
    pub(crate) role_world_size: usize,
    /// Addresses of the store of the workers, as the node of group rank 0 announced them.
    pub(crate) store: Vec<String>,
    /// Restarts used up, if they are counted for the whole job.
    pub(crate) restarts: Option<u32>,
    /// Heartbeat timeout of the nodes of this round.
    pub(crate) heartbeat_timeout: Duration,
}

impl Assignment {
    pub(crate) fn generation(&self) -> Generation {
        Generation::from_bytes(self.generation)
    }
}

/// Reason for which a round ends before its workers do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RestartCause {
    /// A worker of this node failed.
    Failed { node: usize, host: String, summary: String },
    /// A node disappeared, or left with an error.
    Lost { node: usize, host: String, why: Option<String> },
    /// A new node joined.
    Joined { host: String },
    /// A signal stopped a node.
    Stopped { node: usize, host: String, signal: i32 },
    /// A new coordinator knows nothing of the round, because nobody could hand its record over.
    UnknownRound,
}

impl fmt::Display for RestartCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { node, host, summary } => write!(f, "node {node} ({host}) failed: {summary}"),
            Self::Lost { node, host, why: None } => write!(
                f,
                "node {node} ({host}) is lost: its launcher was killed, or its host or the network is down"
            ),
            Self::Lost { node, host, why: Some(why) } => {
                write!(f, "node {node} ({host}) could not continue: {why}")
            }
            Self::Joined { host } => write!(f, "a node has joined: {host}"),
            Self::Stopped { node, host, signal } => {
                write!(f, "node {node} ({host}) was stopped by {}", formatting::signal(*signal))
            }
            Self::UnknownRound => {
                f.write_str("the coordinator was replaced, and the new one does not know this round")
            }
        }
    }
}

/// Outcome of the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum JobResult {
    /// All workers of the last round have succeeded.
    Succeeded,
    /// A failure without a remaining restart.
    Failed { node: usize, host: String, summary: String, report: String },
    /// The launcher that serves the coordinator exits with rank `node`, if it had one, and no other can take
    /// over. `why` is the reason.
    #[serde(rename = "Deserted")]
    CoordinatorExited { node: Option<usize>, host: String, why: String },
}

impl JobResult {
    /// Returns true if another job may start under the run id of a job with this outcome. A failed job may be
    /// queued again.
    /// After success the id stays closed, so that a late node does not wait for others in vain.
    /// A job without a run id of its own (`is_named` is false) always frees the id.
    pub(crate) fn frees_run_id(&self, is_named: bool) -> bool {
        match self {
            Self::Succeeded => !is_named,
            Self::Failed { .. } | Self::CoordinatorExited { .. } => true,
        }
    }
}

/// Reason for which a node cannot take part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The job has ended. If that frees its run id, the node tries again.
    Closed(JobResult),
    /// Too few nodes came in time.
    Timeout { after_s: u64, join_status: JoinStatus },
    /// The node has another `--nnodes` than the job.
    NodeCountMismatch { mine: (usize, usize), theirs: (usize, usize), host: String },
    /// The node was silent for too long, and the job continued without it.
    Evicted { silent_s: u64 },
}

/// Join status: the nodes that have joined and those that are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinStatus {
    /// Nodes that are ready.
    pub(crate) joined: usize,
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// Names of the first nodes that are ready.
    pub(crate) names: Vec<String>,
    /// Names of the first nodes that still stop their workers.
    pub(crate) stopping: Vec<String>,
    /// A round is running without this node. The node is a standby and replaces a lost one.
    pub(crate) standby: bool,
    /// Reason for the end of the previous round, if there was one.
    pub(crate) cause: Option<RestartCause>,
    /// Time until the round starts with the nodes that have joined, in milliseconds from now.
    pub(crate) starts_in_ms: Option<u64>,
}
