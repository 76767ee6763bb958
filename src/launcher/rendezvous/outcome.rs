//! The outcome of a job, on which all its nodes agree.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::formatting;

/// Outcome of the job, and the node that caused it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobOutcome {
    version: u32,
    /// Group rank of the node that the outcome is about.
    pub(crate) node: usize,
    /// Host name of the node that the outcome is about.
    pub(crate) host: String,
    #[serde(rename = "what")]
    pub(crate) kind: OutcomeKind,
}

/// What happened on the node that a [`JobOutcome`] names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OutcomeKind {
    /// A worker failed and no restart is left.
    Failed {
        /// One line: the rank, and how it failed.
        summary: String,
        /// Failure report as JSON, so that all nodes can print it.
        report: String,
    },
    /// The launcher of the node could not continue. `text` is the reason.
    Error { text: String },
    /// The signal with this number ended the launcher of the node.
    Stopped { signal: i32 },
    /// The launcher or the host of the node disappeared.
    Lost,
    /// All nodes have succeeded. From now on, the exit of a node does not count as its loss.
    Succeeded,
    /// This node receives no answers from the rendezvous any more, or the other nodes continued without it.
    /// `text` is one line: what happened.
    #[serde(rename = "alone")]
    Partitioned { text: String },
}

impl JobOutcome {
    pub(super) fn new(node: usize, host: &str, kind: OutcomeKind) -> Self {
        Self { version: 1, node, host: host.to_owned(), kind }
    }

    /// Returns true if the outcome is about `node`, which knows it from the other nodes.
    pub(crate) fn is_about(&self, node: usize) -> bool {
        self.node == node && !matches!(self.kind, OutcomeKind::Partitioned { .. })
    }
}

impl fmt::Display for JobOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !matches!(self.kind, OutcomeKind::Partitioned { .. }) {
            write!(f, "node {} ({}) ", self.node, self.host)?;
        }
        match &self.kind {
            OutcomeKind::Partitioned { text } => f.write_str(text),
            OutcomeKind::Failed { summary, .. } => write!(f, "failed: {summary}"),
            OutcomeKind::Error { text } => write!(f, "could not continue: {text}"),
            OutcomeKind::Stopped { signal } => write!(f, "was stopped by {}", formatting::signal(*signal)),
            OutcomeKind::Lost => {
                f.write_str("is lost: its launcher was killed, or its host or the network is down")
            }
            OutcomeKind::Succeeded => f.write_str("has succeeded, as have all other nodes"),
        }
    }
}
