//! Transitions between the stages of the coordinator. Pure.

use std::collections::BTreeSet;

use super::super::bug::Bug;
use super::super::messages::{AgentId, Cause, Departure, Ending, Failure, Muster, Order, Phase, Refusal};
use super::super::record::{Record, Seat};
use super::super::seats::{Candidate, seat};
use super::{Action, Coordinator, Forming, MUSTER_PERIOD, NAMED, Round, Stage, State, Time};

impl Coordinator {
    /// Handles a changed state of a member.
    pub(super) fn phase_changed(&mut self, now: Time, agent: AgentId, actions: &mut Vec<Action>) {
        let Some(phase) = self.members.get(&agent).and_then(|known| known.phase.clone()) else { return };
        match phase {
            Phase::Left(departure) => {
                self.leave(now, agent, departure, actions);
                return;
            }
            Phase::Ready { after, alone, .. } => self.is_ready(now, agent, (after, alone), actions),
            Phase::Leaving { signal, .. } => self.is_leaving(now, agent, signal),
            Phase::Running { round } | Phase::Succeeded { round } | Phase::Failed { round, .. } => {
                self.drop_candidate(agent);
                self.is_in(agent, round, phase, actions);
            }
        }
        self.judge(now, actions);
    }

    /// Handles a member none of whose workers lives.
    fn is_ready(
        &mut self,
        now: Time,
        agent: AgentId,
        (after, alone): (u64, bool),
        actions: &mut Vec<Action>,
    ) {
        let restarts = self.rules.job_budget.map(|_| self.failures);
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) => match round.rank(&self.ranks, agent) {
                // The member has not received the order for the round yet.
                Some(rank) if after < round.number() => {
                    if let Stage::Live(round) = &self.stage {
                        let run = Order::Run(round.assignment(rank, restarts));
                        self.order(agent, run, actions);
                    }
                }
                Some(rank) if alone => {
                    let why = "it heard nobody for a while and stopped its workers".to_owned();
                    round.set(rank, State::Lost(Some(why)));
                    self.add_candidate(now, agent);
                }
                // The member failed and cleaned up before its failure was received.
                Some(rank) => {
                    let summary = "its workers have ended".to_owned();
                    round
                        .set(rank, State::Failed(Failure { summary, report: String::new(), restarts: true }));
                    self.add_candidate(now, agent);
                }
                None => {
                    self.add_candidate(now, agent);
                    let spare = Order::Wait(self.muster(now, true));
                    self.order(agent, spare, actions);
                }
            },
            Stage::Forming(forming) => {
                if forming.expected.contains(&agent) && after < self.round {
                    // The member has yet to learn that this round is over.
                    return;
                }
                forming.expected.remove(&agent);
                self.add_candidate(now, agent);
                self.try_start(now, actions);
                if let Stage::Forming(_) = self.stage {
                    let wait = Order::Wait(self.muster(now, false));
                    self.order(agent, wait, actions);
                }
            }
            Stage::Ending(_) => {}
            Stage::Over(ending) => {
                let end = Order::End(ending.clone());
                self.order(agent, end, actions);
            }
        }
    }

    /// Handles a member that has or had workers of round `number`.
    fn is_in(&mut self, agent: AgentId, number: u64, phase: Phase, actions: &mut Vec<Action>) {
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) if round.number() == number => {
                if let Some(rank) = round.rank(&self.ranks, agent) {
                    match phase {
                        Phase::Succeeded { .. } => round.set(rank, State::Succeeded),
                        Phase::Failed { failure, .. } => round.set(rank, State::Failed(failure)),
                        Phase::Running { .. }
                        | Phase::Ready { .. }
                        | Phase::Leaving { .. }
                        | Phase::Left(_) => {}
                    }
                }
            }
            Stage::Forming(forming) => {
                // The round is one that this coordinator has ended or does not know.
                forming.expected.insert(agent);
                let cause = forming.cause.clone().unwrap_or_else(|| Cause::Joined { host: String::new() });
                self.order(agent, Order::Stop { round: number.max(self.round), cause }, actions);
            }
            Stage::Over(ending) => {
                let end = Order::End(ending.clone());
                self.order(agent, end, actions);
            }
            Stage::Starting(_) | Stage::Live(_) | Stage::Ending(_) => {}
        }
    }

    /// Handles a member that a signal stops. The next round waits until its workers have ended as well.
    fn is_leaving(&mut self, now: Time, agent: AgentId, signal: i32) {
        self.drop_candidate(agent);
        match &mut self.stage {
            Stage::Starting(round) | Stage::Live(round) => {
                if let Some(rank) = round.rank(&self.ranks, agent) {
                    round.set(rank, State::Left { signal });
                }
            }
            Stage::Forming(forming) => {
                forming.expected.insert(agent);
                forming.not_before = Some(now + self.rules.stop_spread);
            }
            Stage::Ending(_) | Stage::Over(_) => {}
        }
    }

    fn leave(&mut self, now: Time, agent: AgentId, departure: Departure, actions: &mut Vec<Action>) {
        match departure {
            Departure::Stopped { signal } => {
                let (record, rank) = match &mut self.stage {
                    Stage::Starting(round) | Stage::Live(round) => {
                        let rank = round.rank(&self.ranks, agent);
                        if let Some(rank) = rank {
                            round.set(rank, State::Left { signal });
                        }
                        (Some(&mut round.record), rank)
                    }
                    Stage::Forming(Forming { last: Some(last), .. }) => {
                        let rank = last.seats.iter().position(|seat| seat.agent == agent);
                        (Some(last), rank)
                    }
                    Stage::Forming(_) | Stage::Ending(_) | Stage::Over(_) => (None, None),
                };
                if let (Some(record), Some(rank)) = (record, rank) {
                    // A successor must not wait for this node.
                    record.left.push((rank, signal));
                    actions.push(Action::Write(record.clone()));
                }
                self.forget(agent);
                self.after_loss(now, agent, actions);
            }
            Departure::Error(why) => self.lose(now, agent, Some(why), actions),
            Departure::Ended => self.lose(now, agent, None, actions),
        }
    }

    /// Handles the loss of a member.
    pub(super) fn lose(&mut self, now: Time, agent: AgentId, why: Option<String>, actions: &mut Vec<Action>) {
        if let Stage::Starting(round) | Stage::Live(round) = &mut self.stage
            && let Some(rank) = round.rank(&self.ranks, agent)
        {
            round.set(rank, State::Lost(why));
        }
        self.forget(agent);
        self.after_loss(now, agent, actions);
    }

    fn after_loss(&mut self, now: Time, agent: AgentId, actions: &mut Vec<Action>) {
        let waits = self.planted.is(Bug::WaitsForTheDead);
        match &mut self.stage {
            Stage::Forming(forming) => {
                if !waits {
                    forming.expected.remove(&agent);
                }
                self.try_start(now, actions);
            }
            Stage::Live(_) => self.judge(now, actions),
            Stage::Starting(_) | Stage::Ending(_) | Stage::Over(_) => {}
        }
    }

    /// Decides whether the round continues. O(1), unless the round ends.
    pub(super) fn judge(&mut self, now: Time, actions: &mut Vec<Action>) {
        let Stage::Live(round) = &self.stage else { return };
        let name = |rank: usize| (rank, round.seat(rank).profile.host.clone());
        let gone = |rank: usize| {
            let (node, host) = name(rank);
            match &round.states[rank] {
                State::Left { signal } => Cause::Stopped { node, host, signal: *signal },
                State::Lost(why) => Cause::Lost { node, host, why: why.clone() },
                State::Running | State::Succeeded | State::Failed(_) => Cause::Lost { node, host, why: None },
            }
        };
        if let Some(rank) = round.lost {
            let cause = gone(rank);
            return self.break_up(now, cause, actions);
        }
        if let Some((rank, failure)) = round.failure() {
            let (node, host) = name(rank);
            if self.rules.job_budget.map_or(failure.restarts, |budget| self.failures < budget) {
                let cause = Cause::Failed { node, host, summary: failure.summary.clone() };
                self.failures = self.failures.saturating_add(1);
                return self.break_up(now, cause, actions);
            }
            return self.settle(actions);
        }
        if round.running() == 0 && round.succeeded > 0 {
            return self.end(Ending::Succeeded, actions);
        }
        // A job that has nearly finished does not restart for a late node.
        if round.states.len() < self.max() && round.succeeded == 0 {
            let newcomer = self.waiting.first().and_then(|(_, agent)| self.members.get(agent));
            if let Some(host) = newcomer.map(|known| known.profile.host.clone()) {
                self.break_up(now, Cause::Joined { host }, actions);
            }
        }
    }

    /// Ends the job after a failure without a restart, unless a loss that is not known yet caused it. The
    /// coordinator asks all other members whether they are alive. A member that does not answer is lost soon.
    fn settle(&mut self, actions: &mut Vec<Action>) {
        let Stage::Live(round) = &mut self.stage else { return };
        if round.unsure.is_none() {
            self.asks += 1;
            let failed = round.failure().map(|(rank, _)| rank);
            let others = round.record.seats.iter().enumerate().filter(|&(rank, _)| Some(rank) != failed);
            let unsure: BTreeSet<AgentId> =
                others.map(|(_, seat)| seat.agent).filter(|agent| self.members.contains_key(agent)).collect();
            round.unsure = Some(unsure.clone());
            for agent in unsure {
                self.send(agent, false, actions);
            }
        }
        let Stage::Live(round) = &self.stage else { return };
        if round.unsure.as_ref().is_some_and(BTreeSet::is_empty)
            && let Some((node, failure)) = round.failure()
        {
            let Failure { summary, report, .. } = failure.clone();
            let host = round.seat(node).profile.host.clone();
            self.end(Ending::Failed { node, host, summary, report }, actions);
        }
    }

    /// Handles the answer of a member to a question.
    pub(super) fn answered(&mut self, agent: AgentId, actions: &mut Vec<Action>) {
        let (asks, asked) = (self.asks, self.members.get(&agent).map(|known| known.asked));
        if let Stage::Live(round) = &mut self.stage
            && let Some(unsure) = &mut round.unsure
            && asked >= Some(asks)
            && unsure.remove(&agent)
        {
            self.settle(actions);
        }
    }

    /// Ends the round. A new one follows when all members have stopped their workers.
    fn break_up(&mut self, now: Time, cause: Cause, actions: &mut Vec<Action>) {
        let Stage::Live(round) = &self.stage else { return };
        let (number, last) = (round.number(), round.record.clone());
        let seated: Vec<AgentId> = round.record.seats.iter().map(|seat| seat.agent).collect();
        let here: Vec<AgentId> =
            seated.into_iter().filter(|agent| self.members.contains_key(agent)).collect();
        let is_stop = matches!(cause, Cause::Stopped { .. }) && !here.is_empty();
        // A member that is ready again needs no order.
        let is_busy = |agent: &AgentId| !self.candidates.contains_key(agent);
        let expected: BTreeSet<AgentId> = here.into_iter().filter(is_busy).collect();
        self.stage = Stage::Forming(Forming {
            since: now,
            expected: expected.clone(),
            not_before: is_stop.then_some(now + self.rules.stop_spread),
            last_call: None,
            cause: Some(cause.clone()),
            last: Some(last),
            muster_at: now + MUSTER_PERIOD,
        });
        for agent in expected {
            self.order(agent, Order::Stop { round: number, cause: cause.clone() }, actions);
        }
        self.try_start(now, actions);
    }

    /// Starts a round if enough members are ready.
    fn try_start(&mut self, now: Time, actions: &mut Vec<Action>) {
        let (min, max, early) = (self.min(), self.max(), self.planted.is(Bug::StartsTooEarly));
        let Stage::Forming(forming) = &mut self.stage else { return };
        forming.not_before.take_if(|at| *at <= now);
        if !forming.expected.is_empty() && !early || forming.not_before.is_some() {
            return;
        }
        let here = self.candidates.len();
        if here < min {
            forming.last_call = None;
            return;
        }
        // Only a first round waits for more nodes: each node of a previous round is ready or lost.
        let last_call = *forming.last_call.get_or_insert(now + self.rules.last_call);
        if here < max && self.veterans == 0 && now < last_call {
            return;
        }
        let candidates = self.candidates.keys().filter_map(|agent| {
            let profile = &self.members.get(agent)?.profile;
            let before = self.ranks.get(agent).copied();
            Some(Candidate { agent: *agent, host: &profile.host, pid: profile.pid, before })
        });
        let agents = seat(candidates.collect(), max);
        self.start(now, agents, actions);
    }

    fn start(&mut self, now: Time, agents: Vec<AgentId>, actions: &mut Vec<Action>) {
        self.round += 1;
        if agents.iter().all(|agent| !self.ranks.contains_key(agent)) {
            // No node of the failed rounds is left: the job was queued again.
            self.failures = 0;
        }
        for &agent in &agents {
            self.set_due(agent, now + self.silence());
        }
        let seats: Vec<Seat> = agents
            .iter()
            .filter_map(|&agent| Some(Seat { agent, profile: self.members.get(&agent)?.profile.clone() }))
            .collect();
        let first = agents.first().and_then(|agent| self.members.get(agent)?.phase.clone());
        let store = if let Some(Phase::Ready { store, .. }) = first { store } else { Vec::new() };
        agents.iter().for_each(|&agent| self.drop_candidate(agent));
        self.ranks = agents.into_iter().enumerate().map(|(rank, agent)| (agent, rank)).collect();
        self.veterans = 0;
        let record = Record { seats, store, ..self.record() };
        actions.push(Action::Write(record.clone()));
        self.stage = Stage::Starting(Round::new(record, &self.rules));
    }

    pub(super) fn end(&mut self, ending: Ending, actions: &mut Vec<Action>) {
        let record = Record { ending: Some(ending.clone()), ..self.record() };
        self.stage = Stage::Ending(ending);
        actions.push(Action::Write(record));
    }

    /// Returns the record of the current round, without its nodes.
    fn record(&self) -> Record {
        Record {
            version: Record::VERSION,
            round: self.round,
            generation: self.entropy.wrapping_add(self.round.into()).to_le_bytes(),
            seats: Vec::new(),
            left: Vec::new(),
            store: Vec::new(),
            failures: self.failures,
            ending: None,
        }
    }

    /// Handles that the record has been written: the decision is now final.
    pub(super) fn written(&mut self, now: Time, actions: &mut Vec<Action>) {
        let nothing = Stage::Forming(Forming::default());
        match std::mem::replace(&mut self.stage, nothing) {
            Stage::Starting(round) => {
                let restarts = self.rules.job_budget.map(|_| self.failures);
                let holes = self.planted.is(Bug::LeavesHoles) && self.round > 1;
                let mut orders = Vec::with_capacity(round.states.len());
                for rank in 0..round.states.len() {
                    let mut assignment = round.assignment(rank, restarts);
                    assignment.group_rank += usize::from(holes);
                    orders.push((round.seat(rank).agent, Order::Run(assignment)));
                }
                self.stage = Stage::Live(round);
                for (agent, order) in orders {
                    self.set_due(agent, now + self.silence());
                    self.order(agent, order, actions);
                }
                let spares: Vec<AgentId> = self.candidates.keys().copied().collect();
                for agent in spares {
                    let wait = Order::Wait(self.muster(now, true));
                    self.order(agent, wait, actions);
                }
                self.judge(now, actions);
            }
            Stage::Ending(ending) => {
                self.stage = Stage::Over(ending.clone());
                let all: Vec<AgentId> = self.members.keys().copied().collect();
                for agent in all {
                    self.order(agent, Order::End(ending.clone()), actions);
                }
            }
            other => self.stage = other,
        }
    }

    pub(super) fn tick_forming(&mut self, now: Time, actions: &mut Vec<Action>) {
        let Stage::Forming(forming) = &mut self.stage else { return };
        let since = forming.since;
        if now >= since + self.rules.stop_timeout {
            // The member's workers seem impossible to end. The others need not wait for that.
            let stuck = std::mem::take(&mut forming.expected);
            for agent in stuck {
                let silent_s = self.rules.stop_timeout.as_secs();
                self.order(agent, Order::Refuse(Refusal::GivenUp { silent_s }), actions);
                self.forget(agent);
            }
        }
        while let Some(&(first, agent)) = self.waiting.first()
            && now >= first.max(since) + self.rules.join_timeout
        {
            let (after_s, muster) = (self.rules.join_timeout.as_secs(), self.muster(now, false));
            self.order(agent, Order::Refuse(Refusal::Timeout { after_s, muster }), actions);
            self.forget(agent);
        }
        self.try_start(now, actions);
        if let Stage::Forming(forming) = &mut self.stage
            && now >= forming.muster_at
        {
            forming.muster_at = now + MUSTER_PERIOD;
            let waiting: Vec<AgentId> = self.candidates.keys().copied().collect();
            let muster = self.muster(now, false);
            for agent in waiting {
                self.order(agent, Order::Wait(muster.clone()), actions);
            }
        }
    }

    /// Returns the join status for messages to users.
    fn muster(&self, now: Time, spare: bool) -> Muster {
        let names = |agents: &mut dyn Iterator<Item = &AgentId>| {
            agents
                .filter_map(|agent| Some(self.members.get(agent)?.profile.name()))
                .take(NAMED)
                .collect::<Vec<_>>()
        };
        let mut muster = Muster {
            here: self.candidates.len(),
            min: self.min(),
            max: self.max(),
            names: names(&mut self.candidates.keys()),
            spare,
            ..Muster::default()
        };
        if let Stage::Forming(forming) = &self.stage {
            muster.stopping = names(&mut forming.expected.iter());
            muster.cause.clone_from(&forming.cause);
            let begins = forming.last_call.map(|at| at.saturating_sub(now).as_millis());
            muster.begins_ms = begins.and_then(|ms| u64::try_from(ms).ok());
        }
        muster
    }
}
