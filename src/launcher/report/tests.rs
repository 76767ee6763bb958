//! Tests of the layout, of the choice of the root cause, and of error files.

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

fn failure(local_rank: usize, cause: ExitCause) -> EndedWorker {
    EndedWorker {
        local_rank,
        rank: local_rank + 4,
        pid: Some(100 + local_rank as i32),
        end: WorkerEnd::Exited(cause),
        time: at(AT),
        stopped: false,
        error_file: None,
        stderr: (Vec::new(), false),
        evidence: Evidence::default(),
        gpu: Vec::new(),
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
        assumed_python: false,
        began: at(AT - 60),
        stderr_lines: 64,
        notes: Vec::new(),
    }
}

/// The report on host `node7`.
fn made(title: &str, failures: &[EndedWorker]) -> Report {
    let (mut report, _) = build(&job(title), failures);
    report.host = "node7".to_owned();
    report.failures.iter_mut().for_each(|failure| failure.host = "node7".to_owned());
    report
}

/// Returns the full text of the report, in UTC.
fn text(title: &str, failures: &[EndedWorker]) -> String {
    text::report(&made(title, failures), &TimeZone::UTC)
}

fn root_cause(failures: &[EndedWorker]) -> Option<usize> {
    made("x", failures).root_cause
}

#[test]
fn report_layout_matches_torchrun() {
    let stopped = EndedWorker { stopped: true, ..failure(0, ExitCause::Signal(15)) };
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
fn report_borders_match_the_longest_line_up_to_60() -> Result {
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
fn report_time_is_local() {
    let zone = TimeZone::fixed(jiff::tz::offset(2));
    let failures = [failure(0, ExitCause::Code(1))];
    let report = text::report(&made("x", &failures), &zone);
    assert!(report.contains("  time      : 2026-11-21_10:33:05\n"), "{report}");
}

#[test]
fn unknown_signal_numbers_get_no_name() {
    let report = text("x", &[failure(0, ExitCause::Signal(40))]);
    assert!(report.contains("exitcode  : -40 (pid: 100)  (<N/A>)\n"), "{report}");
    assert_eq!(describe(ExitCause::Signal(40)), "was killed by signal 40");
    assert_eq!(describe(ExitCause::Signal(9)), "was killed by SIGKILL");
    assert_eq!(describe(ExitCause::Code(3)), "exited with code 3");
}

#[test]
fn earliest_second_then_detection_order_selects_the_root_cause() {
    let mut failures = vec![failure(0, ExitCause::Code(1)), failure(1, ExitCause::Code(2))];
    assert_eq!(root_cause(&failures), Some(0), "same second: detection order");
    failures[1].time -= Duration::from_millis(900);
    assert_eq!(root_cause(&failures), Some(1), "the second before");
    assert_eq!(root_cause(&[]), None);
}

/// Failures with error files of this content.
fn with_files(contents: &[&str]) -> Result<(tempfile::TempDir, Vec<EndedWorker>)> {
    let dir = tempfile::tempdir()?;
    let mut failures = Vec::new();
    for (rank, content) in contents.iter().enumerate() {
        let path = dir.path().join(format!("{rank}.json"));
        fs::write(&path, content)?;
        failures
            .push(EndedWorker { error_file: Some(path), ..failure(rank, ExitCause::Code(10 + rank as i32)) });
    }
    Ok((dir, failures))
}

const RECORDED: &str = r#"{"message": {"message": "ValueError: bad",
    "extraInfo": {"py_callstack": "Traceback\n  line two", "timestamp": "1700000000"}}}"#;

#[test]
fn error_files_determine_time_and_traceback() -> Result {
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
fn incomplete_error_files_are_shown_as_far_as_possible() -> Result {
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
        let report = render(&report, ReportFormat::Full);
        assert!(report.contains(&format!("  traceback : {traceback}\n")), "{content}: {report}");
    }
    Ok(())
}

#[test]
fn invalid_error_file_is_named_and_report_still_printed() -> Result {
    for content in ["", "{", "not json", r#"{"msg": 1}"#, "[]", "\u{0}"] {
        let (dir, failures) = with_files(&[content, RECORDED])?;
        let (report, wrong) = build(&job("x"), &failures);
        let wrong = wrong.ok_or(content)?;
        assert!(
            wrong.starts_with(&format!("rank 4: error file {}/0.json ", dir.path().display())),
            "{wrong}"
        );
        let text = render(&report, ReportFormat::Full);
        assert!(text.contains("x FAILED\n") && text.contains("Traceback\n    line two"), "{text}");
    }
    Ok(())
}

#[test]
fn huge_error_file_is_not_read_whole() -> Result {
    let (_dir, failures) = with_files(&[&format!(r#"{{"message": "{}"}}"#, "x".repeat(3 << 20))])?;
    let report = text("x", &failures);
    assert!(report.len() < 2000 && report.contains("longer than 1024 KiB"), "{report}");
    Ok(())
}

#[test]
fn non_regular_error_file_is_ignored() -> Result {
    let dir = tempfile::tempdir()?;
    nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU)?;
    for name in ["fifo", ".", "absent"] {
        let failures =
            [EndedWorker { error_file: Some(dir.path().join(name)), ..failure(0, ExitCause::Code(1)) }];
        assert!(text("x", &failures).contains("  error_file: <N/A>\n"), "{name}");
    }
    Ok(())
}

#[test]
fn root_cause_is_copied_to_the_parent_with_exit_code() -> Result {
    let (dir, mut failures) = with_files(&[r#"{"message": "later", "timestamp": 1700000100}"#, RECORDED])?;
    let target = dir.path().join("parent.json");
    copy_error_file(&made("x", &failures), &failures, &target)?;
    let value: serde_json::Value = serde_json::from_slice(&fs::read(&target)?)?;
    assert_eq!(
        value,
        serde_json::json!({"message": {"message": "ValueError: bad", "errorCode": 11,
            "extraInfo": {"py_callstack": "Traceback\n  line two", "timestamp": "1700000000"}}})
    );
    failures[1].end = WorkerEnd::Exited(ExitCause::Signal(11));
    copy_error_file(&made("x", &failures), &failures, &target)?;
    assert!(fs::read_to_string(&target)?.contains(r#""errorCode":-11"#), "negative for signals");
    assert_eq!(fs::read_dir(dir.path())?.count(), 3, "no temporary file is left");
    Ok(())
}

#[test]
fn plain_error_is_copied_unchanged_and_absent_one_not_written() -> Result {
    let (dir, failures) = with_files(&[r#"{"message": "plain", "timestamp": 5}"#])?;
    let target = dir.path().join("parent.json");
    copy_error_file(&made("x", &failures), &failures, &target)?;
    assert!(!fs::read_to_string(&target)?.contains("errorCode"));
    let target = dir.path().join("other.json");
    {
        let failures = [failure(0, ExitCause::Code(1))];
        copy_error_file(&made("x", &failures), &failures, &target)
    }?;
    copy_error_file(&made("x", &[]), &[], &target)?;
    assert!(!target.exists());
    let error = copy_error_file(&made("x", &failures), &failures, &dir.path().join("no/such/dir.json"))
        .expect_err("no directory");
    assert!(error.starts_with("cannot write "), "{error}");
    Ok(())
}

proptest! {
    /// Any output of a worker gives a report or a line about the file, and never a panic.
    #[test]
    fn any_error_file_is_handled_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), bytes).expect("written");
        let failures = [EndedWorker { error_file: Some(file.path().to_owned()), ..failure(0, ExitCause::Code(1)) }];
        let text = text("x", &failures);
        prop_assert!(text.contains("x FAILED"));
    }

    /// Timestamps of any size are shown or ignored.
    #[test]
    fn any_timestamp_is_handled_without_panic(seconds in any::<f64>()) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), serde_json::json!({"message": "m", "timestamp": seconds}).to_string()).expect("written");
        let failures = [EndedWorker { error_file: Some(file.path().to_owned()), ..failure(0, ExitCause::Code(1)) }];
        prop_assert!(text("x", &failures).contains("x FAILED"));
    }
}

/// The traceback of an exception on stderr.
fn raised(worker: EndedWorker, message: &str) -> EndedWorker {
    let text =
        format!("before\nTraceback (most recent call last):\n  File \"t.py\", line 1\n{message}\nafter\n");
    EndedWorker { stderr: (text.into_bytes(), false), ..worker }
}

#[test]
fn cause_follows_the_torchrun_fields() {
    let failures = [raised(failure(0, ExitCause::Code(1)), "ValueError: bad")];
    let report = text("x", &failures);
    let wanted = "  traceback : Traceback (most recent call last):
    File \"t.py\", line 1
  ValueError: bad
  after
  cause     : exception: ValueError: bad
  stderr    : other lines:
    before
=";
    assert!(report.contains(wanted), "{report}");
}

#[test]
fn implausible_error_file_time_does_not_select_the_root_cause() -> Result {
    let told = |seconds: u64| format!(r#"{{"message": "m", "timestamp": {seconds}}}"#);
    // Noticed a moment later, with a clock that is years behind.
    let (_dir, mut failures) = with_files(&["", &told(978_307_200)])?;
    failures[0].error_file = None;
    failures[1].time += Duration::from_secs(1);
    assert_eq!(root_cause(&failures), Some(0));
    // Within the attempt, an error file's time is more exact than the time of the notice.
    let (_dir, mut failures) = with_files(&["", &told(AT - 3)])?;
    failures[0].error_file = None;
    failures[1].time += Duration::from_secs(1);
    assert_eq!(root_cause(&failures), Some(1));
    Ok(())
}

#[test]
fn early_exit_is_root_cause_only_of_lost_connections() {
    let lost = |rank| raised(failure(rank, ExitCause::Code(1)), "ConnectionResetError: reset by peer");
    let left = failure(0, ExitCause::Code(0));
    let report = made("x", &[left.clone(), lost(1), lost(2)]);
    let root = report.root().map(|root| (root.rank, root.class, root.exitcode));
    assert_eq!(root, Some((4, Class::EarlyExit, Some(0))));
    assert_eq!(report.failures.len(), 3);
    let own = raised(failure(2, ExitCause::Code(1)), "ValueError: x");
    let report = made("x", &[left.clone(), lost(1), own]);
    assert_eq!(report.root().map(|root| root.rank), Some(6));
    assert_eq!(report.failures.len(), 2, "no failure");
    assert_eq!(
        made("x", &[lost(1), left.clone()]).root().map(|root| root.rank),
        Some(5),
        "it left afterwards"
    );
    // It counts if they name it, since they may fail before it exits.
    let lost = EndedWorker {
        stderr: (b"rank 4 at 127.0.0.1:4 has left the group; group world\n".to_vec(), false),
        ..failure(1, ExitCause::Code(1))
    };
    assert_eq!(
        made("x", &[lost, left]).root().map(|root| (root.rank, root.class)),
        Some((4, Class::EarlyExit))
    );
}

#[test]
fn worker_logging_its_own_panic_has_not_lost_peers() {
    let stderr =
        b"thread 'main' panicked at x.rs:1:1:\nno data\nrank 5 at 127.0.0.1:4 panicked; group world\n";
    let own = EndedWorker { stderr: (stderr.to_vec(), false), ..failure(1, ExitCause::Code(101)) };
    let other = EndedWorker { rank: 6, ..own.clone() };
    assert_eq!(made("x", &[own]).root().map(|root| root.class), Some(Class::Panic));
    assert_eq!(
        made("x", &[other]).root().map(|root| (root.class, root.suspect_rank)),
        Some((Class::PeerLost, Some(5)))
    );
}

#[test]
fn unstartable_worker_is_a_failure_without_a_process() {
    let how = |class| {
        let (why, advice) = ("./x: Permission denied (os error 13)".to_owned(), "chmod +x ./x".to_owned());
        WorkerEnd::NotStarted(NotStarted { class, reason: why, advice })
    };
    let first = EndedWorker { pid: None, end: how(Class::NotExecutable), ..failure(0, ExitCause::Code(0)) };
    let report = made("x", &[first]);
    let root = report.root().map(|root| (root.class, root.exitcode, root.describe()));
    assert_eq!(root, Some((Class::NotExecutable, None, "could not be started".to_owned())));
    assert!(render(&report, ReportFormat::Full).contains("  exitcode  : <N/A> (pid: 0) \n"));
    assert!(render(&report, ReportFormat::Full).contains("chmod +x ./x"));
    let first = EndedWorker { pid: None, end: how(Class::CpuBinding), ..failure(0, ExitCause::Code(0)) };
    assert_eq!(made("x", &[first]).root().map(|root| root.class), Some(Class::CpuBinding));
}

#[test]
fn report_is_unchanged_after_transfer_to_another_node() -> Result {
    let (_dir, mut failures) = with_files(&[RECORDED, r#"{"message": "b"}"#])?;
    failures.push(raised(failure(2, ExitCause::Signal(40)), "ValueError: x"));
    let report = made("train.py", &failures);
    let there = Report::from_json(&report.to_json())?;
    assert_eq!(there, report);
    assert_eq!(render(&there, ReportFormat::Full), render(&report, ReportFormat::Full));
    let newer =
        report.to_json().replacen('{', r#"{"news": [1], "#, 1).replace("\"exit\"", "\"from-the-future\"");
    assert_eq!(Report::from_json(&newer)?.failures.len(), 3);
    for nonsense in ["", "{}", "[]", &report.to_json().replace("\"root_cause\":0", "\"root_cause\":9")] {
        assert!(Report::from_json(nonsense).is_err(), "{nonsense}");
    }
    Ok(())
}

#[test]
fn transferred_report_is_short_and_keeps_the_root_cause() -> Result {
    let noise: String = (0..4000).map(|line| format!("line {line} \u{7} \"quoted\" äöü\n")).collect();
    let loud = |rank| EndedWorker {
        stderr: (noise.clone().into_bytes(), true),
        ..failure(rank, ExitCause::Code(1))
    };
    let mut failures: Vec<EndedWorker> = (0..500).map(loud).collect();
    failures[400] = raised(loud(400), &format!("ValueError: {}", "long ".repeat(30_000)));
    failures[400].time -= Duration::from_secs(9);
    let mut report = made(&"title".repeat(9999), &failures);
    report.failures[400].traceback = Some("\u{1}".repeat(1 << 20));
    assert_eq!(report.root_cause, Some(400));
    let json = report.to_json();
    assert!(json.len() <= model::MESSAGE_MAX_BYTES, "{}", json.len());
    let there = Report::from_json(&json)?;
    assert_eq!(there.root().map(|root| (root.rank, root.pid)), Some((404, 500)));
    assert_eq!(there.failures.len() + there.failures_left_out, 500);
    assert!(render(&there, ReportFormat::Full).contains("more\n"));
    Ok(())
}

#[test]
fn reports_of_two_nodes_have_one_root_cause() {
    let lost = raised(failure(0, ExitCause::Code(1)), "ConnectionResetError: reset by peer");
    let here = made("x", &[lost]);
    let mut there = made("x", &[failure(3, ExitCause::Signal(11))]);
    // Its clock is ahead.
    there.failures[0].time_unix_ms += 3_600_000;
    there.failures[0].node = 2;
    let agreed = here.clone().with_root_of(&there.root_only());
    assert_eq!(agreed.root().map(|root| (root.node, root.class)), Some((2, Class::Segfault)));
    assert_eq!(agreed.failures.len(), 2);
    assert_eq!(agreed.clone().with_root_of(&there), agreed, "said twice is not two failures");
    assert!(render(&agreed, ReportFormat::Full).contains("Root Cause (first observed failure):\n[1]:\n"));
    assert_eq!(here.clone().with_root_of(&without_failures(&job("x"), Outcome::Failed, None)), here);
}

#[test]
fn report_file_appears_completely_or_not_at_all() -> Result {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("report.json");
    let report = made("x", &[failure(0, ExitCause::Code(1))]);
    write(&report, &path)?;
    write(&report, &path)?;
    assert_eq!(Report::from_json(&fs::read_to_string(&path)?)?, report);
    assert_eq!(fs::read_dir(dir.path())?.count(), 1, "no temporary file is left");
    assert!(write(&report, dir.path()).is_err() && fs::read_dir(dir.path())?.count() == 1);
    write(&report, Path::new("/dev/null"))?;
    Ok(())
}

/// The report on one screen, in UTC.
fn screen(report: &Report) -> String {
    short::report(report, &TimeZone::UTC)
}

#[test]
fn report_starts_with_the_root_cause_and_repeats_no_line() {
    let raised = raised(failure(1, ExitCause::Code(1)), "ValueError: bad");
    let mut after = raised.clone();
    after.stderr = (String::from_utf8_lossy(&after.stderr.0).replace("after\n", "").into_bytes(), false);
    let stopped = |rank| EndedWorker { stopped: true, ..failure(rank, ExitCause::Signal(15)) };
    let report = made("train.py", &[after, stopped(0), stopped(2)]);
    let wanted = "
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_08:33:05
  host      : node7
  rank      : 5 (local_rank: 1)
  exitcode  : 1 (pid: 101)
  traceback : Traceback (most recent call last):
    File \"t.py\", line 1
  cause     : exception: ValueError: bad
  stderr    : other lines:
    before
------------------------------------------------------------
Failures:
  ranks 4,6 on node7: stopped by the launcher, after another had failed
============================================================
";
    assert_eq!(screen(&report), wanted);
}

#[test]
fn report_omits_empty_fields() {
    let report = screen(&made("x", &[failure(0, ExitCause::Code(3))]));
    for filler in ["<N/A>", "To enable traceback", "error_file", "traceback", "cause", "more:"] {
        assert!(!report.contains(filler), "{report}");
    }
    assert!(
        report.contains("  exitcode  : 3 (pid: 100)\n") && report.contains("  <NO_OTHER_FAILURES>\n"),
        "{report}"
    );
    let report = screen(&made("x", &[failure(0, ExitCause::Signal(11))]));
    assert!(report.contains("  exitcode  : -11 (pid: 100)  (SIGSEGV)\n"), "{report}");
}

#[test]
fn thousand_equal_failures_are_one_entry() {
    let worker = |rank| {
        let message = format!("ModuleNotFoundError: No module named 'nemo' (seen after {rank}.5 s)");
        raised(failure(rank, ExitCause::Code(1)), &message)
    };
    let report = screen(&made("x", &(0..1000).map(worker).collect::<Vec<_>>()));
    assert!(report.lines().count() <= 22, "{report}");
    assert!(report.contains("  ranks 5-1003 on node7: as above\n"), "{report}");
    assert_eq!(report.matches("No module named").count(), 1, "{report}");
}

#[test]
fn workers_with_other_failures_are_listed_with_one_traceback() {
    let mut workers = vec![raised(failure(0, ExitCause::Code(1)), "ValueError: bad")];
    workers.extend((1..4).map(|rank| raised(failure(rank, ExitCause::Code(1)), "KeyError: 'x'")));
    workers.push(failure(4, ExitCause::Signal(11)));
    let report = screen(&made("x", &workers));
    let entry = "  ranks 5-7 on node7: exited with code 1 (exception: KeyError: 'x')\n    Traceback (most recent call last):\n";
    assert!(report.contains(entry), "{report}");
    assert!(report.contains("  rank 8 on node7: was killed by SIGSEGV (segfault: "), "{report}");
}

#[test]
fn report_shows_whole_lines_about_calls_of_a_group() {
    let line =
        format!("group world: rank 0 was at seq 0 barrier(); {}", "ranks 1,3 waited in seq 1; ".repeat(12));
    assert!((300..600).contains(&line.len()), "{}", line.len());
    let mut report = made("x", &[failure(0, ExitCause::Code(1))]);
    report.flight =
        Some(FlightSummary { folder: "/tmp/x".to_owned(), groups: vec![line.clone(), "y".repeat(5000)] });
    let report = screen(&report);
    assert!(report.contains(line.trim_end()), "{report}");
    assert!(report.lines().all(|line| line.len() < 620), "{report}");
}

proptest! {
    /// Any number of failures of any kind fits on one screen, with lines of limited length.
    #[test]
    fn any_report_fits_on_a_screen(
        texts in proptest::collection::vec("(Traceback \\(most recent call last\\):\n)?([ -~]{0,300}\n){0,60}", 1..12),
        codes in proptest::collection::vec(-15_i32..130, 1..40),
    ) {
        let worker = |(rank, code): (usize, &i32)| {
            let cause = if *code < 0 { ExitCause::Signal(-code) } else { ExitCause::Code(*code) };
            let stderr = texts[rank % texts.len()].clone().into_bytes();
            EndedWorker { stderr: (stderr, false), stopped: rank % 5 == 4, ..failure(rank, cause) }
        };
        let mut report = made("x", &codes.iter().enumerate().map(worker).collect::<Vec<_>>());
        report.flight = Some(FlightSummary { folder: "/tmp/x".to_owned(), groups: vec!["a group".to_owned(); 30] });
        report.failures.iter_mut().for_each(|failure| failure.gpu = vec!["a line".to_owned(); 9]);
        let text = screen(&report);
        prop_assert!(text.lines().count() <= 50, "{} lines: {text}", text.lines().count());
        prop_assert!(text.lines().all(|line| line.chars().count() <= 260), "{text}");
    }
}
