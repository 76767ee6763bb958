//! Status output: a live line on a terminal, plain lines in a log.

use std::fs::File;
use std::io::Read;
use std::process::Command;

use convoke_launcher_tests::harness::Job;
use convoke_testkit::free_port;

/// Runs `command` with a terminal of 91 columns as stderr; returns everything that the command wrote there.
fn on_a_terminal(job: &Job, mut command: Command) -> String {
    let size = nix::pty::Winsize { ws_row: 33, ws_col: 91, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = nix::pty::openpty(&size, None).unwrap();
    command.env("TERM", "xterm").stderr(pty.slave);
    let mut child = command.stdout(File::create(job.path("out")).unwrap()).spawn().unwrap();
    drop(command);
    let mut seen = Vec::new();
    // The read ends with EIO when the last process closes its end.
    let _ = File::from(pty.master).read_to_end(&mut seen);
    child.wait().unwrap();
    String::from_utf8_lossy(&seen).into_owned()
}

/// Builds the launcher command of node 0 in a job of two nodes; node 1 never starts.
fn command_of_node_0(job: &Job) -> Command {
    let mut command =
        job.command(["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port"]);
    command.args([&free_port().to_string(), "--rdzv-conf=timeout=3", "true"]);
    command
}

const WAITING: &str = "1 of 2 nodes have joined, waiting for node 1";

#[test]
fn terminal_shows_one_updating_line_while_nodes_join() {
    let job = Job::new();
    let seen = on_a_terminal(&job, command_of_node_0(&job));
    let (live, rest) = seen.rsplit_once("\r\x1b[2K").expect(&seen);
    assert!(live.matches(WAITING).count() >= 2, "kept up to date: {seen:?}");
    // A second line stays on the screen: it explains why the other node may never join.
    let stays = "--master-addr is 127.0.0.1, by which every host reaches itself";
    assert!(live.matches('\n').count() == 1 && live.contains(stays), "one line: {seen:?}");
    assert!(
        rest.starts_with("\x1b[1;31mconvoke:\x1b[0m error: 1 of 2 nodes did not join within 3 s"),
        "{seen:?}"
    );
}

#[test]
fn log_file_gets_one_line_per_change() {
    let job = Job::new();
    let ended = job.start(command_of_node_0(&job)).wait().expect_exit_code(1);
    assert_eq!(ended.stderr.matches(WAITING).count(), 1, "{}", ended.stderr);
    assert!(!ended.stderr.contains(['\r', '\x1b']), "{:?}", ended.stderr);
}

#[test]
fn worker_stderr_is_a_terminal_and_appears_in_the_report() {
    let job = Job::new();
    let worker = job.script(
        "[ -t 2 ] && echo \"a terminal of $(stty size <&2)\" >&2\nprintf '10 %%\\r20 %%\\r\\n' >&2\necho 'ValueError: wrong' >&2\nexit 3\n",
    );
    let command = job.command([&worker]);
    let seen = on_a_terminal(&job, command);
    let (live, report) = seen.split_once("FAILED").expect(&seen);
    assert!(live.contains("a terminal of 33 91\r\n"), "{seen:?}");
    assert!(live.contains("10 %\r20 %\r\r\n"), "unchanged but for the outer terminal's own \\r: {seen:?}");
    assert!(report.contains("ValueError: wrong"), "{seen}");
    assert!(!report.contains("not known"), "{seen}");
}

#[test]
fn report_is_coloured_on_a_terminal_unless_disabled() {
    let job = Job::new();
    let worker = job.script("exit 3\n");
    let seen = on_a_terminal(&job, job.command([&worker]));
    assert!(seen.contains("\x1b[1mRoot Cause (first observed failure):\x1b[0m"), "{seen:?}");
    let mut plain = job.command([&worker]);
    plain.env("NO_COLOR", "1");
    let seen = on_a_terminal(&job, plain);
    assert!(seen.contains("Root Cause") && !seen.contains("\x1b[1"), "{seen:?}");
    let ended = job.start(job.command([&worker])).wait().expect_exit_code(1);
    assert!(!ended.stderr.contains('\x1b'), "{:?}", ended.stderr);
}
