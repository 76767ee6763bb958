//! A world in which everything happens at a time that a seed decides: messages that are late, lost, doubled or overtaken,
//! clocks that differ, agents that die, hang or are cut off, a coordinator that dies and is replaced.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use super::super::bug::Bug;
use super::super::*;
use super::agent::{Agent, Workers, ready};

pub(super) const SILENCE: Duration = Duration::from_secs(3);
const BEAT: Duration = Duration::from_millis(750);
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(600);
const LAST_CALL: Duration = Duration::from_secs(5);

/// Numbers that only the seed decides.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(super) fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from + 1))
    }
}

/// What happens at some time.
#[derive(Debug, Clone)]
pub(super) enum Item {
    Hello {
        from: usize,
        id: AgentId,
    },
    Status {
        id: AgentId,
        status: Status,
    },
    Cut {
        id: AgentId,
    },
    Order {
        to: usize,
        id: AgentId,
        message: OrderMessage,
    },
    Written {
        term: u64,
    },
    Beat {
        agent: usize,
        id: AgentId,
    },
    LeaseCheck {
        agent: usize,
        id: AgentId,
    },
    /// Workers end by themselves: well or not, and not because of a lost peer (`own`).
    WorkersEnd {
        agent: usize,
        id: AgentId,
        round: u64,
        well: bool,
        own: bool,
    },
    /// The same, for the loss of a node of the round, unless that is back by now.
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
    CoordinatorStart {
        suspect: Option<(AgentId, Duration)>,
    },
    Fault(Fault),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The process dies, and its connection with it; its workers too.
    Kill(usize),
    /// The host loses its power: nothing is heard.
    PowerOff(usize),
    /// A new process on that host.
    Start(usize),
    Mute(usize),
    Deaf(usize),
    Partition(usize),
    Heal(usize),
    Pause(usize),
    Resume(usize),
    /// The connection breaks; both ends live.
    Break(usize),
    /// Its worker fails, by itself.
    FailWorker(usize),
    /// A signal stops the agent.
    Stop(usize),
    /// Another one takes over soon.
    KillCoordinator,
    /// Its host loses its power, and the other one takes over when that is certain: leases have ended.
    KillHost(usize),
    /// All is well from now on.
    Peace,
}

/// How things are in this world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nature {
    pub(super) delay_ms: u64,
    pub(super) loss_percent: u64,
    pub(super) double_percent: u64,
    pub(super) drift: i64,
    /// Stopping workers takes at most so long.
    pub(super) stop_ms: u64,
    /// Workers end well after so long, in peace.
    pub(super) run: Duration,
}

pub(super) struct World {
    pub(super) now: Duration,
    pub(super) random: Random,
    pub(super) nature: Nature,
    pub(super) rules: Rules,
    pub(super) agents: Vec<Agent>,
    pub(super) coordinator: Option<Coordinator>,
    /// Began at.
    began: Duration,
    term: u64,
    record: Option<Record>,
    /// When the coordinator is next woken.
    tick_at: Option<Duration>,
    ids: u128,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    items: BTreeMap<u64, Item>,
    ties: u64,
    /// Assignments by round and group rank.
    pub(super) rounds: BTreeMap<u64, BTreeMap<usize, (AgentId, Assignment)>>,
    pub(super) peace: bool,
    pub(super) lossless: bool,
    /// Nodes may come after a round has begun.
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
        bug: Option<Bug>,
    ) -> Self {
        let rules = Rules {
            last_call: LAST_CALL,
            join_timeout: JOIN_TIMEOUT,
            silence: SILENCE,
            reconnect: Duration::from_millis(200),
            stop_timeout: Duration::from_secs(90),
            job_budget: None,
        };
        let mut world = Self {
            now: Duration::from_secs(1),
            random: Random::new(seed),
            nature,
            rules,
            agents: Vec::new(),
            coordinator: None,
            began: Duration::ZERO,
            term: 0,
            record: None,
            tick_at: None,
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
        world.start_coordinator(None);
        for index in 0..hosts {
            world.begin(index);
        }
        world
    }

    fn fresh_id(&mut self) -> AgentId {
        self.ids += 1;
        // Not in the order of their coming.
        AgentId(u128::from(self.random.next()) << 64 | self.ids)
    }

    fn start_coordinator(&mut self, suspect: Option<(AgentId, Duration)>) {
        self.term += 1;
        self.began = self.now;
        self.tick_at = None;
        let entropy = u128::from(self.random.next()) << 64;
        let mut coordinator = match self.record.clone() {
            Some(record) => Coordinator::resume(self.rules, self.term, entropy, record, suspect),
            None => Coordinator::new(self.rules, self.term, entropy),
        };
        coordinator.planted.bug = self.bug;
        self.coordinator = Some(coordinator);
        for agent in 0..self.agents.len() {
            self.connect(agent);
        }
    }

    pub(super) fn has_changed_coordinator(&self) -> bool {
        self.term > 1
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

    fn after(&mut self, delay: Duration, item: Item) {
        self.at(self.now + delay, item);
    }

    /// Lets the next thing happen; false if nothing is left or it would be after `until`.
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

    /// Sends over a network that may do anything with it; `from` is the agent at one end.
    fn send(&mut self, from: usize, to_coordinator: bool, item: Item) {
        self.messages += 1;
        let agent = &self.agents[from];
        if to_coordinator && agent.mute || !to_coordinator && agent.deaf {
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

    fn connect(&mut self, index: usize) {
        let id = self.agents[index].id;
        // A connection is there or not: its first message is not lost by itself, but with the network.
        let agent = &self.agents[index];
        if !agent.mute && !agent.deaf && !agent.paused && agent.is_at_work() {
            let delay = self.random.millis(0, self.nature.delay_ms);
            self.after(delay, Item::Hello { from: index, id });
            // Its status comes behind it.
            let status = self.agents[index].status(self.now);
            self.after(delay, Item::Status { id, status });
        }
    }

    /// A process begins.
    fn begin(&mut self, index: usize) {
        self.connect(index);
        let (id, delay) = (self.agents[index].id, self.random.millis(0, 300));
        self.after(delay, Item::Beat { agent: index, id });
    }

    /// The status of an agent is sent at once.
    fn tell(&mut self, index: usize) {
        let agent = &mut self.agents[index];
        if !agent.is_at_work() || agent.paused {
            return;
        }
        let (id, status) = (agent.id, agent.status(self.now));
        self.send(index, true, Item::Status { id, status });
    }

    // ---- what happens ----

    fn happen(&mut self, item: Item) {
        match item {
            Item::Hello { from, id } => {
                let profile = self.agents[from].profile.clone();
                self.coordinate(Event::Hello { agent: id, profile });
            }
            Item::Status { id, status } => {
                self.coordinate(Event::Status { agent: id, status });
            }
            Item::Cut { id } => self.coordinate(Event::Cut { agent: id }),
            Item::Written { term } if term == self.term => self.coordinate(Event::Written),
            Item::CoordinatorTick { term } if term == self.term => {
                if self.tick_at.is_some_and(|at| at <= self.now) {
                    self.tick_at = None;
                }
                self.coordinate(Event::Tick);
            }
            Item::Written { .. } | Item::CoordinatorTick { .. } => {}
            Item::Order { to, id, message } => self.hear(to, id, message),
            Item::Beat { agent, id } => {
                if self.agents[agent].id == id && self.agents[agent].is_at_work() {
                    self.tell(agent);
                    // A driver without an answer connects again.
                    if self.random.percent(20) {
                        self.connect(agent);
                    }
                    self.after(BEAT, Item::Beat { agent, id });
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
            Item::CoordinatorStart { suspect } => {
                if self.coordinator.is_none() {
                    self.start_coordinator(suspect);
                }
            }
        }
    }

    fn coordinate(&mut self, event: Event) {
        let Some(coordinator) = self.coordinator.as_mut() else { return };
        let mut actions = Vec::new();
        let time = self.now - self.began;
        coordinator.handle(time, event, &mut actions);
        let wake = coordinator.wake_at().map(|at| (self.began + at).max(self.now));
        let term = self.term;
        for action in actions {
            match action {
                Action::Send { agent, message } => {
                    if let Some(to) = self.agents.iter().position(|other| other.id == agent) {
                        self.send(to, false, Item::Order { to, id: agent, message });
                    }
                }
                Action::Write(record) => {
                    // What is written is written, also if the coordinator dies before it hears of it.
                    self.record = Some(record);
                    // The place where it is written may be out of reach for a while.
                    let longest = if self.random.percent(5) { 8000 } else { 20 };
                    let delay = self.random.millis(0, longest);
                    self.after(delay, Item::Written { term });
                }
            }
        }
        if let Some(at) = wake
            && self.tick_at.is_none_or(|tick| at < tick)
        {
            self.tick_at = Some(at);
            self.at(at, Item::CoordinatorTick { term });
        }
    }

    /// A lease that has ended takes the workers with it.
    fn check_lease(&mut self, index: usize) {
        let now = self.now;
        let agent = &self.agents[index];
        if agent.paused || !agent.is_at_work() {
            return;
        }
        let Some(ends) = agent.member.lease_ends() else { return };
        let local = agent.local(now);
        if local >= ends {
            if matches!(agent.member.phase(), Phase::Running { .. } | Phase::Failed { .. }) {
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
        let agent = &mut self.agents[index];
        if agent.id != id || !agent.is_at_work() || agent.paused {
            return;
        }
        let (news, reply) = agent.member.hear(message);
        if let Some(news) = news {
            self.obey(index, news);
        }
        if reply {
            self.tell(index);
        }
    }

    fn obey(&mut self, index: usize, news: News) {
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
                let status = agent.status(self.now);
                self.send(index, true, Item::Status { id, status });
                self.after(Duration::from_millis(5), Item::Cut { id });
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
            Phase::Failed { failure, .. } if failure.restarts => agent.restarts += 1,
            // No restart is left: the coordinator has the last word.
            Phase::Failed { .. } if !agent.told => return,
            _ => {}
        }
        let phase = ready(id, round, agent.restarts);
        agent.member.enter(phase);
        self.tell(index);
    }

    fn workers_end(&mut self, index: usize, id: AgentId, round: u64, well: bool, own: bool) {
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

    pub(super) fn fault(&mut self, fault: Fault) {
        self.note(|| format!("{fault:?}"));
        match fault {
            Fault::Kill(index) | Fault::PowerOff(index) => {
                let agent = &mut self.agents[index];
                if !agent.is_at_work() {
                    return;
                }
                let (id, round) = (agent.id, agent.workers.map(|workers| workers.round));
                (agent.alive, agent.disturbed, agent.workers) = (false, true, None);
                if fault == Fault::Kill(index) && !agent.mute && !agent.deaf {
                    let delay = self.random.millis(0, self.nature.delay_ms);
                    self.after(delay, Item::Cut { id });
                }
                self.bereave(index, round, 0);
            }
            Fault::Start(index) => {
                if self.agents[index].is_at_work() || matches!(self.agents[index].ended, Some(News::End(_))) {
                    return;
                }
                let id = self.fresh_id();
                let agent = &mut self.agents[index];
                (agent.alive, agent.ended, agent.paused, agent.restarts) = (true, None, false, 0);
                agent.join_anew(id, SILENCE);
                self.begin(index);
            }
            Fault::Mute(index) => self.disturb(index, |agent| agent.mute = true),
            Fault::Deaf(index) => self.disturb(index, |agent| agent.deaf = true),
            Fault::Partition(index) => {
                self.disturb(index, |agent| (agent.mute, agent.deaf) = (true, true));
                let round = self.agents[index].workers.map(|workers| workers.round);
                // Connections live through a short one.
                self.bereave(index, round, SILENCE.as_millis() as u64);
            }
            Fault::Heal(index) => {
                self.disturb(index, |agent| (agent.mute, agent.deaf) = (false, false));
                self.connect(index);
            }
            Fault::Pause(index) => self.disturb(index, |agent| agent.paused = true),
            Fault::Resume(index) => {
                self.agents[index].paused = false;
                if self.agents[index].is_at_work() {
                    self.check_lease(index);
                    self.connect(index);
                }
            }
            Fault::Break(index) => {
                if self.agents[index].is_at_work() {
                    let id = self.agents[index].id;
                    self.after(Duration::from_millis(1), Item::Cut { id });
                    self.after(Duration::from_millis(30), Item::Hello { from: index, id });
                }
            }
            Fault::FailWorker(index) => {
                if let Some(workers) = self.agents[index].workers {
                    let id = self.agents[index].id;
                    self.workers_end(index, id, workers.round, false, true);
                }
            }
            Fault::Stop(index) => {
                let agent = &mut self.agents[index];
                if !agent.is_at_work() || agent.paused {
                    return;
                }
                agent.disturbed = true;
                let (id, round) = (agent.id, agent.workers.map(|workers| workers.round));
                agent.workers = None;
                agent.member.enter(Phase::Left(Departure::Stopped { signal: 15 }));
                self.tell(index);
                self.agents[index].alive = false;
                let delay = self.random.millis(0, self.nature.delay_ms);
                self.after(delay, Item::Cut { id });
                self.bereave(index, round, 0);
            }
            Fault::KillCoordinator => {
                self.coordinator = None;
                let delay = self.random.millis(10, 500);
                self.after(delay, Item::CoordinatorStart { suspect: None });
            }
            Fault::KillHost(index) => {
                let suspect = Some((self.agents[index].id, self.random.millis(0, 1500)));
                self.fault(Fault::PowerOff(index));
                self.coordinator = None;
                let delay = self.random.millis(2000, 6000);
                self.after(delay, Item::CoordinatorStart { suspect });
            }
            Fault::Peace => self.make_peace(),
        }
    }

    fn disturb(&mut self, index: usize, what: impl FnOnce(&mut Agent)) {
        self.agents[index].disturbed = true;
        what(&mut self.agents[index]);
    }

    /// Node `of` of the round is gone: after a while workers of the others may fail for that.
    fn bereave(&mut self, of: usize, round: Option<u64>, after_ms: u64) {
        let Some(round) = round else { return };
        for index in 0..self.agents.len() {
            let agent = &self.agents[index];
            if agent.workers.is_some_and(|workers| workers.round == round) && self.random.percent(50) {
                let id = self.agents[index].id;
                let delay = self.random.millis(after_ms, after_ms + 4000);
                self.after(delay, Item::Bereaved { agent: index, id, round, of });
            }
        }
    }

    fn make_peace(&mut self) {
        self.peace = true;
        self.nature.loss_percent = 0;
        if self.coordinator.is_none() {
            self.start_coordinator(None);
        }
        for index in 0..self.agents.len() {
            self.fault(Fault::Heal(index));
            self.fault(Fault::Resume(index));
            self.fault(Fault::Start(index));
            if let Some(workers) = self.agents[index].workers {
                let id = self.agents[index].id;
                let round = workers.round;
                self.after(
                    self.nature.run,
                    Item::WorkersEnd { agent: index, id, round, well: true, own: true },
                );
            }
        }
    }
}
