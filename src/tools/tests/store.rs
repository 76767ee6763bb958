//! Tests of `convoke-store` as its users see it.
#![allow(clippy::unwrap_used, clippy::panic)] // in a test a broken expectation ends it

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use convoke_store::{Store, TcpStore};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn start(flags: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_convoke-store"));
    command.args(flags).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn run(flags: &[&str]) -> Output {
    start(flags).wait_with_output().unwrap()
}

/// Returns the address in the server's first line.
fn read_address(server: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    line.trim_end().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned()
}

#[test]
fn store_prints_its_address_serves_and_exits_0_on_signals() {
    for (host, signal) in
        [("127.0.0.1", Signal::SIGTERM), ("localhost", Signal::SIGINT), ("::", Signal::SIGTERM)]
    {
        let mut server = start(&["--host", host, "--port", "0"]);
        let address = read_address(&mut server);
        let port = address.rsplit(':').next().unwrap();
        assert_ne!(port, "0");
        let store = TcpStore::connect(&format!("localhost:{port}"), deadline()).unwrap();
        store.set(b"k", b"v", deadline()).unwrap();
        kill(Pid::from_raw(i32::try_from(server.id()).unwrap()), signal).unwrap();
        let output = server.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{host}");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn busy_port_is_one_clear_line_and_exit_code_1() {
    let mut first = start(&["--port", "0"]);
    let address = read_address(&mut first);
    let output = run(&["--port", address.rsplit(':').next().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(told, format!("error: {address} is in use: another store or program listens there\n"));
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn addresses_of_other_hosts_are_refused_by_name() {
    for (host, expected) in
        [("192.0.2.1", "cannot listen at 192.0.2.1"), ("no-such-host.invalid", "no-such-host.invalid")]
    {
        let output = run(&["--host", host, "--port", "0"]);
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            told.starts_with("error: ") && told.contains(expected) && told.lines().count() == 1,
            "{told}"
        );
    }
}

#[test]
fn help_goes_to_stdout_and_usage_errors_exit_with_2() {
    let help = String::from_utf8(run(&["--help"]).stdout).unwrap();
    for word in ["--host", "--port", "torch.distributed", "[default: 127.0.0.1]", "[default: 29500]"] {
        assert!(help.contains(word), "{word} is not in:\n{help}");
    }
    let version = String::from_utf8(run(&["--version"]).stdout).unwrap();
    assert_eq!(version, format!("convoke-store {}\n", env!("CARGO_PKG_VERSION")));
    for flags in [&["--port", "65536"][..], &["--no-such-flag"], &["surplus"]] {
        assert_eq!(run(flags).status.code(), Some(2), "{flags:?}");
    }
}

#[test]
fn store_exits_with_an_error_if_stdout_is_closed() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_convoke-store"));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut server = command.args(["--port", "0"]).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    server.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(1));
    assert!(told.starts_with("error: cannot write to stdout"), "{told}");
}
