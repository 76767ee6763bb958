//! Invariants of membership, and many random worlds in which they are checked.

use std::time::{Duration, Instant};

use super::super::bug::Bug;
use super::super::*;
use super::faults::{At, Fault};
use super::random::Random;
use super::world::{Item, Nature, World};

/// Number of seeds in the gate; CONVOKE_FULL=1 runs ten times as many.
const SEEDS: u64 = 10_000;
/// Period in which faults occur.
const TROUBLE: Duration = Duration::from_secs(40);
/// Time after that period within which a job must end.
const PROGRESS: Duration = Duration::from_secs(60);

impl World {
    /// Checks that all nodes see a round with equal properties, and that no node runs an older round when it
    /// starts.
    pub(super) fn check_start(&mut self, index: usize, assignment: &Assignment) {
        let round = assignment.round;
        if let Some(workers) = self.agents[index].workers {
            self.violates(format!(
                "{index} has workers of round {} and starts those of {round}",
                workers.round
            ));
        }
        // A paused agent cannot know that it has been evicted.
        let stale = self.agents.iter().position(|other| {
            let is_older = |round_of: u64| round_of < round && !self.cut_off.contains(&round_of);
            other.is_at_work()
                && !other.paused
                && other.workers.is_some_and(|workers| is_older(workers.round))
        });
        if let Some(other) = stale {
            self.violates(format!("{index} starts round {round} while {other} has workers of an older one"));
        }
        let id = self.agents[index].id;
        let seats = self.rounds.entry(round).or_default();
        if let Some((before, _)) = seats.insert(assignment.group_rank, (id, assignment.clone()))
            && before != id
        {
            self.violates(format!("two nodes of round {round} have rank {}", assignment.group_rank));
        }
        let seats = &self.rounds[&round];
        let one = seats.values().next().unwrap().1.clone();
        for (_, other) in seats.values() {
            if (other.group_world_size, other.world_size, other.generation, &other.store)
                != (one.group_world_size, one.world_size, one.generation, &one.store)
            {
                self.violates(format!("the nodes of round {round} do not agree"));
                return;
            }
        }
        let (rank, size) = (assignment.group_rank, assignment.group_world_size);
        let end = assignment.base_rank + self.agents[index].profile.workers;
        let profile = &self.agents[index].profile;
        if rank >= size || end > assignment.world_size || size < profile.min || size > profile.max {
            self.violates(format!("{assignment:?} makes no sense"));
            return;
        }
        // The ranks have no gaps, as far as they are known.
        let ends: Vec<_> = seats.iter().map(|(rank, (_, one))| (*rank, one.base_rank)).collect();
        for pair in ends.windows(2) {
            if pair[0].0 + 1 == pair[1].0 {
                let workers = self.agents.iter().find(|agent| agent.id == self.rounds[&round][&pair[0].0].0);
                if workers.is_some_and(|agent| pair[0].1 + agent.profile.workers != pair[1].1) {
                    self.violates(format!("ranks of round {round} are not one after the other"));
                    return;
                }
            }
        }
    }

    /// Checks that each restart has a cause.
    pub(super) fn check_cause(&mut self, index: usize, cause: &Cause) {
        let agent = |host: &str| self.agents.iter().find(|agent| agent.profile.host == host);
        let true_one = match cause {
            // A successor cannot know why a round of its predecessor ended.
            Cause::Failed { .. } if self.has_changed_coordinator() => true,
            Cause::Failed { host, .. } => {
                agent(host).is_some_and(|agent| agent.own_failure.is_some())
                    || self.agents.iter().any(|agent| agent.disturbed)
            }
            Cause::Lost { host, .. } | Cause::Stopped { host, .. } => {
                !self.lossless || agent(host).is_some_and(|agent| agent.disturbed)
            }
            Cause::Joined { .. } => {
                !self.lossless || self.late || self.agents.iter().any(|agent| agent.disturbed)
            }
        };
        if !true_one {
            self.violates(format!("{index} is to stop without a cause: {cause}"));
        }
    }

    /// Checks that a job fails only by a failure of its own, never by the consequence of a loss.
    pub(super) fn check_end(&mut self, index: usize, end: &News) {
        match end {
            News::End(Ending::Failed { host, .. }) => {
                let guilty = self.agents.iter().find(|agent| agent.profile.host == *host);
                if guilty.is_some_and(|agent| agent.own_failure.is_none()) {
                    self.violates(format!("{index} is told that {host} failed, which it did not by itself"));
                }
            }
            News::Refuse(Refusal::Timeout { .. }) if self.peace => {
                self.violates(format!("{index} waits in vain"));
            }
            _ => {}
        }
    }
}

/// Results of one world.
#[derive(Debug, Default)]
struct Stats {
    rounds: u64,
    coordinators: u64,
    messages: u64,
    succeeded: u64,
    failed: u64,
}

/// Runs one world from its start to the end of its job.
fn live(seed: u64, bug: Option<Bug>) -> Result<Stats, String> {
    let mut random = Random::new(seed ^ 0xABCD);
    let hosts = 1 + random.below(8) as usize;
    let max = 1 + random.below(hosts as u64 + 1) as usize;
    let min = 1 + random.below(max.min(hosts) as u64) as usize;
    let (rough, claimed) = (random.percent(40), random.percent(50));
    let nature = Nature {
        delay_ms: [1, 20, 200][random.below(3) as usize],
        loss_percent: if rough { random.below(20) } else { 0 },
        double_percent: if rough { 10 } else { 0 },
        drift: [0, 10_000][random.below(2) as usize],
        stop_ms: [5, 500, 5000][random.below(3) as usize],
        run: Duration::from_secs(10),
    };
    let mut world = World::new(seed, hosts, (min, max), nature, claimed, bug);
    for _ in 0..random.below(9) {
        let at = world.now + random.millis(0, TROUBLE.as_millis() as u64);
        let which = random.below(hosts as u64) as usize;
        if claimed && random.percent(40) {
            let (fault, back): (At, Option<At>) = match random.below(8) {
                0 => (Fault::Kill, Some(Fault::Start)),
                1 => (Fault::PowerOff, Some(Fault::Start)),
                2 => (Fault::Mute, Some(Fault::Heal)),
                3 => (Fault::Deaf, Some(Fault::Heal)),
                4 => (Fault::Partition, Some(Fault::Heal)),
                5 => (Fault::Pause, Some(Fault::Resume)),
                6 => (Fault::Stop, Some(Fault::Start)),
                _ => (Fault::CutEtcd, Some(Fault::Heal)),
            };
            let back = back.map(|back| (back, random.millis(100, 10_000)));
            world.at(at, Item::FaultAtCoordinator(fault, back));
            continue;
        }
        let fault = match random.below(15) {
            0 | 1 => Fault::Kill(which),
            2 => Fault::PowerOff(which),
            3 | 4 => Fault::Start(which),
            5 => Fault::Mute(which),
            6 => Fault::Deaf(which),
            7 => Fault::Partition(which),
            8 => Fault::Pause(which),
            9 => Fault::Break(which),
            10 | 11 => Fault::FailWorker(which),
            12 => Fault::Stop(which),
            13 if claimed => Fault::CutEtcd(which),
            13 => Fault::KillHost(which),
            _ if claimed => Fault::PowerOff(which),
            _ => Fault::KillCoordinator,
        };
        world.at(at, Item::Fault(fault));
        if matches!(fault, Fault::Mute(_) | Fault::Deaf(_) | Fault::Partition(_) | Fault::CutEtcd(_)) {
            let heal = at + random.millis(100, 10_000);
            world.at(heal, Item::Fault(Fault::Heal(which)));
        }
        if fault == Fault::Pause(which) {
            let resume = at + random.millis(100, 10_000);
            world.at(resume, Item::Fault(Fault::Resume(which)));
        }
    }
    let peace = world.now + TROUBLE;
    world.at(peace, Item::Fault(Fault::Peace));
    let end = peace + PROGRESS;
    while world.step(end) && !(world.peace && world.agents.iter().all(|agent| agent.ended.is_some())) {}
    let stuck: Vec<usize> = (0..hosts).filter(|&index| world.agents[index].ended.is_none()).collect();
    if world.broken.is_none() && !stuck.is_empty() {
        world.violates(format!("{stuck:?} have not come to an end"));
    }
    let mut stats = Stats {
        rounds: world.rounds.len() as u64,
        coordinators: world.place.term,
        messages: world.messages,
        ..Stats::default()
    };
    for agent in &world.agents {
        match &agent.ended {
            Some(News::End(Ending::Succeeded)) => stats.succeeded += 1,
            Some(_) => stats.failed += 1,
            None => {}
        }
    }
    match world.broken {
        None => Ok(stats),
        Some(what) => Err(format!(
            "seed {seed} ({hosts} hosts, {min}:{max}, claimed: {claimed}, {nature:?}): {what}\n{}",
            world.story.join("\n")
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
        let stats = live(seed, None).unwrap_or_else(|what| panic!("CONVOKE_SEED={seed}\n{what}"));
        total.rounds += stats.rounds;
        total.coordinators += stats.coordinators;
        total.messages += stats.messages;
        total.succeeded += stats.succeeded;
        total.failed += stats.failed;
    }
    println!("{seeds} worlds in {:?}: {total:?}", start.elapsed());
    assert!(first.is_some() || total.rounds > seeds && total.succeeded > total.failed, "{total:?}");
}

#[test]
fn simulation_detects_each_planted_bug() {
    let bugs = [
        Bug::StartsTooEarly,
        Bug::LeavesHoles,
        Bug::KeepsOldWorkers,
        Bug::RunsOnAlone,
        Bug::WaitsForTheDead,
        Bug::RestartsForNothing,
        Bug::AnswersUnheard,
    ];
    for bug in bugs {
        let found = (0..SEEDS).find_map(|seed| Some((seed, live(seed, Some(bug)).err()?)));
        let (seed, what) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?} is found by seed {seed}: {}", what.lines().next().unwrap_or_default());
    }
}
