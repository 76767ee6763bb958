//! Coordinators of the simulation. There is either one at an endpoint apart from all nodes, or a leader that
//! is elected by etcd.
//! In etcd any node may become leader, even while a former leader that is cut off does not know.

use std::time::Duration;

use super::super::*;
use super::world::{Item, SILENCE, World};

/// Leader lease.
const TTL: Duration = Duration::from_secs(2);
/// Time for which a coordinator stays after its node has left.
const LINGER: Duration = Duration::from_secs(1);

/// A coordinator of the simulation.
pub(super) struct Office {
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
pub(super) struct Place {
    pub(super) term: u64,
    /// Node that runs the coordinator of that term.
    holder: Option<(usize, AgentId)>,
    held_until: Duration,
    record: Option<Record>,
}

impl World {
    // ---- at an endpoint ----

    /// Starts another coordinator at the endpoint.
    pub(super) fn serve(&mut self, suspect: Option<(AgentId, Duration)>) {
        self.place.term += 1;
        self.offices.clear();
        self.open(self.place.term, None, suspect);
        for agent in 0..self.agents.len() {
            self.find(agent);
        }
    }

    // ---- in etcd ----

    fn reaches_etcd(&self, index: usize) -> bool {
        let agent = &self.agents[index];
        !(agent.mute || agent.deaf || agent.etcd_cut || agent.off)
    }

    /// Returns true if messages can pass in both directions.
    fn is_path_open(&self, one: usize, other: usize) -> bool {
        let open =
            |index: usize| !(self.agents[index].mute || self.agents[index].deaf || self.agents[index].off);
        one == other || open(one) && open(other)
    }

    /// Returns true if an agent can have a connection to the coordinator of that term.
    pub(super) fn is_open_to(&self, index: usize, term: u64) -> bool {
        let agent = &self.agents[index];
        match self.offices.get(&term).map(|office| office.host) {
            Some(Some(host)) => self.is_path_open(index, host),
            Some(None) => !agent.mute && !agent.deaf,
            None => false,
        }
    }

    /// Finds the coordinator and connects to it, or becomes the coordinator if there is none.
    pub(super) fn find(&mut self, index: usize) {
        if self.agents[index].paused || !self.agents[index].is_at_work() {
            return;
        }
        if !self.claimed {
            return self.connect(index);
        }
        if !self.reaches_etcd(index) {
            return;
        }
        let held = self.now < self.place.held_until;
        let ending = self.place.record.as_ref().and_then(|record| record.ending.clone());
        if let Some(ending) = ending.filter(|_| !held) {
            let news = match self.agents[index].last_round {
                0 => News::Refuse(Refusal::Closed(ending)),
                _ => News::End(ending),
            };
            return self.obey(index, news);
        }
        let (term, at) = (self.place.term, self.agents[index].at);
        // The host answers, but no process listens there.
        let refused = self.place.holder.is_some_and(|(host, _)| self.is_path_open(index, host))
            && !self.offices.contains_key(&term);
        if term == 0 || refused || !held && at == term {
            self.take_over(index, refused);
        }
        if at != self.place.term && self.is_open_to(index, at) {
            let id = self.agents[index].id;
            self.after(Duration::ZERO, Item::Cut { id, term: at });
        }
        let agent = &mut self.agents[index];
        (agent.at, agent.heard_at) = (self.place.term, self.now);
        self.connect(index);
    }

    fn take_over(&mut self, index: usize, refused: bool) {
        let wait = if refused { self.rules.reconnect } else { mandate::patience(SILENCE, TTL) };
        let suspect = self.place.holder.map(|(_, agent)| (agent, wait));
        let (term, agent) = (self.place.term + 1, self.agents[index].id);
        self.note(|| format!("{index} coordinates from now on, term {term}, suspect {suspect:?}"));
        let place = &mut self.place;
        (place.term, place.holder, place.held_until) = (term, Some((index, agent)), self.now + TTL);
        self.open(term, Some(index), suspect);
        self.after(TTL / mandate::BEATS, Item::Keep { term });
    }

    pub(super) fn keep(&mut self, term: u64) {
        let Some(Office { host: Some(host), machine, .. }) = self.offices.get(&term) else { return };
        let (host, rests) = (*host, machine.is_useless());
        if !self.agents[host].paused && self.reaches_etcd(host) {
            if self.place.term > term {
                self.note(|| format!("the coordinator of term {term} learns that it has been replaced"));
                return self.vanish(term);
            }
            if !rests {
                self.place.held_until = self.now + TTL;
                self.offices.get_mut(&term).unwrap().confirmed = self.now;
            }
            self.write_down(term);
        }
        self.after(TTL / mandate::BEATS, Item::Keep { term });
    }

    /// Returns true if the coordinator may answer its members.
    fn may_answer(&mut self, term: u64) -> bool {
        let Some(Office { host: Some(host), machine, began, confirmed, .. }) = self.offices.get(&term) else {
            return true;
        };
        if mandate::is_certain(self.now - *confirmed, TTL) {
            return true;
        }
        let (host, own) = (*host, self.agents[*host].id);
        let may = mandate::is_in_touch(machine, own, self.now - *began, TTL);
        if may && !self.reaches_etcd(host) {
            self.note_rounds_cut_off(term, host, own);
        }
        may
    }

    /// Notes rounds half of which is cut off from etcd with its coordinator. They continue, because no node
    /// there can know that etcd is alive.
    fn note_rounds_cut_off(&mut self, term: u64, host: usize, own: AgentId) {
        for (round, seats) in &self.rounds {
            let Some((_, assignment)) = seats.values().next() else { continue };
            let is_own = seats.values().any(|(id, _)| *id == own);
            let others = assignment.group_world_size - usize::from(is_own);
            let here = self.agents.iter().enumerate().filter(|(index, agent)| {
                let is_in = agent.id != own && seats.values().any(|(id, _)| *id == agent.id);
                is_in && agent.is_at_work() && agent.at == term && self.is_path_open(*index, host)
            });
            if 2 * here.count() >= others {
                self.cut_off.insert(*round);
            }
        }
    }

    // ---- both ----

    fn open(&mut self, term: u64, host: Option<usize>, suspect: Option<(AgentId, Duration)>) {
        let entropy = u128::from(self.random.next()) << 64;
        let mut machine = match self.place.record.clone() {
            Some(record) => Coordinator::resume(self.rules, term, entropy, record, suspect),
            None => Coordinator::new(self.rules, term, entropy),
        };
        machine.planted.bug = self.bug;
        let (began, confirmed) = (self.now, self.now);
        let office = Office { machine, began, tick_at: None, host, confirmed, unwritten: None, writes: 0 };
        self.offices.insert(term, office);
    }

    pub(super) fn coordinate(&mut self, term: u64, event: Event) {
        let Some(office) = self.offices.get_mut(&term) else { return };
        if office.host.is_some_and(|host| self.agents[host].paused) {
            return;
        }
        let mut actions = Vec::new();
        office.machine.handle(self.now - office.began, event, &mut actions);
        let wake = office.machine.wake_at().map(|at| (office.began + at).max(self.now));
        if let Some(at) = wake
            && office.tick_at.is_none_or(|tick| at < tick)
        {
            office.tick_at = Some(at);
            self.at(at, Item::CoordinatorTick { term });
        }
        for action in actions {
            match action {
                Action::Send { agent, message } => {
                    if let Some(to) = self.agents.iter().position(|other| other.id == agent)
                        && self.may_answer(term)
                    {
                        self.send(to, term, false, Item::Order { to, id: agent, message });
                    }
                }
                Action::Write(record) => {
                    if let Some(office) = self.offices.get_mut(&term) {
                        office.unwritten = Some(record);
                        office.writes += 1;
                        self.write_down(term);
                    }
                }
            }
        }
    }

    pub(super) fn tick(&mut self, term: u64) {
        let Some(office) = self.offices.get_mut(&term) else { return };
        office.tick_at.take_if(|at| *at <= self.now);
        self.coordinate(term, Event::Tick);
    }

    fn write_down(&mut self, term: u64) {
        let Some(host) = self.offices.get(&term).map(|office| office.host) else { return };
        if self.place.term != term
            || host.is_some_and(|host| self.agents[host].paused || !self.reaches_etcd(host))
        {
            return;
        }
        let office = self.offices.get_mut(&term).unwrap();
        let Some(record) = office.unwritten.take() else { return };
        let write = office.writes;
        // The record is written even if the coordinator dies before it is told so.
        self.place.record = Some(record);
        // The registry may be slow.
        let longest = if self.random.percent(5) { 8000 } else { 20 };
        let delay = self.random.millis(0, longest);
        self.after(delay, Item::Written { term, write });
    }

    pub(super) fn written(&mut self, term: u64, write: u64) {
        let Some(office) = self.offices.get(&term) else { return };
        if office.host.is_some_and(|host| self.agents[host].paused) {
            // A paused process is told later, when it runs again.
            self.after(Duration::from_millis(100), Item::Written { term, write });
        } else if office.writes == write {
            // If a later record exists by now, only that one counts.
            self.coordinate(term, Event::Written);
        }
    }

    /// The node of a coordinator leaves. The coordinator stays until all members have been told.
    pub(super) fn leave_office(&mut self, index: usize) {
        for term in self.terms_of(index) {
            self.after(LINGER, Item::Close { term });
        }
    }

    pub(super) fn close(&mut self, term: u64) {
        if self.place.term == term {
            self.place.held_until = self.now;
        }
        self.vanish(term);
    }

    /// The process or the host of a coordinator dies.
    pub(super) fn die_in_office(&mut self, index: usize) {
        for term in self.terms_of(index) {
            self.vanish(term);
        }
    }

    fn terms_of(&self, index: usize) -> Vec<u64> {
        let own = self.offices.iter().filter(|(_, office)| office.host == Some(index));
        own.map(|(term, _)| *term).collect()
    }

    /// Removes a coordinator. Agents with a connection to it notice that if they can.
    fn vanish(&mut self, term: u64) {
        for agent in 0..self.agents.len() {
            if self.agents[agent].at == term && self.is_open_to(agent, term) {
                let (id, delay) = (self.agents[agent].id, self.random.millis(0, 300));
                self.after(delay, Item::Find { agent, id });
            }
        }
        self.offices.remove(&term);
    }

    /// Returns the node whose process runs the coordinator of the highest term.
    pub(super) fn coordinating(&self) -> Option<usize> {
        self.place.holder.map(|(host, _)| host)
    }
}
