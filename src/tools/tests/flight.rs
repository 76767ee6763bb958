//! Tests of `convoke-flight` as its users see it. Tests of its statements about groups are in
//! `convoke-recorder`, and tests with real jobs in `launcher-tests`.
#![allow(clippy::unwrap_used, clippy::panic)] // in a test a broken expectation ends it

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use convoke_recorder::layout::{
    ENTRY_LEN, Entry, FILE_BYTES, FILE_LEN, GROUP_LEN, Group, GroupState, Header, LISTED_PEERS, Operation,
    Process, State, entry_at, group_at,
};
use serde_json::Value;

fn run<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_convoke-flight"));
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A folder that is deleted at the end of the test.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("convoke-tools-flight-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A recording from another host with 12 calls. The last call waits for the other of two ranks.
fn recording(rank: u32) -> Vec<u8> {
    let header = Header {
        rank: Some(rank),
        world_size: Some(2),
        process: Process { pid: 7, start_ticks: 1, pid_namespace: 1, boot_id: 1 },
        started_unix_ns: 1_795_249_985_000_000_000,
        started_ns: 5_000_000_000,
        host: format!("node{rank}"),
        names: "all_reduce(%t, %n%o)\nf32\nsum\nring".to_owned(),
        ..Header::default()
    };
    let mut words = header.encode().to_vec();
    words[convoke_recorder::layout::header::CALL_COUNT] = 12;
    words.resize(FILE_LEN, 0);
    let group = Group {
        number: 1,
        state: GroupState::Formed,
        cause: None,
        rank,
        size: 2,
        id: 0,
        generation: None,
        created_ns: 5_000_000_000,
        ended_ns: 0,
        name: "world".to_owned(),
        world_ranks: None,
    };
    words[group_at(0)..][..GROUP_LEN].copy_from_slice(&group.encode());
    for number in 1..=12 {
        let last = number == 12;
        let at = 6_000_000_000 + number * 1_000_000;
        let entry = Entry {
            number,
            group: 1,
            state: if last { State::Running } else { State::Done },
            operation: Operation::Collective,
            algorithm: 1,
            seq: number - 1,
            call: [0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0],
            enqueued_ns: at,
            started_ns: at,
            ended_ns: if last { 0 } else { at + 250_000 },
            received_bytes: if last { 0 } else { 3 << 20 },
            sent_bytes: 36,
            to_receive_bytes: 3 << 20,
            to_send_bytes: 36,
            thread: 8,
            waits_for: 1,
            peers: [1 - rank; LISTED_PEERS],
        };
        words[entry_at(number)..][..ENTRY_LEN].copy_from_slice(&entry.encode());
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn report_lists_groups_and_then_last_calls_per_worker() {
    let folder = TempFolder::new();
    // Recordings may be anywhere below the folder; other files are ignored.
    folder.write("node0/flight/rank-0.7.flight", &recording(0));
    let other = folder.write("of-another-node", &recording(1));
    folder.write("node0/attempt_0/0/stderr.log", b"Traceback");
    let output = run(&[folder.0.join("node0").as_path(), other.as_path(), "--last=2".as_ref()]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    let first = "group world: ranks 0,1 wait in seq 11 all_reduce(f32, 9, sum) for each other (";
    assert!(lines[0].starts_with(first), "{}", lines[0]);
    assert!(
        lines[2].starts_with(
            "rank 0 of 2, pid 7 on node0, not visible from here, in another host or container: 12 calls ("
        ),
        "{}",
        lines[2]
    );
    assert!(
        lines[3].ends_with(
            "done      0.25 ms  world: seq 10 all_reduce(f32, 9, sum) by ring, 3.0 MiB in, 36 B out"
        )
    );
    let waiting = "running         -  world: seq 11 all_reduce(f32, 9, sum) by ring, 0 B of 3.0 MiB in, 36 B out, \
                   waits for rank 1";
    assert!(lines[4].ends_with(waiting), "{}", lines[4]);
    assert_eq!(lines.len(), 9);
    let all = run(&[folder.0.as_os_str()]);
    assert_eq!(text(&all.stdout).lines().filter(|line| line.contains(" done ")).count(), 7, "8 by default");
}

#[test]
fn json_contains_the_whole_report() {
    let folder = TempFolder::new();
    folder.write("rank-0.7.flight", &recording(0));
    folder.write("bad.flight", b"");
    let output = run(&["--json".as_ref(), folder.0.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(all["version"], 1);
    let group = &all["groups"][0];
    assert_eq!((group["group"].as_str(), group["size"].as_u64()), (Some("world"), Some(2)));
    assert!(group["line"].as_str().unwrap().ends_with("; no recording of rank 1"), "{group}");
    assert_eq!(group["members"][0]["position"]["step"]["waits_for"], serde_json::json!([1]));
    let worker = &all["recordings"][0];
    assert_eq!((worker["host"].as_str(), worker["calls_count"].as_u64()), (Some("node0"), Some(12)));
    let calls = worker["calls"].as_array().unwrap();
    assert_eq!((calls.len(), calls[11]["state"].as_str()), (12, Some("running")));
    assert_eq!(calls[0]["ended_unix_ms"], 1_795_249_986_001.25);
    assert!(all["skipped"][0]["path"].as_str().unwrap().ends_with("bad.flight"), "{}", all["skipped"]);
}

#[test]
fn unreadable_recordings_are_named_skipped_and_reflected_in_exit_code() {
    let folder = TempFolder::new();
    let good = recording(0);
    folder.write("good.flight", &good);
    let mut later = good.clone();
    later[8] = 9;
    let bad = [
        (folder.write("cut.flight", &good[..FILE_BYTES - 1]), "cut short: 165887 of 165888 bytes"),
        (folder.write("later.flight", &later), "a recording of version 9, and this program reads version 1"),
        (folder.write("text.flight", b"no recording at all"), "not a recording of the flight recorder"),
        (folder.write("empty.flight", b""), "cut short: 0 of 165888 bytes"),
        (folder.0.join("no/such"), "No such file or directory"),
        ("/dev/null".into(), "not a file"),
    ];
    let output = run(&[folder.0.as_os_str(), bad[4].0.as_os_str(), bad[5].0.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    let told = text(&output.stderr);
    for (path, why) in &bad {
        let line = format!("convoke-flight: warning: {}: {why}", path.display());
        assert!(
            told.lines().any(|told| told.starts_with(&line) && told.ends_with("; skipped")),
            "{line}:\n{told}"
        );
    }
    assert_eq!(told.lines().count(), bad.len());
    assert!(text(&output.stdout).starts_with("group world: rank 0 waits in "), "{}", text(&output.stdout));
}

#[test]
fn circular_symlink_is_not_followed() {
    let folder = TempFolder::new();
    folder.write("a/good.flight", &recording(0));
    std::os::unix::fs::symlink(&folder.0, folder.0.join("a/again")).unwrap();
    let output = run(&[&folder.0]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
}

#[test]
fn missing_recordings_error_states_where_to_search() {
    let folder = TempFolder::new();
    let output = run(&[&folder.0]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert!(text(&output.stderr).starts_with("convoke-flight: error: no recordings were found there"));
}

#[test]
fn help_goes_to_stdout_and_usage_errors_exit_with_2() {
    let output = run(&["--help"]);
    let help = text(&output.stdout);
    for word in ["--json", "--last", "*.flight", "CONVOKE_FLIGHT_DIR", "exit code 0"] {
        assert!(help.contains(word), "{word} is not in:\n{help}");
    }
    let version = run(&["--version"]);
    assert_eq!(text(&version.stdout), format!("convoke-flight {}\n", env!("CARGO_PKG_VERSION")));
    for flags in [&[][..], &["--no-such-flag"], &["--last=x", "."]] {
        assert_eq!(run(flags).status.code(), Some(2), "{flags:?}");
    }
}

#[test]
fn closed_stdout_is_no_error_and_full_disk_is() {
    let folder = TempFolder::new();
    folder.write("good.flight", &recording(0));
    let start = |stdout: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_convoke-flight"));
        command.arg(&folder.0).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut early = start(Stdio::piped());
    drop(early.stdout.take());
    assert_eq!(early.wait().unwrap().code(), Some(0));
    let mut full = start(fs::File::options().write(true).open("/dev/full").unwrap().into());
    let mut told = String::new();
    full.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(full.wait().unwrap().code(), Some(1));
    assert!(told.starts_with("convoke-flight: error: cannot write to stdout"), "{told}");
}
