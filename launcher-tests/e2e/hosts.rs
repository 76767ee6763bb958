//! Jobs on simulated hosts: the reaction of a node when another host loses power or network, and the traffic
//! of collectives between hosts.

use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput, describe_process};
use convoke_launcher_tests::hosts::Hosts;
use convoke_launcher_tests::worker_command;
use convoke_testkit::{skip, wait_until};

/// Time from the loss of a host to the end of the other node. The documentation promises 4 s.
const LIMIT: Duration = Duration::from_secs(15);
const PORT: &str = "29500";

/// Starts two hosts; reports a skipped test and returns `None` if this machine cannot have them.
fn two_hosts() -> Option<Hosts> {
    Hosts::up(2).inspect_err(|why| skip(format!("jobs on several hosts: {why}"))).ok()
}

/// The hosts must end by themselves after a test is killed, because then no code takes them down.
#[test]
fn simulated_hosts_and_links_end_with_their_test_process() {
    let hosts =
        Hosts::up_with_tap_links(2).inspect_err(|why| skip(format!("tap links of simulated hosts: {why}")));
    let Ok(mut hosts) = hosts else { return };
    hosts.run_script(["delay", "1", "1"]).unwrap();
    let link = std::fs::read_to_string(hosts.state_dir().join("hosts/1.link")).unwrap();
    let inits = ["0", "1", "2"].map(|host| hosts.run_script(["pid", host]).unwrap());
    hosts.close_orphan_guard();
    for pid in inits.iter().chain([&link]) {
        let process = Path::new("/proc").join(pid.trim());
        wait_until(&format!("process {pid} to end"), || (!process.exists()).then_some(()));
    }
}

/// Starts node 0 on h1 and node 1 on h2 with these numbers of workers; `worker` is a program and its
/// arguments.
fn start<S: AsRef<OsStr>>(hosts: &Hosts, job: &Job, workers: [usize; 2], worker: &[S]) -> [Launcher; 2] {
    [0, 1].map(|node| {
        let through = [Hosts::script().display().to_string(), "exec".to_owned(), (node + 1).to_string()];
        let through: Vec<_> = through.iter().map(String::as_str).collect();
        let mut command =
            job.wrapped_command(&through, ["--nnodes=2", "--master-addr=h1", "--master-port", PORT]);
        command
            .arg(format!("--node-rank={node}"))
            .arg(format!("--nproc-per-node={}", workers[node]))
            .args(worker);
        command.env("TESTBED_DIR", hosts.state_dir()).env("OMP_NUM_THREADS", "1");
        job.start(command)
    })
}

/// Starts two nodes with two waiting workers each, and applies `what` to the host of node `lost`. Returns
/// the output of the other node, and the time until it ended.
fn lose_host(what: &str, lost: usize) -> Option<(ProcessOutput, Duration)> {
    let hosts = two_hosts()?;
    let job = Job::new();
    let worker = job.script("echo $$ > \"$JOB/up.$RANK\"\nexec sleep 1000\n");
    let [first, second] = start(&hosts, &job, [2; 2], &[worker]);
    for rank in 0..4 {
        job.wait_for_file(&format!("up.{rank}"));
    }
    let (survivor, other) = if lost == 0 { (second, first) } else { (first, second) };
    hosts.run_script([what, &(lost + 1).to_string()]).unwrap();
    let start = Instant::now();
    let ended = survivor.wait().expect_exit_code(1);
    let took = start.elapsed();
    let pid_namespace = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let here = hosts.run_script(["pid", &(2 - lost).to_string()]).unwrap();
    let here = pid_namespace(here.parse().unwrap());
    let left: Vec<_> = job.processes().into_iter().filter(|&pid| pid_namespace(pid) == here).collect();
    assert!(left.is_empty(), "{:?}", left.into_iter().map(describe_process).collect::<Vec<_>>());
    if what == "partition" {
        // The node on the partitioned host lives on, and reports the survivor as lost.
        let stderr = other.wait().expect_exit_code(1).stderr;
        assert!(stderr.contains(&format!("node {} (", 1 - lost)) && stderr.contains("is lost"), "{stderr}");
    }
    drop(hosts);
    wait_until("the other host's processes to be gone", || job.processes().is_empty().then_some(()));
    Some((ended, took))
}

fn expect_named(what: &str) {
    for lost in [0, 1] {
        let Some((ended, took)) = lose_host(what, lost) else { return };
        eprintln!("{what}, node {lost}: the other ended after {took:.1?}:\n{}", ended.stderr);
        let named = format!("node {lost} (");
        assert!(ended.stderr.contains(&named) && ended.stderr.contains("is lost"), "{}", ended.stderr);
        assert!(took < LIMIT, "took {took:?}");
    }
}

#[test]
fn powered_off_host_is_reported_lost_by_name() {
    expect_named("kill-host");
}

#[test]
fn disconnected_host_is_reported_lost_by_name() {
    expect_named("partition");
}

/// Six ranks are no power of two, and some subgroups have unequal numbers of ranks on the hosts.
#[test]
fn collectives_between_hosts_are_correct_and_send_only_sums() {
    let Some(hosts) = two_hosts() else { return };
    for workers in [[3, 3], [4, 2]] {
        let job = Job::new();
        let worker = worker_command("collectives");
        let [first, second] = start(&hosts, &job, workers, &worker);
        let ended = first.wait().expect_exit_code(0);
        second.wait().expect_exit_code(0);
        let (payload, sent) = ended.stdout.trim().strip_prefix("sent ").unwrap().split_once(": ").unwrap();
        let payload: u64 = payload.parse().unwrap();
        for sent in sent.split(' ').map(|sent| sent.parse::<u64>().unwrap()) {
            // The minimum for H = 2 hosts is 2·S·(H−1)/H, plus headers and acknowledgements. A flat ring
            // would send two thirds more.
            assert!(payload <= sent && sent < payload + payload / 10, "{workers:?}: {}", ended.stdout);
        }
    }
}
