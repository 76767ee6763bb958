//! Ranks that are alive but silent: stopped, slow, or dead while another process holds their sockets. Their
//! peers cannot tell them from a rank that computes. So the peers must report a timeout that names them, and
//! not before the deadline.

use std::time::Duration;

use convoke_launcher_tests::fault::{Act, Orders, Work};
use nix::sys::signal::Signal;

use super::cases::{Case, cases, fault};
use super::job::{Job, Place, orders, side_by_side};
use super::table::{Promise, Times};

/// Timeout of the calls, and the allowance for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Number of concurrent jobs. They mostly wait, but a waiting rank must get a core within 0.5 s when a peer
/// asks which rank it waits for.
const JOBS: usize = 6;
const MARGIN: Duration = Duration::from_secs(5);

/// Asserts that `act` on each rank in each phase ends in a timeout that names the rank.
fn silent(case: &'static str, act: Act) {
    let mut times = Times::new(case, "the rank", Promise::within(TIMEOUT + MARGIN));
    let took = side_by_side(JOBS, cases(), |case| {
        let Case { size, victim, in_memory, .. } = case;
        let job = Job::start(Place::Here, size, Orders { timeout: TIMEOUT, ..case.orders(act) });
        if act == Act::HoldAndDie && in_memory {
            // Ranks that share memory also hold a pidfd of the victim, so they detect its death at once.
            let took = job.blames(victim, &["PeerLost"]);
            assert!(took < TIMEOUT, "{took:?} after the fault: {case:?}");
            return None;
        }
        let took = job.blames(victim, &["Timeout"]);
        assert!(took > TIMEOUT / 2, "{took:?} after the fault: {case:?}");
        if act == Act::Stop {
            // After SIGCONT the victim must report an equal result.
            job.signal(victim, Signal::SIGCONT);
            let reports: Vec<_> = (0..size).map(|rank| job.report(rank)).collect();
            job.agree(&reports, &[victim], job.fault_at(victim), &["Timeout"]);
        }
        Some(took)
    });
    took.into_iter().flatten().for_each(|took| times.add(took));
    times.hand_in();
}

#[test]
fn a_stopped_rank_is_named_at_the_deadline() {
    silent("SIGSTOP, in any phase of a call; deadline 2 s", Act::Stop);
}

#[test]
fn a_dead_rank_with_open_sockets_is_named_in_time() {
    silent("SIGKILL, a child holds the sockets, no launcher; deadline 2 s", Act::HoldAndDie);
}

#[test]
fn rank_stopped_during_group_formation_is_named_at_the_deadline() {
    let bound = TIMEOUT + MARGIN;
    let mut times =
        Times::new("SIGSTOP while the group forms; deadline 2 s", "the rank", Promise::within(bound));
    let cases =
        ["recorded", "meeting"].into_iter().flat_map(|point| (0..3).map(move |victim| (point, victim)));
    let took = side_by_side(JOBS, cases, |(point, victim)| {
        let faults = vec![fault(victim, (point, 0), Act::Stop)];
        let orders = Orders { faults, init_timeout: TIMEOUT, ..orders(Work::Small) };
        Job::start(Place::Here, 3, orders).blames(victim, &["Bootstrap"])
    });
    took.into_iter().for_each(|took| times.add(took));
    times.hand_in();
}

#[test]
fn earlier_messages_of_a_stopped_rank_mislead_nobody() {
    // All ranks wait for a late rank and report this. Then the late rank arrives, and another rank stops.
    let works = [Work::Ring, Work::Broadcast, Work::Direct];
    let cases = works.into_iter().flat_map(|work| (0..3).map(move |victim| (work, victim)));
    side_by_side(JOBS, cases, |(work, victim)| {
        let late = Act::Sleep(TIMEOUT / 4);
        let faults =
            vec![fault((victim + 1) % 3, ("computing", 0), late), fault(victim, ("received", 1), Act::Stop)];
        let job = Job::start(Place::Here, 3, Orders { faults, timeout: TIMEOUT, ..orders(work) });
        job.blames(victim, &["Timeout"]);
    });
}

#[test]
fn slow_rank_never_fails_before_the_deadline() {
    let peer_timeout = Duration::from_secs(2);
    side_by_side(JOBS, cases(), |case| {
        // The delay exceeds the time limit for a dead host, threefold where the program computes.
        let slow = if case.moment.0 == "computing" { 3 * peer_timeout } else { 5 * peer_timeout / 4 };
        let job =
            Job::start(Place::Here, case.size, Orders { peer_timeout, ..case.orders(Act::Sleep(slow)) });
        for rank in 0..case.size {
            let report = job.report(rank);
            assert!(report.failed.is_none(), "{case:?}: {report:#?}");
            assert!(report.returned >= job.fault_at(case.victim) + slow.as_nanos() as u64, "{report:#?}");
        }
    });
}
