//! What agents and their coordinator tell each other. Pure.

use std::fmt;
use std::time::Duration;

use convoke_env::Generation;
use serde::{Deserialize, Serialize};

use crate::words;

/// One agent process. One that is started anew is another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct AgentId(pub(crate) u128);

impl fmt::Debug for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "agent {:x}", self.0)
    }
}

/// What an agent says of itself, once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Profile {
    /// The host's name, by which nodes are put in order and named to people.
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// `--nnodes`; equal on all.
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// `--nproc-per-node`, at least 1.
    pub(crate) workers: usize,
    /// `--role`.
    pub(crate) role: String,
}

impl Profile {
    /// Whether a launcher can have said so.
    pub(crate) fn is_sound(&self) -> bool {
        0 < self.min && self.min <= self.max && self.workers > 0
    }

    /// As people know it.
    pub(crate) fn name(&self) -> String {
        format!("{} (pid {})", self.host, self.pid)
    }
}

/// What a member does. Each is the whole truth: a later one replaces it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// None of its workers lives, and it waits for a round later than `after`, the last that it was in or was told to
    /// leave (0: none).
    Ready {
        after: u64,
        /// Restarts that it has used up.
        restarts: u32,
        /// Where it would serve the store of a round's workers: addresses, the likeliest first, each `host:port`.
        store: Vec<String>,
        /// It has stopped its workers of round `after` because it heard nobody.
        alone: bool,
    },
    /// Its workers of this round are being started, or run.
    Running { round: u64 },
    /// A worker of this round has failed; the others are being stopped.
    Failed { round: u64, failure: Failure },
    /// All its workers of this round have succeeded.
    Succeeded { round: u64 },
    /// It goes, and comes not back.
    Left(Departure),
    /// A signal stops it: its workers of this round are being stopped, then it goes.
    Leaving { round: u64, signal: i32 },
}

/// What is to be known of a failed worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// One line: which rank, how.
    pub(crate) summary: String,
    /// The report on it, as JSON.
    pub(crate) report: String,
    /// Whether the agent may still restart its workers (`--max-restarts`).
    pub(crate) restarts: bool,
}

/// Why a member goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Departure {
    /// It has heard how the job ended.
    Ended,
    /// A signal stopped it.
    Stopped { signal: i32 },
    /// It could not go on: why.
    Error(String),
}

/// A member's register.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Counts what it has said: the highest is the latest.
    pub(crate) seq: u64,
    pub(crate) phase: Phase,
    /// Term and number of the latest order that it has heard.
    pub(crate) heard: (u64, u64),
    /// The latest question that it has heard.
    pub(crate) asked: u64,
    /// The latest of its statuses that was answered.
    pub(crate) answered: u64,
}

/// The coordinator's register for one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OrderMessage {
    /// Which coordinator: one that takes over has a higher term than the one before.
    pub(crate) term: u64,
    /// Counts its orders to this member: the highest of the highest term is the latest.
    pub(crate) seq: u64,
    /// `None` if the member has heard it: then this is only a sign of life.
    pub(crate) order: Option<Order>,
    /// The latest status that the coordinator has heard.
    pub(crate) heard: u64,
    /// A question: whoever hears it says at once that it is there.
    pub(crate) ask: u64,
}

/// What a member shall do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Wait for a round.
    Wait(Muster),
    /// Run the workers of a round.
    Run(Assignment),
    /// Stop the workers of this round, if there are any, and be ready for a later one.
    Stop { round: u64, cause: Cause },
    /// The job is over on all nodes.
    End(Ending),
    /// This node cannot take part.
    Refuse(Refusal),
}

/// What a node needs to know of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Assignment {
    /// Counts the rounds of the job, from 1.
    pub(crate) round: u64,
    pub(crate) generation: [u8; 16],
    /// Rank of this node, and how many there are.
    pub(crate) group_rank: usize,
    pub(crate) group_world_size: usize,
    /// Rank of its first worker, and workers of all nodes; the same in its role.
    pub(crate) base_rank: usize,
    pub(crate) world_size: usize,
    pub(crate) base_role_rank: usize,
    pub(crate) role_world_size: usize,
    /// Where the store of the workers is served, as the node of group rank 0 said.
    pub(crate) store: Vec<String>,
    /// Restarts that count for this node now, where they are counted for the whole job.
    pub(crate) restarts: Option<u32>,
    /// A node of the round that is not heard for so long is lost.
    pub(crate) silence: Duration,
}

impl Assignment {
    pub(crate) fn generation(&self) -> Generation {
        Generation::from_bytes(self.generation)
    }
}

/// Why a round ends before its workers have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Cause {
    /// A worker failed; its node.
    Failed { node: usize, host: String, summary: String },
    /// A node is gone without a word, or with an error.
    Lost { node: usize, host: String, why: Option<String> },
    /// Another node has come.
    Joined { host: String },
    /// A signal has stopped a node.
    Stopped { node: usize, host: String, signal: i32 },
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { node, host, summary } => write!(f, "node {node} ({host}) failed: {summary}"),
            Self::Lost { node, host, why: None } => write!(
                f,
                "node {node} ({host}) is lost: its launcher was killed, or its host or the network is down"
            ),
            Self::Lost { node, host, why: Some(why) } => {
                write!(f, "node {node} ({host}) could not go on: {why}")
            }
            Self::Joined { host } => write!(f, "a node has come: {host}"),
            Self::Stopped { node, host, signal } => {
                write!(f, "node {node} ({host}) was stopped by {}", words::signal(*signal))
            }
        }
    }
}

/// How the job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ending {
    /// All workers of the last round have succeeded.
    Succeeded,
    /// A failure was final.
    Failed { node: usize, host: String, summary: String, report: String },
    /// The launcher that serves the coordinator goes, and nobody else can take over: why, and its rank if it had one.
    Deserted { node: Option<usize>, host: String, why: String },
}

impl Ending {
    /// Whether another job may begin under the run id of one that ended so. A job that failed may be queued again. After
    /// success the id stays closed, so that a node that comes late does not wait for others in vain; but a job without an
    /// id of its own (`is_named` is false) is no certain job.
    pub(crate) fn frees_run_id(&self, is_named: bool) -> bool {
        match self {
            Self::Succeeded => !is_named,
            Self::Failed { .. } | Self::Deserted { .. } => true,
        }
    }
}

/// Why a node cannot take part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The job has ended. Where that frees its id, the node tries again.
    Closed(Ending),
    /// Too few nodes came in time.
    Timeout { after_s: u64, muster: Muster },
    /// It was told another `--nnodes`.
    Nodes { mine: (usize, usize), theirs: (usize, usize), host: String },
    /// It was silent for too long, and the others went on without it.
    GivenUp { silent_s: u64 },
}

/// Who is there and who is missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Muster {
    /// Nodes that are ready.
    pub(crate) here: usize,
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// Names of the first of them.
    pub(crate) names: Vec<String>,
    /// Nodes that still stop their workers: names of the first of them.
    pub(crate) stopping: Vec<String>,
    /// A round goes on without this node, which is needed if another one is lost.
    pub(crate) spare: bool,
    /// Why a round had to end, if this follows one.
    pub(crate) cause: Option<Cause>,
    /// Until the round begins with the nodes that are there, in milliseconds from now.
    pub(crate) begins_ms: Option<u64>,
}
