//! Transitions between the stages of the coordinator, from the forming of a round to the end of the job.
//! Pure.

use std::collections::BTreeSet;

use super::super::injected_bug::Bug;
use super::super::messages::{AgentId, Departure, Failure, JobResult, Order, Phase, RestartCause};
use super::super::record::{Record, RoundNode};
use super::{Action, Coordinator, Forming, JOIN_STATUS_PERIOD, NodeState, Round, STOP_SPREAD, Stage};

impl Coordinator {
    /// Handles a status by which a member reports a new phase.
    pub(super) fn phase_changed(&mut self, agent: AgentId) {
        let Some(phase) = self.members.get(agent).and_then(|known| known.phase.clone()) else { return };
        if let Stage::Finished(result) = &self.stage
            && !matches!(phase, Phase::Left(_) | Phase::Leaving { .. })
        {
            let end = Order::End(result.clone());
            return self.order(agent, end);
        }
        match phase {
            Phase::Left(departure) => return self.member_left(agent, departure),
            Phase::Ready { after, partitioned, .. } => self.handle_ready(agent, after, partitioned),
            Phase::Leaving { signal, .. } => self.handle_leaving(agent, signal),
            Phase::Running { round } | Phase::Succeeded { round, .. } | Phase::Failed { round, .. } => {
                self.members.drop_candidate(agent);
                self.handle_round_phase(agent, round, phase);
            }
        }
        self.evaluate_round();
    }

    /// Sets the state of a node in the round in progress, if there is one and the node takes part.
    fn set_state(&mut self, agent: AgentId, state: NodeState) {
        if let Stage::Starting(round) | Stage::Live(round) = &mut self.stage
            && let Some(rank) = self.members.rank(agent)
        {
            round.set(rank, state);
        }
    }

    /// Handles a member that has no running workers and waits for a round. `after` and `partitioned` are
    /// those of [`Phase::Ready`].
    fn handle_ready(&mut self, agent: AgentId, after: u64, partitioned: bool) {
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) => match self.members.rank(agent) {
                // The member has not received the order for the round yet.
                Some(rank) if after < round.record.round => {
                    if let Stage::Live(round) = &self.stage {
                        let run = Order::Run(round.assignment(rank, self.used_restarts()));
                        self.order(agent, run);
                    }
                }
                Some(rank) => {
                    round.set(rank, ended_state(partitioned));
                    self.members.add_candidate(self.now, agent);
                }
                None => {
                    self.members.add_candidate(self.now, agent);
                    self.order_to_wait(agent);
                }
            },
            Stage::Forming(forming) => {
                if forming.stopping.contains(&agent) && after < self.round {
                    // The member has not yet received the order that ends the latest round.
                    return;
                }
                forming.stopping.remove(&agent);
                self.members.add_candidate(self.now, agent);
                self.try_start();
                if let Stage::Forming(_) = self.stage {
                    self.order_to_wait(agent);
                }
            }
            Stage::Finishing(_) | Stage::Finished(_) => {}
        }
    }

    /// Handles a member that has or had workers of round `number`.
    fn handle_round_phase(&mut self, agent: AgentId, number: u64, phase: Phase) {
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) if round.record.round == number => match phase {
                Phase::Succeeded { drained, .. } => {
                    round.drained |= drained;
                    self.set_state(agent, NodeState::Succeeded);
                }
                Phase::Failed { failure, .. } => self.set_state(agent, NodeState::Failed(failure)),
                Phase::Running { .. } | Phase::Ready { .. } | Phase::Leaving { .. } | Phase::Left(_) => {}
            },
            Stage::Forming(forming) => {
                // This coordinator has ended round `number` or does not know it.
                forming.stopping.insert(agent);
                let cause = forming.cause.clone().unwrap_or(RestartCause::UnknownRound);
                self.order(agent, Order::Stop { round: number.max(self.round), cause });
            }
            Stage::Starting(_) | Stage::Live(_) | Stage::Finishing(_) | Stage::Finished(_) => {}
        }
    }

    /// Handles a member that a signal stops. The next round waits until the workers of this member have ended
    /// as well.
    fn handle_leaving(&mut self, agent: AgentId, signal: i32) {
        self.members.drop_candidate(agent);
        self.set_state(agent, NodeState::Left { signal });
        if let Stage::Forming(forming) = &mut self.stage {
            forming.stopping.insert(agent);
            forming.not_before = Some(self.now + STOP_SPREAD);
        }
    }

    fn member_left(&mut self, agent: AgentId, departure: Departure) {
        let signal = match departure {
            Departure::Stopped { signal } => signal,
            Departure::Error(why) => return self.member_lost(agent, Some(why)),
            Departure::Ended => return self.member_lost(agent, None),
        };
        self.set_state(agent, NodeState::Left { signal });
        let record = match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) => Some(&mut round.record),
            Stage::Forming(forming) => forming.last.as_mut(),
            Stage::Finishing(_) | Stage::Finished(_) => None,
        };
        if let Some(record) = record
            && let Some(rank) = record.nodes.iter().position(|node| node.agent == agent)
        {
            // A coordinator that takes over must not wait for this node.
            record.left.push((rank, signal));
            self.actions.push(Action::Write(record.clone()));
        }
        self.members.remove(agent);
        self.after_loss(agent);
    }

    /// Handles the loss of a member. `why` is the member's error, or `None` if it disappeared.
    pub(super) fn member_lost(&mut self, agent: AgentId, why: Option<String>) {
        self.set_state(agent, NodeState::Lost(why));
        self.members.remove(agent);
        self.after_loss(agent);
    }

    fn after_loss(&mut self, agent: AgentId) {
        let waits = self.injected_bug.is(Bug::WaitsForLostNode);
        match &mut self.stage {
            Stage::Forming(forming) => {
                if !waits {
                    forming.stopping.remove(&agent);
                }
                self.try_start();
            }
            Stage::Live(_) => self.evaluate_round(),
            Stage::Starting(_) | Stage::Finishing(_) | Stage::Finished(_) => {}
        }
    }

    /// Ends the running round or the job if the states of the nodes require it. O(1), unless the round ends.
    pub(super) fn evaluate_round(&mut self) {
        let Stage::Live(round) = &self.stage else { return };
        let name = |rank: usize| (rank, round.node(rank).profile.host.clone());
        if let Some(rank) = round.lost {
            let (node, host) = name(rank);
            let cause = match &round.states[rank] {
                NodeState::Left { signal } => RestartCause::Stopped { node, host, signal: *signal },
                NodeState::Lost(why) => RestartCause::Lost { node, host, why: why.clone() },
                state => unreachable!("a node that was lost or stopped is in the state {state:?}"),
            };
            return self.end_round(cause);
        }
        if let Some((rank, failure)) = round.failure() {
            let (node, host) = name(rank);
            if self.rules.job_budget.map_or(failure.can_restart, |budget| self.failures < budget) {
                let cause = RestartCause::Failed { node, host, summary: failure.summary.clone() };
                self.failures = self.failures.saturating_add(1);
                return self.end_round(cause);
            }
            return self.confirm_failure();
        }
        if round.running == 0 && round.succeeded > 0 {
            let drained = round.drained;
            return self.end(JobResult::Succeeded { drained });
        }
        // Once a node has succeeded, the job is about to finish and does not restart for a new node.
        if round.states.len() < self.max() && round.succeeded == 0 {
            let newcomer = self.members.waiting.first().and_then(|(_, agent)| self.members.get(*agent));
            if let Some(host) = newcomer.map(|known| known.profile.host.clone()) {
                self.end_round(RestartCause::Joined { host });
            }
        }
    }

    /// Ends the job after a failure without a remaining restart, unless the loss of another node, not known
    /// yet, caused the failure. The coordinator therefore first sends a probe to all other members of the
    /// round. A member that does not answer it is lost at its heartbeat timeout.
    fn confirm_failure(&mut self) {
        let Stage::Live(round) = &mut self.stage else { return };
        if round.unconfirmed.is_none() {
            self.last_probe_sent += 1;
            let failed = round.failure().map(|(rank, _)| rank);
            let others = round.record.nodes.iter().enumerate().filter(|&(rank, _)| Some(rank) != failed);
            let unconfirmed: BTreeSet<AgentId> =
                others.map(|(_, node)| node.agent).filter(|agent| self.members.contains(*agent)).collect();
            round.unconfirmed = Some(unconfirmed.clone());
            for agent in unconfirmed {
                self.send(agent, false);
            }
        }
        let Stage::Live(round) = &self.stage else { return };
        if round.unconfirmed.as_ref().is_some_and(BTreeSet::is_empty)
            && let Some((node, failure)) = round.failure()
        {
            let Failure { summary, report, .. } = failure.clone();
            let host = round.node(node).profile.host.clone();
            self.end(JobResult::Failed { node, host, summary, report });
        }
    }

    /// Handles the answer of a member to a probe.
    pub(super) fn probe_answered(&mut self, agent: AgentId) {
        let (sent, last_probe) =
            (self.last_probe_sent, self.members.get(agent).map(|known| known.last_probe));
        if let Stage::Live(round) = &mut self.stage
            && let Some(unconfirmed) = &mut round.unconfirmed
            && last_probe >= Some(sent)
            && unconfirmed.remove(&agent)
        {
            self.confirm_failure();
        }
    }

    /// Ends the round and orders its members to stop their workers. A new round can start when they have done
    /// so.
    fn end_round(&mut self, cause: RestartCause) {
        let Stage::Live(round) = &self.stage else { return };
        if let RestartCause::Failed { host, .. } | RestartCause::Lost { host, .. } = &cause {
            let rounds = self.failed_hosts.entry(host.clone()).or_default();
            *rounds = rounds.saturating_add(1);
        }
        let (number, last) = (round.record.round, round.record.clone());
        let members = round.record.nodes.iter().map(|node| node.agent);
        let here: Vec<AgentId> = members.filter(|agent| self.members.contains(*agent)).collect();
        let is_stop = matches!(cause, RestartCause::Stopped { .. }) && !here.is_empty();
        // A member that is already ready for the next round needs no order to stop.
        let is_busy = |agent: &AgentId| !self.members.candidates.contains_key(agent);
        let stopping: BTreeSet<AgentId> = here.into_iter().filter(is_busy).collect();
        self.stage = Stage::Forming(Forming {
            since: self.now,
            stopping: stopping.clone(),
            not_before: is_stop.then_some(self.now + STOP_SPREAD),
            last_call: None,
            cause: Some(cause.clone()),
            last: Some(last),
            join_status_at: self.now + JOIN_STATUS_PERIOD,
        });
        for agent in stopping {
            self.order(agent, Order::Stop { round: number, cause: cause.clone() });
        }
        self.try_start();
    }

    pub(super) fn start(&mut self, agents: Vec<AgentId>) {
        self.round += 1;
        if agents.iter().all(|agent| !self.members.ranks.contains_key(agent)) {
            // No node of the previous rounds takes part, so the user has started the job again: the count of
            // restarts begins at 0.
            self.failures = 0;
            self.failed_hosts.clear();
        }
        for &agent in &agents {
            self.members.set_due(agent, self.now + self.heartbeat_timeout());
        }
        let nodes: Vec<RoundNode> = agents
            .iter()
            .filter_map(|&agent| Some(RoundNode { agent, profile: self.members.get(agent)?.profile.clone() }))
            .collect();
        let first = agents.first().and_then(|agent| self.members.get(*agent)?.phase.clone());
        let store = if let Some(Phase::Ready { store, .. }) = first { store } else { Vec::new() };
        agents.iter().for_each(|&agent| self.members.drop_candidate(agent));
        self.members.ranks = agents.into_iter().enumerate().map(|(rank, agent)| (agent, rank)).collect();
        self.members.returning_candidates = 0;
        let record = Record { nodes, store, ..self.record() };
        self.actions.push(Action::Write(record.clone()));
        self.stage = Stage::Starting(Round::new(record, &self.rules));
    }

    pub(super) fn end(&mut self, result: JobResult) {
        let record = Record { result: Some(result.clone()), ..self.record() };
        self.stage = Stage::Finishing(result);
        self.actions.push(Action::Write(record));
    }

    /// Returns the record of the current round, without nodes and store addresses.
    fn record(&self) -> Record {
        let generation = self.entropy.wrapping_add(self.round.into()).to_le_bytes();
        let (failures, failed_hosts) = (self.failures, self.failed_hosts.clone());
        Record { round: self.round, generation, failures, failed_hosts, ..Record::empty() }
    }

    /// Returns the number of restarts that the job has used up; `None` if each node counts its own.
    fn used_restarts(&self) -> Option<u32> {
        self.rules.job_budget.map(|_| self.failures)
    }

    /// Acts on a decision (a round, or the outcome of the job) whose record has been written. The decision is
    /// now final.
    pub(super) fn written(&mut self) {
        let nothing = Stage::Forming(Forming::default());
        match std::mem::replace(&mut self.stage, nothing) {
            Stage::Starting(round) => {
                let rank_gaps = self.injected_bug.is(Bug::LeavesRankGaps) && self.round > 1;
                for (rank, node) in round.record.nodes.iter().enumerate() {
                    let mut assignment = round.assignment(rank, self.used_restarts());
                    assignment.group_rank += usize::from(rank_gaps);
                    self.members.set_due(node.agent, self.now + self.heartbeat_timeout());
                    self.order(node.agent, Order::Run(assignment));
                }
                self.stage = Stage::Live(round);
                let standbys: Vec<AgentId> = self.members.candidates.keys().copied().collect();
                standbys.into_iter().for_each(|agent| self.order_to_wait(agent));
                self.evaluate_round();
            }
            Stage::Finishing(result) => {
                self.stage = Stage::Finished(result.clone());
                let all: Vec<AgentId> = self.members.known.keys().copied().collect();
                for agent in all {
                    self.order(agent, Order::End(result.clone()));
                }
            }
            other => self.stage = other,
        }
    }
}

/// Returns the state of a node that is ready for the next round while the coordinator has not ended the
/// round.
fn ended_state(partitioned: bool) -> NodeState {
    if partitioned {
        let why = "it received no answer to its heartbeats for a while and stopped its workers";
        return NodeState::Lost(Some(why.to_owned()));
    }
    // The workers failed and ended before the coordinator received the failure.
    let (summary, report) = ("its workers have ended".to_owned(), String::new());
    NodeState::Failed(Failure { summary, report, can_restart: true })
}
