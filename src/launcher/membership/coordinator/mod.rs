//! The coordinator decides on rounds, restarts and the outcome of a job for all members. Pure: the caller
//! supplies the time and the events, and carries out the returned actions.
//!
//! With n members, an ordinary event costs O(log n). The start and end of a round, a failure and the loss of
//! a node send one message to each member: O(n). A member is lost if no status of it arrives for
//! [`Rules::heartbeat_timeout`]. A member whose connection breaks has [`RECONNECT_TIMEOUT`] to
//! reconnect.

use std::collections::BTreeMap;
use std::time::Duration;

use super::injected_bug::{Bug, InjectedBug};
use super::messages::{AgentId, JobResult, Order, OrderMessage, Phase, Profile, Refusal, Status};
use super::record::Record;

mod forming;
mod members;
mod round;
mod stages;

use forming::Forming;
use members::Members;
use round::{NodeState, Round};

/// Time since the coordinator started.
pub(crate) type Time = Duration;

/// Interval at which the coordinator tells waiting members which nodes have joined.
const JOIN_STATUS_PERIOD: Duration = Duration::from_secs(10);
/// Factor by which the heartbeat timeout of members without workers is longer. Many agents may start at once
/// on one machine and be slow to send statuses.
pub(crate) const IDLE_TIMEOUT_FACTOR: u32 = 4;
/// Minimum of the heartbeat timeout for each node on the same host. If all nodes of the host start at once,
/// each may delay the statuses of the other nodes by this much.
const TIMEOUT_PER_NODE_ON_HOST: Duration = Duration::from_millis(20);
/// Maximum number of statuses of a member whose receive times the coordinator remembers until the member
/// acknowledges the answers.
const MAX_UNACKED_STATUSES: usize = 8;
/// Time that a member has to reconnect after its connection broke. After that it is lost.
pub(crate) const RECONNECT_TIMEOUT: Duration = Duration::from_millis(200);
/// Number of rounds that a host may end before spare nodes are preferred to it.
const MAX_HOST_FAILURES: u32 = 2;
/// Longest time that a member may take to stop its workers before the coordinator evicts it.
const STOP_TIMEOUT: Duration = Duration::from_secs(90);
/// Time within which a scheduler that cancels the whole job signals all its nodes. After a signal has stopped
/// a node, no new round starts for this long.
const STOP_SPREAD: Duration = Duration::from_secs(1);

/// Command-line settings for rounds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Time for which the first round stays open for more nodes once the minimum has joined.
    pub(crate) last_call: Duration,
    /// Longest time that a node waits for a round.
    pub(crate) join_timeout: Duration,
    /// Heartbeat timeout: a member is lost if no status of it arrives for this long.
    pub(crate) heartbeat_timeout: Duration,
    /// Restart limit of `restart_budget=job`: failures of all nodes count together. `None` if each node has
    /// its own limit.
    pub(crate) job_budget: Option<u32>,
}

impl Rules {
    /// Returns the heartbeat timeout if up to `nodes_on_host` nodes run on one host. It grows with that
    /// number because these nodes share the cores of the host.
    pub(crate) fn heartbeat_timeout_for(&self, nodes_on_host: usize) -> Duration {
        let nodes_on_host = u32::try_from(nodes_on_host).unwrap_or(u32::MAX);
        self.heartbeat_timeout.max(TIMEOUT_PER_NODE_ON_HOST.saturating_mul(nodes_on_host))
    }
}

/// An input of the coordinator, which its caller passes to [`Coordinator::handle`].
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// An agent has connected, for the first time or again, to be a member.
    Hello { agent: AgentId, profile: Profile },
    /// A member has sent its status.
    Status { agent: AgentId, status: Status },
    /// The connection of a member broke.
    Disconnected { agent: AgentId },
    /// The latest record of [`Action::Write`] has been written.
    Written,
    /// The process of this coordinator, agent `agent` on `host`, exits, and no other coordinator can take
    /// over. `why` is the reason.
    CoordinatorExited { agent: AgentId, host: String, why: String },
    /// The time returned by [`Coordinator::wake_at`] has come.
    Tick,
}

/// An output of the coordinator, for its caller to carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send a message to a member.
    Send { agent: AgentId, message: OrderMessage },
    /// Write the record, then report [`Event::Written`].
    Write(Record),
}

#[derive(Debug)]
enum Stage {
    Forming(Forming),
    /// The coordinator has decided on a round and is writing the record.
    Starting(Round),
    Live(Round),
    /// The coordinator has decided how the job ends and is writing the record.
    Finishing(JobResult),
    Finished(JobResult),
}

/// The coordinator of one job.
#[derive(Debug)]
pub(crate) struct Coordinator {
    rules: Rules,
    term: u64,
    /// Random number. The generation of a round (its unique id) is this number plus the number of the round.
    entropy: u128,
    /// `--nnodes` of the first member (minimum and maximum), and the host name of that member.
    range: Option<(usize, usize, String)>,
    members: Members,
    round: u64,
    failures: u32,
    /// Number of rounds that each host has ended by a failure or its loss.
    failed_hosts: BTreeMap<String, u32>,
    last_probe_sent: u64,
    stage: Stage,
    /// Time of the event that is being processed, and what the caller must do because of it.
    now: Time,
    actions: Vec<Action>,
    pub(super) injected_bug: InjectedBug,
}

impl Coordinator {
    /// Starts the coordinator of a new job. `entropy` is random.
    pub(crate) fn new(rules: Rules, term: u64, entropy: u128) -> Self {
        Self {
            rules,
            term,
            entropy,
            range: None,
            members: Members::default(),
            round: 0,
            failures: 0,
            failed_hosts: BTreeMap::new(),
            // Every probe of this term has a higher number than those of earlier terms.
            last_probe_sent: term << 32,
            stage: Stage::Forming(Forming { join_status_at: JOIN_STATUS_PERIOD, ..Forming::default() }),
            now: Duration::ZERO,
            actions: Vec::new(),
            injected_bug: InjectedBug::default(),
        }
    }

    /// Continues, from its `record`, a job that another coordinator started. Nodes of the record are lost
    /// unless a status of them arrives within the heartbeat timeout. `suspect` is the agent that ran the
    /// former coordinator, and the time after which that agent is lost.
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
        resumed.failed_hosts.clone_from(&record.failed_hosts);
        resumed.members.max_on_host = record.max_nodes_on_host();
        if let Some(result) = record.result {
            resumed.stage = Stage::Finished(result);
        } else if record.round > 0 {
            for (rank, node) in record.nodes.iter().enumerate() {
                if record.left.iter().all(|(left, _)| *left != rank) {
                    resumed.add_member(node.agent, node.profile.clone());
                }
                resumed.members.ranks.insert(node.agent, rank);
            }
            resumed.stage = Stage::Live(Round::new(record, &rules));
        }
        if let Some((agent, due)) = suspect {
            let due = due.min(resumed.heartbeat_timeout());
            resumed.members.set_due(agent, due);
        }
        resumed
    }

    /// Processes `event` at the time `now`, which never decreases from event to event. Appends what the
    /// caller must do to `actions`.
    pub(crate) fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        self.now = now;
        match event {
            Event::Hello { agent, profile } => self.hello(agent, profile),
            Event::Status { agent, status } => self.status(agent, status),
            Event::Disconnected { agent } => {
                if let Some(due) = self.members.get(agent).map(|known| known.due) {
                    self.members.set_due(agent, due.min(now + RECONNECT_TIMEOUT));
                }
            }
            Event::Written => self.written(),
            Event::CoordinatorExited { agent, host, why } => {
                if !matches!(self.stage, Stage::Finishing(_) | Stage::Finished(_)) {
                    let node = self.members.ranks.get(&agent).copied();
                    self.end(JobResult::CoordinatorExited { node, host, why });
                }
            }
            Event::Tick => self.tick(),
        }
        actions.append(&mut self.actions);
    }

    /// Returns the time at which the coordinator needs an [`Event::Tick`], or `None` if it waits only for
    /// other events.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let due = self.members.due.first().map(|(due, _)| *due);
        let Stage::Forming(forming) = &self.stage else { return due };
        let first = self.members.waiting.first();
        let first = first.map(|(since, _)| *since.max(&forming.since) + self.rules.join_timeout);
        let join_status = first.map(|_| forming.join_status_at);
        let stop = (!forming.stopping.is_empty()).then_some(forming.since + STOP_TIMEOUT);
        [due, forming.not_before, forming.last_call, first, join_status, stop].into_iter().flatten().min()
    }

    /// Returns true if at least half of the nodes of the latest round, not counting the agent `own`, are
    /// reachable, see [`Members::is_acked_by_half`].
    pub(crate) fn is_acked_by_half(&self, own: AgentId, since: Time) -> bool {
        self.members.is_acked_by_half(own, since)
    }

    /// Returns true if no member may have workers.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(&self.stage, Stage::Forming(forming) if forming.stopping.is_empty())
    }

    /// Returns true if the job does not need this coordinator: no member may have workers, and too few nodes
    /// have joined for a round.
    pub(crate) fn is_unneeded(&self) -> bool {
        self.is_idle() && self.members.candidates.len() < self.min()
    }

    /// Returns the outcome of the job, or `None` if the job has not ended.
    pub(crate) fn result(&self) -> Option<&JobResult> {
        if let Stage::Finished(result) = &self.stage { Some(result) } else { None }
    }

    /// Returns true if the job has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.result().is_some()
    }

    /// Returns true if `agent` is a member.
    pub(crate) fn is_member(&self, agent: AgentId) -> bool {
        self.members.contains(agent)
    }

    /// Returns true if no member remains.
    pub(crate) fn has_no_members(&self) -> bool {
        self.members.known.is_empty()
    }

    fn hello(&mut self, agent: AgentId, profile: Profile) {
        if self.members.former.contains(&agent) {
            let silent_s = self.heartbeat_timeout().as_secs();
            return self.refuse_non_member(agent, Refusal::Evicted { silent_s });
        }
        if let Stage::Finishing(result) | Stage::Finished(result) = &self.stage
            && !self.members.ranks.contains_key(&agent)
            && !self.members.contains(agent)
        {
            return self.refuse_non_member(agent, Refusal::Closed(result.clone()));
        }
        let mine = (profile.min, profile.max);
        if let Some((min, max, host)) = &self.range
            && mine != (*min, *max)
        {
            if self.members.known.values().any(|known| known.phase.is_some()) {
                let refusal = Refusal::NodeCountMismatch { mine, theirs: (*min, *max), host: host.clone() };
                return self.refuse_non_member(agent, refusal);
            }
            // No member has sent a status yet, so this `--nnodes` comes from the former coordinator's record.
            // The nodes of the record may all be gone, which is known after their heartbeat timeout. The new
            // node gets no answer and tries again.
            if !self.members.known.is_empty() {
                return;
            }
            self.range = None;
        }
        if self.injected_bug.is(Bug::RestartsOnReconnect) && self.members.contains(agent) {
            self.member_lost(agent, None);
            self.members.former.remove(&agent);
        }
        if self.members.contains(agent) {
            self.members.set_due(agent, self.now + self.heartbeat_timeout());
        } else {
            self.add_member(agent, profile);
        }
        // The member may have missed the latest order.
        if self.members.get(agent).is_some_and(|known| known.order.is_some()) {
            self.send(agent, true);
        }
    }

    /// Returns the heartbeat timeout of a member with workers.
    fn heartbeat_timeout(&self) -> Duration {
        self.rules.heartbeat_timeout_for(self.members.max_on_host)
    }

    fn add_member(&mut self, agent: AgentId, profile: Profile) {
        self.range.get_or_insert_with(|| (profile.min, profile.max, profile.host.clone()));
        self.members.add(&self.rules, self.now, agent, profile);
    }

    fn status(&mut self, agent: AgentId, status: Status) {
        let term = self.term;
        let Some(known) = self.members.known.get_mut(&agent) else { return };
        let news = status.seq > known.seq && known.phase.as_ref() != Some(&status.phase);
        let answers = status.last_probe > known.last_probe;
        known.last_probe = known.last_probe.max(status.last_probe);
        let has_all_orders = status.last_order >= (term, known.order_seq);
        known.seq = known.seq.max(status.seq);
        if news {
            known.phase = Some(status.phase);
        }
        known.unacked.push_back((status.seq, self.now));
        if known.unacked.len() > MAX_UNACKED_STATUSES {
            known.unacked.pop_front();
        }
        while let Some(&(seq, came)) = known.unacked.front()
            && seq <= status.answered
        {
            known.last_acked = known.last_acked.max(came);
            known.unacked.pop_front();
        }
        let has_workers = !matches!(known.phase, Some(Phase::Ready { .. })) || self.has_run_order(agent);
        let heartbeat_timeout = self.heartbeat_timeout() * if has_workers { 1 } else { IDLE_TIMEOUT_FACTOR };
        self.members.set_due(agent, self.now + heartbeat_timeout);
        if news {
            self.phase_changed(agent);
        }
        if answers {
            self.probe_answered(agent);
        }
        if self.members.contains(agent) {
            self.send(agent, !has_all_orders);
        }
    }

    fn tick(&mut self) {
        while let Some(&(due, agent)) = self.members.due.first()
            && due <= self.now
        {
            self.member_lost(agent, None);
        }
        self.tick_forming();
    }

    /// Returns true if the member takes part in the running round, so that the coordinator has ordered it to
    /// run workers.
    fn has_run_order(&self, agent: AgentId) -> bool {
        matches!(self.stage, Stage::Live(_)) && self.members.ranks.contains_key(&agent)
    }

    /// Orders a member to wait for the next round.
    fn order_to_wait(&mut self, agent: AgentId) {
        let mut join_status = self.join_status();
        let host = self.members.get(agent).map(|known| &known.profile.host);
        join_status.is_replaced = join_status.standby && host.is_some_and(|host| self.fails_often(host));
        self.order(agent, Order::Wait(join_status));
    }

    /// Returns true if a spare node is to replace a node on this host.
    fn fails_often(&self, host: &str) -> bool {
        self.failed_hosts.get(host).is_some_and(|rounds| *rounds >= MAX_HOST_FAILURES)
    }

    /// Sends a new order to a member, unless the member's latest order is the same.
    fn order(&mut self, agent: AgentId, order: Order) {
        let Some(known) = self.members.known.get_mut(&agent) else { return };
        if known.order.as_ref() == Some(&order) {
            return;
        }
        known.order = Some(order);
        known.order_seq += 1;
        self.send(agent, true);
    }

    fn send(&mut self, agent: AgentId, with_order: bool) {
        let Some(known) = self.members.get(agent) else { return };
        let order = known.order.clone().filter(|_| with_order);
        let (term, seq, last_status, probe) = (self.term, known.order_seq, known.seq, self.last_probe_sent);
        self.actions
            .push(Action::Send { agent, message: OrderMessage { term, seq, order, last_status, probe } });
    }

    /// Sends a refusal to an agent that is not, or no longer, a member.
    fn refuse_non_member(&mut self, agent: AgentId, refusal: Refusal) {
        let order = Some(Order::Refuse(refusal));
        // This sequence number exceeds that of every order which the agent may have received from this
        // coordinator, so that the agent obeys the refusal.
        let message = OrderMessage { term: self.term, seq: u64::MAX, order, last_status: 0, probe: 0 };
        self.actions.push(Action::Send { agent, message });
    }

    fn max(&self) -> usize {
        self.range.as_ref().map_or(usize::MAX, |(_, max, _)| *max)
    }

    fn min(&self) -> usize {
        self.range.as_ref().map_or(usize::MAX, |(min, ..)| *min)
    }
}
