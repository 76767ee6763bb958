//! Coordinators of the simulation. There is either one at an endpoint apart from all nodes, or a leader that
//! is elected by etcd.
//! In etcd any node may become leader, even while a former leader that is cut off does not know.

use std::time::Duration;

use super::super::*;
use super::simulation::{HEARTBEAT_TIMEOUT, SimEvent, Simulation};

/// Leader lease.
const TTL: Duration = Duration::from_secs(2);
/// Time for which a coordinator stays after its node has left.
const LINGER: Duration = Duration::from_secs(1);

/// A coordinator of the simulation.
pub(super) struct CoordinatorProcess {
    pub(super) machine: Coordinator,
    began: Duration,
    /// Time of its next tick.
    tick_at: Option<Duration>,
    /// Node whose process runs it; none at an endpoint.
    pub(super) host: Option<usize>,
    /// Time at which etcd last confirmed its lease.
    confirmed: Duration,
    /// Record that is still to be written. `writes` counts the records so far.
    unwritten: Option<Record>,
    pub(super) writes: u64,
}

/// State of etcd, or of the process that serves the endpoint.
#[derive(Default)]
pub(super) struct RegistryState {
    pub(super) term: u64,
    /// Node that runs the coordinator of that term.
    leader: Option<(usize, AgentId)>,
    leased_until: Duration,
    record: Option<Record>,
}

impl Simulation {
    // ---- at an endpoint ----

    /// Starts another coordinator at the endpoint.
    pub(super) fn serve(&mut self, suspect: Option<(AgentId, Duration)>) {
        self.registry.term += 1;
        self.coordinators.clear();
        self.start_coordinator(self.registry.term, None, suspect);
        for agent in 0..self.agents.len() {
            self.discover(agent);
        }
    }

    // ---- in etcd ----

    fn can_reach_etcd(&self, index: usize) -> bool {
        let agent = &self.agents[index];
        !(agent.outbound_cut || agent.inbound_cut || agent.is_cut_from_etcd || agent.powered_off)
    }

    /// Returns true if messages can pass in both directions.
    fn can_exchange(&self, one: usize, other: usize) -> bool {
        let open = |index: usize| {
            !(self.agents[index].outbound_cut
                || self.agents[index].inbound_cut
                || self.agents[index].powered_off)
        };
        one == other || open(one) && open(other)
    }

    /// Returns true if an agent can have a connection to the coordinator of that term.
    pub(super) fn can_connect(&self, index: usize, term: u64) -> bool {
        let agent = &self.agents[index];
        match self.coordinators.get(&term).map(|process| process.host) {
            Some(Some(host)) => self.can_exchange(index, host),
            Some(None) => !agent.outbound_cut && !agent.inbound_cut,
            None => false,
        }
    }

    /// Finds the coordinator and connects to it, or becomes the coordinator if there is none.
    pub(super) fn discover(&mut self, index: usize) {
        if self.agents[index].paused || !self.agents[index].is_active() {
            return;
        }
        if !self.is_elected {
            return self.connect(index);
        }
        if !self.can_reach_etcd(index) {
            return;
        }
        let is_leased = self.now < self.registry.leased_until;
        let result = self.registry.record.as_ref().and_then(|record| record.result.clone());
        if let Some(result) = result.filter(|_| !is_leased) {
            let command = match self.agents[index].last_round {
                0 => Command::Refuse(Refusal::Closed(result)),
                _ => Command::End(result),
            };
            return self.execute(index, command);
        }
        let (term, at) = (self.registry.term, self.agents[index].term);
        // The host answers, but no process listens there.
        let refused = self.registry.leader.is_some_and(|(host, _)| self.can_exchange(index, host))
            && !self.coordinators.contains_key(&term);
        if term == 0 || refused || !is_leased && at == term {
            self.become_leader(index, refused);
        }
        if at != self.registry.term && self.can_connect(index, at) {
            let id = self.agents[index].id;
            self.after(Duration::ZERO, SimEvent::Disconnected { id, term: at });
        }
        let agent = &mut self.agents[index];
        (agent.term, agent.last_message_at) = (self.registry.term, self.now);
        self.connect(index);
    }

    fn become_leader(&mut self, index: usize, refused: bool) {
        let wait =
            if refused { RECONNECT_TIMEOUT } else { leader_lease::takeover_delay(HEARTBEAT_TIMEOUT, TTL) };
        let suspect = self.registry.leader.map(|(_, agent)| (agent, wait));
        let (term, agent) = (self.registry.term + 1, self.agents[index].id);
        self.note(|| format!("{index} coordinates from now on, term {term}, suspect {suspect:?}"));
        let registry = &mut self.registry;
        (registry.term, registry.leader, registry.leased_until) =
            (term, Some((index, agent)), self.now + TTL);
        self.start_coordinator(term, Some(index), suspect);
        self.after(TTL / leader_lease::RENEWALS_PER_TTL, SimEvent::RenewLease { term });
    }

    pub(super) fn renew_lease(&mut self, term: u64) {
        let Some(CoordinatorProcess { host: Some(host), machine, .. }) = self.coordinators.get(&term) else {
            return;
        };
        let (host, is_idle) = (*host, machine.is_unneeded());
        if !self.agents[host].paused && self.can_reach_etcd(host) {
            if self.registry.term > term {
                self.note(|| format!("the coordinator of term {term} learns that it has been replaced"));
                return self.remove_coordinator(term);
            }
            if !is_idle {
                self.registry.leased_until = self.now + TTL;
                self.coordinators.get_mut(&term).unwrap().confirmed = self.now;
            }
            self.write_record(term);
        }
        self.after(TTL / leader_lease::RENEWALS_PER_TTL, SimEvent::RenewLease { term });
    }

    /// Returns true if the coordinator may answer its members.
    fn may_answer(&mut self, term: u64) -> bool {
        let Some(CoordinatorProcess { host: Some(host), machine, began, confirmed, .. }) =
            self.coordinators.get(&term)
        else {
            return true;
        };
        if leader_lease::is_confirmed(self.now - *confirmed, TTL) {
            return true;
        }
        let (host, own) = (*host, self.agents[*host].id);
        let may = leader_lease::has_quorum(machine, own, self.now - *began, TTL);
        if may && !self.can_reach_etcd(host) {
            self.note_rounds_cut_off(term, host, own);
        }
        may
    }

    /// Notes rounds half of which is cut off from etcd with its coordinator. They continue, because no node
    /// there can know that etcd is alive.
    fn note_rounds_cut_off(&mut self, term: u64, host: usize, own: AgentId) {
        for (round, nodes) in &self.rounds {
            let Some((_, assignment)) = nodes.values().next() else { continue };
            let is_own = nodes.values().any(|(id, _)| *id == own);
            let others = assignment.group_world_size - usize::from(is_own);
            let here = self.agents.iter().enumerate().filter(|(index, agent)| {
                let is_in = agent.id != own && nodes.values().any(|(id, _)| *id == agent.id);
                is_in && agent.is_active() && agent.term == term && self.can_exchange(*index, host)
            });
            if 2 * here.count() >= others {
                self.cut_off.insert(*round);
            }
        }
    }

    // ---- both ----

    fn start_coordinator(&mut self, term: u64, host: Option<usize>, suspect: Option<(AgentId, Duration)>) {
        let entropy = u128::from(self.random.next()) << 64;
        let mut machine = match self.registry.record.clone() {
            Some(record) => Coordinator::resume(self.rules, term, entropy, record, suspect),
            None => Coordinator::new(self.rules, term, entropy),
        };
        machine.injected_bug.bug = self.bug;
        let (began, confirmed) = (self.now, self.now);
        let process =
            CoordinatorProcess { machine, began, tick_at: None, host, confirmed, unwritten: None, writes: 0 };
        self.coordinators.insert(term, process);
    }

    pub(super) fn coordinate(&mut self, term: u64, event: Event) {
        let Some(process) = self.coordinators.get_mut(&term) else { return };
        if process.host.is_some_and(|host| self.agents[host].paused) {
            return;
        }
        let mut actions = Vec::new();
        process.machine.handle(self.now - process.began, event, &mut actions);
        let wake = process.machine.wake_at().map(|at| (process.began + at).max(self.now));
        if let Some(at) = wake
            && process.tick_at.is_none_or(|tick| at < tick)
        {
            process.tick_at = Some(at);
            self.at(at, SimEvent::CoordinatorTick { term });
        }
        for action in actions {
            match action {
                Action::Send { agent, message } => {
                    if let Some(to) = self.agents.iter().position(|other| other.id == agent)
                        && self.may_answer(term)
                    {
                        self.send(to, term, false, SimEvent::Order { to, id: agent, message });
                    }
                }
                Action::Write(record) => {
                    if let Some(process) = self.coordinators.get_mut(&term) {
                        process.unwritten = Some(record);
                        process.writes += 1;
                        self.write_record(term);
                    }
                }
            }
        }
    }

    pub(super) fn tick(&mut self, term: u64) {
        let Some(process) = self.coordinators.get_mut(&term) else { return };
        process.tick_at.take_if(|at| *at <= self.now);
        self.coordinate(term, Event::Tick);
    }

    fn write_record(&mut self, term: u64) {
        let Some(host) = self.coordinators.get(&term).map(|process| process.host) else { return };
        if self.registry.term != term
            || host.is_some_and(|host| self.agents[host].paused || !self.can_reach_etcd(host))
        {
            return;
        }
        let process = self.coordinators.get_mut(&term).unwrap();
        let Some(record) = process.unwritten.take() else { return };
        let write = process.writes;
        // The record is written even if the coordinator dies before it is told so.
        self.registry.record = Some(record);
        // The registry may be slow.
        let longest = if self.random.percent(5) { 8000 } else { 20 };
        let delay = self.random.millis(0, longest);
        self.after(delay, SimEvent::Written { term, write });
    }

    pub(super) fn written(&mut self, term: u64, write: u64) {
        let Some(process) = self.coordinators.get(&term) else { return };
        if process.host.is_some_and(|host| self.agents[host].paused) {
            // A paused process is told later, when it runs again.
            self.after(Duration::from_millis(100), SimEvent::Written { term, write });
        } else if process.writes == write {
            // If a later record exists by now, only that one counts.
            self.coordinate(term, Event::Written);
        }
    }

    /// The node of a coordinator leaves. The coordinator stays until all members have been told.
    pub(super) fn close_coordinators(&mut self, index: usize) {
        for term in self.terms_of(index) {
            self.after(LINGER, SimEvent::Close { term });
        }
    }

    pub(super) fn close(&mut self, term: u64) {
        if self.registry.term == term {
            self.registry.leased_until = self.now;
        }
        self.remove_coordinator(term);
    }

    /// The process or the host of a coordinator dies.
    pub(super) fn kill_coordinators(&mut self, index: usize) {
        for term in self.terms_of(index) {
            self.remove_coordinator(term);
        }
    }

    fn terms_of(&self, index: usize) -> Vec<u64> {
        let own = self.coordinators.iter().filter(|(_, process)| process.host == Some(index));
        own.map(|(term, _)| *term).collect()
    }

    /// Removes a coordinator. Agents with a connection to it notice that if they can.
    fn remove_coordinator(&mut self, term: u64) {
        for agent in 0..self.agents.len() {
            if self.agents[agent].term == term && self.can_connect(agent, term) {
                let (id, delay) = (self.agents[agent].id, self.random.millis(0, 300));
                self.after(delay, SimEvent::Discover { agent, id });
            }
        }
        self.coordinators.remove(&term);
    }

    /// Returns the node whose process runs the coordinator of the highest term.
    pub(super) fn leader(&self) -> Option<usize> {
        self.registry.leader.map(|(host, _)| host)
    }
}
