//! The flight recorder: it shows which rank waits for which, while a job hangs and after the job has ended.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_launcher_tests::worker_command;
use convoke_testkit::programs::user_program;
use convoke_testkit::{free_port, skip, wait_until};

const SUM: &str = "seq 1 all_reduce(f32, 1048576, sum)";

/// Runs `convoke-flight` and returns its output.
fn flight(arguments: &[&Path]) -> ProcessOutput {
    let output = Command::new(user_program("convoke-flight")).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    ProcessOutput { status: output.status, stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

/// Runs `convoke-flight --json` and parses its output.
fn flight_json(arguments: &[&Path]) -> Value {
    let arguments: Vec<&Path> = [Path::new("--json")].into_iter().chain(arguments.iter().copied()).collect();
    serde_json::from_str(&flight(&arguments).stdout).unwrap()
}

/// Waits until the first line of `convoke-flight` contains all `parts`.
fn wait_for_line(folders: &[&Path], parts: &[&str]) {
    let mut last = String::new();
    wait_until(&format!("{parts:?}"), || {
        let line = flight(folders).stdout.lines().next().unwrap_or_default().to_owned();
        if line != last {
            println!("{line}");
        }
        last = line;
        parts.iter().all(|part| last.contains(part)).then_some(())
    });
}

/// Extracts the summary of the recordings from the launcher's stderr, without times, and the folder of the
/// recordings.
fn recorded_calls(stderr: &str) -> (String, PathBuf) {
    let line =
        |mark: &str| stderr.lines().find_map(|line| line.split_once(mark)).map(|(_, rest)| rest.trim());
    let calls = line("  calls     : ").or(line("convoke: group ")).unwrap_or_else(|| panic!("{stderr}"));
    let folder = line("convoke-flight ").unwrap_or_else(|| panic!("{stderr}"));
    (without_times(calls), folder.into())
}

/// Removes times such as `(idle 30 s)` and `(29 ms)`, which differ from run to run.
fn without_times(line: &str) -> String {
    let mut out = String::new();
    for (at, part) in line.split(" (").enumerate() {
        let is_time = part
            .split_once(')')
            .is_some_and(|(inside, _)| [" ms", " s", " min"].iter().any(|unit| inside.ends_with(unit)));
        match part.split_once(')') {
            Some((_, rest)) if is_time && at > 0 => out.push_str(rest),
            _ if at == 0 => out.push_str(part),
            _ => out.push_str(&format!(" ({part}")),
        }
    }
    out
}

/// A job whose workers write recordings.
trait RecordingJob {
    /// Starts four workers with this scenario; their logs go to `logs`.
    fn start_four(&self, scenario: &str, flags: &[&str], variables: &[(&str, &str)]) -> Launcher;

    /// Releases the worker that delays the others.
    fn release(&self);

    /// Returns all files below a folder.
    fn files(&self, folder: &str) -> Vec<PathBuf>;
}

impl RecordingJob for Job {
    fn start_four(&self, scenario: &str, flags: &[&str], variables: &[(&str, &str)]) -> Launcher {
        let mut command = self.command(["--nproc-per-node=4", "--log-dir=logs"]);
        command.args(flags).args(worker_command("comm")).arg(scenario).arg(self.dir.path());
        command.envs(variables.iter().copied());
        self.start(command)
    }

    fn release(&self) {
        fs::write(self.path("go"), "").unwrap();
    }

    fn files(&self, folder: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut folders = vec![self.path(folder)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.file_type().unwrap().is_dir() {
                    true => folders.push(entry.path()),
                    false => found.push(entry.path()),
                }
            }
        }
        found
    }
}

#[test]
fn flight_report_shows_waits_during_hang_and_after_kill() {
    let job = Job::new();
    let launcher = job.start_four("late", &[], &[]);
    let logs = job.path("logs");
    let waiting = format!("ranks 0,1,3 wait in {SUM} for rank 2 (");
    wait_for_line(&[&logs], &["group world: rank 2 is at seq 0 barrier() (idle ", &waiting]);
    let recordings = flight_json(&[&logs])["recordings"].clone();
    let pid = recordings[1]["pid"].as_i64().unwrap();
    assert_eq!((recordings[1]["rank"].as_i64(), recordings[1]["alive"].as_bool()), (Some(1), Some(true)));
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();

    let ended = launcher.wait().expect_exit_code(1);
    let (calls, folder) = recorded_calls(&ended.stderr);
    let parts = [
        format!("group world: rank 1 died in {SUM}; rank 2 was at seq 0 barrier(); "),
        // The line may end "for rank 2", "for ranks 1,2" or without a rank: the ranks may have seen rank 1
        // die and failed themselves.
        format!("ranks 0,3 waited in {SUM}"),
    ];
    assert!(parts.iter().all(|part| calls.contains(part)), "{calls}");
    // `convoke-flight` must read an equal summary from the files after the job has ended.
    let later = flight(&[&folder]).expect_exit_code(0).stdout;
    assert_eq!(without_times(later.lines().next().unwrap()), calls);
    assert!(later.contains(" on ") && later.contains("ended by signal SIGKILL: 2 calls"), "{later}");
    let last = format!("{SUM} by shm, ");
    assert!(later.lines().any(|line| line.contains(" running ") && line.contains(&last)), "{later}");
}

#[test]
fn timeout_report_and_file_name_ranks_that_did_not_call() {
    let job = Job::new();
    let ended = job.start_four("timeout", &["--report-file=report.json"], &[]).wait().expect_exit_code(1);
    let (calls, folder) = recorded_calls(&ended.stderr);
    let expected =
        format!("group world: rank 2 was at seq 0 barrier(); ranks 0,1,3 waited in {SUM} for rank 2 (rank ");
    assert!(calls.starts_with(&expected) && calls.ends_with(" timed out waiting for rank 2)"), "{calls}");
    let report: Value = serde_json::from_slice(&fs::read(job.path("report.json")).unwrap()).unwrap();
    assert_eq!(report["flight"]["folder"], folder.to_str().unwrap());
    assert_eq!(without_times(report["flight"]["groups"][0].as_str().unwrap()), calls);
    assert!(ended.stderr.contains("timed out") || ended.stderr.contains("Timeout"), "{}", ended.stderr);
}

#[test]
fn all_ranks_report_a_user_function_that_never_returns() {
    for (scenario, count) in [("function", 8), ("long-function", 1 << 20)] {
        let job = Job::new();
        let launcher = job.start_four(scenario, &[], &[]);
        let call = format!("seq 1 all_reduce(f32, {count}, custom)");
        wait_for_line(&[&job.path("logs")], &[&format!("ranks 0-3 wait in {call}")]);
        job.release();
        launcher.wait().expect_exit_code(0);
    }
}

#[test]
fn report_shows_both_of_two_differing_calls() {
    let job = Job::new();
    let ended = job.start_four("mismatch", &[], &[]).wait().expect_exit_code(1);
    let (calls, _) = recorded_calls(&ended.stderr);
    assert!(calls.contains("rank 2 waited in seq 1 all_reduce(f32, 7, sum)"), "{calls}");
    assert!(calls.contains("waited in seq 1 all_reduce(f32, 8, sum)"), "{calls}");
    assert!(calls.contains(" differ)"), "{calls}");
}

#[test]
fn deadlock_across_groups_is_reported_when_user_stops_the_job() {
    let job = Job::new();
    let launcher = job.start_four("groups", &[], &[]);
    let logs = job.path("logs");
    let world = [
        "group world: rank 0 is in group world/0.0: recv(f32, 3, tag 7) from rank 2",
        "ranks 1-3 wait in seq 3 barrier() for rank 0 (",
    ];
    wait_for_line(&[&logs], &world);
    let lines = flight(&[&logs]).stdout;
    let half = "group world/0.0: rank 2 is in group world: seq 3 barrier(); rank 0 waits in recv(f32, 3, tag 7) from rank 2";
    assert!(lines.lines().any(|line| line.starts_with(half)), "{lines}");
    launcher.signal(Signal::SIGINT);
    let ended = launcher.wait().expect_exit_code(1);
    let (_, folder) = recorded_calls(&ended.stderr);
    let past = "convoke: group world: rank 0 was in group world/0.0: recv(f32, 3, tag 7) from rank 2, \
                here after seq 2 subgroup/split(); ranks 1-3 waited in seq 3 barrier() for rank 0 (";
    assert!(ended.stderr.contains(past), "{}", ended.stderr);
    assert_eq!(flight_json(&[&folder])["recordings"][0]["exit"]["stopped"], true);
}

#[test]
fn guard_loss_report_includes_worker_states_and_calls() {
    let job = Job::new();
    let launcher = job.start_four("late", &["--report-file=report.json"], &[]);
    let logs = job.path("logs");
    let waiting = format!("ranks 0,1,3 wait in {SUM} for rank 2 (");
    wait_for_line(&[&logs], &[&waiting]);
    let guard = launcher.guard();
    kill(guard, Signal::SIGKILL).unwrap();

    let ended = launcher.wait().expect_exit_code(1);
    let loss = format!("the guard process (pid {guard}) was killed by SIGKILL");
    assert!(ended.stderr.contains(&loss), "{}", ended.stderr);
    let (calls, folder) = recorded_calls(&ended.stderr);
    assert!(ended.stderr.contains("convoke: recorded calls: convoke-flight "), "{}", ended.stderr);
    let expected = format!("rank 2 was at seq 0 barrier(); ranks 0,1,3 waited in {SUM} for rank 2");
    assert!(calls.contains(&expected), "{calls}");

    let report: Value = serde_json::from_slice(&fs::read(job.path("report.json")).unwrap()).unwrap();
    assert_eq!((&report["outcome"], &report["root_cause"]), (&"error".into(), &Value::Null), "{report:#}");
    assert!(report["message"].as_str().is_some_and(|message| message.starts_with(&loss)), "{report:#}");
    assert_eq!(report["flight"]["folder"], folder.to_str().unwrap());
    let mut ranks: Vec<_> = report["failures"].as_array().unwrap().iter().collect();
    ranks.sort_by_key(|worker| worker["rank"].as_u64());
    assert_eq!(ranks.len(), 4, "{report:#}");
    for (rank, worker) in ranks.into_iter().enumerate() {
        assert_eq!((&worker["rank"], &worker["exitcode"]), (&rank.into(), &(-9).into()), "{report:#}");
        assert_eq!((&worker["class"], &worker["stopped_by_us"]), (&"stopped".into(), &true.into()));
        assert_eq!(
            worker["explanation"],
            "it ended with the guard process, without which no worker may run: was killed by SIGKILL"
        );
    }
}

#[test]
fn successful_job_deletes_recordings_and_report_names_unjoined_ranks() {
    let job = Job::new();
    let launcher = job.start_four("absent", &[], &[]);
    let logs = job.path("logs");
    wait_for_line(
        &[&logs],
        &["group world: ranks 0,1,3 wait for the others to join (", "; no recording of rank 2"],
    );
    job.release();
    let ended = launcher.wait().expect_exit_code(0);
    assert_eq!((job.files("logs"), job.files("tmp")), (vec![], vec![]), "{}", ended.stderr);
    assert!(!ended.stderr.contains("flight"), "{}", ended.stderr);
    let nothing = flight(&[&logs]).expect_exit_code(1);
    assert!(nothing.stdout.is_empty() && nothing.stderr.contains("no recordings"), "{}", nothing.stderr);
}

#[test]
fn crash_outside_calls_is_reported_and_user_folder_keeps_recordings() {
    let job = Job::new();
    let launcher = job.start_four("crash", &["--max-restarts=1"], &[("CONVOKE_FLIGHT_DIR", "mine")]);
    wait_for_line(&[&job.path("mine")], &["ranks 0,1,3 wait in seq 1 barrier() for rank 2"]);
    job.release();
    let ended = launcher.wait().expect_exit_code(1);
    let line =
        "group world: rank 2 died after seq 0 barrier(); ranks 0,1,3 waited in seq 1 barrier() for rank 2";
    let warned = ended.stderr.lines().find(|line| line.contains("convoke: warning: group"));
    assert!(warned.is_some_and(|warning| warning.contains(line)), "{}", ended.stderr);
    let (calls, folder) = recorded_calls(&ended.stderr);
    // In the second attempt the other ranks may not have reached the barrier.
    assert!(calls.starts_with("group world: rank 2 died after seq 0 barrier(); "), "{calls}");
    assert_eq!((folder, job.files("mine").len()), (job.path("mine"), 8));
    let both = flight(&[&job.path("mine")]).expect_exit_code(0).stdout;
    let lines: Vec<&str> = both.lines().take(2).collect();
    assert!(lines[0].starts_with("earlier group world: ") && lines[1].starts_with("group world: "), "{both}");
    assert!(both.contains("rank 2 of 4 after restart 1, pid "), "{both}");
}

#[test]
fn empty_variable_disables_recording_and_bad_folder_warns_once() {
    let job = Job::new();
    let ended = job.start_four("good", &[], &[("CONVOKE_FLIGHT_DIR", "")]).wait().expect_exit_code(0);
    assert!(!ended.stderr.contains("FLIGHT"), "{}", ended.stderr);
    let ended = job.start_four("good", &[], &[("CONVOKE_FLIGHT_DIR", "/proc/no")]).wait().expect_exit_code(0);
    let warnings: Vec<&str> =
        ended.stderr.lines().filter(|line| line.contains("CONVOKE_FLIGHT_DIR")).collect();
    assert_eq!(warnings.len(), 1, "{}", ended.stderr);
    assert!(
        warnings[0].starts_with("convoke: warning: CONVOKE_FLIGHT_DIR=/proc/no: No such file"),
        "{warnings:?}"
    );
    // Workers of a job without log files record nothing. They must not inherit the folder of an outer
    // launcher.
    let mut command = job.command(["--log-dir=/dev/null", "--no-python", "env"]);
    command.env("CONVOKE_FLIGHT_DIR", "");
    assert!(!job.start(command).wait().expect_exit_code(0).stdout.contains("CONVOKE_FLIGHT_DIR"));
}

#[test]
fn full_disk_does_not_disturb_the_workers() {
    let possible = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        return skip("recordings on a full disk: no mount namespaces here");
    }
    let job = Job::new();
    fs::create_dir(job.path("full")).unwrap();
    // The file system has room for one recording of four.
    let through = "mount -t tmpfs -o size=200k tmpfs full && \"$@\" && ls full | wc -l > seen";
    let [program, role] = worker_command("comm");
    let mut command = job.wrapped_command(
        &["unshare", "-m", "sh", "-c", through, "sh"],
        ["--nproc-per-node=4", "--log-dir=logs", &program, &role, "good"],
    );
    command.env("CONVOKE_FLIGHT_DIR", "full");
    let ended = job.start(command).wait().expect_exit_code(0);
    assert!(!ended.stderr.contains("flight"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(job.path("seen")).unwrap().trim(), "1");
}

#[test]
fn report_combines_recordings_of_two_nodes() {
    let job = Job::new();
    let port = free_port().to_string();
    let node = |rank: &str| {
        let mut command = job.command(["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]);
        command.args(["--node-rank", rank, "--master-port", &port, "--log-dir", &format!("logs{rank}")]);
        command.args(worker_command("comm")).arg("late").arg(job.dir.path());
        job.start(command)
    };
    let nodes = [node("0"), node("1")];
    let (first, second) = (job.path("logs0"), job.path("logs1"));
    let whole = format!("ranks 0,1,3 wait in {SUM} for rank 2 (");
    wait_for_line(&[&first, &second], &["group world: rank 2 is at seq 0 barrier() (idle ", &whole]);
    wait_for_line(&[&first], &[&format!("ranks 0,1 wait in {SUM} for "), "; no recording of ranks 2,3"]);
    job.release();
    nodes.into_iter().for_each(|node| drop(node.wait().expect_exit_code(0)));
    assert_eq!((job.files("logs0"), job.files("logs1")), (vec![], vec![]));
}
