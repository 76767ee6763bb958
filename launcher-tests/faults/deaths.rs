//! Tests in which processes of one host die, in each phase of a call.

use std::time::Duration;

use convoke_launcher_tests::fault::{Act, Orders, Work};
use convoke_testkit::PATIENCE;

use super::cases::{SEQ, cases, fault};
use super::job::{Job, Place, orders};
use super::table::{Promise, Times};

/// Injects `act` into each rank in each phase of each kind of call.
fn in_calls(case: &'static str, place: Place<'_>, act: Act) {
    let mut times = Times::new(case, "the rank", Promise::AT_ONCE);
    for case in cases() {
        let job = Job::start(place, case.size, case.orders(act));
        times.add(job.blames(case.victim, &["PeerLost"]));
    }
    times.hand_in();
}

#[test]
fn rank_killed_in_any_phase_of_a_call_is_named() {
    in_calls("SIGKILL, in any phase of a call", Place::Here, Act::Kill);
}

#[test]
fn rank_killed_together_with_the_store_is_named() {
    in_calls("the same, rank 0 serves the store", Place::Alone, Act::Kill);
}

#[test]
fn next_call_names_a_rank_that_died_during_computation() {
    for victim in 0..3 {
        let faults = vec![fault(victim, ("computing", 0), Act::Kill)];
        let pause = Duration::from_millis(50);
        let job = Job::start(Place::Here, 3, Orders { pause, faults, ..orders(Work::Barrier) });
        job.blames(victim, &["PeerLost"]);
    }
}

#[test]
fn rank_that_exits_without_destroying_its_group_is_named() {
    in_calls("exit(3) without a farewell", Place::Here, Act::Exit);
}

#[test]
fn rank_that_loses_its_connections_but_runs_is_named() {
    in_calls("all its sockets closed, it lives on", Place::Here, Act::Close);
}

#[test]
fn forked_child_does_not_hide_the_death_of_its_parent() {
    in_calls("SIGKILL, a forked child lives on", Place::Here, Act::ForkAndDie);
}

#[test]
fn launcher_reports_the_exit_status_of_a_dead_rank() {
    in_calls("SIGKILL under `convoke`", Place::Launcher, Act::Kill);
}

#[test]
fn launcher_reports_a_dead_rank_whose_sockets_stay_open() {
    in_calls("SIGKILL under `convoke`, a child holds the sockets", Place::Launcher, Act::HoldAndDie);
}

#[test]
fn second_rank_death_does_not_hide_the_first() {
    let mut times =
        Times::new("SIGKILL of two, the second tells of the first", "one of both", Promise::AT_ONCE);
    let size = 4;
    for point in ["failing", "told"] {
        for (first, second) in (0..size).flat_map(|first| (0..size).map(move |second| (first, second))) {
            if first == second {
                continue;
            }
            let faults = vec![fault(first, ("received", 1), Act::Kill), fault(second, (point, 0), Act::Kill)];
            let job = Job::start(Place::Here, size, Orders { faults, ..orders(Work::Ring) });
            let others = job.others(first).filter(|&rank| rank != second);
            let reports: Vec<_> = others.map(|rank| job.report(rank)).collect();
            times.add(job.agree(&reports, &[first, second], job.fault_at(first), &["PeerLost"]));
        }
    }
    times.hand_in();
}

#[test]
fn rank_death_during_group_destruction_blocks_nobody() {
    let mut times = Times::new("SIGKILL while all ranks leave", "nobody: all is done", Promise::AT_ONCE);
    for point in ["leaving", "left"] {
        for victim in 0..3 {
            let faults = vec![fault(victim, (point, 0), Act::Kill)];
            let job = Job::start(Place::Here, 3, Orders { faults, ..orders(Work::Small) });
            let reports: Vec<_> = job.others(victim).map(|rank| job.report(rank)).collect();
            assert!(reports.iter().all(|report| report.failed.is_none()), "{reports:#?}");
            let last = reports.iter().map(|report| report.left).max().unwrap();
            times.add(Duration::from_nanos(last.saturating_sub(job.fault_at(victim))));
        }
    }
    times.hand_in();
}

#[test]
fn ranks_that_need_a_departed_rank_name_it() {
    let mut times = Times::new("SIGKILL while it leaves, the others need it", "the rank", Promise::AT_ONCE);
    for (point, how) in [("leaving", "Disconnected"), ("left", "Left"), ("never", "Left")] {
        for victim in 0..3 {
            let faults = vec![fault(victim, (point, 0), Act::Kill)];
            let early = Some((victim, SEQ));
            let job = Job::start(Place::Here, 3, Orders { early, faults, ..orders(Work::Ring) });
            let reports: Vec<_> = job.others(victim).map(|rank| job.report(rank)).collect();
            let time = job.agree(&reports, &[victim], job.leaving_at(victim), &["PeerLost"]);
            let hows = reports.iter().filter_map(|report| report.failed.as_ref()?.how.as_deref());
            assert!(hows.clone().all(|seen| seen == how), "{point}: {:?}", hows.collect::<Vec<_>>());
            if point != "never" {
                times.add(time);
            }
        }
    }
    times.hand_in();
}

/// Fault points during group formation, in order. No rank connects to the last rank; the first rank connects
/// to no rank.
const FORMING: [&str; 6] = ["recorded", "meeting", "greeted", "welcomed", "proving", "connected"];

#[test]
fn rank_killed_during_group_formation_is_named() {
    let mut times =
        Times::new("SIGKILL while the group forms", "the rank", Promise::within(Duration::from_secs(10)));
    for point in FORMING {
        for victim in 0..3 {
            if point == "welcomed" && victim == 2 || ["greeted", "proving"].contains(&point) && victim == 0 {
                continue;
            }
            let faults = vec![fault(victim, (point, 0), Act::Kill)];
            // Rank 0 dies before it publishes the table of addresses. The others only know that it is
            // missing.
            let alone = (point, victim) == ("recorded", 0);
            let init_timeout = if alone { Duration::from_secs(2) } else { PATIENCE };
            let orders = Orders { faults, init_timeout, ..orders(Work::Small) };
            let job = Job::start(Place::Here, 3, orders);
            times.add(job.blames(victim, &["PeerLost", "Bootstrap"]));
        }
    }
    times.hand_in();
}
