//! Static jobs of several nodes: all nodes end together with one cause, and configuration mistakes are
//! reported at once.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use convoke_launcher_tests::harness::{Job, Launcher};
use convoke_testkit::{TEST_TIMEOUT, free_port, wait_until};

/// Time from the end of one node to the end of the others: one promised second, plus an allowance for a busy
/// machine.
const END_LIMIT: Duration = Duration::from_secs(6);

fn node(job: &Job, port: &str, nodes: u32, rank: u32, worker: &Path) -> Launcher {
    let mut command = job.command(["--master-addr=127.0.0.1", "--master-port", port]);
    command.arg(format!("--nnodes={nodes}")).arg(format!("--node-rank={rank}")).arg(worker);
    command.env("PET_SHUTDOWN_TIMEOUT", "5");
    job.start(command)
}

/// Starts three nodes whose workers run `extra` and then wait for ever; `extra` may select a rank by itself.
fn start_three(job: &Job, extra: &str) -> [Launcher; 3] {
    let worker = job.script(&format!("echo $PPID > \"$JOB/up.$RANK\"\n{extra}\nexec sleep 1000\n"));
    let port = free_port().to_string();
    let nodes = [0, 1, 2].map(|rank| node(job, &port, 3, rank, &worker));
    for rank in 0..3 {
        job.wait_for_file(&format!("up.{rank}"));
    }
    nodes
}

#[test]
fn final_failure_ends_all_nodes_with_one_cause() {
    for culprit in 0..3 {
        let job = Job::new();
        let fail = "while [ ! -e \"$JOB/go\" ]; do sleep 0.01; done\n[ $RANK = CULPRIT ] && exit 3\n";
        let nodes = start_three(&job, &fail.replace("CULPRIT", &culprit.to_string()));
        std::fs::write(job.path("go"), "").unwrap();
        let start = Instant::now();
        for (rank, node) in nodes.into_iter().enumerate() {
            let ended = node.wait().expect_exit_code(1);
            let root = ended.stderr.split("Root Cause").nth(1).unwrap_or_default();
            assert!(root.contains("exitcode  : 3 (pid: "), "node {rank}: {}", ended.stderr);
            assert!(root.contains(&format!("rank      : {culprit} (local_rank: 0)")), "{}", ended.stderr);
            if rank != culprit {
                let cause = format!("failed: rank {culprit} (local_rank 0) exited with code 3");
                assert!(ended.stderr.contains(&cause), "node {rank}: {}", ended.stderr);
                assert!(ended.stderr.contains(&format!("node {culprit} (")), "node {rank}: {}", ended.stderr);
            }
        }
        assert!(start.elapsed() < END_LIMIT, "took {:?}", start.elapsed());
        assert_eq!(job.processes(), [0; 0]);
    }
}

#[test]
fn killed_launcher_ends_all_nodes_and_is_named() {
    for culprit in 0..3 {
        let job = Job::new();
        let nodes = start_three(&job, "");
        nodes[culprit].signal(Signal::SIGKILL);
        let start = Instant::now();
        for (rank, node) in nodes.into_iter().enumerate() {
            let ended = node.wait();
            if rank != culprit {
                assert!(ended.stderr.contains(&format!("node {culprit} (")), "node {rank}: {}", ended.stderr);
                assert!(ended.stderr.contains("is lost"), "node {rank}: {}", ended.stderr);
                assert_eq!(ended.status.code(), Some(1));
            }
        }
        assert!(start.elapsed() < END_LIMIT, "took {:?}", start.elapsed());
        job.wait_until_no_processes(TEST_TIMEOUT);
    }
}

#[test]
fn signal_to_one_node_reaches_workers_of_all_nodes() {
    let job = Job::new();
    let says = "trap 'echo INT > \"$JOB/got.$RANK\"; exit 0' INT\nwhile :; do sleep 0.02; done";
    let nodes = start_three(&job, says);
    nodes[1].signal(Signal::SIGINT);
    for rank in 0..3 {
        assert_eq!(job.wait_for_file(&format!("got.{rank}")), "INT\n");
    }
    nodes.into_iter().for_each(|node| drop(node.wait().expect_exit_code(1)));
}

#[test]
fn signal_to_one_node_ends_all_nodes() {
    let job = Job::new();
    let nodes = start_three(&job, "");
    nodes[1].signal(Signal::SIGTERM);
    let start = Instant::now();
    for (rank, node) in nodes.into_iter().enumerate() {
        let ended = node.wait().expect_exit_code(1);
        let said = if rank == 1 { "stopped by SIGTERM" } else { "was stopped by SIGTERM" };
        assert!(ended.stderr.contains(said), "node {rank}: {}", ended.stderr);
    }
    assert!(start.elapsed() < END_LIMIT, "took {:?}", start.elapsed());
}

#[test]
fn nodes_exit_quietly_in_any_order_after_success() {
    let job = Job::new();
    let worker = job.script("sleep 0.0$RANK\n");
    for _ in 0..10 {
        let port = free_port().to_string();
        let nodes = [0, 1, 2].map(|rank| node(&job, &port, 3, rank, &worker));
        for node in nodes {
            assert_eq!(node.wait().expect_exit_code(0).stderr, "");
        }
    }
}

#[test]
fn duplicate_node_rank_is_refused_without_disturbing_the_job() {
    let job = Job::new();
    let worker = job.script("exit 0\n");
    let port = free_port().to_string();
    // The refusal of one launcher proves that two of the three nodes have joined.
    let first = node(&job, &port, 3, 0, &worker);
    let [one, other] = [node(&job, &port, 3, 1, &worker), node(&job, &port, 3, 1, &worker)];
    let mut both = [Some(one), Some(other)];
    let refused = wait_until("one of the two to be refused", || {
        let at =
            both.iter_mut().flatten().position(|launcher| launcher.child.try_wait().unwrap().is_some())?;
        both[at].take()
    });
    let refused = refused.wait().expect_exit_code(1);
    assert!(refused.stderr.contains("node rank 1 is taken: pid "), "{}", refused.stderr);
    let last = node(&job, &port, 3, 2, &worker);
    first.wait().expect_exit_code(0);
    last.wait().expect_exit_code(0);
    both.into_iter().flatten().for_each(|accepted| drop(accepted.wait().expect_exit_code(0)));
}

#[test]
fn both_sides_report_different_nnodes() {
    let job = Job::new();
    let worker = job.script("exit 0\n");
    let port = free_port().to_string();
    let first = node(&job, &port, 2, 0, &worker);
    let second = node(&job, &port, 3, 1, &worker);
    for node in [first, second] {
        let ended = node.wait().expect_exit_code(1);
        assert!(ended.stderr.contains("--nnodes is 3 here (node 1) and 2 on node 0"), "{}", ended.stderr);
    }
}

#[test]
fn missing_nodes_are_named() {
    let job = Job::new();
    let worker = job.script("exit 0\n");
    let port = free_port().to_string();
    let start = |rank: u32| {
        let mut command = job.command(["--nnodes=4", "--master-addr=127.0.0.1", "--rdzv-conf=timeout=3"]);
        command.arg("--master-port").arg(&port).arg(format!("--node-rank={rank}")).arg(&worker);
        job.start(command)
    };
    let nodes = [start(0), start(2)];
    let [first, third] = nodes.map(|node| node.wait().expect_exit_code(1));
    assert!(first.stderr.contains("2 of 4 nodes did not join within 3 s"), "{}", first.stderr);
    assert!(first.stderr.contains("start convoke on nodes 1, 3 with"), "{}", first.stderr);
    assert!(third.stderr.contains("node 0 ("), "{}", third.stderr);
    assert!(third.stderr.contains("2 of 4 nodes did not join within 3 s"), "{}", third.stderr);
}

#[test]
fn unreachable_master_is_named_during_the_wait_and_finally() {
    let job = Job::new();
    let mut command =
        job.command(["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--rdzv-conf=timeout=3"]);
    let port = free_port().to_string();
    command.args(["--master-port", &port, "true"]);
    let ended = job.start(command).wait().expect_exit_code(1);
    let waiting = format!("waiting for node 0 at 127.0.0.1:{port}: Connection refused");
    assert_eq!(ended.stderr.matches(&waiting).count(), 1, "{}", ended.stderr);
    assert!(
        ended.stderr.contains(&format!(
            "node 0 cannot be reached at 127.0.0.1:{port} within 3 s: Connection refused"
        )),
        "{}",
        ended.stderr
    );
}

#[test]
fn address_local_to_every_host_is_questioned_and_finally_reported() {
    let job = Job::new();
    let port = free_port().to_string();
    let fixed = ["--nnodes=2", "--node-rank=1", "--rdzv-conf=timeout=3", "--master-port", &port, "true"];
    let endpoint = format!("--rdzv-endpoint=localhost:{port}");
    let elastic = ["--nnodes=2", "--rdzv-backend=c10d", &endpoint, "--rdzv-conf=join_timeout=3", "true"];
    for (flags, start) in
        [(&fixed[..], "--master-addr is 127.0.0.1"), (&elastic[..], "--rdzv-endpoint is localhost")]
    {
        let ended = job.run(flags).expect_exit_code(1);
        let doubt = format!("{start}, by which every host reaches itself");
        assert_eq!(ended.stderr.matches(&format!("warning: {doubt}")).count(), 1, "{}", ended.stderr);
        assert_eq!(ended.stderr.matches(&format!("likely: {doubt}")).count(), 1, "{}", ended.stderr);
    }
}

#[test]
fn process_that_owns_the_port_is_named() {
    let job = Job::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let ended = job.run(["--master-port", &port, "true"]).expect_exit_code(1);
    let me = std::process::id();
    assert!(ended.stderr.contains(&format!("127.0.0.1:{port} is in use by ")), "{}", ended.stderr);
    assert!(ended.stderr.contains(&format!("(pid {me})")), "{}", ended.stderr);
}
