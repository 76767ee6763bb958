//! The stage of the coordinator in which nodes gather for the next round. Pure.

use std::collections::BTreeSet;

use super::super::injected_bug::Bug;
use super::super::messages::{AgentId, JoinStatus, Order, Refusal, RestartCause};
use super::super::rank_assignment::{Candidate, assign_node_ranks};
use super::super::record::Record;
use super::{Coordinator, JOIN_STATUS_PERIOD, STOP_TIMEOUT, Stage, Time};

/// Maximum number of host names in each list of a join status.
const MAX_NAMES: usize = 16;

/// State of the coordinator while no round is in progress and nodes gather for the next one.
#[derive(Debug, Default)]
pub(super) struct Forming {
    pub(super) since: Time,
    /// Members that have not yet stopped their workers of the previous round.
    pub(super) stopping: BTreeSet<AgentId>,
    /// Earliest time at which the next round may start.
    pub(super) not_before: Option<Time>,
    /// Time at which the next round starts with the nodes that have joined, even if more could join.
    pub(super) last_call: Option<Time>,
    /// Reason for the end of the previous round. `last` is the record of that round.
    pub(super) cause: Option<RestartCause>,
    pub(super) last: Option<Record>,
    pub(super) join_status_at: Time,
}

impl Coordinator {
    /// Starts a round if enough members are ready.
    pub(super) fn try_start(&mut self) {
        let (min, max, early) = (self.min(), self.max(), self.injected_bug.is(Bug::StartsTooEarly));
        let Stage::Forming(forming) = &mut self.stage else { return };
        forming.not_before.take_if(|at| *at <= self.now);
        if !forming.stopping.is_empty() && !early || forming.not_before.is_some() {
            return;
        }
        let here = self.members.candidates.len();
        if here < min {
            forming.last_call = None;
            return;
        }
        // Only a first round waits for more nodes than the minimum. Later, each node of the previous round is
        // known to be ready or lost.
        let last_call = *forming.last_call.get_or_insert(self.now + self.rules.last_call);
        if here < max && self.members.returning_candidates == 0 && self.now < last_call {
            return;
        }
        let candidates = self.members.candidates.keys().filter_map(|agent| {
            let profile = &self.members.get(*agent)?.profile;
            let previous_rank = self.members.rank(*agent);
            let fails_often = self.fails_often(&profile.host);
            Some(Candidate {
                agent: *agent,
                host: &profile.host,
                pid: profile.pid,
                previous_rank,
                fails_often,
            })
        });
        let agents = assign_node_ranks(candidates.collect(), max);
        self.start(agents);
    }

    pub(super) fn tick_forming(&mut self) {
        let Stage::Forming(forming) = &mut self.stage else { return };
        let since = forming.since;
        if self.now >= since + STOP_TIMEOUT {
            // These members cannot end their workers. The coordinator evicts them, so that the other members
            // need not wait.
            let stuck = std::mem::take(&mut forming.stopping);
            for agent in stuck {
                let silent_s = STOP_TIMEOUT.as_secs();
                self.order(agent, Order::Refuse(Refusal::Evicted { silent_s }));
                self.members.remove(agent);
            }
        }
        while let Some(&(first, agent)) = self.members.waiting.first()
            && self.now >= first.max(since) + self.rules.join_timeout
        {
            let (after_s, join_status) = (self.rules.join_timeout.as_secs(), self.join_status());
            self.order(agent, Order::Refuse(Refusal::Timeout { after_s, join_status }));
            self.members.remove(agent);
        }
        self.try_start();
        if let Stage::Forming(forming) = &mut self.stage
            && self.now >= forming.join_status_at
        {
            forming.join_status_at = self.now + JOIN_STATUS_PERIOD;
            let waiting: Vec<AgentId> = self.members.candidates.keys().copied().collect();
            waiting.into_iter().for_each(|agent| self.order_to_wait(agent));
        }
    }

    /// Returns which nodes have joined and which are missing, for messages to users.
    pub(super) fn join_status(&self) -> JoinStatus {
        let name = |agent: &AgentId| {
            let profile = &self.members.get(*agent)?.profile;
            Some(format!("{} (pid {})", profile.host, profile.pid))
        };
        let names = |agents: &mut dyn Iterator<Item = &AgentId>| {
            agents.filter_map(name).take(MAX_NAMES).collect::<Vec<_>>()
        };
        let mut join_status = JoinStatus {
            joined: self.members.candidates.len(),
            min: self.min(),
            max: self.max(),
            names: names(&mut self.members.candidates.keys()),
            standby: !matches!(self.stage, Stage::Forming(_)),
            ..JoinStatus::default()
        };
        if let Stage::Forming(forming) = &self.stage {
            join_status.stopping = names(&mut forming.stopping.iter());
            join_status.cause.clone_from(&forming.cause);
            let begins = forming.last_call.map(|at| at.saturating_sub(self.now).as_millis());
            join_status.starts_in_ms = begins.and_then(|ms| u64::try_from(ms).ok());
        }
        join_status
    }
}
