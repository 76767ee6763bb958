//! The job of this launcher as the cluster's scheduler describes it: number of nodes, rank of this node, and
//! where node 0 serves the store.

mod kubernetes;
mod scontrol;
mod slurm;

use serde::{Deserialize, Serialize};

pub(crate) use kubernetes::kubernetes_job;
pub(crate) use scontrol::{scontrol, scontrol_field};
pub(crate) use slurm::{SlurmError, SlurmStartContext, slurm_job};

/// Variable with the [`ScheduledJob`] of a launcher that `--hosts` has started, as JSON.
pub(crate) const HOSTS_JOB: &str = "CONVOKE_HOSTS_JOB";

/// The job of this launcher as the scheduler describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ScheduledJob {
    /// Id of the job, equal on all its nodes. No other job has it, and neither has this job after a requeue.
    pub(crate) id: String,
    /// The job as messages name it, such as `slurm job 42.0`.
    pub(crate) label: String,
    /// Number of nodes.
    pub(crate) nodes: usize,
    /// Rank of this node, below `nodes`.
    pub(crate) node: usize,
    pub(crate) node_0: NodeSearch,
    /// Names of the hosts by rank of their nodes, as the scheduler's commands take them; empty if unknown.
    pub(crate) hosts: Vec<String>,
    /// True for a job of Slurm.
    pub(crate) is_slurm: bool,
    /// CPUs that the scheduler gives to this launcher and its workers, if it says so.
    pub(crate) cpus: Option<usize>,
    /// Number of GPUs that the scheduler gives to this node, if it says so.
    pub(crate) gpus: Option<usize>,
    /// The source of each value, one line each, for `--dry-run`.
    pub(crate) sources: Vec<String>,
    /// Warnings about a likely mistake in the way this launcher was started.
    pub(crate) warnings: Vec<String>,
}

/// Number of ports, derived from the id of a job, that node 0 may serve at.
pub(crate) const JOB_PORTS: u16 = 8;

/// The means by which the nodes of a job find node 0. Only the launcher with rank 0 of the same job counts as node 0, so a
/// candidate may be wrong, or belong to another program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeSearch {
    /// The job as messages name it.
    pub(crate) job: String,
    /// The scheduler's name for the host of node 0.
    pub(crate) name: String,
    /// Node 0 serves its store at the first of these ports that is free. There is at least one.
    pub(crate) ports: Vec<u16>,
    /// Addresses to try if `name` cannot be looked up.
    pub(crate) addresses: Vec<String>,
    /// True if `scontrol` may know the address of `name`.
    pub(crate) asks_scontrol: bool,
}
