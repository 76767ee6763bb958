//! Hosts that lose power or network, wholly or in one direction, and slow networks. Each case has its own
//! simulated hosts.

use std::time::Duration;

use convoke_launcher_tests::fault::{Act, Orders, Work, now};
use convoke_launcher_tests::hosts::Hosts;
use convoke_testkit::{is_full, skip};
use nix::sys::signal::Signal;

use super::cases::fault;
use super::job::{Job, Place, orders, side_by_side};
use super::table::{Promise, Times};

/// Time limit for detecting a dead host or path. The documentation promises an error within one further
/// second.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);
const PROMISED: Duration = Duration::from_secs(3);
/// Time limit where no job may fail: delays of a busy machine must not look like a lost path.
const LONG_PEER_TIMEOUT: Duration = Duration::from_secs(4);
/// Allowance for a busy machine.
const MARGIN: Duration = Duration::from_secs(4);

/// Number of sets of hosts that run at a time; the ranks mostly wait.
const TESTBEDS: usize = 6;

/// The fault of the victim's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// The switch drops all frames to and from the host.
    Partition,
    /// All processes of the host die without sending anything further.
    Power,
    /// The host's own network interface goes down.
    LinkDown,
    /// The host loses its routes to the others; the others keep theirs.
    NoRoute,
    /// Frames from the host are lost.
    Mute,
    /// Frames to the host are lost.
    Deaf,
    /// Only the path to the next host is cut.
    Path,
}

impl Cut {
    const ALL: [Self; 7] =
        [Self::Partition, Self::Power, Self::LinkDown, Self::NoRoute, Self::Mute, Self::Deaf, Self::Path];

    fn case(self) -> &'static str {
        match self {
            Self::Partition => "its host is cut off from the network",
            Self::Power => "its host loses its power",
            Self::LinkDown => "its host's network interface goes down",
            Self::NoRoute => "its host loses its routes to the others",
            Self::Mute => "nobody hears its host, which hears all",
            Self::Deaf => "its host hears nobody, all hear it",
            Self::Path => "the path between two hosts is cut",
        }
    }

    /// Injects the fault into `host`, counted from 1, of `count` hosts.
    fn apply(self, hosts: &Hosts, host: usize, count: usize) {
        let name = host.to_string();
        let others = (1..=count).filter(|&other| other != host).map(|other| format!("10.77.0.{other}"));
        match self {
            Self::Partition => drop(hosts.tell(["partition", &name]).unwrap()),
            Self::Power => drop(hosts.tell(["kill-host", &name]).unwrap()),
            Self::LinkDown => drop(hosts.tell(["exec", &name, "ip", "link", "set", "eth0", "down"]).unwrap()),
            Self::NoRoute => others.for_each(|other| {
                drop(hosts.tell(["exec", &name, "ip", "route", "add", "blackhole", &other]).unwrap());
            }),
            Self::Mute => drop(hosts.tell(["mute", &name]).unwrap()),
            Self::Deaf => drop(hosts.tell(["deaf", &name]).unwrap()),
            Self::Path => {
                let next = (host % count + 1).to_string();
                drop(hosts.tell(["partition", &name, &next]).unwrap());
            }
        }
    }
}

/// Starts simulated hosts; reports a skipped test and returns `None` if this machine cannot have them.
fn hosts(count: usize) -> Option<Hosts> {
    Hosts::up(count).inspect_err(|why| skip(format!("faults of networks: {why}"))).ok()
}

/// Starts hosts whose links can be slow, lossy or cut in one direction.
fn hosts_with_wires(count: usize) -> Option<Hosts> {
    Hosts::up_with_wires(count)
        .inspect_err(|why| skip(format!("slow, lossy and half cut networks: {why}")))
        .ok()
}

/// A network fault under ranks that do `work`.
#[derive(Debug, Clone, Copy)]
struct Case {
    cut: Cut,
    work: Work,
    hosts: usize,
    ranks_on_each: usize,
    /// The number of the victim's host, counted from 1.
    victim: usize,
}

impl Case {
    /// Returns the time until the last survivor had its error; `None` if this machine cannot have simulated
    /// hosts.
    fn run(self) -> Option<Duration> {
        let Self { cut, work, hosts: count, ranks_on_each: each, victim } = self;
        let is_one_way = matches!(cut, Cut::Mute | Cut::Deaf);
        let hosts = if is_one_way { hosts_with_wires(count)? } else { hosts(count)? };
        if is_one_way {
            // `delay` inserts the wire; it must be in place before the ranks connect.
            hosts.tell(["delay", &victim.to_string(), "1"]).unwrap();
        }
        let size = count * each;
        let pause = Duration::from_millis(5);
        let orders = Orders { peer_timeout: PEER_TIMEOUT, calls: u64::MAX, pause, ..orders(work) };
        let job = Job::start(Place::Hosts(&hosts, each), size, orders);
        // The test output shows this line on failure. A wait that times out names the folder.
        println!("{self:?} in {}", job.folder().display());
        job.wait_until_up();
        let since = now();
        cut.apply(&hosts, victim, count);
        let on = |host: usize| (host - 1) * each..host * each;
        let (lost, rest): (Vec<usize>, Vec<usize>) = (0..size).partition(|rank| on(victim).contains(rank));
        let reports = |ranks: &[usize]| ranks.iter().map(|&rank| job.report(rank)).collect::<Vec<_>>();
        let took = if cut == Cut::Path {
            // Each end suspects the other, and all ranks agree on one of the two.
            let ends: Vec<usize> = lost.iter().copied().chain(on(victim % count + 1)).collect();
            job.agree(&reports(&(0..size).collect::<Vec<_>>()), &ends, since, &["PeerLost"])
        } else {
            // With two hosts and a cut in one direction, either end may report the other. No rank can know
            // the right one.
            let all: Vec<usize> = (0..size).collect();
            let one_way = matches!(cut, Cut::Mute | Cut::Deaf | Cut::NoRoute);
            let named = if one_way && count == 2 { &all } else { &lost };
            let took = job.agree(&reports(&rest), named, since, &["PeerLost"]);
            if cut != Cut::Power {
                // The lost host is alive, and each of its ranks learns a little later that it was declared
                // lost. A rank that can receive but not send learns it only from a message that arrives in
                // time.
                let named = match (cut, count) {
                    (Cut::Mute | Cut::NoRoute | Cut::Deaf, 2) => &all,
                    (_, 2) => &rest,
                    (_, _) => &lost,
                };
                for report in reports(&lost) {
                    job.agree(&[report], named, since, &["PeerLost"]);
                }
            }
            took
        };
        Some(took)
    }
}

#[test]
fn lost_host_is_named_in_time_for_every_failure_kind() {
    let mut cases = Vec::new();
    for cut in Cut::ALL {
        let case = |victim, work| Case { cut, work, hosts: 3, ranks_on_each: 1, victim };
        if is_full() {
            let works = [Work::Idle, Work::Small, Work::Ring, Work::Messages];
            cases.extend(works.into_iter().flat_map(|work| (1..=3).map(move |victim| case(victim, work))));
            cases.extend((1..=3).map(|victim| Case { ranks_on_each: 2, ..case(victim, Work::Ring) }));
            cases.extend((1..=2).map(|victim| Case {
                hosts: 2,
                ranks_on_each: 2,
                ..case(victim, Work::Small)
            }));
        } else {
            cases.extend([case(1, Work::Small), case(3, Work::Idle)]);
        }
    }
    let took = side_by_side(TESTBEDS, cases, |case| (case.cut, case.run()));
    for cut in Cut::ALL {
        let named = match cut {
            Cut::Path => "one of the two, the same by all",
            Cut::Power => "the rank",
            Cut::Partition | Cut::LinkDown | Cut::NoRoute | Cut::Mute | Cut::Deaf => {
                "the rank, also by itself"
            }
        };
        let mut times = Times::new(cut.case(), named, Promise::within(PROMISED + MARGIN));
        took.iter()
            .filter(|(of, _)| *of == cut)
            .filter_map(|(_, took)| *took)
            .for_each(|took| times.add(took));
        times.hand_in();
    }
}

/// The kind of slowness of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Slow {
    /// A slow link: milliseconds of delay in each direction, percentage of lost frames.
    Path(&'static str, &'static str),
    Stopped,
    Computing,
}

#[test]
fn slow_network_or_host_ends_nothing() {
    let all = [
        (Slow::Path("150", "0"), Work::Direct),
        (Slow::Path("20", "2"), Work::Small),
        (Slow::Stopped, Work::Ring),
        (Slow::Computing, Work::Small),
        (Slow::Path("150", "0"), Work::Messages),
        (Slow::Path("20", "2"), Work::Direct),
        (Slow::Stopped, Work::Messages),
        (Slow::Computing, Work::Broadcast),
    ];
    let some = if is_full() { &all[..] } else { &all[..4] };
    side_by_side(TESTBEDS, some.iter().copied(), |(slow, work)| {
        let hosts = if matches!(slow, Slow::Path(..)) { hosts_with_wires(3) } else { hosts(3) };
        let Some(hosts) = hosts else { return };
        let mut orders = Orders { peer_timeout: LONG_PEER_TIMEOUT, calls: 6, ..orders(work) };
        match slow {
            Slow::Path(ms, loss) => {
                hosts.tell(["delay", "2", ms, loss]).unwrap();
                orders.calls = 3;
                if loss != "0" {
                    // With a limit of 4 s, three lost probes would end the job.
                    orders.peer_timeout = Duration::from_secs(10);
                }
            }
            Slow::Stopped => {
                let point = if work == Work::Messages { "message received" } else { "received" };
                orders.faults = vec![fault(1, (point, 1), Act::Stop)];
            }
            Slow::Computing => {
                orders.faults = vec![fault(1, ("computing", 0), Act::Sleep(3 * LONG_PEER_TIMEOUT))]
            }
        }
        let job = Job::start(Place::Hosts(&hosts, 1), 3, orders);
        if slow == Slow::Stopped {
            job.fault_at(1);
            // This wait exceeds the time limit for a dead host. The host is not lost, because its kernel
            // still answers.
            std::thread::sleep(2 * LONG_PEER_TIMEOUT);
            job.signal(1, Signal::SIGCONT);
        }
        for rank in 0..3 {
            let report = job.report(rank);
            assert!(report.failed.is_none(), "{slow:?}, {work:?}: {report:#?}");
        }
    });
}

#[test]
fn host_is_never_lost_to_itself() {
    // The cut loopback simulates a machine so busy that neither end of a local connection runs for a while.
    let Some(hosts) = hosts(1) else { return };
    let faults = vec![fault(1, ("computing", 0), Act::Sleep(3 * PEER_TIMEOUT))];
    let orders = Orders { peer_timeout: PEER_TIMEOUT, faults, ..orders(Work::Ring) };
    let job = Job::start(Place::Hosts(&hosts, 3), 3, orders);
    job.fault_at(1);
    hosts.tell(["exec", "1", "ip", "link", "set", "lo", "down"]).unwrap();
    std::thread::sleep(2 * PEER_TIMEOUT);
    hosts.tell(["exec", "1", "ip", "link", "set", "lo", "up"]).unwrap();
    for rank in 0..3 {
        let report = job.report(rank);
        assert!(report.failed.is_none(), "{report:#?}");
    }
}

#[test]
fn rank_stopped_on_another_host_is_not_called_host_loss() {
    let (timeout, bound) = (2 * LONG_PEER_TIMEOUT, 2 * LONG_PEER_TIMEOUT + MARGIN);
    let mut times = Times::new("SIGSTOP on another host; deadline 8 s", "the rank", Promise::within(bound));
    let took = side_by_side(TESTBEDS, 0..3, |victim| {
        let hosts = hosts(3)?;
        let faults = vec![fault(victim, ("received", 1), Act::Stop)];
        let orders = Orders { peer_timeout: LONG_PEER_TIMEOUT, timeout, faults, ..orders(Work::Ring) };
        let job = Job::start(Place::Hosts(&hosts, 1), 3, orders);
        Some(job.blames(victim, &["Timeout"]))
    });
    took.into_iter().flatten().for_each(|took| times.add(took));
    times.hand_in();
}
