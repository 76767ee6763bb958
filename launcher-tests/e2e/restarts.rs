//! Restarts of a failed worker: their conditions and their timing.

use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::Job;
use convoke_testkit::wait_until;
use nix::sys::signal::Signal;

/// Returns the number of times that the worker has been started.
fn starts(job: &Job) -> usize {
    std::fs::read_to_string(job.path("starts")).unwrap_or_default().lines().count()
}

#[test]
fn worker_that_fails_at_once_restarts_with_a_delay() {
    let job = Job::new();
    let worker = job.script("echo x >> \"$JOB/starts\"\nexit 3\n");
    let mut command = job.command(["--max-restarts=1000000"]);
    command.arg(&worker);
    let start = Instant::now();
    let launcher = job.start(command);
    // The launcher starts the worker four times at once, then after 1 s and after 2 s.
    wait_until("six starts", || (starts(&job) >= 6).then_some(()));
    assert!(start.elapsed() >= Duration::from_secs(3), "{:?}", start.elapsed());
    launcher.signal(Signal::SIGTERM);
    let ended = launcher.wait().expect_exit_code(1);
    assert!(starts(&job) <= 7, "{}", starts(&job));
    let waiting =
        "convoke: waiting before the restart: the workers failed quickly 4 times in a row (1 s left)\n";
    assert!(ended.stderr.contains(waiting), "{}", ended.stderr);
    assert!(ended.stderr.contains("stopped by SIGTERM"), "{}", ended.stderr);
}

#[test]
fn restart_waits_for_the_delay_that_the_user_sets() {
    let job = Job::new();
    let worker = job.script("echo x >> \"$JOB/starts\"\nexit 3\n");
    let start = Instant::now();
    let worker = worker.to_str().unwrap();
    job.run(["--max-restarts=2", "--restart-delay=0.7", worker]).expect_exit_code(1);
    assert_eq!(starts(&job), 3);
    assert!(start.elapsed() >= Duration::from_millis(1400), "{:?}", start.elapsed());
}

#[test]
fn identical_repeated_failure_ends_the_job() {
    let job = Job::new();
    // The second failure differs from the others, so it resets the count.
    let worker = job.script(
        "echo x >> \"$JOB/starts\"\n[ $(wc -l < \"$JOB/starts\") = 2 ] && exit 4\necho 'no such data set' >&2\nexit 3\n",
    );
    let worker = worker.to_str().unwrap();
    let ended = job.run(["--max-restarts=100", "--restart-stop-after-same=2", worker]).expect_exit_code(1);
    assert_eq!(starts(&job), 4, "{}", ended.stderr);
    let said = "convoke: error: rank 0 exited with code 3 for the same reason 2 times in a row: it is not restarted again \
                (--restart-stop-after-same=2)\n";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    assert!(ended.stderr.contains("Root Cause"), "{}", ended.stderr);
    assert!(ended.stderr.contains("no such data set"), "{}", ended.stderr);
}
