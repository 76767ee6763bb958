//! Faults of the simulation.

use std::time::Duration;

use super::super::*;
use super::agent::Agent;
use super::world::{Item, SILENCE, World};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The process dies, and with it its connection and its workers.
    Kill(usize),
    /// The host loses power: no message leaves it.
    PowerOff(usize),
    /// A new process starts on that host.
    Start(usize),
    Mute(usize),
    Deaf(usize),
    Partition(usize),
    Heal(usize),
    Pause(usize),
    Resume(usize),
    /// The connection breaks; both processes live.
    Break(usize),
    /// A worker of the agent fails by itself.
    FailWorker(usize),
    /// A signal stops the agent.
    Stop(usize),
    /// The coordinator dies. Another one takes over soon.
    KillCoordinator,
    /// The host of the coordinator loses power. Another coordinator takes over when the leases have expired.
    KillHost(usize),
    /// That host cannot reach etcd.
    CutEtcd(usize),
    /// No faults occur from now on.
    Peace,
}

/// A fault at a node that is chosen later.
pub(super) type At = fn(usize) -> Fault;

impl World {
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
                let term = agent.at;
                if fault == Fault::Kill(index) && self.is_open_to(index, term) {
                    let delay = self.random.millis(0, self.nature.delay_ms);
                    self.after(delay, Item::Cut { id, term });
                }
                self.agents[index].off = fault == Fault::PowerOff(index);
                self.die_in_office(index);
                self.bereave(index, round, 0);
            }
            Fault::Start(index) => {
                if self.agents[index].is_at_work() || matches!(self.agents[index].ended, Some(News::End(_))) {
                    return;
                }
                let id = self.fresh_id();
                let agent = &mut self.agents[index];
                (agent.alive, agent.ended, agent.paused, agent.restarts) = (true, None, false, 0);
                (agent.off, agent.at) = (false, 0);
                agent.join_anew(id, SILENCE);
                self.begin(index);
            }
            Fault::Mute(index) => self.disturb(index, |agent| agent.mute = true),
            Fault::Deaf(index) => self.disturb(index, |agent| agent.deaf = true),
            Fault::Partition(index) => {
                self.disturb(index, |agent| (agent.mute, agent.deaf) = (true, true));
                let round = self.agents[index].workers.map(|workers| workers.round);
                // Connections survive a short interruption.
                self.bereave(index, round, SILENCE.as_millis() as u64);
            }
            Fault::Heal(index) => {
                self.disturb(index, |agent| (agent.mute, agent.deaf, agent.etcd_cut) = (false, false, false));
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
                    let (id, term) = (self.agents[index].id, self.agents[index].at);
                    self.after(Duration::from_millis(1), Item::Cut { id, term });
                    self.after(Duration::from_millis(30), Item::Hello { from: index, id, term });
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
                let Some(round) = agent.workers.map(|workers| workers.round) else {
                    return self.depart(index);
                };
                agent.member.enter(Phase::Leaving { round, signal: 15 });
                self.tell(index);
                self.stop_workers(index);
                self.bereave(index, Some(round), 0);
            }
            Fault::CutEtcd(index) => self.disturb(index, |agent| agent.etcd_cut = true),
            Fault::KillCoordinator => {
                self.offices.clear();
                let delay = self.random.millis(10, 500);
                self.after(delay, Item::CoordinatorStart { suspect: None });
            }
            Fault::KillHost(index) => {
                let suspect = Some((self.agents[index].id, self.random.millis(0, 1500)));
                self.fault(Fault::PowerOff(index));
                self.offices.clear();
                let delay = self.random.millis(2000, 6000);
                self.after(delay, Item::CoordinatorStart { suspect });
            }
            Fault::Peace => self.make_peace(),
        }
    }

    /// Ends an agent that a signal has told to leave.
    pub(super) fn depart(&mut self, index: usize) {
        let agent = &mut self.agents[index];
        let (id, term) = (agent.id, agent.at);
        agent.workers = None;
        agent.member.enter(Phase::Left(Departure::Stopped { signal: 15 }));
        self.tell(index);
        self.agents[index].alive = false;
        let delay = self.random.millis(0, self.nature.delay_ms);
        self.after(delay, Item::Cut { id, term });
        self.leave_office(index);
        if self.peace {
            self.after(Duration::from_secs(1), Item::Fault(Fault::Start(index)));
        }
    }

    fn disturb(&mut self, index: usize, what: impl FnOnce(&mut Agent)) {
        self.agents[index].disturbed = true;
        what(&mut self.agents[index]);
    }

    /// Node `of` of the round is gone. After a while workers of the other nodes may fail because of that.
    fn bereave(&mut self, of: usize, round: Option<u64>, after_ms: u64) {
        let Some(round) = round else { return };
        let is_in = |agent: &Agent| agent.workers.is_some_and(|workers| workers.round == round);
        let in_it: Vec<usize> = (0..self.agents.len()).filter(|&index| is_in(&self.agents[index])).collect();
        for &index in &in_it {
            // A node without others in its round loses no peer.
            if in_it != [of] && self.random.percent(50) {
                let id = self.agents[index].id;
                let delay = self.random.millis(after_ms, after_ms + 4000);
                self.after(delay, Item::Bereaved { agent: index, id, round, of });
            }
        }
    }

    fn make_peace(&mut self) {
        self.peace = true;
        self.nature.loss_percent = 0;
        if !self.claimed && self.offices.is_empty() {
            self.serve(None);
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
