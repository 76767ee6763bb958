//! The record of a job. A coordinator with a registry (etcd or a shared file) writes it before it sends the
//! orders that depend on it, so that another coordinator can continue the job. Pure.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::messages::{AgentId, JobResult, Profile};

/// State of the latest rendezvous round, and the outcome of the job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Version of the format of the record.
    pub(crate) version: u32,
    /// Number of the latest round; 0 before the first.
    pub(crate) round: u64,
    pub(crate) generation: [u8; 16],
    /// Nodes of the round, by group rank.
    #[serde(rename = "seats")]
    pub(crate) nodes: Vec<RoundNode>,
    /// Nodes that a signal has stopped and whose workers have ended: group rank and signal number of each.
    pub(crate) left: Vec<(usize, i32)>,
    /// Addresses of the key-value store that the workers of the round use.
    pub(crate) store: Vec<String>,
    /// Number of restarts that failures have caused. It matters only if all nodes share one restart limit
    /// (`restart_budget=job`).
    pub(crate) failures: u32,
    /// Number of rounds that each host has ended by a failure or its loss.
    #[serde(default)]
    pub(crate) failed_hosts: BTreeMap<String, u32>,
    /// Outcome of the job, if it has ended.
    #[serde(rename = "ending")]
    pub(crate) result: Option<JobResult>,
}

/// A node of a rendezvous round.
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

    /// Returns the record of a job that has had no round, in the current version of the format.
    pub(crate) fn empty() -> Self {
        Self { version: 1, ..Self::default() }
    }
}
