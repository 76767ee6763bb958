//! A simulated world in which a seed decides the time of every event. Messages are late, lost, duplicated or
//! reordered, and clocks differ.
//! Agents die, hang or are cut off. Coordinators die and are replaced ([`super::offices`]).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::super::bug::Bug;
use super::super::*;
use super::agent::{Agent, Workers, ready};
use super::faults::{At, Fault};
use super::offices::{Office, Place};
use super::random::Random;

pub(super) const SILENCE: Duration = Duration::from_secs(3);
const BEAT: Duration = Duration::from_millis(500);
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(600);
const LAST_CALL: Duration = Duration::from_secs(5);

/// An event at some time.
#[derive(Debug, Clone)]
pub(super) enum Item {
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
    Cut {
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
    Beat {
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
        well: bool,
        own: bool,
    },
    /// Workers fail because a node of the round is lost, unless that node is back by now.
    Bereaved {
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
    Find {
        agent: usize,
        id: AgentId,
    },
    /// A coordinator renews its lease.
    Keep {
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

/// Properties of this world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nature {
    pub(super) delay_ms: u64,
    pub(super) loss_percent: u64,
    pub(super) double_percent: u64,
    pub(super) drift: i64,
    /// Longest time for stopping workers, in milliseconds.
    pub(super) stop_ms: u64,
    /// Time after which workers succeed once faults have ceased.
    pub(super) run: Duration,
}

pub(super) struct World {
    pub(super) now: Duration,
    pub(super) random: Random,
    pub(super) nature: Nature,
    pub(super) rules: Rules,
    pub(super) agents: Vec<Agent>,
    /// Coordinators by term.
    pub(super) offices: BTreeMap<u64, Office>,
    pub(super) place: Place,
    /// True if nodes find the coordinator in etcd and any of them may become it. Otherwise it is at an
    /// endpoint apart from them.
    pub(super) claimed: bool,
    /// Rounds that were cut off from etcd as a whole.
    pub(super) cut_off: BTreeSet<u64>,
    ids: u128,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    items: BTreeMap<u64, Item>,
    ties: u64,
    /// Assignments by round and group rank.
    pub(super) rounds: BTreeMap<u64, BTreeMap<usize, (AgentId, Assignment)>>,
    pub(super) peace: bool,
    pub(super) lossless: bool,
    /// True if nodes may join after a round has started.
    pub(super) late: bool,
    pub(super) bug: Option<Bug>,
    pub(super) messages: u64,
    pub(super) story: Vec<String>,
    pub(super) broken: Option<String>,
}

impl World {
    pub(super) fn new(
        seed: u64,
        hosts: usize,
        (min, max): (usize, usize),
        nature: Nature,
        claimed: bool,
        bug: Option<Bug>,
    ) -> Self {
        let rules = Rules {
            last_call: LAST_CALL,
            join_timeout: JOIN_TIMEOUT,
            silence: SILENCE,
            reconnect: Duration::from_millis(200),
            stop_timeout: Duration::from_secs(90),
            stop_spread: Duration::from_secs(1),
            job_budget: None,
        };
        let mut world = Self {
            now: Duration::from_secs(1),
            random: Random::new(seed),
            nature,
            rules,
            agents: Vec::new(),
            offices: BTreeMap::new(),
            place: Place::default(),
            claimed,
            cut_off: BTreeSet::new(),
            ids: 0,
            queue: BinaryHeap::new(),
            items: BTreeMap::new(),
            ties: 0,
            rounds: BTreeMap::new(),
            peace: false,
            lossless: nature.loss_percent == 0,
            late: hosts > max,
            bug,
            messages: 0,
            story: Vec::new(),
            broken: None,
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
            let id = world.fresh_id();
            let restarts = world.random.below(3) as u32;
            let mut agent = Agent::new(id, profile, restarts, SILENCE);
            agent.member.planted.bug = bug;
            agent.offset = world.random.millis(0, 100_000_000);
            let drift = nature.drift;
            agent.fast = if drift == 0 { 0 } else { world.random.below(2 * drift as u64) as i64 - drift };
            world.agents.push(agent);
        }
        if !claimed {
            world.serve(None);
        }
        for index in 0..hosts {
            world.begin(index);
        }
        world
    }

    pub(super) fn fresh_id(&mut self) -> AgentId {
        self.ids += 1;
        // Ids do not follow the order of arrival.
        AgentId(u128::from(self.random.next()) << 64 | self.ids)
    }

    pub(super) fn has_changed_coordinator(&self) -> bool {
        self.place.term > 1
    }

    pub(super) fn note(&mut self, what: impl FnOnce() -> String) {
        self.story.push(format!("{:?}: {}", self.now, what()));
    }

    pub(super) fn violates(&mut self, what: String) {
        self.note(|| format!("VIOLATED: {what}"));
        self.broken.get_or_insert(what);
    }

    pub(super) fn at(&mut self, time: Duration, item: Item) {
        self.ties += 1;
        self.queue.push(Reverse((time, self.ties)));
        self.items.insert(self.ties, item);
    }

    pub(super) fn after(&mut self, delay: Duration, item: Item) {
        self.at(self.now + delay, item);
    }

    /// Processes the next event. Returns false if none is left or it would be later than `until`.
    pub(super) fn step(&mut self, until: Duration) -> bool {
        let Some(&Reverse((time, tie))) = self.queue.peek() else { return false };
        if time > until || self.broken.is_some() {
            return false;
        }
        self.queue.pop();
        self.now = self.now.max(time);
        let item = self.items.remove(&tie).unwrap();
        self.happen(item);
        true
    }

    // ---- the network ----

    /// Sends between an agent and the coordinator of a term, over a network that may delay, drop or duplicate
    /// messages.
    pub(super) fn send(&mut self, agent: usize, term: u64, to_coordinator: bool, item: Item) {
        self.messages += 1;
        let host = self.offices.get(&term).and_then(|office| office.host);
        if host == Some(agent) {
            return self.after(Duration::ZERO, item);
        }
        let (from, to) = if to_coordinator { (Some(agent), host) } else { (host, Some(agent)) };
        if from.is_some_and(|from| self.agents[from].mute) || to.is_some_and(|to| self.agents[to].deaf) {
            return;
        }
        let copies = 1 + usize::from(self.random.percent(self.nature.double_percent));
        for _ in 0..copies {
            if !self.random.percent(self.nature.loss_percent) {
                let delay = self.random.millis(0, self.nature.delay_ms);
                self.after(delay, item.clone());
            }
        }
    }

    /// Connects to the coordinator that the agent knows.
    pub(super) fn connect(&mut self, index: usize) {
        if !self.claimed {
            self.agents[index].at = self.place.term;
        }
        let (agent, now) = (&self.agents[index], self.now);
        let (id, term) = (agent.id, agent.at);
        // A connection exists or not. Its first message is not lost alone, but only with the network.
        if agent.paused || !agent.is_at_work() || !self.is_open_to(index, term) {
            return;
        }
        let own = self.offices.get(&term).is_some_and(|office| office.host == Some(index));
        let delay = if own { Duration::ZERO } else { self.random.millis(0, self.nature.delay_ms) };
        self.after(delay, Item::Hello { from: index, id, term });
        // The status follows the first message.
        let agent = &mut self.agents[index];
        agent.member.coordinates(own);
        let status = agent.status(now);
        self.after(delay, Item::Status { id, term, status });
    }

    /// Starts a process.
    pub(super) fn begin(&mut self, index: usize) {
        self.find(index);
        let (id, delay) = (self.agents[index].id, self.random.millis(0, 300));
        self.after(delay, Item::Beat { agent: index, id });
    }

    /// Sends the status of an agent at once.
    pub(super) fn tell(&mut self, index: usize) {
        let agent = &mut self.agents[index];
        if !agent.is_at_work() || agent.paused {
            return;
        }
        let (id, term, status) = (agent.id, agent.at, agent.status(self.now));
        self.send(index, term, true, Item::Status { id, term, status });
    }

    // ---- what happens ----

    fn happen(&mut self, item: Item) {
        match item {
            Item::Hello { from, id, term } => {
                let profile = self.agents[from].profile.clone();
                self.coordinate(term, Event::Hello { agent: id, profile });
            }
            Item::Status { id, term, status } => {
                self.coordinate(term, Event::Status { agent: id, status });
            }
            Item::Cut { id, term } => self.coordinate(term, Event::Cut { agent: id }),
            Item::Written { term, write } => self.written(term, write),
            Item::CoordinatorTick { term } => self.tick(term),
            Item::Find { agent, id } => {
                if self.agents[agent].id == id {
                    self.find(agent);
                }
            }
            Item::Keep { term } => self.keep(term),
            Item::Close { term } => self.close(term),
            Item::Order { to, id, message } => self.hear(to, id, message),
            Item::Beat { agent, id } => {
                if self.agents[agent].id == id && self.agents[agent].is_at_work() {
                    self.tell(agent);
                    // A client without an answer reconnects.
                    let silent = self.now.saturating_sub(self.agents[agent].heard_at);
                    if self.claimed
                        && (self.agents[agent].at == 0 || silent > self.agents[agent].member.lease())
                    {
                        self.find(agent);
                    } else if !self.claimed && self.random.percent(20) {
                        self.connect(agent);
                    }
                    let beat = self.agents[agent].member.beat(BEAT);
                    self.after(beat, Item::Beat { agent, id });
                    self.check_lease(agent);
                }
            }
            Item::LeaseCheck { agent, id } => {
                if self.agents[agent].id == id {
                    self.check_lease(agent);
                }
            }
            Item::WorkersEnd { agent, id, round, well, own } => self.workers_end(agent, id, round, well, own),
            Item::Bereaved { agent, id, round, of } => {
                let lost = &self.agents[of];
                if !lost.is_at_work() || lost.mute {
                    self.workers_end(agent, id, round, false, false);
                }
            }
            Item::WorkersStopped { agent, id, round } => self.workers_stopped(agent, id, round),
            Item::Fault(fault) => self.fault(fault),
            Item::FaultAtCoordinator(fault, heal) => {
                if let Some(index) = self.coordinating() {
                    self.fault(fault(index));
                    if let Some((heal, after)) = heal {
                        self.after(after, Item::Fault(heal(index)));
                    }
                }
            }
            Item::CoordinatorStart { suspect } => {
                if self.offices.is_empty() {
                    self.serve(suspect);
                }
            }
        }
    }

    /// Stops the workers of an agent whose lease has ended.
    pub(super) fn check_lease(&mut self, index: usize) {
        let now = self.now;
        let agent = &self.agents[index];
        if agent.paused || !agent.is_at_work() {
            return;
        }
        let Some(ends) = agent.member.lease_ends() else { return };
        let local = agent.local(now);
        if local >= ends {
            if matches!(agent.member.phase(), Phase::Leaving { .. }) {
                self.depart(index);
            } else if matches!(agent.member.phase(), Phase::Running { .. } | Phase::Failed { .. }) {
                self.note(|| format!("{index} is alone and stops"));
                self.agents[index].stop_alone();
                self.tell(index);
            }
        } else if ends - local < BEAT {
            let id = agent.id;
            self.after(ends - local + Duration::from_millis(1), Item::LeaseCheck { agent: index, id });
        }
    }

    fn rejoin(&mut self, index: usize) {
        let id = self.fresh_id();
        self.agents[index].join_anew(id, SILENCE);
        self.begin(index);
    }

    fn hear(&mut self, index: usize, id: AgentId, message: OrderMessage) {
        let (now, term) = (self.now, message.term);
        let agent = &mut self.agents[index];
        if agent.id != id || !agent.is_at_work() || agent.paused || self.claimed && agent.at != term {
            return;
        }
        agent.heard_at = now;
        let (news, reply) = agent.member.hear(message);
        if let Some(news) = news {
            self.obey(index, news);
        }
        if reply {
            self.tell(index);
        }
    }

    pub(super) fn obey(&mut self, index: usize, news: News) {
        let id = self.agents[index].id;
        match news {
            News::Wait(_) => {}
            News::Run(assignment) => self.run(index, assignment),
            News::Stop(cause) => {
                self.note(|| format!("{index} is to stop: {cause}"));
                self.check_cause(index, &cause);
                self.agents[index].told = true;
                self.stop_workers(index);
            }
            News::Refuse(Refusal::GivenUp { .. }) => self.rejoin(index),
            end @ (News::End(_) | News::Refuse(_)) => {
                self.note(|| format!("{index} ends: {end:?}"));
                self.check_end(index, &end);
                let agent = &mut self.agents[index];
                agent.workers = None;
                agent.ended = Some(end);
                agent.member.enter(Phase::Left(Departure::Ended));
                let (term, status) = (agent.at, agent.status(self.now));
                self.send(index, term, true, Item::Status { id, term, status });
                self.after(Duration::from_millis(5), Item::Cut { id, term });
                self.leave_office(index);
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
        (agent.last_round, agent.told) = (round, false);
        agent.member.enter(Phase::Running { round });
        if self.peace {
            self.after(self.nature.run, Item::WorkersEnd { agent: index, id, round, well: true, own: true });
        }
    }

    pub(super) fn stop_workers(&mut self, index: usize) {
        let agent = &mut self.agents[index];
        let (id, round) = (agent.id, agent.last_round);
        match &mut agent.workers {
            Some(workers) if workers.stopping => {}
            Some(workers) => {
                workers.stopping = true;
                let delay = self.random.millis(0, self.nature.stop_ms);
                self.after(delay, Item::WorkersStopped { agent: index, id, round });
            }
            None => self.workers_stopped(index, id, round),
        }
    }

    fn workers_stopped(&mut self, index: usize, id: AgentId, round: u64) {
        let agent = &mut self.agents[index];
        if agent.id != id || !agent.is_at_work() || agent.last_round != round {
            return;
        }
        agent.workers = None;
        match agent.member.phase() {
            Phase::Leaving { .. } => return self.depart(index),
            Phase::Failed { failure, .. } if failure.restarts => agent.restarts += 1,
            // No restart is left: the coordinator decides whether the failure is final.
            Phase::Failed { .. } if !agent.told => return,
            _ => {}
        }
        let phase = ready(id, round, agent.restarts);
        agent.member.enter(phase);
        self.tell(index);
    }

    pub(super) fn workers_end(&mut self, index: usize, id: AgentId, round: u64, well: bool, own: bool) {
        let agent = &mut self.agents[index];
        let running = Some(Workers { round, stopping: false });
        if agent.id != id || !agent.is_at_work() || agent.paused || agent.workers != running {
            return;
        }
        if well {
            agent.workers = None;
            agent.member.enter(Phase::Succeeded { round });
        } else {
            let restarts = agent.restarts < agent.max_restarts;
            let failure = Failure { summary: format!("rank of {index}"), report: String::new(), restarts };
            agent.member.enter(Phase::Failed { round, failure });
            if own {
                agent.own_failure = Some(round);
            }
            self.note(|| {
                format!("a worker of {index} fails in round {round}, own: {own}, restarts: {restarts}")
            });
            self.stop_workers(index);
        }
        self.tell(index);
    }
}
