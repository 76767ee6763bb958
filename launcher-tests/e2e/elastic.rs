//! Elastic jobs with the built-in rendezvous. Nodes join, leave and fail; unauthorized clients must not
//! disturb the job.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_testkit::{free_port, wait_until};

/// Time from the death of a launcher to new workers on the other nodes. The documentation promises one
/// second.
const RESTART_LIMIT: Duration = Duration::from_secs(6);
/// Time from the end of one node to the end of the others: one promised second, plus an allowance for a busy
/// machine.
const END_LIMIT: Duration = Duration::from_secs(6);

/// The worker writes its restart count to `up.WORLD_SIZE.RANK`, then waits for the file `go`.
const WAITING_WORKER: &str = "echo $TORCHELASTIC_RESTART_COUNT > \"$JOB/up.$WORLD_SIZE.$RANK\"\n\
                     while [ ! -e \"$JOB/go\" ]; do sleep 0.02; done\n";

fn command(job: &Job, endpoint: &str, nodes: &str, conf: &str, worker: &Path) -> Command {
    command_as(job, &["--rdzv-id=job"], endpoint, nodes, conf, worker)
}

fn command_as(job: &Job, id: &[&str], endpoint: &str, nodes: &str, conf: &str, worker: &Path) -> Command {
    let mut command = job.command(["--rdzv-backend=c10d", "--rdzv-endpoint", endpoint]);
    command
        .args(id)
        .args(["--nnodes", nodes, "--rdzv-conf"])
        .arg(format!("last_call_timeout=60,join_timeout=60{conf}"));
    command.arg(worker).env("PET_SHUTDOWN_TIMEOUT", "5");
    command
}

fn node(job: &Job, endpoint: &str, nodes: &str, worker: &Path) -> Launcher {
    job.start(command(job, endpoint, nodes, "", worker))
}

fn endpoint() -> String {
    format!("127.0.0.1:{}", free_port())
}

/// Waits until the workers of a round of `size` are up; returns the restart count that rank 0 wrote.
fn wait_for_round(job: &Job, size: usize) -> String {
    let said: Vec<String> = (0..size).map(|rank| job.wait_for_file(&format!("up.{size}.{rank}"))).collect();
    said[0].clone()
}

fn release_workers(job: &Job) {
    std::fs::write(job.path("go"), "").unwrap();
}

fn wait_for_all(nodes: impl IntoIterator<Item = Launcher>, code: i32) -> Vec<ProcessOutput> {
    nodes.into_iter().map(|node| node.wait().expect_exit_code(code)).collect()
}

/// Starts two nodes and waits for their round; the first serves the rendezvous.
fn start_two(job: &Job, endpoint: &str, nodes: &str, worker: &Path) -> [Launcher; 2] {
    let first = node(job, endpoint, nodes, worker);
    wait_until("the endpoint", || TcpStream::connect(endpoint).ok());
    let second = node(job, endpoint, nodes, worker);
    wait_for_round(job, 2);
    [first, second]
}

#[test]
fn job_continues_when_a_node_is_killed_or_joins() {
    let (job, endpoint) = (Job::new(), endpoint());
    let worker = job.script(WAITING_WORKER);
    let [first, second] = start_two(&job, &endpoint, "1:2", &worker);
    let since = Instant::now();
    second.signal(Signal::SIGKILL);
    assert_eq!(wait_for_round(&job, 1).trim(), "0", "a loss uses no restart");
    assert!(since.elapsed() < RESTART_LIMIT, "took {:?}", since.elapsed());
    for rank in 0..2 {
        std::fs::remove_file(job.path(&format!("up.2.{rank}"))).unwrap();
    }
    let third = node(&job, &endpoint, "1:2", &worker);
    assert_eq!(wait_for_round(&job, 2).trim(), "0", "neither does one that comes");
    release_workers(&job);
    let ended = wait_for_all([first, third], 0);
    assert!(
        ended[0].stderr.contains("node 1 (") && ended[0].stderr.contains(") is lost"),
        "{}",
        ended[0].stderr
    );
    assert!(ended[0].stderr.contains("a node has joined: "), "{}", ended[0].stderr);
    drop(second);
    assert_eq!(job.processes(), [0; 0]);
}

#[test]
fn node_stopped_by_signal_makes_the_others_restart() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let (job, endpoint) = (Job::new(), endpoint());
        let worker = job.script(WAITING_WORKER);
        let [first, second] = start_two(&job, &endpoint, "1:2", &worker);
        let since = Instant::now();
        second.signal(signal);
        assert_eq!(wait_for_round(&job, 1).trim(), "0", "it uses no restart");
        assert!(since.elapsed() < RESTART_LIMIT, "took {:?}", since.elapsed());
        second.wait().expect_exit_code(1);
        release_workers(&job);
        let stderr = first.wait().expect_exit_code(0).stderr;
        assert!(
            stderr.contains(&format!(") was stopped by {signal}; all nodes start a new round")),
            "{stderr}"
        );
    }
}

#[test]
fn job_waits_for_a_stopped_node_below_min_nodes() {
    let job = Job::new();
    let worker = job.script(WAITING_WORKER);
    let endpoint = job.path("shared").display().to_string();
    let start = || job.start(command(&job, &endpoint, "2", ",store_type=file", &worker));
    // Either node may become the coordinator.
    let [first, second] = [start(), start()];
    wait_for_round(&job, 2);
    second.signal(Signal::SIGTERM);
    second.wait().expect_exit_code(1);
    let said = |what: &str| wait_until(what, || first.stderr().contains(what).then_some(()));
    said("was stopped by SIGTERM; all nodes start a new round");
    said("1 of 2 nodes have joined");
    (0..2).for_each(|rank| std::fs::remove_file(job.path(&format!("up.2.{rank}"))).unwrap());
    let third = start();
    wait_for_round(&job, 2);
    release_workers(&job);
    wait_for_all([first, third], 0);
}

#[test]
fn signals_to_all_nodes_within_a_second_stop_the_job() {
    let job = Job::new();
    let saves = "trap 'echo saved > \"$JOB/saved.$RANK\"; exit 0' TERM\n";
    let worker = job.script(&format!("{saves}{WAITING_WORKER}"));
    let endpoint = job.path("shared").display().to_string();
    let start = || job.start(command(&job, &endpoint, "1:3", ",store_type=file", &worker));
    let nodes = [start(), start(), start()];
    wait_for_round(&job, 3);
    for node in &nodes {
        node.signal(Signal::SIGTERM);
        // The other nodes must learn of the stop before the test signals them too.
        wait_until("the stop to be told", || {
            nodes.iter().any(|node| node.stderr().contains("stopped by SIGTERM")).then_some(())
        });
    }
    for node in wait_for_all(nodes, 1) {
        assert!(node.stderr.contains("stopped by SIGTERM"), "{}", node.stderr);
    }
    for rank in 0..3 {
        assert_eq!(job.wait_for_file(&format!("saved.{rank}")), "saved\n");
    }
    assert!(!job.path("up.1.0").exists() && !job.path("up.2.0").exists(), "a round has begun");
    assert_eq!(job.processes(), [0; 0]);
}

#[test]
fn final_failure_ends_all_nodes_with_one_cause() {
    for culprit in 0..3 {
        let (job, endpoint) = (Job::new(), endpoint());
        let fails = format!("{WAITING_WORKER}[ $RANK != {culprit} ] || exit 3\nexec sleep 1000\n");
        let worker = job.script(&fails);
        let nodes = [(); 3].map(|()| node(&job, &endpoint, "3", &worker));
        wait_for_round(&job, 3);
        let since = Instant::now();
        release_workers(&job);
        for node in wait_for_all(nodes, 1) {
            let root = node.stderr.split("Root Cause").nth(1).unwrap_or_default();
            assert!(root.contains("exitcode  : 3 (pid: "), "{}", node.stderr);
            assert!(root.contains(&format!("rank      : {culprit} (local_rank: 0)")), "{}", node.stderr);
        }
        assert!(since.elapsed() < END_LIMIT, "took {:?}", since.elapsed());
        assert_eq!(job.processes(), [0; 0]);
    }
}

#[test]
fn failure_caused_by_node_loss_does_not_end_the_job() {
    let (job, endpoint) = (Job::new(), endpoint());
    // In a world of two, the worker fails as soon as the other node is dead. In a world of one, it succeeds.
    let worker = job.script(&format!(
        "{}if [ $WORLD_SIZE = 2 ]; then while [ -d /proc/$(cat \"$JOB/other\") ]; do sleep 0.01; done; exit 1; fi\n",
        "echo $TORCHELASTIC_RESTART_COUNT > \"$JOB/up.$WORLD_SIZE.$RANK\"\nwhile [ ! -e \"$JOB/other\" ]; do sleep 0.01; done\n",
    ));
    let [first, second] = start_two(&job, &endpoint, "1:2", &worker);
    std::fs::write(job.path("other"), second.pid().to_string()).unwrap();
    second.signal(Signal::SIGKILL);
    drop(second);
    first.wait().expect_exit_code(0);
    assert_eq!(wait_for_round(&job, 1).trim(), "0");
}

#[test]
fn rendezvous_server_announces_its_exit_and_its_death_is_detected() {
    for (signal, said) in [(Signal::SIGTERM, "was stopped by SIGTERM"), (Signal::SIGKILL, "is lost: ")] {
        let (job, endpoint) = (Job::new(), endpoint());
        let worker = job.script(WAITING_WORKER);
        let [first, second] = start_two(&job, &endpoint, "2", &worker);
        let since = Instant::now();
        first.signal(signal);
        let ended = second.wait().expect_exit_code(1);
        assert!(since.elapsed() < END_LIMIT, "took {:?}", since.elapsed());
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
        drop(first);
        job.wait_until_no_processes(END_LIMIT);
    }
}

#[test]
fn any_node_may_die_with_a_shared_file() {
    let job = Job::new();
    let worker = job.script(WAITING_WORKER);
    let endpoint = job.path("shared").display().to_string();
    let start = |nodes| job.start(command(&job, &endpoint, nodes, ",store_type=file", &worker));
    // The first node becomes the coordinator.
    let first = start("1:2");
    wait_until("the entry", || std::fs::metadata(&endpoint).ok().filter(|file| file.len() > 0));
    let second = start("1:2");
    wait_for_round(&job, 2);
    let since = Instant::now();
    first.signal(Signal::SIGKILL);
    assert_eq!(wait_for_round(&job, 1).trim(), "0");
    assert!(since.elapsed() < RESTART_LIMIT, "took {:?}", since.elapsed());
    release_workers(&job);
    second.wait().expect_exit_code(0);
    let late = start("1:2").wait().expect_exit_code(1).stderr;
    assert!(
        late.contains("the job with --rdzv-id=job at ") && late.contains(" has ended successfully"),
        "{late}"
    );
    drop(first);
    assert_eq!(job.processes(), [0; 0]);
}

#[test]
fn failed_job_can_be_restarted_with_the_same_id() {
    let job = Job::new();
    let worker = job.script("[ -e \"$JOB/mended\" ] || exit 3\n");
    let endpoint = job.path("shared").display().to_string();
    let start = || job.start(command(&job, &endpoint, "2", ",store_type=file", &worker));
    wait_for_all([start(), start()], 1);
    std::fs::write(job.path("mended"), "").unwrap();
    wait_for_all([start(), start()], 0);
    let late = start().wait().expect_exit_code(1).stderr;
    assert!(late.contains("--rdzv-id=job") && late.contains("has ended successfully"), "{late}");
    assert!(late.contains("try: another --rdzv-id"), "{late}");
}

#[test]
fn jobs_without_an_id_ignore_records_of_other_jobs() {
    let job = Job::new();
    let worker = job.script("exit 0\n");
    let file = job.path("shared").display().to_string();
    let at_endpoint = endpoint();
    for (endpoint, conf) in [(&file, ",store_type=file"), (&at_endpoint, "")] {
        // Each thread runs launchers one after the other, and the two threads do not wait for each other.
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        let command = command_as(&job, &[], endpoint, "2", conf, &worker);
                        job.start(command).wait().expect_exit_code(0);
                    }
                });
            }
        });
    }
}

#[test]
fn killed_job_can_be_restarted_with_another_number_of_nodes() {
    let job = Job::new();
    let worker = job.script(WAITING_WORKER);
    let endpoint = job.path("shared").display().to_string();
    let start = |nodes| job.start(command(&job, &endpoint, nodes, ",store_type=file", &worker));
    let nodes = [start("2"), start("2")];
    wait_for_round(&job, 2);
    nodes.iter().for_each(|node| node.signal(Signal::SIGKILL));
    drop(nodes);
    let again = start("1");
    wait_for_round(&job, 1);
    release_workers(&job);
    again.wait().expect_exit_code(0);
}

/// Starts two jobs of one node each at one endpoint; the first job serves it.
fn two_jobs_at_one_endpoint(first_ends: &str) -> ([Job; 2], String, [Launcher; 2]) {
    let (jobs, endpoint) = ([Job::new(), Job::new()], endpoint());
    let start = |job: &Job, id: &str, ends: &str| {
        let worker = job.script(&format!("{WAITING_WORKER}{ends}\n"));
        let launcher = job.start(command_as(job, &[id], &endpoint, "1", "", &worker));
        wait_for_round(job, 1);
        launcher
    };
    let nodes = [start(&jobs[0], "--rdzv-id=a", first_ends), start(&jobs[1], "--rdzv-id=b", "exit 0")];
    release_workers(&jobs[0]);
    wait_until("the first to stay", || {
        nodes[0].stderr().contains("another job uses the rendezvous at ").then_some(())
    });
    (jobs, endpoint, nodes)
}

#[test]
fn other_job_continues_after_the_job_serving_it_ends() {
    for (ends, code) in [("exit 0", 0), ("exit 3", 1)] {
        let (jobs, endpoint, [first, second]) = two_jobs_at_one_endpoint(ends);
        let third = Job::new();
        let late = third.start(command_as(&third, &["--rdzv-id=c"], &endpoint, "1", "", Path::new("true")));
        let late = late.wait().expect_exit_code(1).stderr;
        assert!(late.contains("it now serves only jobs that already run: use another port"), "{late}");
        release_workers(&jobs[1]);
        let second = second.wait().expect_exit_code(0).stderr;
        assert!(!second.contains("lost") && !second.contains("error"), "{second}");
        first.wait().expect_exit_code(code);
    }
}

#[test]
fn launcher_serving_another_job_announces_its_stop_by_signal() {
    let (_jobs, endpoint, [first, second]) = two_jobs_at_one_endpoint("exit 0");
    let since = Instant::now();
    first.signal(Signal::SIGTERM);
    let second = second.wait().expect_exit_code(1).stderr;
    assert!(since.elapsed() < END_LIMIT, "took {:?}", since.elapsed());
    let said = format!("that served the rendezvous at {endpoint} has ended: it was stopped by SIGTERM");
    assert!(second.contains(&said), "{second}");
    // The job of the first node itself has succeeded.
    first.wait().expect_exit_code(0);
}

#[test]
fn standby_node_exits_with_the_outcome_of_the_job() {
    for (workers_end, code) in [("", 0), ("exit 3\n", 1)] {
        let job = Job::new();
        let worker = job.script(&format!("{WAITING_WORKER}{workers_end}"));
        let endpoint = job.path("shared").display().to_string();
        let start = || job.start(command(&job, &endpoint, "1", ",store_type=file", &worker));
        let first = start();
        wait_for_round(&job, 1);
        let spare = start();
        wait_until("it to wait", || spare.stderr().contains("waits as a standby node").then_some(()));
        release_workers(&job);
        for node in wait_for_all([first, spare], code) {
            assert!(code != 0 || !node.stderr.contains("error: "), "{}", node.stderr);
        }
    }
}

#[test]
fn nodes_with_another_nnodes_are_refused() {
    let (job, endpoint) = (Job::new(), endpoint());
    let worker = job.script(WAITING_WORKER);
    let first = node(&job, &endpoint, "2", &worker);
    wait_until("the endpoint", || TcpStream::connect(&endpoint).ok());
    wait_until("it to wait", || first.stderr().contains("1 of 2 nodes have joined").then_some(()));
    let other = node(&job, &endpoint, "1:3", &worker).wait().expect_exit_code(1).stderr;
    assert!(other.contains("--nnodes is 1:3 here and 2:2 on "), "{other}");
    let second = node(&job, &endpoint, "2", &worker);
    wait_for_round(&job, 2);
    release_workers(&job);
    wait_for_all([first, second], 0);
}

#[test]
fn unauthenticated_peers_cannot_join_or_disturb_the_job() {
    let (job, endpoint) = (Job::new(), endpoint());
    let worker = job.script(WAITING_WORKER);
    let start = |token: Option<&str>, conf: &str| {
        let mut command = command(&job, &endpoint, "2", conf, &worker);
        if let Some(token) = token {
            command.env("CONVOKE_TOKEN", token);
        }
        job.start(command)
    };
    let first = start(Some("sesame"), "");
    wait_until("the endpoint", || TcpStream::connect(&endpoint).ok());
    // Unauthenticated connections, more than the server keeps. They send nothing, an incomplete message or
    // an oversized one.
    let words: [&[u8]; 5] = [
        b"",
        b"convoke",
        b"convoke\x03\xff\xff\xff\xff",
        b"GET / HTTP/1.0\r\n\r\n",
        &[0, 0x3c, 0x85, 0xf7, 0xce],
    ];
    let strangers: Vec<TcpStream> = (0..400)
        .map(|index| {
            let mut stream = TcpStream::connect(&endpoint).unwrap();
            let _ = stream.write_all(words[index % words.len()]);
            stream
        })
        .collect();
    for token in [Some("open"), None] {
        let refused = start(token, ",join_timeout=2").wait().expect_exit_code(1).stderr;
        assert!(refused.contains("is CONVOKE_TOKEN the same on all nodes?"), "{refused}");
    }
    assert!(!job.path("up.2.0").exists());
    let second = start(Some("sesame"), "");
    wait_for_round(&job, 2);
    release_workers(&job);
    wait_for_all([first, second], 0);
    drop(strangers);
}

#[test]
fn foreign_service_at_the_endpoint_is_reported() {
    type Client = fn(&mut TcpStream);
    let cases: [(Client, &str); 5] = [
        (
            |stream| drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
            "it is not a rendezvous of convoke",
        ),
        (|stream| drop(stream.write_all(b"SSH-2.0-OpenSSH_9.2p1\r\n")), "it is not a rendezvous of convoke"),
        (|stream| drop(stream.write_all(b"-ERR unknown command\r\n")), "it is not a rendezvous of convoke"),
        (
            |stream| drop(stream.shutdown(std::net::Shutdown::Both)),
            "it closed the connection, and is not a rendezvous",
        ),
        (|_| {}, "connected, but it does not answer as a rendezvous"),
    ];
    for (talk, said) in cases {
        let job = Job::new();
        let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = stranger.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let mut open = Vec::new();
            for mut stream in stranger.incoming().flatten() {
                talk(&mut stream);
                open.push(stream);
            }
        });
        let conf = ",join_timeout=7";
        let ended =
            job.start(command(&job, &endpoint, "2", conf, Path::new("true"))).wait().expect_exit_code(1);
        assert!(ended.stderr.contains(said), "no \"{said}\" in {}", ended.stderr);
    }
}

#[test]
fn restarts_of_all_nodes_count_against_the_job_limit() {
    let (job, endpoint) = (Job::new(), endpoint());
    let worker = job.script(
        "n=$TORCHELASTIC_RESTART_COUNT\necho > \"$JOB/up.$n.$RANK\"\n\
         while [ ! -e \"$JOB/up.$n.$((1 - RANK))\" ]; do sleep 0.01; done\n[ $RANK != $n ] || exit 3\nexec sleep 1000\n",
    );
    let nodes = [(); 2].map(|()| {
        let mut command = command(&job, &endpoint, "2", ",restart_budget=job", &worker);
        command.env("PET_MAX_RESTARTS", "1");
        job.start(command)
    });
    for node in wait_for_all(nodes, 1) {
        let root = node.stderr.split("Root Cause").nth(1).unwrap_or_default();
        assert!(root.contains("rank      : 1 (local_rank: 0)"), "{}", node.stderr);
    }
    for (restarts, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        assert!(job.path(&format!("up.{restarts}.{rank}")).exists());
    }
    assert!(!job.path("up.2.0").exists());
}

#[test]
fn waiting_nodes_report_present_and_missing_nodes_every_ten_seconds() {
    let (job, endpoint) = (Job::new(), endpoint());
    let ended = job
        .start(command(&job, &endpoint, "2", ",join_timeout=12", Path::new("true")))
        .wait()
        .expect_exit_code(1);
    let line = "1 of 2 nodes have joined: ";
    let said: Vec<_> = ended.stderr.lines().filter(|text| text.contains(line)).collect();
    assert!(said.len() >= 3, "at once, again, and why it ends: {}", ended.stderr);
    assert!(said[0].contains("at least 1 more must join") && said[0].ends_with(" s left)"), "{said:?}");
}
