//! A drain: the job learns that it is about to lose its nodes, and all its ranks stop at one step.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use convoke_launcher_tests::harness::{Job, Launcher};
use convoke_launcher_tests::path_argument;
use convoke_testkit::programs::user_program;
use convoke_testkit::{Random, free_port, is_full_test_run, wait_until};

/// Longest time of an undisturbed training.
const LONG_TRAINING: Duration = Duration::from_secs(600);

/// Starts two nodes with two workers each that run this program.
fn start_two(job: &Job, flags: &[&str], program: &[&str]) -> [Launcher; 2] {
    let port = free_port().to_string();
    [0, 1].map(|node| {
        let mut command = job.command(["--nnodes=2", "--master-addr=127.0.0.1", "--master-port", &port]);
        command.arg(format!("--node-rank={node}")).args(["--nproc-per-node=2", "--drain-signal=USR1"]);
        command.arg(format!("--log-dir={}", job.path(&format!("logs.{node}")).display()));
        job.start({
            command.args(flags).args(program).env("OMP_NUM_THREADS", "1");
            command
        })
    })
}

fn digits(checkpoint: &Path, epochs: usize) -> Vec<String> {
    let program = path_argument(user_program("digits"));
    let epochs = epochs.to_string();
    let checkpoint = checkpoint.to_str().unwrap();
    [&program, "--epochs", &epochs, "--print-every", &epochs, "--checkpoint", checkpoint]
        .map(str::to_owned)
        .into()
}

/// Returns the hash of the parameters at the end of a run.
fn hash(output: &str) -> String {
    let line =
        output.lines().find(|line| line.contains("parameter hash")).unwrap_or_else(|| panic!("{output}"));
    line.split("hash ").nth(1).unwrap().to_owned()
}

/// Asks node `node` for a drain in the way `how`.
fn ask(job: &Job, nodes: &[Launcher; 2], node: usize, how: usize) {
    if how == 0 {
        nodes[node].signal(Signal::SIGUSR1);
    } else {
        let folder = job.path(&format!("logs.{node}"));
        let asked = job.run(["drain", folder.to_str().unwrap()]);
        assert!(asked.stderr.contains("1 launcher has begun the drain"), "{}", asked.stderr);
    }
}

#[test]
fn digits_resumes_at_the_step_where_a_drain_stopped_it() {
    let drains = if is_full_test_run() { 100 } else { 4 };
    let mut random = Random::new("moments of drains");
    let job = Job::new();
    let epochs = 150 + 80 * drains;
    let run = |checkpoint: &Path| {
        let words = digits(checkpoint, epochs);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        start_two(&job, &[], &words)
    };
    // The training of the long form takes a minute and a half.
    let complete = |checkpoint: &Path| {
        run(checkpoint).map(|node| node.wait_within(LONG_TRAINING).expect_exit_code(0).stdout).concat()
    };
    let undisturbed = complete(&job.path("undisturbed"));
    let checkpoint = job.path("state");
    for drain in 0..drains {
        let nodes = run(&checkpoint);
        // Before, while and after the first steps.
        wait_until("training to begin", || nodes[0].stdout().contains("workers, ").then_some(()));
        let moment = Duration::from_millis(random.below(200) as u64);
        let began = Instant::now();
        wait_until("the moment", || (began.elapsed() >= moment).then_some(()));
        ask(&job, &nodes, random.below(2), if drain % 4 == 3 { 1 } else { 0 });
        let [first, second] = nodes.map(|node| node.wait().expect_exit_code(75));
        assert!(first.stdout.contains("drained after epoch "), "{}", first.stdout);
        let said = [first.stderr, second.stderr].concat();
        assert_eq!(said.matches("drained: all workers have stopped").count(), 1, "one node says it: {said}");
    }
    let resumed = complete(&checkpoint);
    assert!(resumed.contains("going on after epoch "), "{resumed}");
    assert_eq!(hash(&resumed), hash(&undisturbed), "an example was lost or used twice");
}

/// Starts one node with two workers that run this script, and waits until both are up.
fn start_one(job: &Job, flags: &[&str], worker: &str) -> Launcher {
    let script = job.script(&format!("{worker}\n"));
    let mut command = job.command(["--nproc-per-node=2", "--drain-signal=SIGUSR1"]);
    command.args(flags).arg(script);
    let launcher = job.start(command);
    (0..2).for_each(|rank| drop(job.wait_for_file(&format!("up.{rank}"))));
    launcher
}

const SLEEP: &str = "echo > \"$JOB/up.$RANK\"\nwhile :; do sleep 0.02; done";

#[test]
fn workers_learn_of_a_drain_by_signal_or_file() {
    for (worker, how) in [
        (format!("trap 'exit 75' USR1\n{SLEEP}"), "a handler for the signal"),
        (format!("trap 'exit 0' USR1\n{SLEEP}"), "a handler that ends with 0"),
        (
            "echo > \"$JOB/up.$RANK\"\nuntil [ -e \"$CONVOKE_DRAIN_FILE\" ]; do sleep 0.02; done\nexit 75"
                .to_owned(),
            "the file, and no handler",
        ),
    ] {
        let job = Job::new();
        let launcher = start_one(&job, &[], &worker);
        launcher.signal(Signal::SIGUSR1);
        let ended = launcher.wait();
        assert_eq!(ended.status.code(), Some(75), "{how}: {}", ended.stderr);
        assert!(
            ended.stderr.contains("drain, asked for by SIGUSR1: the workers have 90 s"),
            "{}",
            ended.stderr
        );
    }
    let job = Job::new();
    let launcher = start_one(&job, &["--drain-exit-code=3"], &format!("trap 'exit 3' USR1\n{SLEEP}"));
    launcher.signal(Signal::SIGUSR1);
    assert_eq!(launcher.wait().status.code(), Some(3));
}

#[test]
fn late_worker_is_named_and_stopped() {
    let job = Job::new();
    let worker = format!("[ $RANK = 0 ] && trap 'exit 75' USR1\n[ $RANK = 1 ] && trap '' USR1 TERM\n{SLEEP}");
    let launcher = start_one(&job, &["--drain-timeout=3"], &worker);
    let began = Instant::now();
    launcher.signal(Signal::SIGUSR1);
    let ended = launcher.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("the drain has not stopped rank 1, 2.0 s after it began"),
        "{}",
        ended.stderr
    );
    assert!(began.elapsed() >= Duration::from_secs(3), "{:?}", began.elapsed());
    assert_eq!(job.processes(), [0; 0]);
}

#[test]
fn second_signal_failure_and_restart_end_the_drain() {
    let job = Job::new();
    let launcher = start_one(&job, &[], SLEEP);
    launcher.signal(Signal::SIGUSR1);
    wait_until("the drain to begin", || launcher.stderr().contains("drain, asked for").then_some(()));
    launcher.signal(Signal::SIGUSR1);
    let ended = launcher.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("SIGUSR1 for the second time: the workers are stopped"),
        "{}",
        ended.stderr
    );

    let job = Job::new();
    let worker = format!("[ $RANK = 1 ] && trap 'exit 5' USR1\n{SLEEP}");
    let launcher = start_one(&job, &["--max-restarts=3"], &worker);
    launcher.signal(Signal::SIGUSR1);
    let ended = launcher.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("exitcode  : 5"), "no restart: {}", ended.stderr);
}

#[test]
fn elastic_job_is_drained_on_all_nodes() {
    let job = Job::new();
    let endpoint = format!("127.0.0.1:{}", free_port());
    let worker = job.script(&format!("trap 'exit 75' USR1\n{SLEEP}\n"));
    let nodes = [0, 1].map(|_| {
        let mut command =
            job.command(["--nnodes=2:2", "--rdzv-backend=c10d", "--rdzv-id=drain", "--drain-signal=USR1"]);
        job.start({
            command.arg(format!("--rdzv-endpoint={endpoint}")).arg(&worker);
            command
        })
    });
    (0..2).for_each(|rank| drop(job.wait_for_file(&format!("up.{rank}"))));
    nodes[1].signal(Signal::SIGUSR1);
    let said = nodes.map(|node| node.wait().expect_exit_code(75).stderr).concat();
    assert!(said.contains("drain, asked for by SIGUSR1 on node "), "{said}");
}

#[test]
fn drain_begins_at_its_deadline_on_all_nodes() {
    let job = Job::new();
    let program = digits(&job.path("state"), 100_000);
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    let began = Instant::now();
    let nodes = start_two(&job, &["--drain-after=1.5"], &program);
    let said = nodes.map(|node| node.wait().expect_exit_code(75).stderr).concat();
    assert!(said.contains("drain, asked for by --drain-after"), "{said}");
    assert!(said.contains("drained: all workers have stopped"), "{said}");
    assert!(began.elapsed() >= Duration::from_millis(1500), "{:?}", began.elapsed());
}

/// A scheduler requeues a drained job under its id. The id of a job that has succeeded stays closed.
#[test]
fn drained_job_may_start_again_under_its_id_and_its_report_says_drained() {
    let job = Job::new();
    let endpoint = job.path("rendezvous");
    let report = job.path("report.json");
    let start = |worker: &str| {
        let mut command = job.command(["--nnodes=1:1", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]);
        command.args(["--rdzv-id=requeued", "--drain-signal=USR1"]);
        command.arg(format!("--rdzv-endpoint={}", endpoint.display()));
        command.arg(format!("--report-file={}", report.display()));
        command.arg(job.script(&format!("{worker}\n")));
        job.start(command)
    };
    let outcome = || {
        let report: serde_json::Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        report["outcome"].as_str().unwrap().to_owned()
    };
    let first = start(&format!("trap 'exit 75' USR1\n{SLEEP}"));
    job.wait_for_file("up.0");
    first.signal(Signal::SIGUSR1);
    first.wait().expect_exit_code(75);
    assert_eq!(outcome(), "drained");
    start("true").wait().expect_exit_code(0);
    assert_eq!(outcome(), "succeeded");
    let third = start("true").wait();
    assert!(third.stderr.contains("has ended successfully"), "{}", third.stderr);
}

#[test]
fn drain_command_says_what_is_wrong() {
    let job = Job::new();
    let no_folder = job.run(["drain"]);
    assert_eq!(no_folder.status.code(), Some(2));
    assert!(no_folder.stderr.contains("convoke drain DIR: asks the launchers"), "{}", no_folder.stderr);
    let empty = job.run(["drain", job.dir.path().to_str().unwrap()]);
    assert_eq!(empty.status.code(), Some(1));
    assert!(empty.stderr.contains("is no log folder of convoke and contains none"), "{}", empty.stderr);
    fs::create_dir_all(job.path("logs/old_1/attempt_0")).unwrap();
    let old = job.run(["drain", job.path("logs").to_str().unwrap()]);
    assert_eq!(old.status.code(), Some(1));
    assert!(old.stderr.contains("no launcher has looked into"), "{}", old.stderr);
    assert!(!job.path("logs/old_1/drain-request").exists());
    // A program of this name is launched.
    fs::write(job.path("drain"), "#!/bin/sh\necho it ran\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(job.path("drain"), mode).unwrap();
    let ran = job.run(["drain"]);
    assert!(ran.stdout.contains("it ran"), "{}{}", ran.stdout, ran.stderr);
}
