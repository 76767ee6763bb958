//! `convoke-perf` between hosts names the host whose network is slow.

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_launcher_tests::hosts::Hosts;
use convoke_testkit::programs::user_program;
use convoke_testkit::skip;

/// Bandwidth of the slow host's link in Mbit/s, in each direction. The other links have no limit, and are
/// about a hundred times as fast.
const MBIT: &str = "50";

/// Runs `convoke-perf ARGUMENTS` on `count` hosts, one rank on each; returns the output of node 0.
fn run(hosts: &Hosts, count: usize, arguments: &[&str]) -> ProcessOutput {
    let job = Job::new();
    let nodes: Vec<Launcher> = (0..count)
        .map(|node| {
            let script = Hosts::script().display().to_string();
            let host = (node + 1).to_string();
            let through = [script.as_str(), "exec", host.as_str()];
            let node_rank = format!("--node-rank={node}");
            let nnodes = format!("--nnodes={count}");
            let flags = [&nnodes, node_rank.as_str(), "--master-addr=h1", "--master-port=29500"];
            let mut command = job.wrapped_command(&through, flags);
            command.arg(user_program("convoke-perf")).args(arguments);
            command.env("TESTBED_DIR", hosts.state_dir()).env("OMP_NUM_THREADS", "1");
            job.start(command)
        })
        .collect();
    let mut ended: Vec<ProcessOutput> =
        nodes.into_iter().map(|node| node.wait().expect_exit_code(0)).collect();
    ended.swap_remove(0)
}

#[test]
fn perf_names_the_slowest_host_pair_and_the_slow_host() {
    let Ok(hosts) = Hosts::up(3).inspect_err(|why| skip(format!("hosts: {why}"))) else { return };
    hosts.run_script(["rate", "2", MBIT]).unwrap();
    let told = run(&hosts, 3, &["pairs", "--pair-bytes=1M"]).stdout;
    assert!(told.contains("3 ranks on 3 hosts") && told.contains("h2: rank 1"), "{told}");
    let line =
        |begin: &str| told.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{told}"));
    let pair = line("# slowest pair of hosts: ");
    assert!(pair.contains("h1 - h2, 0.0") || pair.contains("h2 - h3, 0.0"), "{told}");
    let host = line("# slowest host: ");
    assert!(
        host.contains("slowest host: h2, at most 0.0") && host.contains("times slower than the median"),
        "{told}"
    );
}

#[test]
fn perf_on_two_hosts_measures_their_one_pair() {
    let Ok(hosts) = Hosts::up(2).inspect_err(|why| skip(format!("hosts: {why}"))) else { return };
    let arguments = ["all_reduce", "--max-bytes=64K", "--iters=3", "--pair-bytes=64K"];
    let told = run(&hosts, 2, &arguments).stdout;
    assert!(told.contains("# average bus bandwidth") && told.contains("h1 - h2"), "{told}");
    assert!(!told.contains("slowest"), "nothing to compare with: {told}");
    let none = run(&hosts, 2, &[&arguments[..], &["--no-pairs"]].concat()).stdout;
    assert!(!none.contains("h1 - h2"), "{none}");
}
