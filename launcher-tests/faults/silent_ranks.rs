//! Ranks that are alive but silent: stopped, slow, or dead while another process holds their sockets. Their
//! peers cannot tell them from a rank that computes. So the peers must report a timeout that names them, and
//! not before the deadline.

use std::time::Duration;

use convoke_launcher_tests::fault_spec::{FaultKind, FaultTestConfig, Operation};
use nix::sys::signal::Signal;

use super::cases::{Case, cases, fault};
use super::job::{Job, Placement, config, run_concurrently};
use super::table::{Measurements, TimeBounds};

/// Timeout of the calls, and the allowance for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Number of concurrent jobs. They mostly wait, but a waiting rank must get a core within 0.5 s when a peer
/// asks which rank it waits for.
const CONCURRENT_JOBS: usize = 6;
const MARGIN: Duration = Duration::from_secs(5);

/// Asserts that `kind` on each rank in each phase ends in a timeout that names the rank.
fn check_silent_rank(case: &'static str, kind: FaultKind) {
    let mut times = Measurements::new(case, "the rank", TimeBounds::within(TIMEOUT + MARGIN));
    let took = run_concurrently(CONCURRENT_JOBS, cases(), |case| {
        let Case { size, victim, in_memory, .. } = case;
        let job =
            Job::start(Placement::Local, size, FaultTestConfig { timeout: TIMEOUT, ..case.config(kind) });
        if kind == FaultKind::DieHoldingSockets && in_memory {
            // Ranks that share memory also hold a pidfd of the victim, so they detect its death at once.
            let took = job.expect_suspect(victim, &["PeerLost"]);
            assert!(took < TIMEOUT, "{took:?} after the fault: {case:?}");
            return None;
        }
        let took = job.expect_suspect(victim, &["Timeout"]);
        assert!(took > TIMEOUT / 2, "{took:?} after the fault: {case:?}");
        if kind == FaultKind::Stop {
            // After SIGCONT the victim must report an equal result.
            job.signal(victim, Signal::SIGCONT);
            let reports: Vec<_> = (0..size).map(|rank| job.report(rank)).collect();
            job.expect_agreement(&reports, &[victim], job.fault_time(victim), &["Timeout"]);
        }
        Some(took)
    });
    took.into_iter().flatten().for_each(|took| times.add(took));
    times.finish();
}

#[test]
fn a_stopped_rank_is_named_at_the_deadline() {
    check_silent_rank("SIGSTOP, in any phase of a call; deadline 2 s", FaultKind::Stop);
}

#[test]
fn a_dead_rank_with_open_sockets_is_named_in_time() {
    check_silent_rank(
        "SIGKILL, a child holds the sockets, no launcher; deadline 2 s",
        FaultKind::DieHoldingSockets,
    );
}

#[test]
fn rank_stopped_during_group_formation_is_named_at_the_deadline() {
    let bound = TIMEOUT + MARGIN;
    let mut times = Measurements::new(
        "SIGSTOP while the group forms; deadline 2 s",
        "the rank",
        TimeBounds::within(bound),
    );
    let cases =
        ["recorded", "meeting"].into_iter().flat_map(|point| (0..3).map(move |victim| (point, victim)));
    let took = run_concurrently(CONCURRENT_JOBS, cases, |(point, victim)| {
        let faults = vec![fault(victim, (point, 0), FaultKind::Stop)];
        let config = FaultTestConfig { faults, init_timeout: TIMEOUT, ..config(Operation::SmallAllReduce) };
        Job::start(Placement::Local, 3, config).expect_suspect(victim, &["Bootstrap"])
    });
    took.into_iter().for_each(|took| times.add(took));
    times.finish();
}

#[test]
fn earlier_messages_of_a_stopped_rank_mislead_nobody() {
    // All ranks wait for a late rank and report this. Then the late rank arrives, and another rank stops.
    let operations = [Operation::RingAllReduce, Operation::Broadcast, Operation::DirectAllReduce];
    let cases = operations.into_iter().flat_map(|operation| (0..3).map(move |victim| (operation, victim)));
    run_concurrently(CONCURRENT_JOBS, cases, |(operation, victim)| {
        let late = FaultKind::Sleep(TIMEOUT / 4);
        let faults = vec![
            fault((victim + 1) % 3, ("computing", 0), late),
            fault(victim, ("received", 1), FaultKind::Stop),
        ];
        let job = Job::start(
            Placement::Local,
            3,
            FaultTestConfig { faults, timeout: TIMEOUT, ..config(operation) },
        );
        job.expect_suspect(victim, &["Timeout"]);
    });
}

#[test]
fn slow_rank_never_fails_before_the_deadline() {
    let peer_timeout = Duration::from_secs(2);
    run_concurrently(CONCURRENT_JOBS, cases(), |case| {
        // The delay exceeds the time limit for a dead host, threefold where the program computes.
        let slow = if case.fault_point.0 == "computing" { 3 * peer_timeout } else { 5 * peer_timeout / 4 };
        let job = Job::start(
            Placement::Local,
            case.size,
            FaultTestConfig { peer_timeout, ..case.config(FaultKind::Sleep(slow)) },
        );
        for rank in 0..case.size {
            let report = job.report(rank);
            assert!(report.error.is_none(), "{case:?}: {report:#?}");
            assert!(
                report.returned_at >= job.fault_time(case.victim) + slow.as_nanos() as u64,
                "{report:#?}"
            );
        }
    });
}
