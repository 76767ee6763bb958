//! The layout, the order of blame, and what workers leave in their error files.

use std::fs;
use std::time::{Duration, SystemTime};

use jiff::tz::TimeZone;
use proptest::prelude::*;

use super::*;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const AT: u64 = 1_795_249_985; // 2026-11-21 08:33:05 UTC

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn failure(local_rank: usize, cause: ExitCause) -> Ended {
    Ended {
        local_rank,
        rank: local_rank + 4,
        pid: Some(100 + local_rank as i32),
        how: How::Exited(cause),
        time: at(AT),
        stopped: false,
        error_file: None,
        stderr: (Vec::new(), false),
        evidence: Evidence::default(),
    }
}

fn job(title: &str) -> Job {
    Job {
        title: title.to_owned(),
        run_id: "job7".to_owned(),
        node: Some(1),
        nodes: Some(2),
        restarts: 0,
        max_restarts: 0,
        began: at(AT - 60),
        stderr_lines: STDERR_LINES,
    }
}

/// The report on host `node7`.
fn made(title: &str, failures: &[Ended]) -> Report {
    let (mut report, _) = build(&job(title), failures);
    report.host = "node7".to_owned();
    report.failures.iter_mut().for_each(|failure| failure.host = "node7".to_owned());
    report
}

/// The same as text, in UTC.
fn text(title: &str, failures: &[Ended]) -> String {
    text::report(&made(title, failures), &TimeZone::UTC)
}

fn root_cause(failures: &[Ended]) -> Option<usize> {
    made("x", failures).root_cause
}

#[test]
fn the_layout_is_torchruns() {
    let stopped = Ended { stopped: true, ..failure(0, ExitCause::Signal(15)) };
    let failures = [failure(1, ExitCause::Code(3)), stopped];
    let wanted = "
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_08:33:05
  host      : node7
  rank      : 4 (local_rank: 0)
  exitcode  : -15 (pid: 100)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 100
  cause     : stopped: by the launcher, after another worker had failed (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_08:33:05
  host      : node7
  rank      : 5 (local_rank: 1)
  exitcode  : 3 (pid: 101) \n  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
";
    assert_eq!(text("train.py", &failures), wanted);
}

#[test]
fn borders_are_as_wide_as_the_longest_line_up_to_sixty() -> Result {
    let (_dir, failures) = with_files(&[r#"{"message": "short"}"#])?;
    let mut report = made("x", &failures);
    report.failures[0].error_file = None;
    let report = text::report(&report, &TimeZone::UTC);
    let longest = "  time      : 2026-11-21_08:33:05".len();
    assert_eq!(report.lines().nth(1), Some("=".repeat(longest).as_str()));
    assert!(report.contains("Failures:\n  <NO_OTHER_FAILURES>\n"));
    let long = text(&"y".repeat(200), &[failure(0, ExitCause::Code(1))]);
    assert_eq!(long.lines().nth(1), Some("=".repeat(60).as_str()));
    Ok(())
}

#[test]
fn the_time_is_local() {
    let zone = TimeZone::fixed(jiff::tz::offset(2));
    let failures = [failure(0, ExitCause::Code(1))];
    let report = text::report(&made("x", &failures), &zone);
    assert!(report.contains("  time      : 2026-11-21_10:33:05\n"), "{report}");
}

#[test]
fn signals_without_a_name_are_not_invented() {
    let report = text("x", &[failure(0, ExitCause::Signal(40))]);
    assert!(report.contains("exitcode  : -40 (pid: 100)  (<N/A>)\n"), "{report}");
    assert_eq!(describe(ExitCause::Signal(40)), "was killed by signal 40");
    assert_eq!(describe(ExitCause::Signal(9)), "was killed by SIGKILL");
    assert_eq!(describe(ExitCause::Code(3)), "exited with code 3");
}

#[test]
fn the_earliest_second_is_to_blame_then_detection() {
    let mut failures = vec![failure(0, ExitCause::Code(1)), failure(1, ExitCause::Code(2))];
    assert_eq!(root_cause(&failures), Some(0), "same second: detection order");
    failures[1].time -= Duration::from_millis(900);
    assert_eq!(root_cause(&failures), Some(1), "the second before");
    assert_eq!(root_cause(&[]), None);
}

/// Failures with error files of this content.
fn with_files(contents: &[&str]) -> Result<(tempfile::TempDir, Vec<Ended>)> {
    let dir = tempfile::tempdir()?;
    let mut failures = Vec::new();
    for (rank, content) in contents.iter().enumerate() {
        let path = dir.path().join(format!("{rank}.json"));
        fs::write(&path, content)?;
        failures.push(Ended { error_file: Some(path), ..failure(rank, ExitCause::Code(10 + rank as i32)) });
    }
    Ok((dir, failures))
}

const RECORDED: &str = r#"{"message": {"message": "ValueError: bad",
    "extraInfo": {"py_callstack": "Traceback\n  line two", "timestamp": "1700000000"}}}"#;

#[test]
fn error_files_decide_time_and_traceback() -> Result {
    let (dir, failures) =
        with_files(&[r#"{"message": "out of cheese", "timestamp": 1700000100}"#, RECORDED])?;
    assert_eq!(root_cause(&failures), Some(1));
    let report = text("x", &failures);
    let root = &report[report.find("Root Cause").ok_or("no root cause")?..];
    assert!(root.contains("  time      : 2023-11-14_22:13:20\n"), "{root}");
    assert!(root.contains("  traceback : Traceback\n    line two\n"), "{root}");
    assert!(root.contains(&format!("  error_file: {}/1.json\n", dir.path().display())), "{root}");
    assert!(report.contains("  traceback : out of cheese\n"), "{report}");
    Ok(())
}

#[test]
fn odd_error_files_are_shown_as_far_as_they_go() -> Result {
    for (content, traceback) in [
        (r#"{"message": {"message": "only this"}}"#, "only this"),
        (r#"{"message": {}}"#, "<N/A>"),
        (r#"{"message": {"message": {"a": 1}, "extraInfo": {}}}"#, r#"{"a":1}"#),
        (r#"{"message": 7}"#, "7"),
        (r#"{"message": "x", "timestamp": "soon"}"#, "x"),
        (r#"{"message": "two\nlines", "timestamp": 0}"#, "two\n  lines"),
        (
            r#"{"message": ""}"#,
            "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        ),
    ] {
        let (_dir, failures) = with_files(&[content])?;
        let report = made("x", &failures);
        assert_eq!(report.failures[0].time_unix_ms, 1000 * AT as i64, "{content}: time of detection");
        let report = render(&report);
        assert!(report.contains(&format!("  traceback : {traceback}\n")), "{content}: {report}");
    }
    Ok(())
}

#[test]
fn an_error_file_that_is_no_json_is_named_and_the_report_still_there() -> Result {
    for content in ["", "{", "not json", r#"{"msg": 1}"#, "[]", "\u{0}"] {
        let (dir, failures) = with_files(&[content, RECORDED])?;
        let (report, wrong) = build(&job("x"), &failures);
        let wrong = wrong.ok_or(content)?;
        assert!(
            wrong.starts_with(&format!("rank 4: error file {}/0.json ", dir.path().display())),
            "{wrong}"
        );
        let text = render(&report);
        assert!(text.contains("x FAILED\n") && text.contains("Traceback\n    line two"), "{text}");
    }
    Ok(())
}

#[test]
fn a_huge_error_file_is_not_read_whole() -> Result {
    let (_dir, failures) = with_files(&[&format!(r#"{{"message": "{}"}}"#, "x".repeat(3 << 20))])?;
    let report = text("x", &failures);
    assert!(report.len() < 2000 && report.contains("longer than 1024 KiB"), "{report}");
    Ok(())
}

#[test]
fn what_is_no_file_is_no_error_file() -> Result {
    let dir = tempfile::tempdir()?;
    nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU)?;
    for name in ["fifo", ".", "absent"] {
        let failures = [Ended { error_file: Some(dir.path().join(name)), ..failure(0, ExitCause::Code(1)) }];
        assert!(text("x", &failures).contains("  error_file: <N/A>\n"), "{name}");
    }
    Ok(())
}

#[test]
fn the_root_cause_is_handed_on_with_its_exit_code() -> Result {
    let (dir, mut failures) = with_files(&[r#"{"message": "later", "timestamp": 1700000100}"#, RECORDED])?;
    let target = dir.path().join("parent.json");
    hand_on(&made("x", &failures), &failures, &target)?;
    let value: serde_json::Value = serde_json::from_slice(&fs::read(&target)?)?;
    assert_eq!(
        value,
        serde_json::json!({"message": {"message": "ValueError: bad", "errorCode": 11,
            "extraInfo": {"py_callstack": "Traceback\n  line two", "timestamp": "1700000000"}}})
    );
    failures[1].how = How::Exited(ExitCause::Signal(11));
    hand_on(&made("x", &failures), &failures, &target)?;
    assert!(fs::read_to_string(&target)?.contains(r#""errorCode":-11"#), "negative for signals");
    assert_eq!(fs::read_dir(dir.path())?.count(), 3, "no temporary file is left");
    Ok(())
}

#[test]
fn the_plain_form_is_handed_on_as_it_is_and_nothing_if_there_is_nothing() -> Result {
    let (dir, failures) = with_files(&[r#"{"message": "plain", "timestamp": 5}"#])?;
    let target = dir.path().join("parent.json");
    hand_on(&made("x", &failures), &failures, &target)?;
    assert!(!fs::read_to_string(&target)?.contains("errorCode"));
    let target = dir.path().join("other.json");
    {
        let failures = [failure(0, ExitCause::Code(1))];
        hand_on(&made("x", &failures), &failures, &target)
    }?;
    hand_on(&made("x", &[]), &[], &target)?;
    assert!(!target.exists());
    let error = hand_on(&made("x", &failures), &failures, &dir.path().join("no/such/dir.json"))
        .expect_err("no directory");
    assert!(error.starts_with("cannot write "), "{error}");
    Ok(())
}

#[test]
fn full_host_names_are_in_etc_hosts() {
    let hosts = "127.0.0.1 localhost # loop\n::1 localhost\n10.0.0.7\tnode7.cluster.example node7 # me\n127.0.1.1 lone\n";
    assert_eq!(host::full_name("node7", hosts), Some("node7.cluster.example".to_owned()));
    assert_eq!(host::full_name("NODE7", hosts), Some("node7.cluster.example".to_owned()));
    assert_eq!(host::full_name("lone", hosts), Some("lone".to_owned()));
    assert_eq!(host::full_name("other", hosts), None);
    assert_eq!(
        host::full_name("box", "127.0.0.1 localhost box\n"),
        Some("localhost".to_owned()),
        "as Python"
    );
    assert!(!full_host_name().is_empty() && !host_name().is_empty());
}

proptest! {
    /// Whatever a worker writes, there is a report or a line about the file, and never a panic.
    #[test]
    fn any_error_file_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), bytes).expect("written");
        let failures = [Ended { error_file: Some(file.path().to_owned()), ..failure(0, ExitCause::Code(1)) }];
        let text = text("x", &failures);
        prop_assert!(text.contains("x FAILED"));
    }

    /// Timestamps of any size are shown or passed over.
    #[test]
    fn any_timestamp_is_survived(seconds in any::<f64>()) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), serde_json::json!({"message": "m", "timestamp": seconds}).to_string()).expect("written");
        let failures = [Ended { error_file: Some(file.path().to_owned()), ..failure(0, ExitCause::Code(1)) }];
        prop_assert!(text("x", &failures).contains("x FAILED"));
    }
}
