//! Transitions between the stages of the coordinator, from the forming of a round to the end of the job.
//! Pure.

use std::collections::BTreeSet;

use super::super::injected_bug::Bug;
use super::super::messages::{AgentId, Departure, Failure, JobResult, Order, Phase, RestartCause};
use super::super::record::{Record, RoundNode};
use super::{Action, Coordinator, Forming, JOIN_STATUS_PERIOD, NodeState, Round, Stage, Time};

impl Coordinator {
    /// Handles a status by which a member reports a new phase.
    pub(super) fn phase_changed(&mut self, now: Time, agent: AgentId, actions: &mut Vec<Action>) {
        let Some(phase) = self.members.get(agent).and_then(|known| known.phase.clone()) else { return };
        match phase {
            Phase::Left(departure) => {
                self.member_left(now, agent, departure, actions);
                return;
            }
            Phase::Ready { after, partitioned, .. } => {
                self.handle_ready(now, agent, (after, partitioned), actions)
            }
            Phase::Leaving { signal, .. } => self.handle_leaving(now, agent, signal),
            Phase::Running { round } | Phase::Succeeded { round } | Phase::Failed { round, .. } => {
                self.members.drop_candidate(agent);
                self.handle_round_phase(agent, round, phase, actions);
            }
        }
        self.evaluate_round(now, actions);
    }

    /// Handles a member that has no running workers and waits for a round. `after` and `partitioned` are
    /// those of [`Phase::Ready`].
    fn handle_ready(
        &mut self,
        now: Time,
        agent: AgentId,
        (after, partitioned): (u64, bool),
        actions: &mut Vec<Action>,
    ) {
        let restarts = self.rules.job_budget.map(|_| self.failures);
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) => match round.rank(&self.members.ranks, agent) {
                // The member has not received the order for the round yet.
                Some(rank) if after < round.number() => {
                    if let Stage::Live(round) = &self.stage {
                        let run = Order::Run(round.assignment(rank, restarts));
                        self.order(agent, run, actions);
                    }
                }
                Some(rank) if partitioned => {
                    let why = "it received no answer to its heartbeats for a while and stopped its workers"
                        .to_owned();
                    round.set(rank, NodeState::Lost(Some(why)));
                    self.members.add_candidate(now, agent);
                }
                // The workers of the member failed and ended before the coordinator received the failure.
                Some(rank) => {
                    let summary = "its workers have ended".to_owned();
                    round.set(
                        rank,
                        NodeState::Failed(Failure { summary, report: String::new(), can_restart: true }),
                    );
                    self.members.add_candidate(now, agent);
                }
                None => {
                    self.members.add_candidate(now, agent);
                    let standby = Order::Wait(self.join_status(now, true));
                    self.order(agent, standby, actions);
                }
            },
            Stage::Forming(forming) => {
                if forming.stopping.contains(&agent) && after < self.round {
                    // The member has not yet received the order that ends the latest round.
                    return;
                }
                forming.stopping.remove(&agent);
                self.members.add_candidate(now, agent);
                self.try_start(now, actions);
                if let Stage::Forming(_) = self.stage {
                    let wait = Order::Wait(self.join_status(now, false));
                    self.order(agent, wait, actions);
                }
            }
            Stage::Finishing(_) => {}
            Stage::Finished(result) => {
                let end = Order::End(result.clone());
                self.order(agent, end, actions);
            }
        }
    }

    /// Handles a member that has or had workers of round `number`.
    fn handle_round_phase(&mut self, agent: AgentId, number: u64, phase: Phase, actions: &mut Vec<Action>) {
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) if round.number() == number => {
                if let Some(rank) = round.rank(&self.members.ranks, agent) {
                    match phase {
                        Phase::Succeeded { .. } => round.set(rank, NodeState::Succeeded),
                        Phase::Failed { failure, .. } => round.set(rank, NodeState::Failed(failure)),
                        Phase::Running { .. }
                        | Phase::Ready { .. }
                        | Phase::Leaving { .. }
                        | Phase::Left(_) => {}
                    }
                }
            }
            Stage::Forming(forming) => {
                // This coordinator has ended round `number` or does not know it.
                forming.stopping.insert(agent);
                let cause = forming.cause.clone().unwrap_or(RestartCause::UnknownRound);
                self.order(agent, Order::Stop { round: number.max(self.round), cause }, actions);
            }
            Stage::Finished(result) => {
                let end = Order::End(result.clone());
                self.order(agent, end, actions);
            }
            Stage::Starting(_) | Stage::Live(_) | Stage::Finishing(_) => {}
        }
    }

    /// Handles a member that a signal stops. The next round waits until the workers of this member have ended
    /// as well.
    fn handle_leaving(&mut self, now: Time, agent: AgentId, signal: i32) {
        self.members.drop_candidate(agent);
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) => {
                if let Some(rank) = round.rank(&self.members.ranks, agent) {
                    round.set(rank, NodeState::Left { signal });
                }
            }
            Stage::Forming(forming) => {
                forming.stopping.insert(agent);
                forming.not_before = Some(now + self.rules.stop_spread);
            }
            Stage::Finishing(_) | Stage::Finished(_) => {}
        }
    }

    fn member_left(&mut self, now: Time, agent: AgentId, departure: Departure, actions: &mut Vec<Action>) {
        match departure {
            Departure::Stopped { signal } => {
                let (record, rank) = match &mut self.stage {
                    Stage::Starting(round) | Stage::Live(round) => {
                        let rank = round.rank(&self.members.ranks, agent);
                        if let Some(rank) = rank {
                            round.set(rank, NodeState::Left { signal });
                        }
                        (Some(&mut round.record), rank)
                    }
                    Stage::Forming(Forming { last: Some(last), .. }) => {
                        let rank = last.nodes.iter().position(|node| node.agent == agent);
                        (Some(last), rank)
                    }
                    Stage::Forming(_) | Stage::Finishing(_) | Stage::Finished(_) => (None, None),
                };
                if let (Some(record), Some(rank)) = (record, rank) {
                    // A coordinator that takes over must not wait for this node.
                    record.left.push((rank, signal));
                    actions.push(Action::Write(record.clone()));
                }
                self.members.remove(agent);
                self.after_loss(now, agent, actions);
            }
            Departure::Error(why) => self.member_lost(now, agent, Some(why), actions),
            Departure::Ended => self.member_lost(now, agent, None, actions),
        }
    }

    /// Handles the loss of a member. `why` is the member's error, or `None` if it disappeared.
    pub(super) fn member_lost(
        &mut self,
        now: Time,
        agent: AgentId,
        why: Option<String>,
        actions: &mut Vec<Action>,
    ) {
        if let Stage::Starting(round) | Stage::Live(round) = &mut self.stage
            && let Some(rank) = round.rank(&self.members.ranks, agent)
        {
            round.set(rank, NodeState::Lost(why));
        }
        self.members.remove(agent);
        self.after_loss(now, agent, actions);
    }

    fn after_loss(&mut self, now: Time, agent: AgentId, actions: &mut Vec<Action>) {
        let waits = self.injected_bug.is(Bug::WaitsForLostNode);
        match &mut self.stage {
            Stage::Forming(forming) => {
                if !waits {
                    forming.stopping.remove(&agent);
                }
                self.try_start(now, actions);
            }
            Stage::Live(_) => self.evaluate_round(now, actions),
            Stage::Starting(_) | Stage::Finishing(_) | Stage::Finished(_) => {}
        }
    }

    /// Ends the running round or the job if the states of the nodes require it. O(1), unless the round ends.
    pub(super) fn evaluate_round(&mut self, now: Time, actions: &mut Vec<Action>) {
        let Stage::Live(round) = &self.stage else { return };
        let name = |rank: usize| (rank, round.node(rank).profile.host.clone());
        let gone = |rank: usize| {
            let (node, host) = name(rank);
            match &round.states[rank] {
                NodeState::Left { signal } => RestartCause::Stopped { node, host, signal: *signal },
                NodeState::Lost(why) => RestartCause::Lost { node, host, why: why.clone() },
                NodeState::Running | NodeState::Succeeded | NodeState::Failed(_) => {
                    RestartCause::Lost { node, host, why: None }
                }
            }
        };
        if let Some(rank) = round.lost {
            let cause = gone(rank);
            return self.end_round(now, cause, actions);
        }
        if let Some((rank, failure)) = round.failure() {
            let (node, host) = name(rank);
            if self.rules.job_budget.map_or(failure.can_restart, |budget| self.failures < budget) {
                let cause = RestartCause::Failed { node, host, summary: failure.summary.clone() };
                self.failures = self.failures.saturating_add(1);
                return self.end_round(now, cause, actions);
            }
            return self.confirm_failure(actions);
        }
        if round.running() == 0 && round.succeeded > 0 {
            return self.end(JobResult::Succeeded, actions);
        }
        // Once a node has succeeded, the job is about to finish and does not restart for a new node.
        if round.states.len() < self.max() && round.succeeded == 0 {
            let newcomer = self.members.waiting.first().and_then(|(_, agent)| self.members.get(*agent));
            if let Some(host) = newcomer.map(|known| known.profile.host.clone()) {
                self.end_round(now, RestartCause::Joined { host }, actions);
            }
        }
    }

    /// Ends the job after a failure without a remaining restart, unless the loss of another node, not known
    /// yet, caused the failure. The coordinator therefore first sends a probe to all other members of the
    /// round. A member that does not answer it is lost at its heartbeat timeout.
    fn confirm_failure(&mut self, actions: &mut Vec<Action>) {
        let Stage::Live(round) = &mut self.stage else { return };
        if round.unconfirmed.is_none() {
            self.last_probe_sent += 1;
            let failed = round.failure().map(|(rank, _)| rank);
            let others = round.record.nodes.iter().enumerate().filter(|&(rank, _)| Some(rank) != failed);
            let unconfirmed: BTreeSet<AgentId> =
                others.map(|(_, node)| node.agent).filter(|agent| self.members.contains(*agent)).collect();
            round.unconfirmed = Some(unconfirmed.clone());
            for agent in unconfirmed {
                self.send(agent, false, actions);
            }
        }
        let Stage::Live(round) = &self.stage else { return };
        if round.unconfirmed.as_ref().is_some_and(BTreeSet::is_empty)
            && let Some((node, failure)) = round.failure()
        {
            let Failure { summary, report, .. } = failure.clone();
            let host = round.node(node).profile.host.clone();
            self.end(JobResult::Failed { node, host, summary, report }, actions);
        }
    }

    /// Handles the answer of a member to a probe.
    pub(super) fn probe_answered(&mut self, agent: AgentId, actions: &mut Vec<Action>) {
        let (sent, last_probe) =
            (self.last_probe_sent, self.members.get(agent).map(|known| known.last_probe));
        if let Stage::Live(round) = &mut self.stage
            && let Some(unconfirmed) = &mut round.unconfirmed
            && last_probe >= Some(sent)
            && unconfirmed.remove(&agent)
        {
            self.confirm_failure(actions);
        }
    }

    /// Ends the round and orders its members to stop their workers. A new round can start when they have done
    /// so.
    fn end_round(&mut self, now: Time, cause: RestartCause, actions: &mut Vec<Action>) {
        let Stage::Live(round) = &self.stage else { return };
        let (number, last) = (round.number(), round.record.clone());
        let members: Vec<AgentId> = round.record.nodes.iter().map(|node| node.agent).collect();
        let here: Vec<AgentId> = members.into_iter().filter(|agent| self.members.contains(*agent)).collect();
        let is_stop = matches!(cause, RestartCause::Stopped { .. }) && !here.is_empty();
        // A member that is already ready for the next round needs no order to stop.
        let is_busy = |agent: &AgentId| !self.members.candidates.contains_key(agent);
        let stopping: BTreeSet<AgentId> = here.into_iter().filter(is_busy).collect();
        self.stage = Stage::Forming(Forming {
            since: now,
            stopping: stopping.clone(),
            not_before: is_stop.then_some(now + self.rules.stop_spread),
            last_call: None,
            cause: Some(cause.clone()),
            last: Some(last),
            join_status_at: now + JOIN_STATUS_PERIOD,
        });
        for agent in stopping {
            self.order(agent, Order::Stop { round: number, cause: cause.clone() }, actions);
        }
        self.try_start(now, actions);
    }

    pub(super) fn start(&mut self, now: Time, agents: Vec<AgentId>, actions: &mut Vec<Action>) {
        self.round += 1;
        if agents.iter().all(|agent| !self.members.ranks.contains_key(agent)) {
            // No node of the previous rounds takes part, so the user has started the job again: the count of
            // restarts begins at 0.
            self.failures = 0;
        }
        for &agent in &agents {
            self.members.set_due(agent, now + self.members.heartbeat_timeout());
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
        actions.push(Action::Write(record.clone()));
        self.stage = Stage::Starting(Round::new(record, &self.rules));
    }

    pub(super) fn end(&mut self, result: JobResult, actions: &mut Vec<Action>) {
        let record = Record { result: Some(result.clone()), ..self.record() };
        self.stage = Stage::Finishing(result);
        actions.push(Action::Write(record));
    }

    /// Returns the record of the current round, without nodes and store addresses.
    fn record(&self) -> Record {
        Record {
            version: Record::VERSION,
            round: self.round,
            generation: self.entropy.wrapping_add(self.round.into()).to_le_bytes(),
            nodes: Vec::new(),
            left: Vec::new(),
            store: Vec::new(),
            failures: self.failures,
            result: None,
        }
    }

    /// Acts on a decision (a round, or the outcome of the job) whose record has been written. The decision is
    /// now final.
    pub(super) fn written(&mut self, now: Time, actions: &mut Vec<Action>) {
        let nothing = Stage::Forming(Forming::default());
        match std::mem::replace(&mut self.stage, nothing) {
            Stage::Starting(round) => {
                let restarts = self.rules.job_budget.map(|_| self.failures);
                let rank_gaps = self.injected_bug.is(Bug::LeavesRankGaps) && self.round > 1;
                let mut orders = Vec::with_capacity(round.states.len());
                for rank in 0..round.states.len() {
                    let mut assignment = round.assignment(rank, restarts);
                    assignment.group_rank += usize::from(rank_gaps);
                    orders.push((round.node(rank).agent, Order::Run(assignment)));
                }
                self.stage = Stage::Live(round);
                for (agent, order) in orders {
                    self.members.set_due(agent, now + self.members.heartbeat_timeout());
                    self.order(agent, order, actions);
                }
                let standbys: Vec<AgentId> = self.members.candidates.keys().copied().collect();
                for agent in standbys {
                    let wait = Order::Wait(self.join_status(now, true));
                    self.order(agent, wait, actions);
                }
                self.evaluate_round(now, actions);
            }
            Stage::Finishing(result) => {
                self.stage = Stage::Finished(result.clone());
                let all: Vec<AgentId> = self.members.known.keys().copied().collect();
                for agent in all {
                    self.order(agent, Order::End(result.clone()), actions);
                }
            }
            other => self.stage = other,
        }
    }
}
