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
    last_orders: BTreeMap<u128, (u64, u64)>,
    last_probe: u64,
    /// True if members have received the answers to their statuses.
    answered: bool,
    rules: Rules,
}

impl Job {
    fn new(job_budget: Option<u32>) -> Self {
        let rules = Rules {
            last_call: 5 * SECOND,
            join_timeout: 60 * SECOND,
            heartbeat_timeout: 3 * SECOND,
            job_budget,
        };
        Self {
            coordinator: Coordinator::new(rules, 1, 7),
            now: Duration::ZERO,
            orders: BTreeMap::new(),
            seqs: BTreeMap::new(),
            last_orders: BTreeMap::new(),
            last_probe: 0,
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
                        self.last_probe = self.last_probe.max(message.probe);
                        if let Some(order) = message.order {
                            self.last_orders.insert(agent.0, (message.term, message.seq));
                            self.orders.insert(agent.0, order);
                        }
                    }
                }
            }
        }
    }

    fn join(&mut self, agent: u128, range: (usize, usize)) {
        self.join_from(&format!("h{agent}"), agent, range);
    }

    fn join_from(&mut self, host: &str, agent: u128, (min, max): (usize, usize)) {
        let (host, role) = (host.to_owned(), "default".to_owned());
        let profile = Profile { host, pid: 1, min, max, workers: 2, role };
        self.handle(Event::Hello { agent: AgentId(agent), profile });
        self.send_status(
            agent,
            Phase::Ready { after: 0, restarts: 0, store: vec![format!("h{agent}:1")], partitioned: false },
        );
    }

    fn send_status(&mut self, agent: u128, phase: Phase) {
        let seq = self.seqs.entry(agent).or_default();
        *seq += 1;
        let last_order = self.last_orders.get(&agent).copied().unwrap_or_default();
        let answered = if self.answered { *seq - 1 } else { 0 };
        let status = Status { seq: *seq, phase, last_order, last_probe: self.last_probe, answered };
        self.handle(Event::Status { agent: AgentId(agent), status });
    }

    /// The member repeats its status.
    fn send_running(&mut self, agent: u128, round: u64) {
        self.send_status(agent, Phase::Running { round });
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        self.handle(Event::Tick);
    }

    /// Returns round, group rank and size, if the member's order is to run.
    fn run_order(&self, agent: u128) -> Option<(u64, usize, usize)> {
        match &self.orders[&agent] {
            Order::Run(run) => Some((run.round, run.group_rank, run.group_world_size)),
            Order::Wait(_) | Order::Stop { .. } | Order::End(_) | Order::Refuse(_) => None,
        }
    }

    fn send_ready(&mut self, agent: u128, after: u64) {
        self.send_status(agent, Phase::Ready { after, restarts: 0, store: Vec::new(), partitioned: false });
    }

    fn send_failure(&mut self, agent: u128, round: u64, restarts: bool) {
        let failure = Failure {
            summary: "rank 1 exited with 1".to_owned(),
            report: "r".to_owned(),
            can_restart: restarts,
        };
        self.send_status(agent, Phase::Failed { round, failure });
    }
}

/// Returns a job with nodes 1 to `count` in round 1.
fn running(count: u128, range: (usize, usize), job_budget: Option<u32>) -> Job {
    let mut job = Job::new(job_budget);
    (1..=count).for_each(|agent| job.join(agent, range));
    while job.run_order(1).is_none() {
        job.advance(SECOND);
        let ready = |agent| Phase::Ready {
            after: 0,
            restarts: 0,
            store: vec![format!("h{agent}:1")],
            partitioned: false,
        };
        (1..=count).for_each(|agent| job.send_status(agent, ready(agent)));
    }
    (1..=count).for_each(|agent| job.send_running(agent, 1));
    job
}

#[test]
fn full_round_starts_at_once_and_smaller_after_last_call() {
    let mut job = Job::new(None);
    job.join(2, (1, 2));
    assert_eq!(job.run_order(2), None);
    job.join(1, (1, 2));
    assert_eq!((job.run_order(1), job.run_order(2)), (Some((1, 0, 2)), Some((1, 1, 2))));
    let job = running(2, (1, 3), None);
    assert_eq!((job.run_order(1), job.run_order(2)), (Some((1, 0, 2)), Some((1, 1, 2))));
}

#[test]
fn spare_node_replaces_a_host_that_has_failed_twice() {
    let mut job = running(2, (1, 2), None);
    job.join(3, (1, 2));
    for round in 1..=2 {
        assert_eq!(job.run_order(2), Some((round, 1, 2)), "one failure is no reason");
        [1, 2].into_iter().for_each(|agent| job.send_running(agent, round));
        job.send_failure(2, round, true);
        [1, 2].into_iter().for_each(|agent| job.send_ready(agent, round));
    }
    // Node 1 keeps its rank, and the spare node gets that of node 2.
    assert_eq!((job.run_order(1), job.run_order(3)), (Some((3, 0, 2)), Some((3, 1, 2))));
    assert!(
        matches!(&job.orders[&2], Order::Wait(join_status) if join_status.is_replaced),
        "{:?}",
        job.orders[&2]
    );
    // Without another node, the host is used again.
    [1, 3].into_iter().for_each(|agent| job.send_running(agent, 3));
    job.send_status(3, Phase::Left(Departure::Error("gone".to_owned())));
    job.send_ready(1, 3);
    assert_eq!(job.run_order(2), Some((4, 1, 2)));
}

#[test]
fn successor_of_the_coordinator_knows_which_hosts_fail() {
    let mut record = Record::empty();
    record.failed_hosts.insert("h2".to_owned(), 2);
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    // A record of an earlier version has no such hosts.
    let without = text.replace(",\"failed_hosts\":{\"h2\":2}", "");
    assert_eq!(serde_json::from_str::<Record>(&without).unwrap(), Record::empty());
}

#[test]
fn excess_node_is_standby_and_replaces_a_lost_node() {
    let mut job = running(2, (2, 2), None);
    job.join(3, (2, 2));
    assert!(matches!(&job.orders[&3], Order::Wait(join_status) if join_status.standby));
    job.handle(Event::Disconnected { agent: AgentId(1) });
    job.advance(SECOND);
    assert!(matches!(&job.orders[&2], Order::Stop { round: 1, cause: RestartCause::Lost { node: 0, .. } }));
    job.send_ready(2, 1);
    assert_eq!(
        (job.run_order(3), job.run_order(2)),
        (Some((2, 0, 2)), Some((2, 1, 2))),
        "node 2 keeps its rank"
    );
}

#[test]
fn reconnection_in_time_changes_nothing() {
    let mut job = running(2, (2, 2), None);
    job.handle(Event::Disconnected { agent: AgentId(1) });
    job.now += SECOND / 10;
    job.send_running(1, 1);
    job.advance(SECOND);
    assert_eq!(job.run_order(2), Some((1, 1, 2)));
}

#[test]
fn nodes_below_the_minimum_wait_and_finally_time_out() {
    let mut job = running(2, (2, 2), None);
    job.handle(Event::Disconnected { agent: AgentId(1) });
    job.advance(SECOND);
    job.send_ready(2, 1);
    let Order::Wait(join_status) = &job.orders[&2] else { panic!("{:?}", job.orders[&2]) };
    assert_eq!(
        (join_status.joined, join_status.min, join_status.names.as_slice()),
        (1, 2, &["h2 (pid 1)".to_owned()][..])
    );
    assert!(matches!(&join_status.cause, Some(RestartCause::Lost { node: 0, .. })));
    for _ in 0..61 {
        job.send_ready(2, 1);
        job.advance(SECOND);
    }
    assert!(matches!(&job.orders[&2], Order::Refuse(Refusal::Timeout { after_s: 60, .. })));
}

#[test]
fn final_failure_waits_for_reports_of_all_other_nodes() {
    let mut job = running(3, (1, 3), None);
    job.send_failure(1, 1, false);
    assert_eq!(job.run_order(2), Some((1, 1, 3)), "not yet");
    job.send_running(2, 1);
    assert_eq!(job.run_order(2), Some((1, 1, 3)), "node 3 has not answered");
    job.send_running(3, 1);
    let failed = |order: &Order| matches!(order, Order::End(JobResult::Failed { node: 0, .. }));
    assert!([1, 2, 3].iter().all(|agent| failed(&job.orders[agent])), "{:?}", job.orders);
    // A late node is told the outcome.
    job.join(4, (1, 3));
    assert!(matches!(&job.orders[&4], Order::Refuse(Refusal::Closed(JobResult::Failed { .. }))));
}

#[test]
fn failure_caused_by_an_undetected_node_loss_is_not_final() {
    let mut job = running(3, (1, 3), None);
    job.send_failure(1, 1, false);
    job.send_running(2, 1);
    for _ in 0..4 {
        job.advance(SECOND);
        job.send_running(2, 1);
        job.send_failure(1, 1, false);
    }
    for agent in [1, 2] {
        assert!(matches!(&job.orders[&agent], Order::Stop { cause: RestartCause::Lost { node: 2, .. }, .. }));
        job.send_ready(agent, 1);
    }
    assert_eq!((job.run_order(1), job.run_order(2)), (Some((2, 0, 2)), Some((2, 1, 2))));
}

#[test]
fn restarts_are_counted_per_node_or_per_job() {
    // Each node has one restart: both may fail once.
    let mut job = running(2, (2, 2), None);
    for (round, agent) in [(1, 1), (2, 2)] {
        job.send_failure(agent, round, true);
        assert!(matches!(&job.orders[&(3 - agent)], Order::Stop { cause: RestartCause::Failed { .. }, .. }));
        (1..=2).for_each(|agent| job.send_ready(agent, round));
        (1..=2).for_each(|agent| job.send_running(agent, round + 1));
    }
    // All nodes share one restart: the second failure is final, on whichever node it happens.
    let mut job = running(2, (2, 2), Some(1));
    job.send_failure(1, 1, true);
    (1..=2).for_each(|agent| job.send_ready(agent, 1));
    assert!(matches!(&job.orders[&2], Order::Run(run) if run.restarts == Some(1)));
    (1..=2).for_each(|agent| job.send_running(agent, 2));
    job.send_failure(2, 2, true);
    job.send_running(1, 2);
    assert!(matches!(&job.orders[&1], Order::End(JobResult::Failed { node: 1, .. })));
}

#[test]
fn other_nodes_restart_after_workers_of_a_signalled_node_exit() {
    let mut job = running(2, (1, 2), None);
    job.send_status(2, Phase::Leaving { round: 1, signal: 15 });
    assert!(matches!(
        &job.orders[&1],
        Order::Stop { cause: RestartCause::Stopped { node: 1, signal: 15, .. }, .. }
    ));
    // A failure that follows from it is not final either.
    job.send_failure(1, 1, false);
    job.send_ready(1, 1);
    job.advance(SECOND);
    assert_eq!(job.run_order(1), None, "the workers of node 2 still save");
    job.send_status(2, Phase::Left(Departure::Stopped { signal: 15 }));
    assert_eq!(job.run_order(1), Some((2, 0, 1)));
    job.send_status(1, Phase::Succeeded { round: 2, drained: false });
    assert_eq!(job.orders[&1], Order::End(JobResult::Succeeded { drained: false }));
}

#[test]
fn job_waits_for_a_stopped_node_below_min_nodes() {
    let mut job = running(2, (2, 2), None);
    job.send_status(2, Phase::Left(Departure::Stopped { signal: 15 }));
    job.send_ready(1, 1);
    let Order::Wait(join_status) = &job.orders[&1] else { panic!("{:?}", job.orders[&1]) };
    assert_eq!(join_status.cause.as_ref().unwrap().to_string(), "node 1 (h2) was stopped by SIGTERM");
    job.advance(2 * SECOND);
    job.join(3, (2, 2));
    assert_eq!((job.run_order(1), job.run_order(3)), (Some((2, 0, 2)), Some((2, 1, 2))));
}

#[test]
fn nodes_stopped_within_a_second_start_no_round() {
    let mut job = running(3, (1, 3), None);
    for agent in [2, 1, 3] {
        job.send_status(agent, Phase::Leaving { round: 1, signal: 2 });
        job.send_status(agent, Phase::Left(Departure::Stopped { signal: 2 }));
        (1..=3).for_each(|other| job.send_ready(other, 1));
        job.advance(SECOND * 4 / 10);
    }
    job.advance(SECOND);
    assert!(job.coordinator.has_no_members() && (1..=3).all(|agent| job.run_order(agent) != Some((2, 0, 1))));
    assert!(job.orders.values().all(|order| !matches!(order, Order::Run(run) if run.round > 1)));
}

#[test]
fn another_number_of_nodes_is_refused() {
    let mut job = Job::new(None);
    job.join(1, (2, 2));
    job.join(2, (1, 3));
    let nodes = Refusal::NodeCountMismatch { mine: (1, 3), theirs: (2, 2), host: "h1".to_owned() };
    assert_eq!(job.orders[&2], Order::Refuse(nodes));
}

#[test]
fn heartbeat_timeout_grows_with_nodes_per_host() {
    let mut job = Job::new(None);
    (1..=400).for_each(|agent| job.join_from("one", agent, (399, 400)));
    // The timeout is 20 ms per node.
    let Order::Run(run) = &job.orders[&1] else { panic!("{:?}", job.orders[&1]) };
    assert_eq!(run.heartbeat_timeout, 8 * SECOND);
    for _ in 0..7 {
        (1..400).for_each(|agent| job.send_running(agent, 1));
        job.advance(SECOND);
    }
    assert_eq!(job.run_order(1), Some((1, 0, 400)));
    job.advance(SECOND);
    assert!(matches!(&job.orders[&1], Order::Stop { cause: RestartCause::Lost { node: 399, .. }, .. }));
}

#[test]
fn end_of_an_unknown_round_names_no_node_as_its_cause() {
    let mut job = Job::new(None);
    job.join_from("one", 1, (2, 2));
    job.send_running(1, 4);
    let Order::Stop { round: 4, cause } = &job.orders[&1] else { panic!("{:?}", job.orders[&1]) };
    assert_eq!(cause.to_string(), "the coordinator was replaced, and the new one does not know this round");
}

#[test]
fn member_does_not_wait_for_a_round_that_ended() {
    let mut member = Member::new(Phase::Running { round: 2 }, 3 * SECOND);
    let order = Some(Order::Stop { round: 3, cause: RestartCause::Joined { host: "h2".to_owned() } });
    let (command, _) = member.receive(OrderMessage { term: 1, seq: 1, order, last_status: 0, probe: 0 });
    assert!(matches!(command, Some(Command::Stop(_))));
    // Its own last round was 2.
    member.enter(Phase::Ready { after: 2, restarts: 0, store: Vec::new(), partitioned: false });
    assert!(matches!(member.status(SECOND).phase, Phase::Ready { after: 3, .. }));
}

#[test]
fn member_refused_by_one_job_follows_the_next_coordinator() {
    let mut member = Member::new(
        Phase::Ready { after: 0, restarts: 0, store: Vec::new(), partitioned: false },
        3 * SECOND,
    );
    let order = |seq, order| OrderMessage { term: 1, seq, order: Some(order), last_status: 0, probe: 0 };
    let refused = Order::Refuse(Refusal::Closed(JobResult::Succeeded { drained: false }));
    assert!(matches!(member.receive(order(u64::MAX, refused)), (Some(Command::Refuse(_)), true)));
    member.forget_coordinator();
    assert!(matches!(
        member.receive(order(1, Order::Wait(JoinStatus::default()))),
        (Some(Command::Wait(_)), true)
    ));
}

#[test]
fn new_coordinator_does_not_wait_for_nodes_that_all_departed() {
    let mut job = running(1, (1, 1), None);
    let profile = Profile { host: "h1".to_owned(), pid: 1, min: 1, max: 1, workers: 2, role: String::new() };
    let nodes = vec![RoundNode { agent: AgentId(1), profile }];
    let record = Record { round: 1, nodes, left: vec![(0, 15)], ..Record::default() };
    let rules = job.rules;
    job.coordinator = Coordinator::resume(rules, 2, 7, record, None);
    job.join(2, (1, 1));
    assert_eq!(job.run_order(2), Some((2, 0, 1)));
}

#[test]
fn finished_job_can_be_restarted_with_another_number_of_nodes() {
    let mut job = Job::new(Some(1));
    let profile = Profile { host: "h1".to_owned(), pid: 1, min: 1, max: 1, workers: 2, role: String::new() };
    let nodes = vec![RoundNode { agent: AgentId(1), profile }];
    let record = Record { round: 1, nodes, failures: 1, ..Record::default() };
    job.coordinator = Coordinator::resume(job.rules, 2, 7, record, None);
    job.join(2, (2, 2));
    assert_eq!(job.orders.get(&2), None, "node 1 may yet come");
    job.advance(4 * SECOND);
    job.join(2, (2, 2));
    job.join(3, (2, 2));
    assert_eq!((job.run_order(2), job.run_order(3)), (Some((2, 0, 2)), Some((2, 1, 2))));
    assert!(matches!(&job.orders[&2], Order::Run(run) if run.restarts == Some(0)), "{:?}", job.orders[&2]);
}

#[test]
fn new_coordinator_continues_despite_newcomer_with_another_nnodes() {
    let mut job = Job::new(None);
    let profile = Profile { host: "h1".to_owned(), pid: 1, min: 1, max: 1, workers: 2, role: String::new() };
    let nodes = vec![RoundNode { agent: AgentId(1), profile: profile.clone() }];
    let record = Record { round: 1, nodes, ..Record::default() };
    job.coordinator = Coordinator::resume(job.rules, 2, 7, record, None);
    job.join(2, (2, 2));
    job.handle(Event::Hello { agent: AgentId(1), profile });
    job.send_running(1, 1);
    job.join(2, (2, 2));
    assert!(matches!(&job.orders[&2], Order::Refuse(Refusal::NodeCountMismatch { theirs: (1, 1), .. })));
    job.send_status(1, Phase::Succeeded { round: 1, drained: false });
    assert_eq!(job.orders[&1], Order::End(JobResult::Succeeded { drained: false }));
}

#[test]
fn newcomer_learns_the_outcome_before_it_is_recorded() {
    let mut job = running(1, (1, 1), None);
    let failure = Failure { summary: String::new(), report: String::new(), can_restart: false };
    let status = Status {
        seq: 99,
        phase: Phase::Failed { round: 1, failure },
        last_order: (9, 9),
        last_probe: 9,
        answered: 0,
    };
    let mut actions = Vec::new();
    job.coordinator.handle(job.now, Event::Status { agent: AgentId(1), status }, &mut actions);
    assert!(actions.iter().any(|action| matches!(action, Action::Write(_))), "{actions:?}");
    job.join(2, (1, 1));
    assert!(matches!(&job.orders[&2], Order::Refuse(Refusal::Closed(JobResult::Failed { .. }))));
}

#[test]
fn run_id_is_reusable_after_failure_drain_or_unnamed_success() {
    let failed =
        JobResult::Failed { node: 0, host: String::new(), summary: String::new(), report: String::new() };
    let deserted = JobResult::CoordinatorExited { node: None, host: String::new(), why: String::new() };
    let success = |drained| JobResult::Succeeded { drained };
    let free = |is_named| {
        [&failed, &deserted, &success(true), &success(false)].map(|result| result.frees_run_id(is_named))
    };
    assert_eq!((free(true), free(false)), ([true, true, true, false], [true; 4]));
}

#[test]
fn coordinator_without_acknowledgements_has_no_contact() {
    let mut job = running(2, (2, 2), None);
    let own = AgentId(1);
    for _ in 0..4 {
        job.advance(SECOND / 2);
        // All statuses arrive, but no answer does.
        job.send_running(2, 1);
    }
    assert!(!job.coordinator.is_acked_by_half(own, job.now - SECOND));
    job.answered = true;
    job.advance(SECOND / 2);
    (0..2).for_each(|_| job.send_running(2, 1));
    assert!(job.coordinator.is_acked_by_half(own, job.now - SECOND));
}

#[test]
fn coordinator_with_half_of_the_acknowledgements_has_contact() {
    let mut job = running(3, (3, 3), None);
    job.answered = true;
    let is_acked = |job: &Job| job.coordinator.is_acked_by_half(AgentId(1), job.now - SECOND);
    let answer = |job: &mut Job, agents: &[u128]| {
        for _ in 0..4 {
            job.advance(SECOND / 2);
            agents.iter().for_each(|&agent| job.send_running(agent, 1));
        }
    };
    answer(&mut job, &[]);
    assert!(!is_acked(&job));
    answer(&mut job, &[3]);
    assert!(is_acked(&job));
}
