//! Hosts that lose power or network, wholly or in one direction, and slow networks. Each case has its own
//! simulated hosts.

use std::time::Duration;

use convoke_launcher_tests::fault_spec::{FaultKind, FaultTestConfig, Operation, now};
use convoke_launcher_tests::hosts::Hosts;
use convoke_testkit::{is_full_test_run, skip};
use nix::sys::signal::Signal;

use super::cases::fault;
use super::job::{Job, Placement, config, run_concurrently};
use super::table::{Measurements, TimeBounds};

/// Time limit for detecting a dead host or path. The documentation promises an error within one further
/// second.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);
const DETECTION_LIMIT: Duration = Duration::from_secs(3);
/// Time limit where no job may fail: delays of a busy machine must not look like a lost path.
const LONG_PEER_TIMEOUT: Duration = Duration::from_secs(4);
/// Allowance for a busy machine.
const MARGIN: Duration = Duration::from_secs(4);

/// Number of sets of hosts that run at a time; the ranks mostly wait.
const CONCURRENT_TESTBEDS: usize = 6;

/// The fault of the victim's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NetworkFault {
    /// The switch drops all frames to and from the host.
    Partition,
    /// All processes of the host die without sending anything further.
    PowerLoss,
    /// The host's own network interface goes down.
    LinkDown,
    /// The host loses its routes to the others; the others keep theirs.
    NoRoute,
    /// Frames from the host are lost.
    OutboundLoss,
    /// Frames to the host are lost.
    InboundLoss,
    /// Only the path to the next host is cut.
    PathDown,
}

impl NetworkFault {
    const ALL: [Self; 7] = [
        Self::Partition,
        Self::PowerLoss,
        Self::LinkDown,
        Self::NoRoute,
        Self::OutboundLoss,
        Self::InboundLoss,
        Self::PathDown,
    ];

    fn description(self) -> &'static str {
        match self {
            Self::Partition => "its host is cut off from the network",
            Self::PowerLoss => "its host loses its power",
            Self::LinkDown => "its host's network interface goes down",
            Self::NoRoute => "its host loses its routes to the others",
            Self::OutboundLoss => "nobody hears its host, which hears all",
            Self::InboundLoss => "its host hears nobody, all hear it",
            Self::PathDown => "the path between two hosts is cut",
        }
    }

    /// Injects the fault into `host`, counted from 1, of `count` hosts.
    fn apply(self, hosts: &Hosts, host: usize, count: usize) {
        let name = host.to_string();
        let others = (1..=count).filter(|&other| other != host).map(|other| format!("10.77.0.{other}"));
        match self {
            Self::Partition => drop(hosts.run_script(["partition", &name]).unwrap()),
            Self::PowerLoss => drop(hosts.run_script(["kill-host", &name]).unwrap()),
            Self::LinkDown => {
                drop(hosts.run_script(["exec", &name, "ip", "link", "set", "eth0", "down"]).unwrap())
            }
            Self::NoRoute => others.for_each(|other| {
                drop(hosts.run_script(["exec", &name, "ip", "route", "add", "blackhole", &other]).unwrap());
            }),
            Self::OutboundLoss => drop(hosts.run_script(["mute", &name]).unwrap()),
            Self::InboundLoss => drop(hosts.run_script(["deaf", &name]).unwrap()),
            Self::PathDown => {
                let next = (host % count + 1).to_string();
                drop(hosts.run_script(["partition", &name, &next]).unwrap());
            }
        }
    }
}

/// Starts simulated hosts; reports a skipped test and returns `None` if this machine cannot have them.
fn hosts(count: usize) -> Option<Hosts> {
    Hosts::up(count).inspect_err(|why| skip(format!("faults of networks: {why}"))).ok()
}

/// Starts hosts whose links can be slow, lossy or cut in one direction.
fn hosts_with_tap_links(count: usize) -> Option<Hosts> {
    Hosts::up_with_tap_links(count)
        .inspect_err(|why| skip(format!("slow, lossy and half cut networks: {why}")))
        .ok()
}

/// A network fault while the ranks run `operation`.
#[derive(Debug, Clone, Copy)]
struct Case {
    network_fault: NetworkFault,
    operation: Operation,
    hosts: usize,
    ranks_on_each: usize,
    /// The number of the victim's host, counted from 1.
    victim: usize,
}

impl Case {
    /// Returns the time until the last survivor had its error; `None` if this machine cannot have simulated
    /// hosts.
    fn run(self) -> Option<Duration> {
        let Self { network_fault, operation, hosts: count, ranks_on_each: each, victim } = self;
        let is_one_way = matches!(network_fault, NetworkFault::OutboundLoss | NetworkFault::InboundLoss);
        let hosts = if is_one_way { hosts_with_tap_links(count)? } else { hosts(count)? };
        if is_one_way {
            // `delay` inserts the tap link; it must be in place before the ranks connect.
            hosts.run_script(["delay", &victim.to_string(), "1"]).unwrap();
        }
        let size = count * each;
        let pause = Duration::from_millis(5);
        let config =
            FaultTestConfig { peer_timeout: PEER_TIMEOUT, calls: u64::MAX, pause, ..config(operation) };
        let job = Job::start(Placement::SimulatedHosts(&hosts, each), size, config);
        // The test output shows this line on failure. A wait that times out names the folder.
        println!("{self:?} in {}", job.folder().display());
        job.wait_until_running();
        let since = now();
        network_fault.apply(&hosts, victim, count);
        let on = |host: usize| (host - 1) * each..host * each;
        let (lost, rest): (Vec<usize>, Vec<usize>) = (0..size).partition(|rank| on(victim).contains(rank));
        let reports = |ranks: &[usize]| ranks.iter().map(|&rank| job.report(rank)).collect::<Vec<_>>();
        let took = if network_fault == NetworkFault::PathDown {
            // Each end suspects the other, and all ranks agree on one of the two.
            let ends: Vec<usize> = lost.iter().copied().chain(on(victim % count + 1)).collect();
            job.expect_agreement(&reports(&(0..size).collect::<Vec<_>>()), &ends, since, &["PeerLost"])
        } else {
            // With two hosts and a cut in one direction, either end may report the other. No rank can know
            // the right one.
            let all: Vec<usize> = (0..size).collect();
            let one_way = matches!(
                network_fault,
                NetworkFault::OutboundLoss | NetworkFault::InboundLoss | NetworkFault::NoRoute
            );
            let named = if one_way && count == 2 { &all } else { &lost };
            let took = job.expect_agreement(&reports(&rest), named, since, &["PeerLost"]);
            if network_fault != NetworkFault::PowerLoss {
                // The lost host is alive, and each of its ranks learns a little later that it was declared
                // lost. A rank that can receive but not send learns it only from a message that arrives in
                // time.
                let named = match (network_fault, count) {
                    (NetworkFault::OutboundLoss | NetworkFault::NoRoute | NetworkFault::InboundLoss, 2) => {
                        &all
                    }
                    (_, 2) => &rest,
                    (_, _) => &lost,
                };
                for report in reports(&lost) {
                    job.expect_agreement(&[report], named, since, &["PeerLost"]);
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
    for network_fault in NetworkFault::ALL {
        let case = |victim, operation| Case { network_fault, operation, hosts: 3, ranks_on_each: 1, victim };
        if is_full_test_run() {
            let operations = [
                Operation::UnmatchedRecv,
                Operation::SmallAllReduce,
                Operation::RingAllReduce,
                Operation::MessageRing,
            ];
            cases.extend(
                operations
                    .into_iter()
                    .flat_map(|operation| (1..=3).map(move |victim| case(victim, operation))),
            );
            cases.extend(
                (1..=3).map(|victim| Case { ranks_on_each: 2, ..case(victim, Operation::RingAllReduce) }),
            );
            cases.extend((1..=2).map(|victim| Case {
                hosts: 2,
                ranks_on_each: 2,
                ..case(victim, Operation::SmallAllReduce)
            }));
        } else {
            cases.extend([case(1, Operation::SmallAllReduce), case(3, Operation::UnmatchedRecv)]);
        }
    }
    let took = run_concurrently(CONCURRENT_TESTBEDS, cases, |case| (case.network_fault, case.run()));
    for network_fault in NetworkFault::ALL {
        let named = match network_fault {
            NetworkFault::PathDown => "one of the two, the same by all",
            NetworkFault::PowerLoss => "the rank",
            NetworkFault::Partition
            | NetworkFault::LinkDown
            | NetworkFault::NoRoute
            | NetworkFault::OutboundLoss
            | NetworkFault::InboundLoss => "the rank, also by itself",
        };
        let mut times = Measurements::new(
            network_fault.description(),
            named,
            TimeBounds::within(DETECTION_LIMIT + MARGIN),
        );
        took.iter()
            .filter(|(of, _)| *of == network_fault)
            .filter_map(|(_, took)| *took)
            .for_each(|took| times.add(took));
        times.finish();
    }
}

/// The kind of slowness of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Slowness {
    /// A slow link: milliseconds of delay in each direction, percentage of lost frames.
    Path(&'static str, &'static str),
    Stopped,
    Computing,
}

#[test]
fn slow_network_or_host_ends_nothing() {
    let all = [
        (Slowness::Path("150", "0"), Operation::DirectAllReduce),
        (Slowness::Path("20", "2"), Operation::SmallAllReduce),
        (Slowness::Stopped, Operation::RingAllReduce),
        (Slowness::Computing, Operation::SmallAllReduce),
        (Slowness::Path("150", "0"), Operation::MessageRing),
        (Slowness::Path("20", "2"), Operation::DirectAllReduce),
        (Slowness::Stopped, Operation::MessageRing),
        (Slowness::Computing, Operation::Broadcast),
    ];
    let some = if is_full_test_run() { &all[..] } else { &all[..4] };
    run_concurrently(CONCURRENT_TESTBEDS, some.iter().copied(), |(slow, operation)| {
        let hosts = if matches!(slow, Slowness::Path(..)) { hosts_with_tap_links(3) } else { hosts(3) };
        let Some(hosts) = hosts else { return };
        let mut config = FaultTestConfig { peer_timeout: LONG_PEER_TIMEOUT, calls: 6, ..config(operation) };
        match slow {
            Slowness::Path(ms, loss) => {
                hosts.run_script(["delay", "2", ms, loss]).unwrap();
                config.calls = 3;
                if loss != "0" {
                    // With a limit of 4 s, three lost probes would end the job.
                    config.peer_timeout = Duration::from_secs(10);
                }
            }
            Slowness::Stopped => {
                let point = if operation == Operation::MessageRing { "message received" } else { "received" };
                config.faults = vec![fault(1, (point, 1), FaultKind::Stop)];
            }
            Slowness::Computing => {
                config.faults = vec![fault(1, ("computing", 0), FaultKind::Sleep(3 * LONG_PEER_TIMEOUT))]
            }
        }
        let job = Job::start(Placement::SimulatedHosts(&hosts, 1), 3, config);
        if slow == Slowness::Stopped {
            job.fault_time(1);
            // This wait exceeds the time limit for a dead host. The host is not lost, because its kernel
            // still answers.
            std::thread::sleep(2 * LONG_PEER_TIMEOUT);
            job.signal(1, Signal::SIGCONT);
        }
        // The rank that fails first may be another than the one that it names, so all reports are shown.
        let reports: Vec<_> = (0..3).map(|rank| job.report(rank)).collect();
        let all_well = reports.iter().all(|report| report.error.is_none());
        assert!(all_well, "{slow:?}, {operation:?}: {reports:#?}");
    });
}

#[test]
fn host_is_never_lost_to_itself() {
    // The cut loopback simulates a machine so busy that neither end of a local connection runs for a while.
    let Some(hosts) = hosts(1) else { return };
    let faults = vec![fault(1, ("computing", 0), FaultKind::Sleep(3 * PEER_TIMEOUT))];
    let config = FaultTestConfig { peer_timeout: PEER_TIMEOUT, faults, ..config(Operation::RingAllReduce) };
    let job = Job::start(Placement::SimulatedHosts(&hosts, 3), 3, config);
    job.fault_time(1);
    hosts.run_script(["exec", "1", "ip", "link", "set", "lo", "down"]).unwrap();
    std::thread::sleep(2 * PEER_TIMEOUT);
    hosts.run_script(["exec", "1", "ip", "link", "set", "lo", "up"]).unwrap();
    for rank in 0..3 {
        let report = job.report(rank);
        assert!(report.error.is_none(), "{report:#?}");
    }
}

#[test]
fn rank_stopped_on_another_host_is_not_called_host_loss() {
    let (timeout, bound) = (2 * LONG_PEER_TIMEOUT, 2 * LONG_PEER_TIMEOUT + MARGIN);
    let mut times =
        Measurements::new("SIGSTOP on another host; deadline 8 s", "the rank", TimeBounds::within(bound));
    let took = run_concurrently(CONCURRENT_TESTBEDS, 0..3, |victim| {
        let hosts = hosts(3)?;
        let faults = vec![fault(victim, ("received", 1), FaultKind::Stop)];
        let config = FaultTestConfig {
            peer_timeout: LONG_PEER_TIMEOUT,
            timeout,
            faults,
            ..config(Operation::RingAllReduce)
        };
        let job = Job::start(Placement::SimulatedHosts(&hosts, 1), 3, config);
        Some(job.expect_suspect(victim, &["Timeout"]))
    });
    took.into_iter().flatten().for_each(|took| times.add(took));
    times.finish();
}
