//! The output of workers arrives complete, and errors at its destination do not stop the workers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use convoke_launcher_tests::{numbered_line, worker_command};

use convoke_launcher_tests::harness::{Job, ProcessOutput};
use convoke_testkit::skip;

const WORKERS: usize = 8;
const LINES: usize = 80_000;

/// Returns the only entry of `path`.
fn only_entry(path: &Path) -> PathBuf {
    let entries: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries[0].clone()
}

/// Asserts that each line is one whole line of a worker, and that each worker's lines are complete and in
/// order.
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
fn teed_lines_of_eight_busy_workers_stay_whole_and_complete() {
    let job = Job::new();
    let mut command = job.command(["--tee=3", "--log-dir=logs", &format!("--nproc-per-node={WORKERS}")]);
    let [program, role] = worker_command("plain");
    command.args([&program, &role, "lines", &LINES.to_string()]);
    command.env("OMP_NUM_THREADS", "1");
    let start = Instant::now();
    let ended = job.start(command).wait().expect_exit_code(0);
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
fn stderr_lines_of_eight_busy_workers_stay_whole_and_complete() {
    let job = Job::new();
    let mut command = job.command([&format!("--nproc-per-node={WORKERS}")]);
    let [program, role] = worker_command("plain");
    command.args([&program, &role, "lines", &LINES.to_string(), "stderr"]);
    command.env("OMP_NUM_THREADS", "1");
    let start = Instant::now();
    let ended = job.start(command).wait().expect_exit_code(0);
    print_rate("stderr", ended.stderr.len(), start);
    expect_all_lines(&ended.stderr, |_| String::new());
}

/// Runs the launcher in its own mount namespace after the shell commands `mounts`. Reports a skipped test
/// and returns `None` if that is impossible here.
fn with_mounts(job: &Job, mounts: &str, arguments: &[&str], worker: &str) -> Option<ProcessOutput> {
    let possible = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    let why = match possible {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    };
    if let Some(why) = why {
        skip(format!("log folders that cannot be written to: {why}"));
        return None;
    }
    let through = format!("set -e\nmkdir disk\n{mounts}\nexec \"$@\"\n");
    let mut command = job.wrapped_command(&["unshare", "-m", "sh", "-c", &through, "sh"], arguments);
    command.arg(job.script(worker)).env("OMP_NUM_THREADS", "1");
    Some(job.start(command).wait())
}

/// Each worker writes far more than fits, and ignores write errors.
const WRITES: &str = "seq 30000 2>/dev/null\nseq 30000 >&2\nexit 0\n";

#[test]
fn full_disk_is_reported_once_and_the_job_continues() {
    for flag in ["--redirects=3", "--tee=3"] {
        let job = Job::new();
        let mounts = "mount -t tmpfs -o size=64k tmpfs disk\nmkfifo both";
        let arguments = ["--nproc-per-node=2", "--log-dir=disk", "--max-restarts=1", flag];
        // The second attempt has no space for output either. No worker fails before both have written
        // everything.
        let meet = "if [ $RANK = 0 ]; then : > both; else : < both; fi\n[ $TORCHELASTIC_RESTART_COUNT = 1 ]";
        let worker = WRITES.replace("exit 0", meet);
        let Some(ended) = with_mounts(&job, mounts, &arguments, &worker) else { return };
        let ended = ended.expect_exit_code(0);
        let told: Vec<_> =
            ended.stderr.lines().filter(|line| line.contains("No space left on device")).collect();
        assert_eq!(told.len(), 1, "{flag}: {told:?}");
        assert!(told[0].contains(&job.path("disk").display().to_string()), "{flag}: {told:?}");
        if flag == "--tee=3" {
            assert_eq!(ended.stdout.lines().count(), 2 * 2 * 30_000, "the console has it all");
        }
    }
}

#[test]
fn unusable_log_folder_is_reported_once_and_the_job_continues() {
    let job = Job::new();
    fs::write(job.path("file"), "").unwrap();
    let worker = "echo out; echo err >&2; [ -z \"$TORCHELASTIC_ERROR_FILE\" ] || exit 2\n[ $TORCHELASTIC_RESTART_COUNT = 1 ]\n";
    let read_only = "mount -t tmpfs tmpfs disk\nmount -o remount,ro disk";
    for (folder, error) in [
        ("file/below", "Not a directory"),
        ("disk", "Read-only file system"),
        ("disk/below", "Read-only file system"),
    ] {
        let _ = fs::remove_dir(job.path("disk"));
        let folder_flag = format!("--log-dir={folder}");
        let arguments = [folder_flag.as_str(), "--redirects=3", "--max-restarts=1"];
        let Some(ended) = with_mounts(&job, read_only, &arguments, worker) else { return };
        let ended = ended.expect_exit_code(0);
        let told = format!("warning: no log files: cannot make a directory in {folder}: {error} (os error ");
        assert_eq!(ended.stderr.matches(&told).count(), 1, "{folder}: {}", ended.stderr);
        assert_eq!(ended.stderr.matches("--log-dir").count(), 1, "{folder}: {}", ended.stderr);
        // Without log files, output must go to the console instead of being lost.
        assert_eq!((ended.stdout.as_str(), ended.stderr.matches("err\n").count()), ("out\nout\n", 2));
    }
}

#[test]
fn unwritable_stdout_is_reported_once_and_the_job_continues() {
    // One worker writes a short line, the other much more than any pipe holds. Each makes two attempts.
    for worker in ["echo hello", "seq 100000"] {
        for full in [true, false] {
            let job = Job::new();
            let stdout = if full {
                fs::File::create("/dev/full").unwrap().into()
            } else {
                // The reader of the pipe has closed it, as `head` does.
                Stdio::from(std::io::pipe().unwrap().1)
            };
            let mut command = job.command(["--tee=1", "--log-dir=logs", "--max-restarts=1"]);
            command.arg(job.script(&format!("{worker}\n[ $TORCHELASTIC_RESTART_COUNT = 1 ]\n")));
            let ended = job.start_with_stdout(command, Some(stdout)).wait().expect_exit_code(0);
            let error = if full { "no storage space" } else { "broken pipe" };
            let told = format!("convoke: warning: cannot write to stdout: {error}; the job continues\n");
            assert_eq!(ended.stderr.matches(&told).count(), 1, "{worker}: {}", ended.stderr);
            // The second line reports the restart.
            assert_eq!(ended.stderr.lines().count(), 2, "{worker}: {}", ended.stderr);
            let run = only_entry(&job.path("logs"));
            for attempt in 0..2 {
                let log = fs::read_to_string(run.join(format!("attempt_{attempt}/0/stdout.log"))).unwrap();
                assert!(log.ends_with("hello\n") || log.ends_with("\n100000\n"), "{worker}");
            }
        }
    }
}

#[test]
fn unwritable_stderr_does_not_end_the_job() {
    for redirection in ["2>/dev/full", "2>&-"] {
        let job = Job::new();
        let through = format!("exec \"$@\" {redirection}");
        let mut command = job.wrapped_command(&["sh", "-c", &through, "sh"], ["--nproc-per-node=2"]);
        command.arg(job.script("seq 10000 >&2\necho done\n"));
        let ended = job.start(command).wait().expect_exit_code(0);
        assert_eq!(ended.stdout, "done\ndone\n", "{redirection}");
    }
}
