//! The launcher as PID 1 of a container. Signals with a default action do not kill PID 1, and PID 1 inherits
//! all orphans.

use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use convoke_launcher_tests::harness::{Job, Launcher};
use convoke_launcher_tests::path_argument;
use convoke_testkit::programs::user_program;
use convoke_testkit::{free_port, skip, wait_until};

/// Executes a program as PID 1 of new namespaces. The program dies with `unshare`, and `unshare` returns its
/// exit status.
const UNSHARE: &[&str] = &["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];

/// Returns true if `unshare` works here; otherwise reports a skipped test.
fn can_unshare() -> bool {
    let works = Command::new(UNSHARE[0]).args(&UNSHARE[1..]).arg("true").output();
    let why = match works {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => format!("unshare: {error}"),
    };
    skip(format!("PID 1 of a container: {why}"));
    false
}

/// Returns the launcher's pid as seen from outside the container.
fn pid_1(unshare: &Launcher) -> Pid {
    let children = PathBuf::from(format!("/proc/{0}/task/{0}/children", unshare.pid()));
    let begin = path_argument(user_program("convoke")) + "\0";
    wait_until("the launcher as PID 1", || {
        let pid: i32 = std::fs::read_to_string(&children).ok()?.trim().parse().ok()?;
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        line.starts_with(&begin).then_some(Pid::from_raw(pid))
    })
}

fn start(job: &Job, flags: &[&str], worker: &str) -> Launcher {
    let mut command = job.wrapped_command(UNSHARE, flags);
    command.arg(job.script(worker));
    job.start(command)
}

#[test]
fn launcher_as_pid_1_returns_the_exit_code() {
    if !can_unshare() {
        return;
    }
    for code in [0, 1] {
        let job = Job::new();
        let worker = format!("grep -q /convoke /proc/1/cmdline || exit 2\nexit {code}\n");
        let ended = start(&job, &["--standalone"], &worker).wait().expect_exit_code(code);
        assert_eq!(ended.stderr.contains("exitcode  : 1 "), code == 1, "{}", ended.stderr);
    }
}

#[test]
fn launcher_as_pid_1_reaps_orphans_during_the_job() {
    if !can_unshare() {
        return;
    }
    // The test makes orphans of the worker, and orphans of a process that enters as with `docker exec`. The
    // latter become children of PID 1 itself.
    let job = Job::new();
    let launcher = start(
        &job,
        &["--standalone"],
        r#"
n=0
while [ $n -lt 20 ]; do setsid --fork sh -c "echo > $JOB/own.$n"; n=$((n + 1)); done
echo > "$JOB/up"
there() { [ "$(ls "$JOB" | grep -c "^$1\.")" = 20 ]; }
until there own && there came; do sleep 0.01; done
while grep -q '^State:.Z' /proc/[0-9]*/status; do sleep 0.01; done
ls -d /proc/[0-9]* > "$JOB/left"
"#,
    );
    job.wait_for_file("up");
    let pid = pid_1(&launcher).to_string();
    let forks = format!(
        "for n in $(seq 20); do setsid --fork sh -c \"echo > {}/came.$n\"; done",
        job.dir.path().display()
    );
    let came = Command::new("nsenter").args(["-t", &pid, "-p", "-m", "sh", "-c", &forks]).status().unwrap();
    assert!(came.success());
    launcher.wait().expect_exit_code(0);
    // The three processes are the launcher, its guard and the worker.
    assert_eq!(job.wait_for_file("left").lines().count(), 3, "{}", job.wait_for_file("left"));
}

#[test]
fn signal_stops_workers_and_kills_them_after_the_shutdown_timeout() {
    if !can_unshare() {
        return;
    }
    for (signal, told) in [(Signal::SIGTERM, "stopped by SIGTERM"), (Signal::SIGINT, "stopped by SIGINT")] {
        let job = Job::new();
        let worker =
            "trap 'echo > \"$JOB/got\"' TERM INT\necho > \"$JOB/up\"\nwhile :; do sleep 0.01; done\n";
        let launcher = start(&job, &["--standalone", "--shutdown-timeout=1"], worker);
        job.wait_for_file("up");
        kill(pid_1(&launcher), signal).unwrap();
        job.wait_for_file("got");
        let ended = launcher.wait().expect_exit_code(1);
        assert!(ended.stderr.contains(told), "{}", ended.stderr);
        assert_eq!(job.processes(), [0; 0]);
    }
}

#[test]
fn signal_before_workers_start_ends_the_launcher() {
    if !can_unshare() {
        return;
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let job = Job::new();
        let port = free_port().to_string();
        let nodes = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port", &port];
        let launcher = start(&job, &nodes, "exit 0\n");
        // A successful connection shows that the launcher listens.
        wait_until("the launcher to wait for node 1", || {
            std::net::TcpStream::connect(format!("127.0.0.1:{port}")).ok()
        });
        kill(pid_1(&launcher), signal).unwrap();
        // The signal cannot kill PID 1, so the launcher exits with the code that a shell gives for this
        // death.
        let ended = launcher.wait().expect_exit_code(128 + signal as i32);
        assert!(
            ended.stderr.contains(&format!("{signal} while waiting for other nodes")),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn unhandled_signal_still_ends_the_launcher() {
    if !can_unshare() {
        return;
    }
    let job = Job::new();
    let worker = "echo > \"$JOB/up\"\nexec sleep 1000\n";
    let launcher = start(&job, &["--standalone", "--signals-to-handle=SIGINT"], worker);
    job.wait_for_file("up");
    kill(pid_1(&launcher), Signal::SIGTERM).unwrap();
    launcher.wait().expect_exit_code(128 + Signal::SIGTERM as i32);
    assert_eq!(job.processes(), [0; 0]);
}
