//! Messages from the launcher to its workers.

use std::process::Command;

use convoke_launcher_tests::harness::Job;
use convoke_launcher_tests::worker_command;
use convoke_testkit::free_port;

/// Builds a launcher command whose workers write `count` messages of the agent channel to files.
fn channel(job: &Job, flags: &[&str], count: &str) -> Command {
    let mut command = job.command(flags);
    command.args(worker_command("channel")).args(["heard", count]);
    command
}

#[test]
fn each_worker_gets_the_generation_and_a_token() {
    let job = Job::new();
    job.start(channel(&job, &["--nproc-per-node=2"], "1")).wait().expect_exit_code(0);
    for rank in 0..2 {
        assert_eq!(job.wait_for_file(&format!("heard.{rank}")), "hello same_generation=true token=32\n");
    }
}

#[test]
fn valid_user_token_is_passed_on_and_invalid_one_refused() {
    let job = Job::new();
    std::fs::write(job.path("secret"), "0123456789\n").unwrap();
    let mut command = channel(&job, &[], "1");
    command.env("CONVOKE_TOKEN_FILE", "secret");
    job.start(command).wait().expect_exit_code(0);
    assert_eq!(job.wait_for_file("heard.0"), "hello same_generation=true token=10\n");

    let mut command = channel(&job, &[], "1");
    command.env("CONVOKE_TOKEN_FILE", "/no/such/file");
    let ended = job.start(command).wait().expect_exit_code(1);
    assert!(ended.stderr.contains("CONVOKE_TOKEN_FILE=/no/such/file: No such file"), "{}", ended.stderr);
}

#[test]
fn bad_thread_migration_is_an_error_that_lists_what_is_allowed() {
    let job = Job::new();
    let start = |value: &str| {
        let mut command = job.command(["--nproc-per-node=2"]);
        command.args(worker_command("group")).env("CONVOKE_THREAD_MIGRATION", value);
        job.start(command).wait()
    };
    let ended = start("sometimes").expect_exit_code(1);
    let error = "CONVOKE_THREAD_MIGRATION=\"sometimes\" is not never, oversubscribed or always";
    assert!(ended.stderr.contains(error), "{}", ended.stderr);
    for value in ["", "never", "oversubscribed", "always"] {
        start(value).expect_exit_code(0);
    }
}

#[test]
fn launcher_reports_a_dead_peer_to_workers() {
    let job = Job::new();
    // The surviving workers ignore SIGTERM, so that they have time to record the message.
    let worker = job.script(&format!("trap '' TERM\nexec {} heard 2\n", worker_command("channel").join(" ")));
    let mut command = job.command(["--nproc-per-node=3"]);
    command.arg(&worker).env("DIE_AFTER_HELLO", "1");
    job.start(command).wait().expect_exit_code(1);
    for rank in [0, 2] {
        let heard = job.wait_for_file(&format!("heard.{rank}"));
        assert_eq!(heard, "hello same_generation=true token=32\nexit 1 Code(1)\n");
    }
}

#[test]
fn nodes_share_a_generation_that_changes_on_restart() {
    let job = Job::new();
    let worker = job.script(
        r#"
echo $CONVOKE_GENERATION > "$JOB/generation.$RANK.$TORCHELASTIC_RESTART_COUNT"
[ $TORCHELASTIC_RESTART_COUNT = 1 ]
"#,
    );
    let port = free_port().to_string();
    let node = |rank: &str| {
        let mut command = job.command(["--nnodes=2", "--master-addr=127.0.0.1", "--max-restarts=1"]);
        command.args(["--node-rank", rank, "--master-port", &port]).arg(&worker);
        job.start(command)
    };
    let nodes = [node("0"), node("1")];
    for node in nodes {
        node.wait().expect_exit_code(0);
    }
    let generation = |rank: u32, restart: u32| job.wait_for_file(&format!("generation.{rank}.{restart}"));
    assert_eq!(generation(0, 0), generation(1, 0));
    assert_eq!(generation(0, 1), generation(1, 1));
    assert_ne!(generation(0, 0), generation(0, 1));
    assert_eq!(generation(0, 0).trim().len(), 32);
}

#[test]
fn program_with_a_fast_interval_timer_runs_under_the_launcher() {
    let job = Job::new();
    let mut command = job.command(["--nproc-per-node=4"]);
    command.args(worker_command("timers"));
    job.start(command).wait().expect_exit_code(0);
}

#[test]
fn workers_join_and_leave_100_times_through_the_launcher_store() {
    let job = Job::new();
    let mut command = job.command(["--nproc-per-node=3"]);
    command.args(worker_command("comm")).arg("again");
    job.start(command).wait().expect_exit_code(0);
}

#[test]
fn workers_start_with_no_signal_blocked() {
    let job = Job::new();
    let ended = job.run(["--no-python", "grep", "SigBlk", "/proc/self/status"]).expect_exit_code(0);
    assert_eq!(ended.stdout, "SigBlk:\t0000000000000000\n");
}

#[test]
fn as_gloo_is_refused_where_the_package_is_not_installed() {
    let job = Job::new();
    std::fs::write(
        job.path("train.py"),
        "import os\nopen('ran', 'w').write(os.environ['CONVOKE_AS_GLOO'])\n",
    )
    .unwrap();
    let start = |flags: &[&str], packages: &str| {
        let mut command = job.command(["--as-gloo"]);
        command.args(flags).env("PYTHONPATH", job.path(packages));
        job.start(command).wait()
    };
    let ended = start(&["train.py"], "none").expect_exit_code(1);
    let (what, remedy) = ("--as-gloo needs the Python package convoke-dist", "-m pip install convoke-dist");
    assert!(ended.stderr.contains(what) && ended.stderr.contains(remedy), "{}", ended.stderr);
    assert!(!job.path("ran").exists());

    std::fs::create_dir_all(job.path("packages/convoke_dist")).unwrap();
    std::fs::write(job.path("packages/convoke_dist/__init__.py"), "").unwrap();
    start(&["train.py"], "packages").expect_exit_code(0);
    assert_eq!(std::fs::read_to_string(job.path("ran")).unwrap(), "1");
    // A program that the launcher's Python does not run gets the variable alone.
    start(&["--no-python", "sh", "-c", "test $CONVOKE_AS_GLOO = 1"], "none").expect_exit_code(0);
}
