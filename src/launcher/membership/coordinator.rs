//! Decides for all members of a job. Pure: time and events are given to it, actions are what it returns.
//!
//! An event costs O(log n); the beginning and the end of a round, a failure and a loss cost O(n), which is a message to
//! each. A member that is not heard for [`Rules::silence`] is lost; one whose connection breaks has [`Rules::reconnect`]
//! to come back.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use super::bug::{Bug, Planted};
use super::messages::{AgentId, Cause, Ending, Order, OrderMessage, Phase, Profile, Refusal, Status};
use super::record::Record;

mod round;
mod stages;

pub(super) use round::{Round, State};

/// Time since the coordinator began.
pub(crate) type Time = Duration;

/// How often waiting members are told who is there.
const MUSTER_PERIOD: Duration = Duration::from_secs(10);
/// Who has no workers may be silent for so many times longer: on machines on which many nodes begin at once.
pub(crate) const LENIENCE: u32 = 4;
/// For so long each of a host's nodes may keep it from all others, when all begin at once.
const PER_NODE_OF_A_HOST: Duration = Duration::from_millis(20);
/// So many of those that are gone are remembered.
const REMEMBERED: usize = 100_000;
/// Statuses of a member of which it is remembered when they came.
const UNECHOED: usize = 8;
/// So many names are told.
const NAMED: usize = 16;

/// What the command line says about rounds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// How long a first round stays open for more nodes after the fewest are there.
    pub(crate) last_call: Duration,
    /// How long a node waits for a round.
    pub(crate) join_timeout: Duration,
    /// A member that is not heard for so long is lost.
    pub(crate) silence: Duration,
    /// The same for one whose connection broke.
    pub(crate) reconnect: Duration,
    /// How long a member may take to stop its workers.
    pub(crate) stop_timeout: Duration,
    /// Whoever stops a whole job signals all its nodes within this time: until then a node that is stopped by a signal
    /// leads to no new round.
    pub(crate) stop_spread: Duration,
    /// `restart_budget=job`: restarts for failures, all nodes together.
    pub(crate) job_budget: Option<u32>,
}

impl Rules {
    /// After which silence a node is lost, where there are so many on one host: they share its cores.
    pub(crate) fn silence_of(&self, crowd: usize) -> Duration {
        let crowd = u32::try_from(crowd).unwrap_or(u32::MAX);
        self.silence.max(PER_NODE_OF_A_HOST.saturating_mul(crowd))
    }
}

/// What happens.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A member has connected, perhaps again.
    Hello { agent: AgentId, profile: Profile },
    /// What it says.
    Status { agent: AgentId, status: Status },
    /// Its connection broke.
    Cut { agent: AgentId },
    /// The last record is written down.
    Written,
    /// The agent that this coordinator belongs to, on `host`, goes, and nobody can take over: why.
    Deserted { agent: AgentId, host: String, why: String },
    /// It is [`Coordinator::wake_at`], or later.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Tell a member.
    Send { agent: AgentId, message: OrderMessage },
    /// Write it down, then say [`Event::Written`].
    Write(Record),
}

/// What is known of a member.
#[derive(Debug)]
struct Known {
    profile: Profile,
    /// Of the status.
    seq: u64,
    phase: Option<Phase>,
    /// When its last statuses came that it has not yet said were answered, and the latest that it has.
    unechoed: VecDeque<(u64, Time)>,
    echoed: Time,
    /// When it is lost unless it is heard before.
    due: Time,
    order: Option<Order>,
    order_seq: u64,
    asked: u64,
}

#[derive(Debug)]
enum Stage {
    Forming(Forming),
    /// A round is decided and being written down.
    Starting(Round),
    Live(Round),
    /// The end is decided and being written down.
    Ending(Ending),
    Over(Ending),
}

/// No round.
#[derive(Debug, Default)]
struct Forming {
    since: Time,
    /// Who has yet to stop its workers.
    expected: BTreeSet<AgentId>,
    /// No round begins before.
    not_before: Option<Time>,
    /// When the round begins with those that are there.
    last_call: Option<Time>,
    /// Why the last one ended, and its record.
    cause: Option<Cause>,
    last: Option<Record>,
    muster_at: Time,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Coordinator {
    rules: Rules,
    term: u64,
    /// Generations are this and the number of the round.
    entropy: u128,
    /// `--nnodes` of the first, and its name.
    range: Option<(usize, usize, String)>,
    members: BTreeMap<AgentId, Known>,
    /// How many of them are on each host, and the most that ever were on one.
    hosts: HashMap<String, usize>,
    crowd: usize,
    /// All of them by when they are lost.
    due: BTreeSet<(Time, AgentId)>,
    /// Members without a seat that could take part, and since when.
    candidates: BTreeMap<AgentId, Time>,
    /// The same, the first first.
    waiting: BTreeSet<(Time, AgentId)>,
    /// How many of them were in the latest round.
    veterans: usize,
    /// Those that were lost, or could not take part.
    gone: BTreeSet<AgentId>,
    /// Ranks in the latest round.
    ranks: BTreeMap<AgentId, usize>,
    round: u64,
    failures: u32,
    asks: u64,
    stage: Stage,
    pub(super) planted: Planted,
}

impl Coordinator {
    /// Of a new job. `entropy` is random.
    pub(crate) fn new(rules: Rules, term: u64, entropy: u128) -> Self {
        Self {
            rules,
            term,
            entropy,
            range: None,
            members: BTreeMap::new(),
            hosts: HashMap::new(),
            crowd: 0,
            due: BTreeSet::new(),
            candidates: BTreeMap::new(),
            waiting: BTreeSet::new(),
            veterans: 0,
            gone: BTreeSet::new(),
            ranks: BTreeMap::new(),
            round: 0,
            failures: 0,
            // Higher than all of the terms before.
            asks: term << 32,
            stage: Stage::Forming(Forming { muster_at: MUSTER_PERIOD, ..Forming::default() }),
            planted: Planted::default(),
        }
    }

    /// Of a job that another coordinator has begun. Its members are lost unless they are heard in time; `suspect`, the
    /// agent that has had the coordinator, after this time.
    pub(crate) fn resume(
        rules: Rules,
        term: u64,
        entropy: u128,
        record: Record,
        suspect: Option<(AgentId, Duration)>,
    ) -> Self {
        let mut resumed = Self::new(rules, term, entropy);
        resumed.round = record.round;
        resumed.failures = record.failures;
        resumed.crowd = record.crowd();
        if let Some(ending) = record.ending {
            resumed.stage = Stage::Over(ending);
        } else if record.round > 0 {
            for (rank, seat) in record.seats.iter().enumerate() {
                if record.left.iter().all(|(left, _)| *left != rank) {
                    resumed.know(Duration::ZERO, seat.agent, seat.profile.clone());
                }
                resumed.ranks.insert(seat.agent, rank);
            }
            resumed.stage = Stage::Live(Round::new(record, &rules));
        }
        if let Some((agent, due)) = suspect {
            resumed.set_due(agent, due.min(resumed.silence()));
        }
        resumed
    }

    /// Takes in `event` at `now`, which never goes back.
    pub(crate) fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Hello { agent, profile } => self.hello(now, agent, profile, actions),
            Event::Status { agent, status } => self.status(now, agent, status, actions),
            Event::Cut { agent } => {
                if let Some(due) = self.members.get(&agent).map(|known| known.due) {
                    self.set_due(agent, due.min(now + self.rules.reconnect));
                }
            }
            Event::Written => self.written(now, actions),
            Event::Deserted { agent, host, why } => {
                if !matches!(self.stage, Stage::Ending(_) | Stage::Over(_)) {
                    let node = self.ranks.get(&agent).copied();
                    self.end(Ending::Deserted { node, host, why }, actions);
                }
            }
            Event::Tick => self.tick(now, actions),
        }
    }

    /// When it wants a [`Event::Tick`].
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let due = self.due.first().map(|(due, _)| *due);
        let forming = match &self.stage {
            Stage::Forming(forming) => {
                let first = self
                    .waiting
                    .first()
                    .map(|(since, _)| *since.max(&forming.since) + self.rules.join_timeout);
                let muster = (!self.waiting.is_empty()).then_some(forming.muster_at);
                let stop = (!forming.expected.is_empty()).then_some(forming.since + self.rules.stop_timeout);
                [forming.not_before, forming.last_call, first, muster, stop].into_iter().flatten().min()
            }
            Stage::Starting(_) | Stage::Live(_) | Stage::Ending(_) | Stage::Over(_) => None,
        };
        due.into_iter().chain(forming).min()
    }

    /// Whether at least half of the latest round, without `own`, was heard after `since`, and has heard that it was: not
    /// to be heard is as bad as to be deaf. O(n).
    pub(crate) fn is_heard_by_half(&self, own: AgentId, since: Time) -> bool {
        let others = self.ranks.keys().filter(|agent| **agent != own);
        let (mut count, mut heard) = (0, 0);
        for agent in others {
            count += 1;
            heard += usize::from(self.members.get(agent).is_some_and(|known| known.echoed >= since));
        }
        2 * heard >= count
    }

    /// Whether no member may have workers.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(&self.stage, Stage::Forming(forming) if forming.expected.is_empty())
    }

    /// Whether it could be done without: no member may have workers, and those that are there are too few.
    pub(crate) fn is_useless(&self) -> bool {
        self.is_idle() && self.candidates.len() < self.min()
    }

    /// How the job ended, if it has.
    pub(crate) fn ending(&self) -> Option<&Ending> {
        match &self.stage {
            Stage::Over(ending) => Some(ending),
            Stage::Forming(_) | Stage::Starting(_) | Stage::Live(_) | Stage::Ending(_) => None,
        }
    }

    /// Whether it has.
    pub(crate) fn is_over(&self) -> bool {
        self.ending().is_some()
    }

    /// Whether this agent is a member.
    pub(crate) fn knows(&self, agent: AgentId) -> bool {
        self.members.contains_key(&agent)
    }

    /// Whether nobody is left.
    pub(crate) fn is_deserted(&self) -> bool {
        self.members.is_empty()
    }

    fn hello(&mut self, now: Time, agent: AgentId, profile: Profile, actions: &mut Vec<Action>) {
        if self.gone.contains(&agent) {
            let silent_s = self.silence().as_secs();
            self.refuse_stranger(agent, Refusal::GivenUp { silent_s }, actions);
            return;
        }
        if let Stage::Ending(ending) | Stage::Over(ending) = &self.stage
            && !self.ranks.contains_key(&agent)
            && !self.members.contains_key(&agent)
        {
            let refusal = Refusal::Closed(ending.clone());
            self.refuse_stranger(agent, refusal, actions);
            return;
        }
        let mine = (profile.min, profile.max);
        if let Some((min, max, host)) = &self.range
            && mine != (*min, *max)
        {
            if self.members.values().any(|known| known.phase.is_some()) {
                let refusal = Refusal::Nodes { mine, theirs: (*min, *max), host: host.clone() };
                self.refuse_stranger(agent, refusal, actions);
                return;
            }
            // Only a record says what the others were told. They may all be gone: it is known when their time is up, and
            // the newcomer tries again.
            if !self.members.is_empty() {
                return;
            }
            self.range = None;
        }
        if self.planted.is(Bug::RestartsForNothing) && self.members.contains_key(&agent) {
            self.lose(now, agent, None, actions);
            self.gone.remove(&agent);
        }
        if self.members.contains_key(&agent) {
            self.set_due(agent, now + self.silence());
        } else {
            self.know(now, agent, profile);
        }
        // It may have missed the latest.
        if self.members.get(&agent).is_some_and(|known| known.order.is_some()) {
            self.send(agent, true, actions);
        }
    }

    fn know(&mut self, now: Time, agent: AgentId, profile: Profile) {
        if self.range.is_none() {
            self.range = Some((profile.min, profile.max, profile.host.clone()));
        }
        let crowd = self.hosts.entry(profile.host.clone()).or_default();
        *crowd += 1;
        self.crowd = self.crowd.max(*crowd);
        let due = now + self.silence();
        self.due.insert((due, agent));
        let known = Known {
            profile,
            seq: 0,
            phase: None,
            unechoed: VecDeque::new(),
            echoed: now,
            due,
            order: None,
            order_seq: 0,
            asked: 0,
        };
        self.members.insert(agent, known);
    }

    fn status(&mut self, now: Time, agent: AgentId, status: Status, actions: &mut Vec<Action>) {
        let term = self.term;
        let Some(known) = self.members.get_mut(&agent) else { return };
        let news = status.seq > known.seq && known.phase.as_ref() != Some(&status.phase);
        let answers = status.asked > known.asked;
        known.asked = known.asked.max(status.asked);
        let heard_all = status.heard >= (term, known.order_seq);
        known.seq = known.seq.max(status.seq);
        if news {
            known.phase = Some(status.phase);
        }
        known.unechoed.push_back((status.seq, now));
        if known.unechoed.len() > UNECHOED {
            known.unechoed.pop_front();
        }
        while let Some(&(seq, came)) = known.unechoed.front()
            && seq <= status.answered
        {
            known.echoed = known.echoed.max(came);
            known.unechoed.pop_front();
        }
        let has_workers = !matches!(known.phase, Some(Phase::Ready { .. })) || self.is_to_run(agent);
        let silence = self.silence() * if has_workers { 1 } else { LENIENCE };
        self.set_due(agent, now + silence);
        if news {
            self.phase_changed(now, agent, actions);
        }
        if answers {
            self.answered(agent, actions);
        }
        if self.members.contains_key(&agent) {
            self.send(agent, !heard_all, actions);
        }
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<Action>) {
        while let Some(&(due, agent)) = self.due.first()
            && due <= now
        {
            self.lose(now, agent, None, actions);
        }
        self.tick_forming(now, actions);
    }

    /// Whether it has been told to run workers, and may do so by now.
    fn is_to_run(&self, agent: AgentId) -> bool {
        matches!(&self.stage, Stage::Live(round) if round.rank(&self.ranks, agent).is_some())
    }

    /// After which a member with workers is lost.
    fn silence(&self) -> Duration {
        self.rules.silence_of(self.crowd)
    }

    fn set_due(&mut self, agent: AgentId, due: Time) {
        let Some(known) = self.members.get_mut(&agent) else { return };
        self.due.remove(&(known.due, agent));
        known.due = due;
        self.due.insert((due, agent));
    }

    /// Forgets a member that is gone.
    fn forget(&mut self, agent: AgentId) {
        if let Some(known) = self.members.remove(&agent) {
            self.due.remove(&(known.due, agent));
            if let Some(crowd) = self.hosts.get_mut(&known.profile.host) {
                *crowd -= 1;
                if *crowd == 0 {
                    self.hosts.remove(&known.profile.host);
                }
            }
        }
        self.drop_candidate(agent);
        self.gone.insert(agent);
        if self.gone.len() > REMEMBERED {
            self.gone.pop_first();
        }
    }

    fn drop_candidate(&mut self, agent: AgentId) {
        if let Some(since) = self.candidates.remove(&agent) {
            self.waiting.remove(&(since, agent));
            self.veterans -= usize::from(self.ranks.contains_key(&agent));
        }
    }

    fn add_candidate(&mut self, now: Time, agent: AgentId) {
        if let Entry::Vacant(entry) = self.candidates.entry(agent) {
            entry.insert(now);
            self.waiting.insert((now, agent));
            self.veterans += usize::from(self.ranks.contains_key(&agent));
        }
    }

    /// Gives a member an order, unless it has it already.
    fn order(&mut self, agent: AgentId, order: Order, actions: &mut Vec<Action>) {
        let Some(known) = self.members.get_mut(&agent) else { return };
        if known.order.as_ref() == Some(&order) {
            return;
        }
        known.order = Some(order);
        known.order_seq += 1;
        self.send(agent, true, actions);
    }

    fn send(&self, agent: AgentId, with_order: bool, actions: &mut Vec<Action>) {
        let Some(known) = self.members.get(&agent) else { return };
        let order = known.order.clone().filter(|_| with_order);
        let (term, seq, heard, ask) = (self.term, known.order_seq, known.seq, self.asks);
        actions.push(Action::Send { agent, message: OrderMessage { term, seq, order, heard, ask } });
    }

    /// To somebody who is not, or no longer, known.
    fn refuse_stranger(&self, agent: AgentId, refusal: Refusal, actions: &mut Vec<Action>) {
        let order = Some(Order::Refuse(refusal));
        // Higher than what it may have heard of this coordinator before.
        let message = OrderMessage { term: self.term, seq: u64::MAX, order, heard: 0, ask: 0 };
        actions.push(Action::Send { agent, message });
    }

    fn max(&self) -> usize {
        self.range.as_ref().map_or(usize::MAX, |(_, max, _)| *max)
    }

    fn min(&self) -> usize {
        self.range.as_ref().map_or(usize::MAX, |(min, ..)| *min)
    }
}
