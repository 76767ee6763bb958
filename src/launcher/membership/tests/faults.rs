//! Faults of the simulation.

use std::time::Duration;

use super::super::*;
use super::agent::Agent;
use super::simulation::{HEARTBEAT_TIMEOUT, SimEvent, Simulation};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The process dies, and with it its connection and its workers.
    Kill(usize),
    /// The host loses power: no message leaves it.
    PowerOff(usize),
    /// A new process starts on that host.
    Start(usize),
    CutOutbound(usize),
    CutInbound(usize),
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
    EndFaults,
}

/// A fault at a node that is chosen later.
pub(super) type At = fn(usize) -> Fault;

impl Simulation {
    pub(super) fn fault(&mut self, fault: Fault) {
        self.note(|| format!("{fault:?}"));
        match fault {
            Fault::Kill(index) | Fault::PowerOff(index) => {
                let agent = &mut self.agents[index];
                if !agent.is_active() {
                    return;
                }
                let (id, round) = (agent.id, agent.workers.map(|workers| workers.round));
                (agent.alive, agent.was_disturbed, agent.workers) = (false, true, None);
                let term = agent.term;
                if fault == Fault::Kill(index) && self.can_connect(index, term) {
                    let delay = self.random.millis(0, self.conditions.delay_ms);
                    self.after(delay, SimEvent::Disconnected { id, term });
                }
                self.agents[index].powered_off = fault == Fault::PowerOff(index);
                self.kill_coordinators(index);
                self.schedule_peer_failures(index, round, 0);
            }
            Fault::Start(index) => {
                if self.agents[index].is_active() || matches!(self.agents[index].ended, Some(Command::End(_)))
                {
                    return;
                }
                let id = self.fresh_id();
                let agent = &mut self.agents[index];
                (agent.alive, agent.ended, agent.paused, agent.restarts) = (true, None, false, 0);
                (agent.powered_off, agent.term) = (false, 0);
                agent.rejoin_as(id, HEARTBEAT_TIMEOUT);
                self.begin(index);
            }
            Fault::CutOutbound(index) => self.change_agent(index, |agent| agent.outbound_cut = true),
            Fault::CutInbound(index) => self.change_agent(index, |agent| agent.inbound_cut = true),
            Fault::Partition(index) => {
                self.change_agent(index, |agent| (agent.outbound_cut, agent.inbound_cut) = (true, true));
                let round = self.agents[index].workers.map(|workers| workers.round);
                // Connections survive a short interruption.
                self.schedule_peer_failures(index, round, HEARTBEAT_TIMEOUT.as_millis() as u64);
            }
            Fault::Heal(index) => {
                self.change_agent(index, |agent| {
                    (agent.outbound_cut, agent.inbound_cut, agent.is_cut_from_etcd) = (false, false, false)
                });
                self.connect(index);
            }
            Fault::Pause(index) => self.change_agent(index, |agent| agent.paused = true),
            Fault::Resume(index) => {
                self.agents[index].paused = false;
                if self.agents[index].is_active() {
                    self.check_lease(index);
                    self.connect(index);
                }
            }
            Fault::Break(index) => {
                if self.agents[index].is_active() {
                    let (id, term) = (self.agents[index].id, self.agents[index].term);
                    self.after(Duration::from_millis(1), SimEvent::Disconnected { id, term });
                    self.after(Duration::from_millis(30), SimEvent::Hello { from: index, id, term });
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
                if !agent.is_active() || agent.paused {
                    return;
                }
                agent.was_disturbed = true;
                let Some(round) = agent.workers.map(|workers| workers.round) else {
                    return self.depart(index);
                };
                agent.member.enter(Phase::Leaving { round, signal: 15 });
                self.send_status(index);
                self.stop_workers(index);
                self.schedule_peer_failures(index, Some(round), 0);
            }
            Fault::CutEtcd(index) => self.change_agent(index, |agent| agent.is_cut_from_etcd = true),
            Fault::KillCoordinator => {
                self.coordinators.clear();
                let delay = self.random.millis(10, 500);
                self.after(delay, SimEvent::CoordinatorStart { suspect: None });
            }
            Fault::KillHost(index) => {
                let suspect = Some((self.agents[index].id, self.random.millis(0, 1500)));
                self.fault(Fault::PowerOff(index));
                self.coordinators.clear();
                let delay = self.random.millis(2000, 6000);
                self.after(delay, SimEvent::CoordinatorStart { suspect });
            }
            Fault::EndFaults => self.end_faults(),
        }
    }

    /// Ends an agent that a signal has told to leave.
    pub(super) fn depart(&mut self, index: usize) {
        let agent = &mut self.agents[index];
        let (id, term) = (agent.id, agent.term);
        agent.workers = None;
        agent.member.enter(Phase::Left(Departure::Stopped { signal: 15 }));
        self.send_status(index);
        self.agents[index].alive = false;
        let delay = self.random.millis(0, self.conditions.delay_ms);
        self.after(delay, SimEvent::Disconnected { id, term });
        self.close_coordinators(index);
        if self.faults_ended {
            self.after(Duration::from_secs(1), SimEvent::Fault(Fault::Start(index)));
        }
    }

    fn change_agent(&mut self, index: usize, what: impl FnOnce(&mut Agent)) {
        self.agents[index].was_disturbed = true;
        what(&mut self.agents[index]);
    }

    /// Node `of` of the round is gone. After a while workers of the other nodes may fail because of that.
    fn schedule_peer_failures(&mut self, of: usize, round: Option<u64>, after_ms: u64) {
        let Some(round) = round else { return };
        let is_in = |agent: &Agent| agent.workers.is_some_and(|workers| workers.round == round);
        let in_it: Vec<usize> = (0..self.agents.len()).filter(|&index| is_in(&self.agents[index])).collect();
        for &index in &in_it {
            // A node without others in its round loses no peer.
            if in_it != [of] && self.random.percent(50) {
                let id = self.agents[index].id;
                let delay = self.random.millis(after_ms, after_ms + 4000);
                self.after(delay, SimEvent::PeerFailure { agent: index, id, round, of });
            }
        }
    }

    fn end_faults(&mut self) {
        self.faults_ended = true;
        self.conditions.loss_percent = 0;
        if !self.is_elected && self.coordinators.is_empty() {
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
                    self.conditions.run,
                    SimEvent::WorkersEnd { agent: index, id, round, is_success: true, own: true },
                );
            }
        }
    }
}
