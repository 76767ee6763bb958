//! The record of a job, written before anybody acts on it, so that another coordinator can continue. Pure.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::messages::{AgentId, JobResult, Profile};

/// State of the latest round, and the outcome of the job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Version of this format.
    pub(crate) version: u32,
    /// Number of the latest round; 0 before the first.
    pub(crate) round: u64,
    pub(crate) generation: [u8; 16],
    /// Nodes of the round, by group rank.
    #[serde(rename = "seats")]
    pub(crate) nodes: Vec<RoundNode>,
    /// Group ranks of nodes that a signal has stopped and that have no workers any more, and the signal.
    pub(crate) left: Vec<(usize, i32)>,
    /// Addresses of the store of the workers.
    pub(crate) store: Vec<String>,
    /// Restarts used up by failures, if they are counted for the whole job.
    pub(crate) failures: u32,
    /// Outcome of the job, if it has ended.
    #[serde(rename = "ending")]
    pub(crate) result: Option<JobResult>,
}

/// A node of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RoundNode {
    pub(crate) agent: AgentId,
    pub(crate) profile: Profile,
}

impl Record {
    /// Returns the largest number of nodes of the round on one host. O(n).
    pub(crate) fn max_nodes_on_host(&self) -> usize {
        let mut hosts = HashMap::<&str, usize>::new();
        for node in &self.nodes {
            *hosts.entry(&node.profile.host).or_default() += 1;
        }
        hosts.into_values().max().unwrap_or_default()
    }

    /// Current version of the format.
    pub(crate) const VERSION: u32 = 1;

    /// Returns the record of a job that has had no round.
    pub(crate) fn empty() -> Self {
        Self { version: Self::VERSION, ..Self::default() }
    }
}
