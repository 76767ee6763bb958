//! A round and the states of its nodes. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::messages::{AgentId, Assignment, Failure};
use super::super::rank_assignment::{Ranks, assign};
use super::super::record::{Record, RoundNode};
use super::Rules;

/// State of a node of the round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum NodeState {
    Running,
    Succeeded,
    /// A worker failed. The failure is not final until it is known whether a loss caused it.
    Failed(Failure),
    /// A signal is stopping the node, or has stopped it.
    Left {
        signal: i32,
    },
    /// The node is gone, with its reason if it gave one.
    Lost(Option<String>),
}

/// The nodes of a round, by group rank.
#[derive(Debug)]
pub(in super::super) struct Round {
    pub(super) record: Record,
    pub(super) states: Vec<NodeState>,
    /// Ranks that failed, oldest first.
    pub(super) failed: Vec<usize>,
    running: usize,
    pub(super) succeeded: usize,
    /// First rank that was lost or stopped by a signal.
    pub(super) lost: Option<usize>,
    /// Members that have not yet confirmed, after a possibly final failure, that they are alive.
    pub(super) unconfirmed: Option<BTreeSet<AgentId>>,
    /// Ranks of the workers of each node.
    ranks: Vec<Ranks>,
    /// Heartbeat timeout of the nodes.
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

    pub(super) fn number(&self) -> u64 {
        self.record.round
    }

    pub(super) fn node(&self, rank: usize) -> &RoundNode {
        &self.record.nodes[rank]
    }

    /// Returns the rank of a node that takes part in the round.
    pub(super) fn rank(&self, ranks: &BTreeMap<AgentId, usize>, agent: AgentId) -> Option<usize> {
        ranks
            .get(&agent)
            .copied()
            .filter(|&rank| self.record.nodes.get(rank).is_some_and(|node| node.agent == agent))
    }

    /// Sets the state of a node. A final state stays.
    pub(super) fn set(&mut self, rank: usize, state: NodeState) {
        let old = &mut self.states[rank];
        let goes = match (&*old, &state) {
            (NodeState::Running, _) => true,
            (NodeState::Failed(_), NodeState::Lost(_) | NodeState::Left { .. }) => true,
            (
                NodeState::Succeeded | NodeState::Failed(_) | NodeState::Left { .. } | NodeState::Lost(_),
                _,
            ) => false,
        };
        if !goes {
            return;
        }
        self.running -= usize::from(*old == NodeState::Running);
        match state {
            NodeState::Running => {}
            NodeState::Succeeded => self.succeeded += 1,
            NodeState::Failed(_) => self.failed.push(rank),
            NodeState::Left { .. } | NodeState::Lost(_) => drop(self.lost.get_or_insert(rank)),
        }
        *old = state;
    }

    /// Returns the number of nodes that are running.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    /// Returns the first node with a failure that has led to no restart.
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
