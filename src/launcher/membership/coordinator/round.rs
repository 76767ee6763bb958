//! A round and the states of its nodes. Pure.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::messages::{AgentId, Assignment, Failure};
use super::super::rank_assignment::{Ranks, assign};
use super::super::record::{Record, RoundNode};
use super::Rules;

/// State of a node in a rendezvous round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NodeState {
    Running,
    Succeeded,
    /// A worker of the node failed. The failure is not final until the coordinator knows whether the loss of
    /// another node caused it.
    Failed(Failure),
    /// A signal is stopping the node, or has stopped it.
    Left {
        signal: i32,
    },
    /// The node disappeared, or left with an error. The text is the error.
    Lost(Option<String>),
}

/// A rendezvous round, with the states of its nodes by group rank.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) record: Record,
    pub(super) states: Vec<NodeState>,
    /// Group ranks of the nodes that failed, earliest failure first.
    pub(super) failed: Vec<usize>,
    /// Number of nodes whose workers are still running.
    pub(super) running: usize,
    pub(super) succeeded: usize,
    /// A node has stopped its workers because the job is drained.
    pub(super) drained: bool,
    /// Group rank of the first node that was lost or stopped by a signal.
    pub(super) lost: Option<usize>,
    /// Members that have not yet answered the probe that follows a failure without a remaining restart.
    /// `None` if there was no such failure.
    pub(super) unconfirmed: Option<BTreeSet<AgentId>>,
    /// Ranks of the workers of each node.
    ranks: Vec<Ranks>,
    /// Heartbeat timeout of the nodes of this round.
    heartbeat_timeout: Duration,
}

impl Round {
    pub(super) fn new(record: Record, rules: &Rules) -> Self {
        let nodes = record.nodes.iter().map(|node| &node.profile);
        let ranks = assign(nodes.map(|profile| (profile.role.as_str(), profile.workers)));
        let size = record.nodes.len();
        let states = vec![NodeState::Running; size];
        let left = record.left.clone();
        let heartbeat_timeout = rules.heartbeat_timeout_for(record.max_nodes_on_host());
        let mut round = Self {
            record,
            states,
            failed: Vec::new(),
            running: size,
            succeeded: 0,
            drained: false,
            lost: None,
            unconfirmed: None,
            ranks,
            heartbeat_timeout,
        };
        for (rank, signal) in left.into_iter().filter(|(rank, _)| *rank < size) {
            round.set(rank, NodeState::Left { signal });
        }
        round
    }

    pub(super) fn node(&self, rank: usize) -> &RoundNode {
        &self.record.nodes[rank]
    }

    /// Sets the state of a node, unless its old state is final. `Failed` may still become `Lost` or `Left`.
    pub(super) fn set(&mut self, rank: usize, state: NodeState) {
        let old = &mut self.states[rank];
        match (&*old, &state) {
            (NodeState::Running, _) => self.running -= 1,
            (NodeState::Failed(_), NodeState::Lost(_) | NodeState::Left { .. }) => {}
            _ => return,
        }
        match state {
            NodeState::Running => {}
            NodeState::Succeeded => self.succeeded += 1,
            NodeState::Failed(_) => self.failed.push(rank),
            NodeState::Left { .. } | NodeState::Lost(_) => drop(self.lost.get_or_insert(rank)),
        }
        *old = state;
    }

    /// Returns the group rank and the failure of the node that failed first. Nodes that were lost or stopped
    /// after their failure do not count.
    pub(super) fn failure(&self) -> Option<(usize, &Failure)> {
        self.failed.iter().find_map(|&rank| match &self.states[rank] {
            NodeState::Failed(failure) => Some((rank, failure)),
            NodeState::Running | NodeState::Succeeded | NodeState::Left { .. } | NodeState::Lost(_) => None,
        })
    }

    pub(super) fn assignment(&self, rank: usize, restarts: Option<u32>) -> Assignment {
        let (base_rank, world_size, base_role_rank, role_world_size) = self.ranks[rank];
        Assignment {
            round: self.record.round,
            generation: self.record.generation,
            group_rank: rank,
            group_world_size: self.record.nodes.len(),
            base_rank,
            world_size,
            base_role_rank,
            role_world_size,
            store: self.record.store.clone(),
            restarts,
            heartbeat_timeout: self.heartbeat_timeout,
        }
    }
}
