use super::*;
use crate::cause::Class;

const GRACE: Duration = Duration::from_secs(30);

/// A supervisor on virtual time. `does` asserts the actions that an event causes.
struct Simulation {
    supervisor: Supervisor,
    start: Instant,
}

impl Simulation {
    fn of(count: usize, settle_ms: u64) -> Self {
        let window = Duration::from_millis(settle_ms);
        let mut simulation = Self { supervisor: Supervisor::new(count, window), start: Instant::now() };
        for local_rank in 0..count {
            simulation.at(0, Event::Started { local_rank }, &[]);
        }
        simulation
    }

    fn at(&mut self, ms: u64, event: Event, expected: &[Action]) {
        let mut out = Vec::new();
        self.supervisor.handle(self.start + Duration::from_millis(ms), event.clone(), &mut out);
        assert_eq!(out, expected, "after {event:?}");
    }

    fn wakes_at(&self, ms: Option<u64>) {
        assert_eq!(self.supervisor.wake_at(), ms.map(|ms| self.start + Duration::from_millis(ms)));
    }
}

fn exit(local_rank: usize, code: i32) -> Event {
    Event::Exited { local_rank, cause: ExitCause::Code(code), origin: FailureOrigin::Own }
}

fn killed(local_rank: usize, signal: Signal) -> Event {
    Event::Exited { local_rank, cause: ExitCause::Signal(signal as i32), origin: FailureOrigin::Own }
}

fn signal(local_rank: usize, signal: Signal) -> Action {
    Action::Signal { local_rank, signal }
}

fn round_failed(local_rank: usize, code: i32) -> Action {
    Action::RoundFailed { local_rank, cause: ExitCause::Code(code) }
}

fn failure(local_rank: usize, cause: ExitCause, stopped: bool) -> Failure {
    Failure { local_rank, cause, stopped, origin: FailureOrigin::Own }
}

/// Exit with code 1 that blames another worker, which may be named.
fn peer_exit(local_rank: usize, other: Option<usize>) -> Event {
    Event::Exited { local_rank, cause: ExitCause::Code(1), origin: FailureOrigin::Peer(other) }
}

fn peer_failure(local_rank: usize, other: Option<usize>) -> Failure {
    Failure { local_rank, cause: ExitCause::Code(1), stopped: false, origin: FailureOrigin::Peer(other) }
}

#[test]
fn accused_worker_may_exit_with_its_own_error_first() {
    let mut simulation = Simulation::of(3, 0);
    simulation.at(0, peer_exit(0, Some(1)), &[]);
    simulation.wakes_at(Some(5_000));
    simulation.at(10, peer_exit(2, Some(1)), &[]);
    let failures =
        vec![peer_failure(0, Some(1)), peer_failure(2, Some(1)), failure(1, ExitCause::Code(7), false)];
    simulation.at(900, exit(1, 7), &[round_failed(1, 7), Action::Finish(Outcome::Failed(failures))]);
}

#[test]
fn other_workers_are_stopped_when_the_accused_worker_exits() {
    for (code, cause) in [(7, round_failed(1, 7)), (0, round_failed(0, 1))] {
        let mut simulation = Simulation::of(3, 0);
        simulation.at(0, peer_exit(0, Some(1)), &[]);
        simulation.at(20, exit(1, code), &[cause, signal(2, Signal::SIGTERM)]);
    }
}

#[test]
fn accused_worker_that_continues_is_stopped_after_a_timeout() {
    let mut simulation = Simulation::of(3, 0);
    simulation.at(0, peer_exit(0, Some(1)), &[]);
    simulation.at(4_999, Event::Tick, &[]);
    let stops = [round_failed(0, 1), signal(1, Signal::SIGTERM), signal(2, Signal::SIGTERM)];
    simulation.at(5_000, Event::Tick, &stops);
}

#[test]
fn worker_accusing_another_node_waits_for_its_local_workers() {
    let mut simulation = Simulation::of(3, 0);
    simulation.at(0, peer_exit(0, None), &[]);
    simulation.at(1, exit(2, 0), &[]);
    simulation.at(
        2,
        exit(1, 3),
        &[
            round_failed(1, 3),
            Action::Finish(Outcome::Failed(vec![
                peer_failure(0, None),
                failure(1, ExitCause::Code(3), false),
            ])),
        ],
    );
    let mut alone = Simulation::of(1, 0);
    let failures = vec![peer_failure(0, None)];
    alone.at(0, peer_exit(0, None), &[round_failed(0, 1), Action::Finish(Outcome::Failed(failures))]);
}

#[test]
fn job_end_on_other_nodes_stops_workers_awaiting_the_root_cause() {
    let mut simulation = Simulation::of(2, 0);
    simulation.at(0, peer_exit(0, None), &[]);
    simulation.at(1, Event::Abort { signal: Signal::SIGTERM, grace: GRACE }, &[signal(1, Signal::SIGTERM)]);
    simulation.at(2, killed(1, Signal::SIGTERM), &[Action::Finish(Outcome::Aborted)]);
}

#[test]
fn settling_time_starts_with_the_first_independent_failure() {
    let mut simulation = Simulation::of(3, 2_000);
    simulation.at(0, peer_exit(0, Some(1)), &[]);
    simulation.at(3_000, exit(1, 7), &[round_failed(1, 7)]);
    simulation.wakes_at(Some(5_000));
    simulation.at(5_000, Event::Tick, &[signal(2, Signal::SIGTERM)]);
}

#[test]
fn attempt_succeeds_when_all_workers_exit_with_0() {
    let mut simulation = Simulation::of(2, 0);
    simulation.at(1, exit(1, 0), &[]);
    simulation.wakes_at(None);
    simulation.at(9, exit(0, 0), &[Action::Finish(Outcome::Succeeded)]);
}

#[test]
fn failure_stops_the_other_workers_and_keeps_the_order() {
    let mut simulation = Simulation::of(3, 0);
    simulation.at(1, exit(0, 0), &[]);
    simulation.at(2, exit(2, 3), &[round_failed(2, 3), signal(1, Signal::SIGTERM)]);
    simulation.wakes_at(Some(30_002));
    let failures = vec![
        failure(2, ExitCause::Code(3), false),
        failure(1, ExitCause::Signal(Signal::SIGTERM as i32), true),
    ];
    simulation.at(3, killed(1, Signal::SIGTERM), &[Action::Finish(Outcome::Failed(failures))]);
}

#[test]
fn worker_exiting_with_0_when_stopped_is_no_failure() {
    let mut simulation = Simulation::of(2, 0);
    simulation.at(1, exit(0, 9), &[round_failed(0, 9), signal(1, Signal::SIGTERM)]);
    simulation.at(
        2,
        exit(1, 0),
        &[Action::Finish(Outcome::Failed(vec![failure(0, ExitCause::Code(9), false)]))],
    );
}

#[test]
fn worker_ignoring_sigterm_is_killed_after_the_grace_period() {
    let mut simulation = Simulation::of(2, 0);
    simulation.at(0, exit(0, 1), &[round_failed(0, 1), signal(1, Signal::SIGTERM)]);
    simulation.at(29_999, Event::Tick, &[]);
    simulation.at(30_000, Event::Tick, &[signal(1, Signal::SIGKILL)]);
    simulation.wakes_at(None);
    let failures = vec![
        failure(0, ExitCause::Code(1), false),
        failure(1, ExitCause::Signal(Signal::SIGKILL as i32), true),
    ];
    simulation.at(30_001, killed(1, Signal::SIGKILL), &[Action::Finish(Outcome::Failed(failures))]);
}

#[test]
fn failures_within_the_settling_time_are_simultaneous() {
    let mut simulation = Simulation::of(3, 2_000);
    simulation.at(0, exit(0, 10), &[round_failed(0, 10)]);
    simulation.wakes_at(Some(2_000));
    simulation.at(50, exit(1, 11), &[]);
    simulation.at(2_000, Event::Tick, &[signal(2, Signal::SIGTERM)]);
    let failures = vec![failure(0, ExitCause::Code(10), false), failure(1, ExitCause::Code(11), false)];
    simulation.at(2_010, exit(2, 0), &[Action::Finish(Outcome::Failed(failures))]);
}

#[test]
fn settling_ends_when_no_worker_remains() {
    let mut simulation = Simulation::of(2, 2_000);
    simulation.at(0, exit(0, 10), &[round_failed(0, 10)]);
    let failures = vec![failure(0, ExitCause::Code(10), false), failure(1, ExitCause::Code(11), false)];
    simulation.at(50, exit(1, 11), &[Action::Finish(Outcome::Failed(failures))]);
}

#[test]
fn forwarded_signal_has_its_own_grace_period() {
    let mut simulation = Simulation::of(2, 0);
    let stop = Event::Stop { signal: Signal::SIGINT, grace: Duration::from_secs(3), at_once: false };
    simulation.at(0, stop, &[signal(0, Signal::SIGINT), signal(1, Signal::SIGINT)]);
    simulation.wakes_at(Some(3_000));
    simulation.at(1, killed(0, Signal::SIGINT), &[]);
    simulation.at(2, exit(1, 0), &[Action::Finish(Outcome::Stopped { signal: Signal::SIGINT })]);
}

#[test]
fn repeated_ctrl_c_by_a_user_ends_the_grace_period() {
    let mut simulation = Simulation::of(1, 0);
    let stop = |at_once| Event::Stop { signal: Signal::SIGINT, grace: GRACE, at_once };
    simulation.at(0, stop(false), &[signal(0, Signal::SIGINT)]);
    // A scheduler may signal twice.
    simulation.at(5, stop(false), &[]);
    simulation.wakes_at(Some(30_000));
    simulation.at(6, stop(true), &[signal(0, Signal::SIGKILL)]);
    simulation.at(7, stop(true), &[]);
    simulation.at(
        8,
        killed(0, Signal::SIGKILL),
        &[Action::Finish(Outcome::Stopped { signal: Signal::SIGINT })],
    );
}

#[test]
fn stop_by_other_nodes_and_own_signal_are_one_stop() {
    let mut simulation = Simulation::of(1, 0);
    simulation.at(0, Event::Abort { signal: Signal::SIGTERM, grace: GRACE }, &[signal(0, Signal::SIGTERM)]);
    let stop = Event::Stop { signal: Signal::SIGTERM, grace: Duration::from_secs(10), at_once: false };
    simulation.at(1_000, stop, &[]);
    simulation.wakes_at(Some(11_000));
    let end = Action::Finish(Outcome::Stopped { signal: Signal::SIGTERM });
    simulation.at(2_000, killed(0, Signal::SIGTERM), &[end]);
    // The user's time for saving applies, not the shorter one of other nodes' failures.
    let mut simulation = Simulation::of(1, 0);
    simulation.at(0, Event::Abort { signal: Signal::SIGINT, grace: GRACE }, &[signal(0, Signal::SIGINT)]);
    let stop = Event::Stop { signal: Signal::SIGINT, grace: Duration::from_secs(120), at_once: false };
    simulation.at(1_000, stop, &[]);
    simulation.wakes_at(Some(121_000));
}

#[test]
fn signal_during_failure_handling_keeps_the_failure_as_reason() {
    let mut simulation = Simulation::of(2, 0);
    simulation.at(0, exit(0, 9), &[round_failed(0, 9), signal(1, Signal::SIGTERM)]);
    simulation.at(5, Event::Stop { signal: Signal::SIGTERM, grace: GRACE, at_once: false }, &[]);
    simulation.at(
        9,
        exit(1, 0),
        &[Action::Finish(Outcome::Failed(vec![failure(0, ExitCause::Code(9), false)]))],
    );
}

#[test]
fn late_started_worker_is_also_stopped() {
    let window = Duration::ZERO;
    let mut simulation = Simulation { supervisor: Supervisor::new(2, window), start: Instant::now() };
    simulation.at(0, Event::Started { local_rank: 0 }, &[]);
    simulation.at(1, exit(0, 1), &[round_failed(0, 1)]);
    simulation.at(2, Event::Started { local_rank: 1 }, &[signal(1, Signal::SIGTERM)]);
    let failures = vec![
        failure(0, ExitCause::Code(1), false),
        failure(1, ExitCause::Signal(Signal::SIGTERM as i32), true),
    ];
    simulation.at(3, killed(1, Signal::SIGTERM), &[Action::Finish(Outcome::Failed(failures))]);
}

#[test]
fn urgent_abort_shortens_the_grace_period_of_stopping_workers() {
    let mut simulation = Simulation::of(2, 0);
    let stop = [Action::RoundFailed { local_rank: 0, cause: ExitCause::Code(1) }, signal(1, Signal::SIGTERM)];
    simulation.at(0, exit(0, 1), &stop);
    simulation.at(1, Event::Abort { signal: Signal::SIGTERM, grace: Duration::from_millis(500) }, &[]);
    simulation.at(600, Event::Tick, &[signal(1, Signal::SIGKILL)]);
}

#[test]
fn abort_stops_the_workers_without_a_failure() {
    let mut simulation = Simulation::of(2, 0);
    simulation.at(
        0,
        Event::Abort { signal: Signal::SIGTERM, grace: GRACE },
        &[signal(0, Signal::SIGTERM), signal(1, Signal::SIGTERM)],
    );
    simulation.at(1, killed(0, Signal::SIGTERM), &[]);
    simulation.at(2, killed(1, Signal::SIGTERM), &[Action::Finish(Outcome::Aborted)]);
}

fn not_found() -> NotStarted {
    NotStarted {
        class: Class::MissingProgram,
        reason: "not found".to_owned(),
        advice: "install it".to_owned(),
    }
}

#[test]
fn unstartable_program_ends_the_attempt() {
    let window = Duration::ZERO;
    let mut simulation = Simulation { supervisor: Supervisor::new(2, window), start: Instant::now() };
    let not_found = not_found();
    simulation.at(0, Event::StartFailed { local_rank: 0, error: not_found.clone() }, &[]);
    let outcome = Outcome::NotStarted { local_rank: 0, error: not_found.clone() };
    simulation.at(1, Event::StartFailed { local_rank: 1, error: not_found }, &[Action::Finish(outcome)]);
}

#[test]
fn random_attempts_finish_once_and_leave_no_process() {
    let seed = std::env::var("CONVOKE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121);
    println!("CONVOKE_SEED={seed}");
    for round in 0..2_000 {
        random_round(seed ^ round);
    }
}

/// Runs one round of random events. A worker that got SIGKILL, or SIGTERM without ignoring it, dies some time
/// later.
fn random_round(seed: u64) {
    let mut state = seed | 1;
    let mut random = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    };
    let count = usize::try_from(1 + random(6)).unwrap();
    let window = Duration::from_millis(random(2) * 500);
    let mut supervisor = Supervisor::new(count, window);
    let mut now = Instant::now();
    let mut started = vec![false; count];
    let mut alive = vec![true; count];
    let mut doomed = vec![None; count];
    let mut outcome = None;
    let mut failed = false;
    for _ in 0..10_000 {
        now += Duration::from_millis(random(2_000));
        let who = usize::try_from(random(count as u64)).unwrap();
        let event = match random(12) {
            0 if random(2) == 0 => Event::Abort { signal: Signal::SIGTERM, grace: GRACE },
            0 => Event::Stop { signal: Signal::SIGINT, grace: GRACE, at_once: random(2) == 0 },
            1..=5 => Event::Tick,
            _ if !alive[who] => continue,
            _ if !started[who] && random(30) == 0 => {
                alive[who] = false;
                Event::StartFailed { local_rank: who, error: not_found() }
            }
            _ if !started[who] => {
                started[who] = true;
                Event::Started { local_rank: who }
            }
            _ => {
                let cause = match doomed[who] {
                    Some(signal) => ExitCause::Signal(signal as i32),
                    None if random(3) == 0 => ExitCause::Code(i32::try_from(random(2)).unwrap()),
                    None => continue,
                };
                alive[who] = false;
                let origin = match random(4) {
                    0 => FailureOrigin::Peer(None),
                    1 => FailureOrigin::Peer(Some(usize::try_from(random(count as u64)).unwrap())),
                    _ => FailureOrigin::Own,
                };
                Event::Exited { local_rank: who, cause, origin }
            }
        };
        let mut out = Vec::new();
        supervisor.handle(now, event, &mut out);
        for action in out {
            assert!(outcome.is_none(), "seed {seed}: {action:?} after the end");
            match action {
                Action::Signal { local_rank, signal } => {
                    assert!(alive[local_rank] && started[local_rank], "seed {seed}: signal to nobody");
                    if signal == Signal::SIGKILL || random(2) == 0 {
                        doomed[local_rank] = Some(signal);
                    }
                }
                Action::RoundFailed { local_rank, .. } => {
                    assert!(!alive[local_rank] && !std::mem::replace(&mut failed, true), "seed {seed}");
                }
                Action::Finish(end) => outcome = Some(end),
            }
        }
        if outcome.is_some() {
            assert!(alive.iter().all(|alive| !alive), "seed {seed}: finished with workers alive");
            return;
        }
    }
    panic!("seed {seed}: the round does not end");
}
