//! What workers write comes through whole, and trouble with where it goes does not stop them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use convoke_launcher_tests::numbered_line;

use super::harness::Job;

const WORKERS: usize = 8;
const LINES: usize = 80_000;

/// The only folder in `path`.
fn only_entry(path: &Path) -> PathBuf {
    let entries: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries[0].clone()
}

/// Each line is one of a worker's, whole, and each worker's are all there in their order.
fn expect_all_lines(text: &str, prefix: impl Fn(usize) -> String) {
    let mut next = [0; WORKERS];
    for line in text.lines() {
        let known = (0..WORKERS).find(|&rank| {
            let rest = line.strip_prefix(&prefix(rank));
            rest.is_some_and(|rest| rest == numbered_line(rank, next[rank]))
        });
        let rank = known.unwrap_or_else(|| panic!("after {next:?} lines: {line}"));
        next[rank] += 1;
    }
    assert_eq!(next, [LINES; WORKERS]);
}

fn print_rate(what: &str, bytes: usize, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("{what}: {:.0} MB/s ({bytes} bytes in {seconds:.2} s)", bytes as f64 / 1e6 / seconds);
}

#[test]
fn teed_lines_of_eight_busy_workers_are_whole_and_complete() {
    let job = Job::new();
    let mut command = job.command(["--tee=3", "--log-dir=logs", &format!("--nproc-per-node={WORKERS}")]);
    command.args([env!("CARGO_BIN_EXE_plain_worker"), "lines", &LINES.to_string()]);
    command.env("OMP_NUM_THREADS", "1");
    let start = Instant::now();
    let ended = job.start(command).wait().expect(0);
    print_rate("teed", ended.stdout.len() + ended.stderr.len(), start);
    expect_all_lines(&ended.stdout, |rank| format!("[default{rank}]:"));
    expect_all_lines(&ended.stderr, |rank| format!("[default{rank}]:"));
    let attempt = only_entry(&job.path("logs")).join("attempt_0");
    for rank in 0..WORKERS {
        let expected: String = (0..LINES).map(|number| numbered_line(rank, number) + "\n").collect();
        for name in ["stdout.log", "stderr.log"] {
            let written = fs::read_to_string(attempt.join(rank.to_string()).join(name)).unwrap();
            assert!(written == expected, "{name} of {rank} is not what the worker wrote");
        }
    }
}

#[test]
fn stderr_lines_of_eight_busy_workers_are_whole_and_complete() {
    let job = Job::new();
    let mut command = job.command([&format!("--nproc-per-node={WORKERS}")]);
    command.args([env!("CARGO_BIN_EXE_plain_worker"), "lines", &LINES.to_string(), "stderr"]);
    command.env("OMP_NUM_THREADS", "1");
    let start = Instant::now();
    let ended = job.start(command).wait().expect(0);
    print_rate("stderr", ended.stderr.len(), start);
    expect_all_lines(&ended.stderr, |_| String::new());
}
