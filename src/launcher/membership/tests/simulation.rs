//! A simulated cluster in which a seed decides the time of every event.
//! Messages are late, lost, duplicated or reordered, and clocks differ.
//! Agents die, hang or are cut off. Coordinators die and are replaced ([`super::coordinators`]).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::super::injected_bug::Bug;
use super::super::*;
use super::agent::{Agent, Workers, ready};
use super::coordinators::{CoordinatorProcess, RegistryState};
use super::faults::{At, Fault};
use super::random::Random;

pub(super) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(600);
const LAST_CALL: Duration = Duration::from_secs(5);

/// An event at some time.
#[derive(Debug, Clone)]
pub(super) enum SimEvent {
    // Events for the coordinator of a term.
    Hello {
        from: usize,
        id: AgentId,
        term: u64,
    },
    Status {
        id: AgentId,
        term: u64,
        status: Status,
    },
    Disconnected {
        id: AgentId,
        term: u64,
    },
    Order {
        to: usize,
        id: AgentId,
        message: OrderMessage,
    },
    /// The record with this number has been written.
    Written {
        term: u64,
        write: u64,
    },
    Heartbeat {
        agent: usize,
        id: AgentId,
    },
    LeaseCheck {
        agent: usize,
        id: AgentId,
    },
    /// Workers end by themselves, successfully or not. With `own`, the cause is not a lost peer.
    WorkersEnd {
        agent: usize,
        id: AgentId,
        round: u64,
        is_success: bool,
        own: bool,
    },
    /// Workers fail because a node of the round is lost, unless that node is back by now.
    PeerFailure {
        agent: usize,
        id: AgentId,
        round: u64,
        of: usize,
    },
    WorkersStopped {
        agent: usize,
        id: AgentId,
        round: u64,
    },
    CoordinatorTick {
        term: u64,
    },
    /// A coordinator serves the endpoint again.
    CoordinatorStart {
        suspect: Option<(AgentId, Duration)>,
    },
    /// An agent searches for the coordinator.
    Discover {
        agent: usize,
        id: AgentId,
    },
    /// A coordinator renews its lease.
    RenewLease {
        term: u64,
    },
    /// The process of a coordinator ends.
    Close {
        term: u64,
    },
    Fault(Fault),
    /// A fault at the node that runs the coordinator then, and optionally its repair after a while.
    FaultAtCoordinator(At, Option<(At, Duration)>),
}

/// Properties of this simulation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conditions {
    pub(super) delay_ms: u64,
    pub(super) loss_percent: u64,
    pub(super) double_percent: u64,
    pub(super) drift: i64,
    /// Longest time for stopping workers, in milliseconds.
    pub(super) stop_ms: u64,
    /// Time after which workers succeed once faults have ceased.
    pub(super) run: Duration,
}

pub(super) struct Simulation {
    pub(super) now: Duration,
    pub(super) random: Random,
    pub(super) conditions: Conditions,
    pub(super) rules: Rules,
    pub(super) agents: Vec<Agent>,
    /// Coordinators by term.
    pub(super) coordinators: BTreeMap<u64, CoordinatorProcess>,
    pub(super) registry: RegistryState,
    /// True if nodes find the coordinator in etcd and any of them may become it. Otherwise it is at an
    /// endpoint apart from them.
    pub(super) is_elected: bool,
    /// Rounds that were cut off from etcd as a whole.
    pub(super) cut_off: BTreeSet<u64>,
    ids: u128,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, SimEvent>,
    ties: u64,
    /// Assignments by round and group rank.
    pub(super) rounds: BTreeMap<u64, BTreeMap<usize, (AgentId, Assignment)>>,
    pub(super) faults_ended: bool,
    pub(super) is_lossless: bool,
    /// True if nodes may join after a round has started.
    pub(super) late: bool,
    pub(super) bug: Option<Bug>,
    pub(super) messages: u64,
    pub(super) trace: Vec<String>,
    pub(super) violation: Option<String>,
}

impl Simulation {
    pub(super) fn new(
        seed: u64,
        hosts: usize,
        (min, max): (usize, usize),
        conditions: Conditions,
        is_elected: bool,
        bug: Option<Bug>,
    ) -> Self {
        let rules = Rules {
            last_call: LAST_CALL,
            join_timeout: JOIN_TIMEOUT,
            heartbeat_timeout: HEARTBEAT_TIMEOUT,
            job_budget: None,
        };
        let mut simulation = Self {
            now: Duration::from_secs(1),
            random: Random::new(seed),
            conditions,
            rules,
            agents: Vec::new(),
            coordinators: BTreeMap::new(),
            registry: RegistryState::default(),
            is_elected,
            cut_off: BTreeSet::new(),
            ids: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            ties: 0,
            rounds: BTreeMap::new(),
            faults_ended: false,
            is_lossless: conditions.loss_percent == 0,
            late: hosts > max,
            bug,
            messages: 0,
            trace: Vec::new(),
            violation: None,
        };
        for host in 0..hosts {
            let profile = Profile {
                host: format!("h{host}"),
                pid: 1,
                min,
                max,
                workers: 1 + host % 3,
                role: "default".to_owned(),
            };
            let id = simulation.fresh_id();
            let restarts = simulation.random.below(3) as u32;
            let mut agent = Agent::new(id, profile, restarts, HEARTBEAT_TIMEOUT);
            agent.member.injected_bug.bug = bug;
            agent.offset = simulation.random.millis(0, 100_000_000);
            let drift = conditions.drift;
            agent.drift_ppm =
                if drift == 0 { 0 } else { simulation.random.below(2 * drift as u64) as i64 - drift };
            simulation.agents.push(agent);
        }
        if !is_elected {
            simulation.serve(None);
        }
        for index in 0..hosts {
            simulation.begin(index);
        }
        simulation
    }

    pub(super) fn fresh_id(&mut self) -> AgentId {
        self.ids += 1;
        // Ids do not follow the order of arrival.
        AgentId(u128::from(self.random.next()) << 64 | self.ids)
    }

    pub(super) fn has_changed_coordinator(&self) -> bool {
        self.registry.term > 1
    }

    pub(super) fn note(&mut self, what: impl FnOnce() -> String) {
        self.trace.push(format!("{:?}: {}", self.now, what()));
    }

    pub(super) fn report_violation(&mut self, what: String) {
        self.note(|| format!("VIOLATED: {what}"));
        self.violation.get_or_insert(what);
    }

    pub(super) fn at(&mut self, time: Duration, item: SimEvent) {
        self.ties += 1;
        self.queue.push(Reverse((time, self.ties)));
        self.events.insert(self.ties, item);
    }

    pub(super) fn after(&mut self, delay: Duration, item: SimEvent) {
        self.at(self.now + delay, item);
    }

    /// Processes the next event. Returns false if none is left or it would be later than `until`.
    pub(super) fn step(&mut self, until: Duration) -> bool {
        let Some(&Reverse((time, tie))) = self.queue.peek() else { return false };
        if time > until || self.violation.is_some() {
            return false;
        }
        self.queue.pop();
        self.now = self.now.max(time);
        let item = self.events.remove(&tie).unwrap();
        self.process(item);
        true
    }

    // ---- the network ----

    /// Sends between an agent and the coordinator of a term, over a network that may delay, drop or duplicate
    /// messages.
    pub(super) fn send(&mut self, agent: usize, term: u64, to_coordinator: bool, item: SimEvent) {
        self.messages += 1;
        let host = self.coordinators.get(&term).and_then(|process| process.host);
        if host == Some(agent) {
            return self.after(Duration::ZERO, item);
        }
        let (from, to) = if to_coordinator { (Some(agent), host) } else { (host, Some(agent)) };
        if from.is_some_and(|from| self.agents[from].outbound_cut)
            || to.is_some_and(|to| self.agents[to].inbound_cut)
        {
            return;
        }
        let copies = 1 + usize::from(self.random.percent(self.conditions.double_percent));
        for _ in 0..copies {
            if !self.random.percent(self.conditions.loss_percent) {
                let delay = self.random.millis(0, self.conditions.delay_ms);
                self.after(delay, item.clone());
            }
        }
    }

    /// Connects to the coordinator that the agent knows.
    pub(super) fn connect(&mut self, index: usize) {
        if !self.is_elected {
            self.agents[index].term = self.registry.term;
        }
        let (agent, now) = (&self.agents[index], self.now);
        let (id, term) = (agent.id, agent.term);
        // A connection exists or not. Its first message is not lost alone, but only with the network.
        if agent.paused || !agent.is_active() || !self.can_connect(index, term) {
            return;
        }
        let own = self.coordinators.get(&term).is_some_and(|process| process.host == Some(index));
        let delay = if own { Duration::ZERO } else { self.random.millis(0, self.conditions.delay_ms) };
        self.after(delay, SimEvent::Hello { from: index, id, term });
        // The status follows the first message.
        let agent = &mut self.agents[index];
        agent.member.set_coordinator(own);
        let status = agent.status(now);
        self.after(delay, SimEvent::Status { id, term, status });
    }

    /// Starts a process.
    pub(super) fn begin(&mut self, index: usize) {
        self.discover(index);
        let (id, delay) = (self.agents[index].id, self.random.millis(0, 300));
        self.after(delay, SimEvent::Heartbeat { agent: index, id });
    }

    /// Sends the status of an agent at once.
    pub(super) fn send_status(&mut self, index: usize) {
        let agent = &mut self.agents[index];
        if !agent.is_active() || agent.paused {
            return;
        }
        let (id, term, status) = (agent.id, agent.term, agent.status(self.now));
        self.send(index, term, true, SimEvent::Status { id, term, status });
    }

    // ---- event handlers ----

    fn process(&mut self, item: SimEvent) {
        match item {
            SimEvent::Hello { from, id, term } => {
                let profile = self.agents[from].profile.clone();
                self.coordinate(term, Event::Hello { agent: id, profile });
            }
            SimEvent::Status { id, term, status } => {
                self.coordinate(term, Event::Status { agent: id, status });
            }
            SimEvent::Disconnected { id, term } => self.coordinate(term, Event::Disconnected { agent: id }),
            SimEvent::Written { term, write } => self.written(term, write),
            SimEvent::CoordinatorTick { term } => self.tick(term),
            SimEvent::Discover { agent, id } => {
                if self.agents[agent].id == id {
                    self.discover(agent);
                }
            }
            SimEvent::RenewLease { term } => self.renew_lease(term),
            SimEvent::Close { term } => self.close(term),
            SimEvent::Order { to, id, message } => self.receive(to, id, message),
            SimEvent::Heartbeat { agent, id } => {
                if self.agents[agent].id == id && self.agents[agent].is_active() {
                    self.send_status(agent);
                    // A client without an answer reconnects.
                    let silent = self.now.saturating_sub(self.agents[agent].last_message_at);
                    if self.is_elected
                        && (self.agents[agent].term == 0 || silent > self.agents[agent].member.lease())
                    {
                        self.discover(agent);
                    } else if !self.is_elected && self.random.percent(20) {
                        self.connect(agent);
                    }
                    let heartbeat_interval = self.agents[agent].member.heartbeat_interval(HEARTBEAT_INTERVAL);
                    self.after(heartbeat_interval, SimEvent::Heartbeat { agent, id });
                    self.check_lease(agent);
                }
            }
            SimEvent::LeaseCheck { agent, id } => {
                if self.agents[agent].id == id {
                    self.check_lease(agent);
                }
            }
            SimEvent::WorkersEnd { agent, id, round, is_success, own } => {
                self.workers_end(agent, id, round, is_success, own)
            }
            SimEvent::PeerFailure { agent, id, round, of } => {
                let lost = &self.agents[of];
                if !lost.is_active() || lost.outbound_cut {
                    self.workers_end(agent, id, round, false, false);
                }
            }
            SimEvent::WorkersStopped { agent, id, round } => self.workers_stopped(agent, id, round),
            SimEvent::Fault(fault) => self.fault(fault),
            SimEvent::FaultAtCoordinator(fault, heal) => {
                if let Some(index) = self.leader() {
                    self.fault(fault(index));
                    if let Some((heal, after)) = heal {
                        self.after(after, SimEvent::Fault(heal(index)));
                    }
                }
            }
            SimEvent::CoordinatorStart { suspect } => {
                if self.coordinators.is_empty() {
                    self.serve(suspect);
                }
            }
        }
    }

    /// Stops the workers of an agent whose lease has ended.
    pub(super) fn check_lease(&mut self, index: usize) {
        let now = self.now;
        let agent = &self.agents[index];
        if agent.paused || !agent.is_active() {
            return;
        }
        let Some(ends) = agent.member.lease_end() else { return };
        let local = agent.local(now);
        if local >= ends {
            if matches!(agent.member.phase(), Phase::Leaving { .. }) {
                self.depart(index);
            } else if matches!(agent.member.phase(), Phase::Running { .. } | Phase::Failed { .. }) {
                self.note(|| format!("{index} is alone and stops"));
                self.agents[index].mark_partitioned();
                self.send_status(index);
            }
        } else if ends - local < HEARTBEAT_INTERVAL {
            let id = agent.id;
            self.after(ends - local + Duration::from_millis(1), SimEvent::LeaseCheck { agent: index, id });
        }
    }

    fn rejoin(&mut self, index: usize) {
        let id = self.fresh_id();
        self.agents[index].rejoin_as(id, HEARTBEAT_TIMEOUT);
        self.begin(index);
    }

    fn receive(&mut self, index: usize, id: AgentId, message: OrderMessage) {
        let (now, term) = (self.now, message.term);
        let agent = &mut self.agents[index];
        if agent.id != id || !agent.is_active() || agent.paused || self.is_elected && agent.term != term {
            return;
        }
        agent.last_message_at = now;
        let (command, reply) = agent.member.receive(message);
        if let Some(command) = command {
            self.execute(index, command);
        }
        if reply {
            self.send_status(index);
        }
    }

    pub(super) fn execute(&mut self, index: usize, command: Command) {
        let id = self.agents[index].id;
        match command {
            Command::Wait(_) => {}
            Command::Run(assignment) => self.run(index, assignment),
            Command::Stop(cause) => {
                self.note(|| format!("{index} is to stop: {cause}"));
                self.check_cause(index, &cause);
                self.agents[index].stop_ordered = true;
                self.stop_workers(index);
            }
            Command::Refuse(Refusal::Evicted { .. }) => self.rejoin(index),
            end @ (Command::End(_) | Command::Refuse(_)) => {
                self.note(|| format!("{index} ends: {end:?}"));
                self.check_end(index, &end);
                let agent = &mut self.agents[index];
                agent.workers = None;
                agent.ended = Some(end);
                agent.member.enter(Phase::Left(Departure::Ended));
                let (term, status) = (agent.term, agent.status(self.now));
                self.send(index, term, true, SimEvent::Status { id, term, status });
                self.after(Duration::from_millis(5), SimEvent::Disconnected { id, term });
                self.close_coordinators(index);
            }
        }
    }

    fn run(&mut self, index: usize, assignment: Assignment) {
        let round = assignment.round;
        self.note(|| {
            format!(
                "{index} runs round {round} as {} of {}",
                assignment.group_rank, assignment.group_world_size
            )
        });
        self.check_start(index, &assignment);
        let agent = &mut self.agents[index];
        let id = agent.id;
        agent.workers = Some(Workers { round, stopping: false });
        (agent.last_round, agent.stop_ordered) = (round, false);
        agent.member.enter(Phase::Running { round });
        if self.faults_ended {
            self.after(
                self.conditions.run,
                SimEvent::WorkersEnd { agent: index, id, round, is_success: true, own: true },
            );
        }
    }

    pub(super) fn stop_workers(&mut self, index: usize) {
        let agent = &mut self.agents[index];
        let (id, round) = (agent.id, agent.last_round);
        match &mut agent.workers {
            Some(workers) if workers.stopping => {}
            Some(workers) => {
                workers.stopping = true;
                let delay = self.random.millis(0, self.conditions.stop_ms);
                self.after(delay, SimEvent::WorkersStopped { agent: index, id, round });
            }
            None => self.workers_stopped(index, id, round),
        }
    }

    fn workers_stopped(&mut self, index: usize, id: AgentId, round: u64) {
        let agent = &mut self.agents[index];
        if agent.id != id || !agent.is_active() || agent.last_round != round {
            return;
        }
        agent.workers = None;
        match agent.member.phase() {
            Phase::Leaving { .. } => return self.depart(index),
            Phase::Failed { failure, .. } if failure.can_restart => agent.restarts += 1,
            // No restart is left: the coordinator decides whether the failure is final.
            Phase::Failed { .. } if !agent.stop_ordered => return,
            _ => {}
        }
        let phase = ready(id, round, agent.restarts);
        agent.member.enter(phase);
        self.send_status(index);
    }

    pub(super) fn workers_end(&mut self, index: usize, id: AgentId, round: u64, is_success: bool, own: bool) {
        let agent = &mut self.agents[index];
        let running = Some(Workers { round, stopping: false });
        if agent.id != id || !agent.is_active() || agent.paused || agent.workers != running {
            return;
        }
        if is_success {
            agent.workers = None;
            agent.member.enter(Phase::Succeeded { round, drained: false });
        } else {
            let restarts = agent.restarts < agent.max_restarts;
            let failure =
                Failure { summary: format!("rank of {index}"), report: String::new(), can_restart: restarts };
            agent.member.enter(Phase::Failed { round, failure });
            if own {
                agent.failed_round = Some(round);
            }
            self.note(|| {
                format!("a worker of {index} fails in round {round}, own: {own}, restarts: {restarts}")
            });
            self.stop_workers(index);
        }
        self.send_status(index);
    }
}
