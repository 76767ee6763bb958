//! Scenarios of one job, step by step, as a user would see them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::super::*;

const SECOND: Duration = Duration::from_secs(1);

struct Job {
    coordinator: Coordinator,
    now: Duration,
    /// Latest order to each member.
    orders: BTreeMap<u128, Order>,
    seqs: BTreeMap<u128, u64>,
    heard: BTreeMap<u128, (u64, u64)>,
    asked: u64,
    /// True if members have received the answers to their statuses.
    answered: bool,
    rules: Rules,
}

impl Job {
    fn new(job_budget: Option<u32>) -> Self {
        let rules = Rules {
            last_call: 5 * SECOND,
            join_timeout: 60 * SECOND,
            silence: 3 * SECOND,
            reconnect: SECOND / 5,
            stop_timeout: 90 * SECOND,
            stop_spread: Duration::from_secs(1),
            job_budget,
        };
        Self {
            coordinator: Coordinator::new(rules, 1, 7),
            now: Duration::ZERO,
            orders: BTreeMap::new(),
            seqs: BTreeMap::new(),
            heard: BTreeMap::new(),
            asked: 0,
            answered: false,
            rules,
        }
    }

    fn handle(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut actions = Vec::new();
            self.coordinator.handle(self.now, event, &mut actions);
            for action in actions {
                match action {
                    Action::Write(_) => events.push_back(Event::Written),
                    Action::Send { agent, message } => {
                        self.asked = self.asked.max(message.ask);
                        if let Some(order) = message.order {
                            self.heard.insert(agent.0, (message.term, message.seq));
                            self.orders.insert(agent.0, order);
                        }
                    }
                }
            }
        }
    }

    fn comes(&mut self, agent: u128, range: (usize, usize)) {
        self.comes_from(&format!("h{agent}"), agent, range);
    }

    fn comes_from(&mut self, host: &str, agent: u128, (min, max): (usize, usize)) {
        let (host, role) = (host.to_owned(), "default".to_owned());
        let profile = Profile { host, pid: 1, min, max, workers: 2, role };
        self.handle(Event::Hello { agent: AgentId(agent), profile });
        self.says(
            agent,
            Phase::Ready { after: 0, restarts: 0, store: vec![format!("h{agent}:1")], alone: false },
        );
    }

    fn says(&mut self, agent: u128, phase: Phase) {
        let seq = self.seqs.entry(agent).or_default();
        *seq += 1;
        let heard = self.heard.get(&agent).copied().unwrap_or_default();
        let answered = if self.answered { *seq - 1 } else { 0 };
        let status = Status { seq: *seq, phase, heard, asked: self.asked, answered };
        self.handle(Event::Status { agent: AgentId(agent), status });
    }

    /// The member repeats its status.
    fn is_there(&mut self, agent: u128, round: u64) {
        self.says(agent, Phase::Running { round });
    }

    fn later(&mut self, by: Duration) {
        self.now += by;
        self.handle(Event::Tick);
    }

    /// Returns round, group rank and size, if the member's order is to run.
    fn runs(&self, agent: u128) -> Option<(u64, usize, usize)> {
        match &self.orders[&agent] {
            Order::Run(run) => Some((run.round, run.group_rank, run.group_world_size)),
            Order::Wait(_) | Order::Stop { .. } | Order::End(_) | Order::Refuse(_) => None,
        }
    }

    fn ready_again(&mut self, agent: u128, after: u64) {
        self.says(agent, Phase::Ready { after, restarts: 0, store: Vec::new(), alone: false });
    }

    fn fails(&mut self, agent: u128, round: u64, restarts: bool) {
        let failure =
            Failure { summary: "rank 1 exited with 1".to_owned(), report: "r".to_owned(), restarts };
        self.says(agent, Phase::Failed { round, failure });
    }
}

/// Returns a job with nodes 1 to `count` in round 1.
fn running(count: u128, range: (usize, usize), job_budget: Option<u32>) -> Job {
    let mut job = Job::new(job_budget);
    (1..=count).for_each(|agent| job.comes(agent, range));
    while job.runs(1).is_none() {
        job.later(SECOND);
        let ready =
            |agent| Phase::Ready { after: 0, restarts: 0, store: vec![format!("h{agent}:1")], alone: false };
        (1..=count).for_each(|agent| job.says(agent, ready(agent)));
    }
    (1..=count).for_each(|agent| job.is_there(agent, 1));
    job
}

#[test]
fn full_round_starts_at_once_and_smaller_after_last_call() {
    let mut job = Job::new(None);
    job.comes(2, (1, 2));
    assert_eq!(job.runs(2), None);
    job.comes(1, (1, 2));
    assert_eq!((job.runs(1), job.runs(2)), (Some((1, 0, 2)), Some((1, 1, 2))));
    let job = running(2, (1, 3), None);
    assert_eq!((job.runs(1), job.runs(2)), (Some((1, 0, 2)), Some((1, 1, 2))));
}

#[test]
fn excess_node_is_standby_and_replaces_a_lost_node() {
    let mut job = running(2, (2, 2), None);
    job.comes(3, (2, 2));
    assert!(matches!(&job.orders[&3], Order::Wait(muster) if muster.spare));
    job.handle(Event::Cut { agent: AgentId(1) });
    job.later(SECOND);
    assert!(matches!(&job.orders[&2], Order::Stop { round: 1, cause: Cause::Lost { node: 0, .. } }));
    job.ready_again(2, 1);
    assert_eq!((job.runs(3), job.runs(2)), (Some((2, 0, 2)), Some((2, 1, 2))), "node 2 keeps its rank");
}

#[test]
fn reconnection_in_time_changes_nothing() {
    let mut job = running(2, (2, 2), None);
    job.handle(Event::Cut { agent: AgentId(1) });
    job.now += SECOND / 10;
    job.is_there(1, 1);
    job.later(SECOND);
    assert_eq!(job.runs(2), Some((1, 1, 2)));
}

#[test]
fn nodes_below_the_minimum_wait_and_finally_time_out() {
    let mut job = running(2, (2, 2), None);
    job.handle(Event::Cut { agent: AgentId(1) });
    job.later(SECOND);
    job.ready_again(2, 1);
    let Order::Wait(muster) = &job.orders[&2] else { panic!("{:?}", job.orders[&2]) };
    assert_eq!((muster.here, muster.min, muster.names.as_slice()), (1, 2, &["h2 (pid 1)".to_owned()][..]));
    assert!(matches!(&muster.cause, Some(Cause::Lost { node: 0, .. })));
    for _ in 0..61 {
        job.ready_again(2, 1);
        job.later(SECOND);
    }
    assert!(matches!(&job.orders[&2], Order::Refuse(Refusal::Timeout { after_s: 60, .. })));
}

#[test]
fn final_failure_waits_for_reports_of_all_other_nodes() {
    let mut job = running(3, (1, 3), None);
    job.fails(1, 1, false);
    assert_eq!(job.runs(2), Some((1, 1, 3)), "not yet");
    job.is_there(2, 1);
    assert_eq!(job.runs(2), Some((1, 1, 3)), "node 3 has not answered");
    job.is_there(3, 1);
    let failed = |order: &Order| matches!(order, Order::End(Ending::Failed { node: 0, .. }));
    assert!([1, 2, 3].iter().all(|agent| failed(&job.orders[agent])), "{:?}", job.orders);
    // A late node is told the outcome.
    job.comes(4, (1, 3));
    assert!(matches!(&job.orders[&4], Order::Refuse(Refusal::Closed(Ending::Failed { .. }))));
}

#[test]
fn failure_caused_by_an_undetected_node_loss_is_not_final() {
    let mut job = running(3, (1, 3), None);
    job.fails(1, 1, false);
    job.is_there(2, 1);
    for _ in 0..4 {
        job.later(SECOND);
        job.is_there(2, 1);
        job.fails(1, 1, false);
    }
    for agent in [1, 2] {
        assert!(matches!(&job.orders[&agent], Order::Stop { cause: Cause::Lost { node: 2, .. }, .. }));
        job.ready_again(agent, 1);
    }
    assert_eq!((job.runs(1), job.runs(2)), (Some((2, 0, 2)), Some((2, 1, 2))));
}

#[test]
fn restarts_are_counted_per_node_or_per_job() {
    // Each node has one restart: both may fail once.
    let mut job = running(2, (2, 2), None);
    for (round, agent) in [(1, 1), (2, 2)] {
        job.fails(agent, round, true);
        assert!(matches!(&job.orders[&(3 - agent)], Order::Stop { cause: Cause::Failed { .. }, .. }));
        (1..=2).for_each(|agent| job.ready_again(agent, round));
        (1..=2).for_each(|agent| job.is_there(agent, round + 1));
    }
    // All nodes share one restart: the second failure is final, on whichever node it happens.
    let mut job = running(2, (2, 2), Some(1));
    job.fails(1, 1, true);
    (1..=2).for_each(|agent| job.ready_again(agent, 1));
    assert!(matches!(&job.orders[&2], Order::Run(run) if run.restarts == Some(1)));
    (1..=2).for_each(|agent| job.is_there(agent, 2));
    job.fails(2, 2, true);
    job.is_there(1, 2);
    assert!(matches!(&job.orders[&1], Order::End(Ending::Failed { node: 1, .. })));
}

#[test]
fn other_nodes_restart_after_workers_of_a_signalled_node_exit() {
    let mut job = running(2, (1, 2), None);
    job.says(2, Phase::Leaving { round: 1, signal: 15 });
    assert!(matches!(&job.orders[&1], Order::Stop { cause: Cause::Stopped { node: 1, signal: 15, .. }, .. }));
    // A failure that follows from it is not final either.
    job.fails(1, 1, false);
    job.ready_again(1, 1);
    job.later(SECOND);
    assert_eq!(job.runs(1), None, "the workers of node 2 still save");
    job.says(2, Phase::Left(Departure::Stopped { signal: 15 }));
    assert_eq!(job.runs(1), Some((2, 0, 1)));
    job.says(1, Phase::Succeeded { round: 2 });
    assert_eq!(job.orders[&1], Order::End(Ending::Succeeded));
}

#[test]
fn job_waits_for_a_stopped_node_below_min_nodes() {
    let mut job = running(2, (2, 2), None);
    job.says(2, Phase::Left(Departure::Stopped { signal: 15 }));
    job.ready_again(1, 1);
    let Order::Wait(muster) = &job.orders[&1] else { panic!("{:?}", job.orders[&1]) };
    assert_eq!(muster.cause.as_ref().unwrap().to_string(), "node 1 (h2) was stopped by SIGTERM");
    job.later(2 * SECOND);
    job.comes(3, (2, 2));
    assert_eq!((job.runs(1), job.runs(3)), (Some((2, 0, 2)), Some((2, 1, 2))));
}

#[test]
fn nodes_stopped_within_a_second_start_no_round() {
    let mut job = running(3, (1, 3), None);
    for agent in [2, 1, 3] {
        job.says(agent, Phase::Leaving { round: 1, signal: 2 });
        job.says(agent, Phase::Left(Departure::Stopped { signal: 2 }));
        (1..=3).for_each(|other| job.ready_again(other, 1));
        job.later(SECOND * 4 / 10);
    }
    job.later(SECOND);
    assert!(job.coordinator.is_deserted() && (1..=3).all(|agent| job.runs(agent) != Some((2, 0, 1))));
    assert!(job.orders.values().all(|order| !matches!(order, Order::Run(run) if run.round > 1)));
}

#[test]
fn another_number_of_nodes_is_refused() {
    let mut job = Job::new(None);
    job.comes(1, (2, 2));
    job.comes(2, (1, 3));
    let nodes = Refusal::Nodes { mine: (1, 3), theirs: (2, 2), host: "h1".to_owned() };
    assert_eq!(job.orders[&2], Order::Refuse(nodes));
}

#[test]
fn heartbeat_timeout_grows_with_nodes_per_host() {
    let mut job = Job::new(None);
    (1..=400).for_each(|agent| job.comes_from("one", agent, (399, 400)));
    // The timeout is 20 ms per node.
    let Order::Run(run) = &job.orders[&1] else { panic!("{:?}", job.orders[&1]) };
    assert_eq!(run.silence, 8 * SECOND);
    for _ in 0..7 {
        (1..400).for_each(|agent| job.is_there(agent, 1));
        job.later(SECOND);
    }
    assert_eq!(job.runs(1), Some((1, 0, 400)));
    job.later(SECOND);
    assert!(matches!(&job.orders[&1], Order::Stop { cause: Cause::Lost { node: 399, .. }, .. }));
}

#[test]
fn member_does_not_wait_for_a_round_that_ended() {
    let mut member = Member::new(Phase::Running { round: 2 }, 3 * SECOND);
    let order = Some(Order::Stop { round: 3, cause: Cause::Joined { host: "h2".to_owned() } });
    let (news, _) = member.hear(OrderMessage { term: 1, seq: 1, order, heard: 0, ask: 0 });
    assert!(matches!(news, Some(News::Stop(_))));
    // Its own last round was 2.
    member.enter(Phase::Ready { after: 2, restarts: 0, store: Vec::new(), alone: false });
    assert!(matches!(member.status(SECOND).phase, Phase::Ready { after: 3, .. }));
}

#[test]
fn member_refused_by_one_job_follows_the_next_coordinator() {
    let mut member =
        Member::new(Phase::Ready { after: 0, restarts: 0, store: Vec::new(), alone: false }, 3 * SECOND);
    let order = |seq, order| OrderMessage { term: 1, seq, order: Some(order), heard: 0, ask: 0 };
    let refused = Order::Refuse(Refusal::Closed(Ending::Succeeded));
    assert!(matches!(member.hear(order(u64::MAX, refused)), (Some(News::Refuse(_)), true)));
    member.forget_coordinator();
    assert!(matches!(member.hear(order(1, Order::Wait(Muster::default()))), (Some(News::Wait(_)), true)));
}

#[test]
fn new_coordinator_does_not_wait_for_nodes_that_all_departed() {
    let mut job = running(1, (1, 1), None);
    let profile = Profile { host: "h1".to_owned(), pid: 1, min: 1, max: 1, workers: 2, role: String::new() };
    let seats = vec![Seat { agent: AgentId(1), profile }];
    let record = Record { round: 1, seats, left: vec![(0, 15)], ..Record::default() };
    let rules = job.rules;
    job.coordinator = Coordinator::resume(rules, 2, 7, record, None);
    job.comes(2, (1, 1));
    assert_eq!(job.runs(2), Some((2, 0, 1)));
}

#[test]
fn finished_job_can_be_restarted_with_another_number_of_nodes() {
    let mut job = Job::new(Some(1));
    let profile = Profile { host: "h1".to_owned(), pid: 1, min: 1, max: 1, workers: 2, role: String::new() };
    let seats = vec![Seat { agent: AgentId(1), profile }];
    let record = Record { round: 1, seats, failures: 1, ..Record::default() };
    job.coordinator = Coordinator::resume(job.rules, 2, 7, record, None);
    job.comes(2, (2, 2));
    assert_eq!(job.orders.get(&2), None, "node 1 may yet come");
    job.later(4 * SECOND);
    job.comes(2, (2, 2));
    job.comes(3, (2, 2));
    assert_eq!((job.runs(2), job.runs(3)), (Some((2, 0, 2)), Some((2, 1, 2))));
    assert!(matches!(&job.orders[&2], Order::Run(run) if run.restarts == Some(0)), "{:?}", job.orders[&2]);
}

#[test]
fn new_coordinator_continues_despite_newcomer_with_another_nnodes() {
    let mut job = Job::new(None);
    let profile = Profile { host: "h1".to_owned(), pid: 1, min: 1, max: 1, workers: 2, role: String::new() };
    let seats = vec![Seat { agent: AgentId(1), profile: profile.clone() }];
    let record = Record { round: 1, seats, ..Record::default() };
    job.coordinator = Coordinator::resume(job.rules, 2, 7, record, None);
    job.comes(2, (2, 2));
    job.handle(Event::Hello { agent: AgentId(1), profile });
    job.is_there(1, 1);
    job.comes(2, (2, 2));
    assert!(matches!(&job.orders[&2], Order::Refuse(Refusal::Nodes { theirs: (1, 1), .. })));
    job.says(1, Phase::Succeeded { round: 1 });
    assert_eq!(job.orders[&1], Order::End(Ending::Succeeded));
}

#[test]
fn newcomer_learns_the_outcome_before_it_is_recorded() {
    let mut job = running(1, (1, 1), None);
    let failure = Failure { summary: String::new(), report: String::new(), restarts: false };
    let status =
        Status { seq: 99, phase: Phase::Failed { round: 1, failure }, heard: (9, 9), asked: 9, answered: 0 };
    let mut actions = Vec::new();
    job.coordinator.handle(job.now, Event::Status { agent: AgentId(1), status }, &mut actions);
    assert!(actions.iter().any(|action| matches!(action, Action::Write(_))), "{actions:?}");
    job.comes(2, (1, 1));
    assert!(matches!(&job.orders[&2], Order::Refuse(Refusal::Closed(Ending::Failed { .. }))));
}

#[test]
fn run_id_is_reusable_after_failure_or_unnamed_success() {
    let failed =
        Ending::Failed { node: 0, host: String::new(), summary: String::new(), report: String::new() };
    let deserted = Ending::Deserted { node: None, host: String::new(), why: String::new() };
    let free =
        |is_named| [&failed, &deserted, &Ending::Succeeded].map(|ending| ending.frees_run_id(is_named));
    assert_eq!((free(true), free(false)), ([true, true, false], [true, true, true]));
}

#[test]
fn coordinator_without_acknowledgements_has_no_contact() {
    let mut job = running(2, (2, 2), None);
    let own = AgentId(1);
    for _ in 0..4 {
        job.later(SECOND / 2);
        // All statuses arrive, but no answer does.
        job.is_there(2, 1);
    }
    assert!(!job.coordinator.is_heard_by_half(own, job.now - SECOND));
    job.answered = true;
    job.later(SECOND / 2);
    (0..2).for_each(|_| job.is_there(2, 1));
    assert!(job.coordinator.is_heard_by_half(own, job.now - SECOND));
}

#[test]
fn coordinator_with_half_of_the_acknowledgements_has_contact() {
    let mut job = running(3, (3, 3), None);
    job.answered = true;
    let heard = |job: &Job| job.coordinator.is_heard_by_half(AgentId(1), job.now - SECOND);
    let answer = |job: &mut Job, agents: &[u128]| {
        for _ in 0..4 {
            job.later(SECOND / 2);
            agents.iter().for_each(|&agent| job.is_there(agent, 1));
        }
    };
    answer(&mut job, &[]);
    assert!(!heard(&job));
    answer(&mut job, &[3]);
    assert!(heard(&job));
}
