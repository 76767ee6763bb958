//! Signals to the launcher: some end the job, some go to the workers, some have no effect.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use convoke_launcher_tests::harness::{Job, Launcher};
use convoke_testkit::{free_port, wait_until};

/// Writes a worker script that runs `extra`, then waits for the file `go`.
fn worker(job: &Job, extra: &str) -> std::path::PathBuf {
    job.script(&format!(
        "{extra}\necho $$ > \"$JOB/up.$RANK\"\nwhile [ ! -e \"$JOB/go\" ]; do sleep 0.01; done\necho done > \"$JOB/done.$RANK\"\n"
    ))
}

/// Starts the launcher and waits until its workers are up.
fn start_and_wait(job: &Job, command: Command, workers: usize) -> Launcher {
    let launcher = job.start(command);
    for rank in 0..workers {
        job.wait_for_file(&format!("up.{rank}"));
    }
    launcher
}

fn start_two(job: &Job, extra: &str) -> Launcher {
    let mut command = job.command(["--nproc-per-node=2"]);
    command.arg(worker(job, extra));
    start_and_wait(job, command, 2)
}

fn release_workers(job: &Job) {
    std::fs::write(job.path("go"), "\n").unwrap();
}

/// Returns the letter of the process state: T means stopped.
fn state(pid: i32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").map_or_else(String::new, |(_, rest)| rest[..1].to_owned())
}

fn pid(job: &Job, rank: usize) -> i32 {
    job.wait_for_file(&format!("up.{rank}")).trim().parse().unwrap()
}

#[test]
fn inherited_ignored_signal_ends_nothing() {
    for signal in [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGALRM] {
        let job = Job::new();
        let name = &signal.as_str()[3..];
        let trap = format!("trap '' {name}; exec \"$0\" \"$@\"");
        let mut command = job.wrapped_command(&["sh", "-c", &trap], ["--nproc-per-node=2"]);
        command.arg(worker(&job, ""));
        let launcher = start_and_wait(&job, command, 2);
        launcher.signal(signal);
        // If the launcher reported the ignored signal, it would do so before it reports SIGUSR2.
        launcher.signal(Signal::SIGUSR2);
        wait_until("SIGUSR2 to be told", || launcher.stderr().contains("SIGUSR2 was not sent").then_some(()));
        release_workers(&job);
        let ended = launcher.wait().expect_exit_code(0);
        assert!(!ended.stderr.contains(signal.as_str()), "{}", ended.stderr);
    }
}

#[test]
fn signals_listed_by_the_user_count_even_if_inherited_ignored() {
    let job = Job::new();
    let trap = "trap '' HUP; exec \"$0\" \"$@\"";
    let mut command =
        job.wrapped_command(&["sh", "-c", trap], ["--signals-to-handle=SIGHUP", "--shutdown-timeout=1"]);
    command.arg(worker(&job, ""));
    let launcher = start_and_wait(&job, command, 1);
    launcher.signal(Signal::SIGHUP);
    // The worker inherits the ignored SIGHUP, so the launcher kills it after the grace period.
    assert!(launcher.wait().expect_exit_code(1).stderr.contains("stopped by SIGHUP"));
}

#[test]
fn signal_caught_by_workers_is_forwarded_and_ends_nothing() {
    let job = Job::new();
    let launcher = start_two(&job, "[ $RANK = 0 ] && trap 'echo saved > \"$JOB/saved\"' USR1");
    launcher.signal(Signal::SIGUSR1);
    job.wait_for_file("saved");
    wait_until("a word on rank 1", || launcher.stderr().contains("rank 1").then_some(()));
    release_workers(&job);
    let ended = launcher.wait().expect_exit_code(0);
    let said = "convoke: SIGUSR1 was not sent to rank 1, which would be killed by it: no handler is installed there; the other workers got it\n";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    assert_eq!(job.wait_for_file("done.1"), "done\n");
}

#[test]
fn program_started_by_a_shell_receives_forwarded_signals() {
    let job = Job::new();
    let script = "sh -c 'trap \"echo saved > $JOB/saved\" WINCH; echo $$ > $JOB/up.0; while [ ! -e $JOB/go ]; do sleep 0.01; done; :'; :\n";
    let mut command = job.command(["--forward-signals=SIGWINCH,SIGUSR1"]);
    command.arg(job.script(script));
    let launcher = start_and_wait(&job, command, 1);
    launcher.signal(Signal::SIGWINCH);
    job.wait_for_file("saved");
    release_workers(&job);
    assert_eq!(launcher.wait().expect_exit_code(0).stderr, "");
}

#[test]
fn no_catchable_signal_ends_the_launcher_silently() {
    // Signal 40 is a real-time signal.
    for number in [14, 26, 27, 29, 30, 24, 25, 6, 16, 40] {
        let job = Job::new();
        let launcher = start_two(&job, "trap 'echo saved > \"$JOB/saved.$RANK\"; exit 0' TERM");
        // `nix` has no names for real-time signals, so the test uses kill(1).
        let sent = Command::new("kill").arg(format!("-{number}")).arg(launcher.pid().to_string()).status();
        assert!(sent.unwrap().success());
        let ended = launcher.wait();
        for rank in 0..2 {
            assert_eq!(job.wait_for_file(&format!("saved.{rank}")), "saved\n", "signal {number}");
        }
        assert!(ended.stderr.contains("ends the launcher; first it stops the workers"), "{}", ended.stderr);
        let by = ended.status.signal().unwrap_or_else(|| ended.status.code().unwrap() - 128);
        assert_eq!(by, number, "{:?}", ended.status);
        assert_eq!(job.processes(), [0; 0]);
    }
}

/// On SIGTERM or SIGINT the worker saves a checkpoint, which takes until the file `go` exists.
const SAVING_WORKER: &str = "trap 'echo begun > \"$JOB/begun.$RANK\"; while [ ! -e \"$JOB/go\" ]; do sleep 0.01; done; echo saved > \"$JOB/saved.$RANK\"; exit 0' TERM INT";

#[test]
fn repeated_scheduler_signal_does_not_shorten_the_grace_period() {
    for first in [Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGHUP] {
        let job = Job::new();
        let launcher = start_two(&job, SAVING_WORKER.replace("TERM INT", "TERM INT HUP").as_str());
        launcher.signal(first);
        launcher.signal(Signal::SIGTERM);
        (0..2).for_each(|rank| drop(job.wait_for_file(&format!("begun.{rank}"))));
        launcher.signal(Signal::SIGTERM);
        // These SIGINTs do not come from a terminal, so they must not cut the checkpoint short.
        launcher.signal(Signal::SIGINT);
        launcher.signal(Signal::SIGINT);
        // The launcher handles signals in order: its report of SIGUSR2 shows that it has handled the others.
        launcher.signal(Signal::SIGUSR2);
        wait_until("SIGUSR2 to be told", || launcher.stderr().contains("SIGUSR2").then_some(()));
        release_workers(&job);
        launcher.wait().expect_exit_code(1);
        for rank in 0..2 {
            assert_eq!(job.wait_for_file(&format!("saved.{rank}")), "saved\n", "after {first}");
        }
    }
}

#[test]
fn workers_can_save_when_all_nodes_are_signalled_at_once() {
    let job = Job::new();
    let port = free_port().to_string();
    let script = worker(&job, SAVING_WORKER);
    let nodes = [0, 1].map(|node| {
        let mut command = job.command(["--nnodes=2", "--master-addr=127.0.0.1", "--master-port", &port]);
        command.arg(format!("--node-rank={node}")).arg(&script);
        job.start(command)
    });
    (0..2).for_each(|rank| drop(job.wait_for_file(&format!("up.{rank}"))));
    nodes.iter().for_each(|node| node.signal(Signal::SIGTERM));
    (0..2).for_each(|rank| drop(job.wait_for_file(&format!("begun.{rank}"))));
    // A repeated signal must not cut the checkpoint short, even on a node that already knows of the stop.
    nodes.iter().for_each(|node| node.signal(Signal::SIGTERM));
    release_workers(&job);
    for node in nodes {
        node.wait().expect_exit_code(1);
    }
    for rank in 0..2 {
        assert_eq!(job.wait_for_file(&format!("saved.{rank}")), "saved\n");
    }
}

/// Starts a launcher on its own terminal. The returned file is the keyboard of this terminal.
fn at_a_terminal(job: &Job, script: &Path) -> (Launcher, File) {
    let pty = nix::pty::openpty(None, None).unwrap();
    let mut command = job.wrapped_command(&["setsid", "--ctty"], ["--nproc-per-node=2"]);
    command.arg(script).stdin(pty.slave);
    (start_and_wait(job, command, 2), File::from(pty.master))
}

#[test]
fn first_ctrl_c_lets_workers_save_and_second_does_not() {
    let job = Job::new();
    let (launcher, mut keys) = at_a_terminal(&job, &worker(&job, SAVING_WORKER));
    keys.write_all(b"\x03").unwrap();
    (0..2).for_each(|rank| drop(job.wait_for_file(&format!("begun.{rank}"))));
    keys.write_all(b"\x03").unwrap();
    launcher.wait().expect_exit_code(1);
    assert!(!job.path("saved.0").exists());
    assert_eq!(job.processes(), [0; 0]);
}

#[test]
fn ctrl_z_stops_workers_and_fg_continues_them() {
    let job = Job::new();
    let (launcher, mut keys) = at_a_terminal(&job, &worker(&job, ""));
    let (all, own) = ([pid(&job, 0), pid(&job, 1)], launcher.pid());
    keys.write_all(b"\x1a").unwrap();
    wait_until("the launcher to stop", || (state(own.as_raw()) == "T").then_some(()));
    // A shell in state D waits in vfork for a child that is itself stopped.
    let is_stopped = |&pid: &i32| matches!(state(pid).as_str(), "T" | "D");
    wait_until("the workers to stop", || all.iter().all(is_stopped).then_some(()));
    kill(own, Signal::SIGCONT).unwrap();
    release_workers(&job);
    let ended = launcher.wait().expect_exit_code(0);
    assert!(ended.stderr.contains("`fg` or `bg` continues them\n"), "{}", ended.stderr);
    assert!(ended.stderr.contains("continued after "), "{}", ended.stderr);
}

#[test]
fn workers_receive_terminal_size_changes() {
    let job = Job::new();
    let size =
        |rows, columns| nix::pty::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = nix::pty::openpty(&size(33, 91), None).unwrap();
    let script = worker(
        &job,
        "trap 'stty size <&2 > \"$JOB/size.partial\"; mv \"$JOB/size.partial\" \"$JOB/size\"' WINCH",
    );
    let mut command = job.command([""; 0]);
    command.arg(script).env("TERM", "xterm").stderr(pty.slave).stdout(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    drop(command);
    job.wait_for_file("up.0");
    let mut resize = Command::new("stty");
    resize.args(["rows", "20", "cols", "60"]).stdin(pty.master.try_clone().unwrap());
    assert!(resize.status().unwrap().success());
    // A real terminal would send SIGWINCH to its foreground process group.
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGWINCH).unwrap();
    assert_eq!(job.wait_for_file("size"), "20 60\n");
    release_workers(&job);
    assert!(child.wait().unwrap().success());
}
