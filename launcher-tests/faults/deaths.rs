//! Tests in which processes of one host die, in each phase of a call.

use std::time::Duration;

use convoke_launcher_tests::fault_spec::{FaultKind, FaultTestConfig, Operation};
use convoke_testkit::TEST_TIMEOUT;

use super::cases::{FAULTY_CALL, cases, fault};
use super::job::{Job, Placement, config};
use super::table::{Measurements, TimeBounds};

/// Injects `kind` into each rank in each phase of each kind of call.
fn check_in_calls(case: &'static str, placement: Placement<'_>, kind: FaultKind) {
    let mut times = Measurements::new(case, "the rank", TimeBounds::LOCAL_DEATH);
    for case in cases() {
        let job = Job::start(placement, case.size, case.config(kind));
        times.add(job.expect_suspect(case.victim, &["PeerLost"]));
    }
    times.finish();
}

#[test]
fn rank_killed_in_any_phase_of_a_call_is_named() {
    check_in_calls("SIGKILL, in any phase of a call", Placement::Local, FaultKind::Kill);
}

#[test]
fn rank_killed_while_ranks_read_in_the_memory_of_each_other_is_named() {
    let case = "SIGKILL, ranks read in the memory of each other";
    let mut times = Measurements::new(case, "the rank", TimeBounds::LOCAL_DEATH);
    let all_to_all = ["calling", "sent", "received", "moved"].map(|point| (Operation::AllToAll, point));
    let messages =
        ["computing", "message received", "message sent"].map(|point| (Operation::MessageRing, point));
    for (operation, point) in all_to_all.into_iter().chain(messages) {
        for victim in 0..3 {
            let faults = vec![fault(victim, (point, 0), FaultKind::Kill)];
            let config = FaultTestConfig { faults, single_copy: true, ..config(operation) };
            times.add(Job::start(Placement::Local, 3, config).expect_suspect(victim, &["PeerLost"]));
        }
    }
    times.finish();
}

#[test]
fn rank_killed_together_with_the_store_is_named() {
    check_in_calls("the same, rank 0 serves the store", Placement::LocalStoreOnRank0, FaultKind::Kill);
}

#[test]
fn next_call_names_a_rank_that_died_during_computation() {
    for victim in 0..3 {
        let faults = vec![fault(victim, ("computing", 0), FaultKind::Kill)];
        let pause = Duration::from_millis(50);
        let job =
            Job::start(Placement::Local, 3, FaultTestConfig { pause, faults, ..config(Operation::Barrier) });
        job.expect_suspect(victim, &["PeerLost"]);
    }
}

#[test]
fn rank_that_exits_without_destroying_its_group_is_named() {
    check_in_calls("exit(3) without a farewell", Placement::Local, FaultKind::Exit);
}

#[test]
fn rank_that_loses_its_connections_but_runs_is_named() {
    check_in_calls("all its sockets closed, it lives on", Placement::Local, FaultKind::CloseSockets);
}

#[test]
fn forked_child_does_not_hide_the_death_of_its_parent() {
    check_in_calls("SIGKILL, a forked child lives on", Placement::Local, FaultKind::DieLeavingChild);
}

#[test]
fn launcher_reports_the_exit_status_of_a_dead_rank() {
    check_in_calls("SIGKILL under `convoke`", Placement::Launcher, FaultKind::Kill);
}

#[test]
fn launcher_reports_a_dead_rank_whose_sockets_stay_open() {
    check_in_calls(
        "SIGKILL under `convoke`, a child holds the sockets",
        Placement::Launcher,
        FaultKind::DieHoldingSockets,
    );
}

#[test]
fn second_rank_death_does_not_hide_the_first() {
    let mut times = Measurements::new(
        "SIGKILL of two, the second tells of the first",
        "one of both",
        TimeBounds::LOCAL_DEATH,
    );
    let size = 4;
    for point in ["failing", "told"] {
        for (first, second) in (0..size).flat_map(|first| (0..size).map(move |second| (first, second))) {
            if first == second {
                continue;
            }
            let faults = vec![
                fault(first, ("received", 1), FaultKind::Kill),
                fault(second, (point, 0), FaultKind::Kill),
            ];
            let job = Job::start(
                Placement::Local,
                size,
                FaultTestConfig { faults, ..config(Operation::RingAllReduce) },
            );
            let others = job.other_ranks(first).filter(|&rank| rank != second);
            let reports: Vec<_> = others.map(|rank| job.report(rank)).collect();
            times.add(job.expect_agreement(&reports, &[first, second], job.fault_time(first), &["PeerLost"]));
        }
    }
    times.finish();
}

#[test]
fn rank_death_during_group_destruction_blocks_nobody() {
    let mut times =
        Measurements::new("SIGKILL while all ranks leave", "nobody: all is done", TimeBounds::LOCAL_DEATH);
    for point in ["leaving", "left"] {
        for victim in 0..3 {
            let faults = vec![fault(victim, (point, 0), FaultKind::Kill)];
            let job = Job::start(
                Placement::Local,
                3,
                FaultTestConfig { faults, ..config(Operation::SmallAllReduce) },
            );
            let reports: Vec<_> = job.other_ranks(victim).map(|rank| job.report(rank)).collect();
            assert!(reports.iter().all(|report| report.error.is_none()), "{reports:#?}");
            let last = reports.iter().map(|report| report.left_at).max().unwrap();
            times.add(Duration::from_nanos(last.saturating_sub(job.fault_time(victim))));
        }
    }
    times.finish();
}

#[test]
fn ranks_that_need_a_departed_rank_name_it() {
    let mut times =
        Measurements::new("SIGKILL while it leaves, the others need it", "the rank", TimeBounds::LOCAL_DEATH);
    for (point, how) in [("leaving", "Disconnected"), ("left", "Left"), ("never", "Left")] {
        for victim in 0..3 {
            let faults = vec![fault(victim, (point, 0), FaultKind::Kill)];
            let early_leave = Some((victim, FAULTY_CALL));
            let job = Job::start(
                Placement::Local,
                3,
                FaultTestConfig { early_leave, faults, ..config(Operation::RingAllReduce) },
            );
            let reports: Vec<_> = job.other_ranks(victim).map(|rank| job.report(rank)).collect();
            let time = job.expect_agreement(&reports, &[victim], job.leave_time(victim), &["PeerLost"]);
            let hows = reports.iter().filter_map(|report| report.error.as_ref()?.loss_reason.as_deref());
            assert!(hows.clone().all(|seen| seen == how), "{point}: {:?}", hows.collect::<Vec<_>>());
            if point != "never" {
                times.add(time);
            }
        }
    }
    times.finish();
}

/// Fault points during group formation, in order. No rank connects to the last rank; the first rank connects
/// to no rank.
const BOOTSTRAP_POINTS: [&str; 6] = ["recorded", "meeting", "greeted", "welcomed", "proving", "connected"];

#[test]
fn rank_killed_during_group_formation_is_named() {
    let mut times = Measurements::new(
        "SIGKILL while the group forms",
        "the rank",
        TimeBounds::within(Duration::from_secs(10)),
    );
    for point in BOOTSTRAP_POINTS {
        for victim in 0..3 {
            if point == "welcomed" && victim == 2 || ["greeted", "proving"].contains(&point) && victim == 0 {
                continue;
            }
            let faults = vec![fault(victim, (point, 0), FaultKind::Kill)];
            // Rank 0 dies before it publishes the table of addresses. The others only know that it is
            // missing.
            let alone = (point, victim) == ("recorded", 0);
            let init_timeout = if alone { Duration::from_secs(2) } else { TEST_TIMEOUT };
            let config = FaultTestConfig { faults, init_timeout, ..config(Operation::SmallAllReduce) };
            let job = Job::start(Placement::Local, 3, config);
            times.add(job.expect_suspect(victim, &["PeerLost", "Bootstrap"]));
        }
    }
    times.finish();
}
