//! Invariants of membership, and many random simulations in which they are checked.

use std::time::{Duration, Instant};

use super::super::injected_bug::Bug;
use super::super::*;
use super::faults::{At, Fault};
use super::random::Random;
use super::simulation::{Conditions, SimEvent, Simulation};

/// Number of seeds in the gate; CONVOKE_FULL=1 runs ten times as many.
const SEEDS: u64 = 10_000;
/// Period in which faults occur.
const FAULT_PERIOD: Duration = Duration::from_secs(40);
/// Time after that period within which a job must end.
const PROGRESS: Duration = Duration::from_secs(60);

impl Simulation {
    /// Checks that all nodes see a round with equal properties, and that no node runs an older round when it
    /// starts.
    pub(super) fn check_start(&mut self, index: usize, assignment: &Assignment) {
        let round = assignment.round;
        if let Some(workers) = self.agents[index].workers {
            self.report_violation(format!(
                "{index} has workers of round {} and starts those of {round}",
                workers.round
            ));
        }
        // A paused agent cannot know that it has been evicted.
        let stale = self.agents.iter().position(|other| {
            let is_older = |round_of: u64| round_of < round && !self.cut_off.contains(&round_of);
            other.is_active() && !other.paused && other.workers.is_some_and(|workers| is_older(workers.round))
        });
        if let Some(other) = stale {
            self.report_violation(format!(
                "{index} starts round {round} while {other} has workers of an older one"
            ));
        }
        let id = self.agents[index].id;
        let nodes = self.rounds.entry(round).or_default();
        if let Some((before, _)) = nodes.insert(assignment.group_rank, (id, assignment.clone()))
            && before != id
        {
            self.report_violation(format!("two nodes of round {round} have rank {}", assignment.group_rank));
        }
        let nodes = &self.rounds[&round];
        let one = nodes.values().next().unwrap().1.clone();
        for (_, other) in nodes.values() {
            if (other.group_world_size, other.world_size, other.generation, &other.store)
                != (one.group_world_size, one.world_size, one.generation, &one.store)
            {
                self.report_violation(format!("the nodes of round {round} do not agree"));
                return;
            }
        }
        let (rank, size) = (assignment.group_rank, assignment.group_world_size);
        let end = assignment.base_rank + self.agents[index].profile.workers;
        let profile = &self.agents[index].profile;
        if rank >= size || end > assignment.world_size || size < profile.min || size > profile.max {
            self.report_violation(format!("{assignment:?} makes no sense"));
            return;
        }
        // The ranks have no gaps, as far as they are known.
        let ends: Vec<_> = nodes.iter().map(|(rank, (_, one))| (*rank, one.base_rank)).collect();
        for pair in ends.windows(2) {
            if pair[0].0 + 1 == pair[1].0 {
                let workers = self.agents.iter().find(|agent| agent.id == self.rounds[&round][&pair[0].0].0);
                if workers.is_some_and(|agent| pair[0].1 + agent.profile.workers != pair[1].1) {
                    self.report_violation(format!("ranks of round {round} are not one after the other"));
                    return;
                }
            }
        }
    }

    /// Checks that each restart has a cause.
    pub(super) fn check_cause(&mut self, index: usize, cause: &RestartCause) {
        let agent = |host: &str| self.agents.iter().find(|agent| agent.profile.host == host);
        let is_true = match cause {
            // A successor cannot know why a round of its predecessor ended.
            RestartCause::Failed { .. } if self.has_changed_coordinator() => true,
            RestartCause::Failed { host, .. } => {
                agent(host).is_some_and(|agent| agent.failed_round.is_some())
                    || self.agents.iter().any(|agent| agent.was_disturbed)
            }
            RestartCause::Lost { host, .. } | RestartCause::Stopped { host, .. } => {
                !self.is_lossless || agent(host).is_some_and(|agent| agent.was_disturbed)
            }
            RestartCause::UnknownRound => self.has_changed_coordinator() || !self.is_lossless,
            RestartCause::Joined { .. } => {
                !self.is_lossless || self.late || self.agents.iter().any(|agent| agent.was_disturbed)
            }
        };
        if !is_true {
            self.report_violation(format!("{index} is to stop without a cause: {cause}"));
        }
    }

    /// Checks that a job fails only by a failure of its own, never by the consequence of a loss.
    pub(super) fn check_end(&mut self, index: usize, end: &Command) {
        match end {
            Command::End(JobResult::Failed { host, .. }) => {
                let failed = self.agents.iter().find(|agent| agent.profile.host == *host);
                if failed.is_some_and(|agent| agent.failed_round.is_none()) {
                    self.report_violation(format!(
                        "{index} is told that {host} failed, which it did not by itself"
                    ));
                }
            }
            Command::Refuse(Refusal::Timeout { .. }) if self.faults_ended => {
                self.report_violation(format!("{index} waits in vain"));
            }
            _ => {}
        }
    }
}

/// Results of one simulation.
#[derive(Debug, Default)]
struct Stats {
    rounds: u64,
    coordinators: u64,
    messages: u64,
    succeeded: u64,
    failed: u64,
}

/// Runs one simulation from its start to the end of its job.
fn run_simulation(seed: u64, bug: Option<Bug>) -> Result<Stats, String> {
    let mut random = Random::new(seed ^ 0xABCD);
    let hosts = 1 + random.below(8) as usize;
    let max = 1 + random.below(hosts as u64 + 1) as usize;
    let min = 1 + random.below(max.min(hosts) as u64) as usize;
    let (rough, is_elected) = (random.percent(40), random.percent(50));
    let conditions = Conditions {
        delay_ms: [1, 20, 200][random.below(3) as usize],
        loss_percent: if rough { random.below(20) } else { 0 },
        double_percent: if rough { 10 } else { 0 },
        drift: [0, 10_000][random.below(2) as usize],
        stop_ms: [5, 500, 5000][random.below(3) as usize],
        run: Duration::from_secs(10),
    };
    let mut simulation = Simulation::new(seed, hosts, (min, max), conditions, is_elected, bug);
    for _ in 0..random.below(9) {
        let at = simulation.now + random.millis(0, FAULT_PERIOD.as_millis() as u64);
        let which = random.below(hosts as u64) as usize;
        if is_elected && random.percent(40) {
            let (fault, back): (At, Option<At>) = match random.below(8) {
                0 => (Fault::Kill, Some(Fault::Start)),
                1 => (Fault::PowerOff, Some(Fault::Start)),
                2 => (Fault::CutOutbound, Some(Fault::Heal)),
                3 => (Fault::CutInbound, Some(Fault::Heal)),
                4 => (Fault::Partition, Some(Fault::Heal)),
                5 => (Fault::Pause, Some(Fault::Resume)),
                6 => (Fault::Stop, Some(Fault::Start)),
                _ => (Fault::CutEtcd, Some(Fault::Heal)),
            };
            let back = back.map(|back| (back, random.millis(100, 10_000)));
            simulation.at(at, SimEvent::FaultAtCoordinator(fault, back));
            continue;
        }
        let fault = match random.below(15) {
            0 | 1 => Fault::Kill(which),
            2 => Fault::PowerOff(which),
            3 | 4 => Fault::Start(which),
            5 => Fault::CutOutbound(which),
            6 => Fault::CutInbound(which),
            7 => Fault::Partition(which),
            8 => Fault::Pause(which),
            9 => Fault::Break(which),
            10 | 11 => Fault::FailWorker(which),
            12 => Fault::Stop(which),
            13 if is_elected => Fault::CutEtcd(which),
            13 => Fault::KillHost(which),
            _ if is_elected => Fault::PowerOff(which),
            _ => Fault::KillCoordinator,
        };
        simulation.at(at, SimEvent::Fault(fault));
        if matches!(
            fault,
            Fault::CutOutbound(_) | Fault::CutInbound(_) | Fault::Partition(_) | Fault::CutEtcd(_)
        ) {
            let heal = at + random.millis(100, 10_000);
            simulation.at(heal, SimEvent::Fault(Fault::Heal(which)));
        }
        if fault == Fault::Pause(which) {
            let resume = at + random.millis(100, 10_000);
            simulation.at(resume, SimEvent::Fault(Fault::Resume(which)));
        }
    }
    let faults_end = simulation.now + FAULT_PERIOD;
    simulation.at(faults_end, SimEvent::Fault(Fault::EndFaults));
    let end = faults_end + PROGRESS;
    while simulation.step(end)
        && !(simulation.faults_ended && simulation.agents.iter().all(|agent| agent.ended.is_some()))
    {}
    let stuck: Vec<usize> = (0..hosts).filter(|&index| simulation.agents[index].ended.is_none()).collect();
    if simulation.violation.is_none() && !stuck.is_empty() {
        simulation.report_violation(format!("{stuck:?} have not come to an end"));
    }
    let mut stats = Stats {
        rounds: simulation.rounds.len() as u64,
        coordinators: simulation.registry.term,
        messages: simulation.messages,
        ..Stats::default()
    };
    for agent in &simulation.agents {
        match &agent.ended {
            Some(Command::End(JobResult::Succeeded { .. })) => stats.succeeded += 1,
            Some(_) => stats.failed += 1,
            None => {}
        }
    }
    match simulation.violation {
        None => Ok(stats),
        Some(what) => Err(format!(
            "seed {seed} ({hosts} hosts, {min}:{max}, is_elected: {is_elected}, {conditions:?}): {what}\n{}",
            simulation.trace.join("\n")
        )),
    }
}

#[test]
fn random_faults_leave_one_active_round_and_job_ends() {
    let full = std::env::var_os("CONVOKE_FULL").is_some_and(|value| value == "1");
    let seeds = if full { 10 * SEEDS } else { SEEDS };
    let first = std::env::var("CONVOKE_SEED").ok().and_then(|seed| seed.parse().ok());
    let start = Instant::now();
    let mut total = Stats::default();
    for seed in first.map_or(0..seeds, |seed: u64| seed..seed + 1) {
        let stats = run_simulation(seed, None).unwrap_or_else(|what| panic!("CONVOKE_SEED={seed}\n{what}"));
        total.rounds += stats.rounds;
        total.coordinators += stats.coordinators;
        total.messages += stats.messages;
        total.succeeded += stats.succeeded;
        total.failed += stats.failed;
    }
    println!("{seeds} simulations in {:?}: {total:?}", start.elapsed());
    assert!(first.is_some() || total.rounds > seeds && total.succeeded > total.failed, "{total:?}");
}

#[test]
fn simulation_detects_each_injected_bug() {
    let bugs = [
        Bug::StartsTooEarly,
        Bug::LeavesRankGaps,
        Bug::KeepsOldWorkers,
        Bug::RunsWhilePartitioned,
        Bug::WaitsForLostNode,
        Bug::RestartsOnReconnect,
        Bug::AnswersWithoutQuorum,
    ];
    for bug in bugs {
        let found = (0..SEEDS).find_map(|seed| Some((seed, run_simulation(seed, Some(bug)).err()?)));
        let (seed, what) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?} is found by seed {seed}: {}", what.lines().next().unwrap_or_default());
    }
}
