//! Tests of the diagnoses of texts that real programs write.

use std::collections::BTreeSet;

use convoke_env::ExitCause;

use super::*;

fn log(text: &str) -> LogEvidence {
    LogEvidence::from_lines(&lines(text.as_bytes(), false))
}

fn diagnosis(cause: ExitCause, stderr: &str) -> Diagnosis {
    diagnosis_of(cause, false, stderr, None)
}

fn diagnosis_of(cause: ExitCause, stopped: bool, stderr: &str, oom: Option<OomKills>) -> Diagnosis {
    let evidence = Evidence { core_dumped: false, oom };
    diagnose(&Facts { cause, stopped, assumed_python: false, evidence: &evidence, log: &log(stderr) })
}

const ONE: ExitCause = ExitCause::Code(1);
const TRACE: &str = "Traceback (most recent call last):\n  File \"t.py\", line 3, in <module>\n    f()\n";

fn oom(cgroup: Option<&str>) -> Option<OomKills> {
    let cgroup = cgroup.map(str::to_owned);
    Some(OomKills { count: 2, cgroup, limit_bytes: Some(64 << 20), peak_bytes: Some(63 << 20) })
}

#[test]
fn error_texts_map_to_failure_classes() {
    use Class::*;
    let cases: &[(i32, &str, Class, &str)] = &[
        (1, "ValueError: no traceback", Exit, "exited with code 1"),
        (1, &format!("{TRACE}ValueError: bad\n"), Exception, "ValueError: bad"),
        (1, &format!("{TRACE}my.pkg.CustomError\n"), Exception, "my.pkg.CustomError"),
        (
            1,
            &format!("{TRACE}ModuleNotFoundError: No module named 'nope'\n"),
            ImportError,
            "No module named 'nope'",
        ),
        (1, "/usr/bin/python: No module named nope", ImportError, "No module named nope"),
        (
            1,
            &format!(
                "{TRACE}ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n"
            ),
            MissingLibrary,
            "libcudart.so.12",
        ),
        (
            127,
            "./a: error while loading shared libraries: libx.so: cannot open shared object file: No such file\n",
            MissingLibrary,
            "libx.so",
        ),
        (
            1,
            &format!("{TRACE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"),
            DeviceOutOfMemory,
            "2.00 GiB",
        ),
        (1, "RuntimeError: CUDA error: out of memory\n", DeviceOutOfMemory, "CUDA error"),
        (1, &format!("{TRACE}MemoryError\n"), OutOfMemory, "host memory"),
        (
            1,
            &format!("{TRACE}OSError: [Errno 28] No space left on device: '/x'\n"),
            DiskFull,
            "No space left",
        ),
        (1, "dd: error writing 'x': No space left on device\n", DiskFull, "dd: error"),
        (1, &format!("{TRACE}OSError: [Errno 98] Address already in use\n"), AddressInUse, "Errno 98"),
        (
            1,
            &format!("{TRACE}ConnectionResetError: [Errno 104] Connection reset by peer\n"),
            PeerLost,
            "Errno 104",
        ),
        (
            1,
            &format!(
                "{TRACE}torch.distributed.DistBackendError: NCCL error in: x, remote process exited or there was a network error\n"
            ),
            PeerLost,
            "NCCL error",
        ),
        (
            1,
            &format!(
                "{TRACE}RuntimeError: [../gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:4: Connection reset by peer\n"
            ),
            PeerLost,
            "pair.cc",
        ),
        (
            1,
            "rank 3 at 10.0.0.1:4000 was ended by SIGSEGV; group world, call 7 all_reduce, 0 of 8 bytes received, reported by rank 1",
            PeerLost,
            "rank 3 at",
        ),
        (
            1,
            "Error: rank 3 at 10.0.0.1:4000 closed its connections without leaving the group: did it die?; \
             group world, call 7 all_reduce(f32, 2, sum), 0 of 8 bytes received, reported by rank 1",
            PeerLost,
            "rank 3 at",
        ),
        (
            1,
            "Error: no loss at step 7: rank 3 at [::1]:4000 has left the group; group world, reported by rank 1",
            PeerLost,
            "rank 3 at",
        ),
        (
            101,
            "thread 'main' panicked at w.rs:3:9:\ncalled `Result::unwrap()` on an `Err` value: rank 3 at 10.0.0.1:4000 exited with code 2; group world, call 0 barrier(), 0 of 0 bytes received, reported by rank 0 (not confirmed)\nnote: run with `RUST_BACKTRACE=1`",
            PeerLost,
            "rank 3 at",
        ),
        (
            101,
            "thread 'main' panicked at w.rs:3:9:\ncalled `Result::unwrap()` on an `Err` value: timed out after 3000 ms waiting for rank(s) 3; group world, call 7 barrier(), 0 of 0 bytes received, reported by rank 1",
            Timeout,
            "rank(s) 3",
        ),
        (
            1,
            "Error: PeerLost { rank: 3, address: \"10.0.0.1:4000\", how: Disconnected }",
            PeerLost,
            "rank: 3",
        ),
        (
            101,
            "thread 'main' panicked at w.rs:3:9:\ncalled `Result::unwrap()` on an `Err` value: PeerLost { rank: 3, how: Left }\nnote: run with `RUST_BACKTRACE=1`",
            PeerLost,
            "rank: 3",
        ),
        (1, "Error: timed out after 3000 ms waiting for rank(s) 2, 5; group world", Timeout, "rank(s) 2"),
        (
            101,
            "thread 'main' panicked at src/main.rs:3:5:\nindex out of bounds\nnote: run with `RUST_BACKTRACE=1`",
            Panic,
            "panicked at src/main.rs:3:5: index out of bounds",
        ),
        (101, "thread 'worker-2' (4711) panicked at src/main.rs:3:5:\nold", Panic, "src/main.rs:3:5: old"),
        (2, "panic: runtime error\n\ngoroutine 1 [running]:\nmain.main()", Panic, "panic: runtime error"),
        (
            2,
            "python3: can't open file '/x/train.py': [Errno 2] No such file or directory",
            MissingProgram,
            "train.py",
        ),
        (1, "python3: can't find '__main__' module in 'job.zip'", MissingProgram, "job.zip"),
        (127, "sh: 1: nope: not found", MissingProgram, "nope: not found"),
        (126, "sh: 1: ./data: Permission denied", NotExecutable, "./data"),
        (
            2,
            "usage: t.py [-h]\nt.py: error: unrecognized arguments: --local-rank=0",
            UsageError,
            "--local-rank=0",
        ),
        (2, "Usage: t [OPTIONS]\n", UsageError, "usage text"),
        (3, "", Exit, "exited with code 3"),
        (255, "", Exit, "ssh"),
        (134, "", Abort, "exit code 134 = 128 + 6"),
        (137, "", Killed, "128 + 9"),
        (139, "Segmentation fault", Segfault, "128 + 11"),
        (143, "", Terminated, "SIGTERM"),
    ];
    for (code, stderr, class, text) in cases {
        let diagnosis = diagnosis(ExitCause::Code(*code), stderr);
        assert_eq!(diagnosis.class, *class, "{stderr}\n{diagnosis:?}");
        assert!(diagnosis.explanation.contains(text), "{diagnosis:?}");
    }
}

#[test]
fn signals_map_to_failure_classes() {
    use Class::*;
    for (signal, class) in [
        (4, IllegalInstruction),
        (6, Abort),
        (7, BusError),
        (8, ArithmeticError),
        (9, Killed),
        (11, Segfault),
        (13, Signal),
        (15, Terminated),
        (2, Terminated),
        (24, CpuLimit),
        (25, FileSizeLimit),
        (40, Signal),
    ] {
        let diagnosis = diagnosis(ExitCause::Signal(signal), "");
        assert_eq!(diagnosis.class, class, "{signal}");
        assert!(
            diagnosis.explanation.contains("SIG") || diagnosis.explanation.contains("40"),
            "{diagnosis:?}"
        );
    }
}

#[test]
fn last_output_explains_why_a_program_aborted() {
    for (stderr, text) in [
        ("free(): invalid pointer\n", "free(): invalid pointer"),
        ("t.c:3: main: Assertion `x == 1' failed.\n", "Assertion `x == 1' failed."),
        (
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  oh\n",
            "'std::runtime_error': oh",
        ),
        (
            "\nthread 'main' has overflowed its stack\nfatal runtime error: stack overflow\n",
            "overflowed its stack",
        ),
        (
            "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File \"t.py\", line 1\n",
            "Fatal Python error",
        ),
    ] {
        let diagnosis = diagnosis(ExitCause::Signal(6), stderr);
        assert_eq!(diagnosis.class, Class::Abort, "{stderr}");
        assert!(diagnosis.explanation.contains(text), "{diagnosis:?}");
    }
    let nccl = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0] Watchdog caught collective operation timeout: WorkNCCL\n";
    assert_eq!(diagnosis(ExitCause::Signal(6), nccl).class, Class::Timeout);
    assert_eq!(diagnosis(ExitCause::Signal(6), "thread 'x' panicked at a.rs:1:1:\nb\n").class, Class::Panic);
}

#[test]
fn python_exit_with_live_group_gets_advice_to_destroy_it() {
    let stderr = "epoch 9 done\nterminate called without an active exception\n";
    let found = diagnosis(ExitCause::Signal(6), stderr);
    assert_eq!(found.class, Class::Abort);
    let advice = found.advice.unwrap_or_default();
    assert!(advice.contains("dist.destroy_process_group()"), "{advice}");
    assert!(advice.contains("del model; gc.collect()"), "{advice}");
    let other = diagnosis(ExitCause::Signal(6), "terminate called after throwing an instance of 'x'\n");
    assert_eq!(other.advice, None);
}

#[test]
fn counted_oom_kill_is_classified_as_out_of_memory() {
    let killed = ExitCause::Signal(9);
    let found = diagnosis_of(killed, false, "", oom(Some("/job")));
    assert_eq!(found.class, Class::OutOfMemory);
    assert!(
        found.explanation.contains("ended 2 process(es) in cgroup /job (limit 64 MiB, peak 63 MiB)"),
        "{found:?}"
    );
    assert_eq!(diagnosis_of(killed, false, "", None).class, Class::Killed);
    assert_eq!(diagnosis_of(killed, true, "", oom(None)).class, Class::Stopped, "that was us");
    assert_eq!(diagnosis_of(ExitCause::Code(137), false, "", oom(None)).class, Class::OutOfMemory);
    assert_eq!(
        diagnosis_of(ONE, false, &format!("{TRACE}ValueError: x\n"), oom(None)).class,
        Class::Exception
    );
    let child = format!("{TRACE}RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n");
    assert_eq!(diagnosis_of(ONE, false, &child, oom(None)).class, Class::OutOfMemory);
    assert_eq!(diagnosis_of(ONE, false, &child, None).class, Class::Exception);
}

#[test]
fn stopped_workers_are_called_stopped_unless_they_failed_before() {
    let stopped = |cause, stderr: &str| diagnosis_of(cause, true, stderr, None).class;
    assert_eq!(stopped(ExitCause::Signal(15), ""), Class::Stopped);
    assert_eq!(stopped(ExitCause::Signal(9), ""), Class::Stopped);
    assert_eq!(stopped(ONE, ""), Class::Stopped);
    assert_eq!(stopped(ONE, &format!("{TRACE}KeyboardInterrupt\n")), Class::Stopped);
    assert_eq!(stopped(ONE, &format!("{TRACE}SignalException: Process 7 got signal: 15\n")), Class::Stopped);
    assert_eq!(stopped(ONE, &format!("{TRACE}ConnectionResetError: reset\n")), Class::Stopped);
    assert_eq!(stopped(ExitCause::Signal(11), ""), Class::Segfault);
    assert_eq!(stopped(ExitCause::Signal(15), &format!("{TRACE}ValueError: x\n")), Class::Exception);
}

#[test]
fn broken_pipe_failure_points_to_the_reading_process() {
    let hint = |cause, text: &str| diagnosis(cause, text).advice.unwrap_or_default();
    let python = hint(ONE, &format!("{TRACE}BrokenPipeError: [Errno 32] Broken pipe\n"));
    for hint in [hint(ExitCause::Signal(13), ""), python] {
        assert!(hint.contains("what the output of convoke is piped into"), "{hint}");
    }
}

#[test]
fn unknown_script_argument_has_its_hint() {
    let hint = |text: &str| diagnosis(ExitCause::Code(2), text).advice.unwrap_or_default();
    assert!(
        hint("t.py: error: unrecognized arguments: --local-rank=0").contains("--pass-local-rank=underscore")
    );
    assert!(hint("t.py: error: unrecognized arguments: --local_rank=0").contains("--pass-local-rank=dash"));
    assert!(hint("error: unexpected argument '--bogus' found").contains("before SCRIPT"));
}

#[test]
fn traceback_is_extracted_from_surrounding_output() {
    let picked = |text: &str| {
        let all = lines(text.as_bytes(), false);
        let found = LogEvidence::from_lines(&all);
        (
            found.exception.unwrap_or_default(),
            found.traceback_range.map_or_else(String::new, |range| format_traceback(&all, &range)),
        )
    };
    let chain = format!(
        "noise\n{TRACE}KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACE}ValueError: two\nlines of it\n\nafter\n"
    );
    let (exception, shown) = picked(&chain);
    assert_eq!(exception, "ValueError: two");
    assert!(
        shown.starts_with("Traceback")
            && shown.contains("KeyError: 1")
            && shown.ends_with("two\nlines of it"),
        "{shown}"
    );
    let ranks = format!("{TRACE}ValueError: x").replace('\n', "\n[rank7]: ");
    assert_eq!(picked(&format!("[rank7]: {ranks}\n")).0, "ValueError: x");
    let ignored = format!(
        "{TRACE}ValueError: real\nException ignored in: <function D.__del__>\n{TRACE}TypeError: late\n"
    );
    assert_eq!(picked(&ignored), ("ValueError: real".to_owned(), format!("{TRACE}ValueError: real")));
    let thread = format!("Exception in thread Thread-1 (f):\n{TRACE}ValueError: in thread\n");
    assert_eq!(picked(&thread).0, "ValueError: in thread");
    let syntax = "x\n  File \"t.py\", line 1\n    f(\n     ^\nSyntaxError: '(' was never closed\n";
    assert_eq!(picked(syntax).0, "SyntaxError: '(' was never closed");
    assert!(picked(syntax).1.starts_with("  File \"t.py\""));
    let group = "  + Exception Group Traceback (most recent call last):\n  |   File \"t.py\", line 1, in <module>\n  |     f()\n  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n";
    assert_eq!(picked(group).0, "ExceptionGroup: two (2 sub-exceptions)");
    assert_eq!(picked("Traceback (most recent call last):\n  File \"cut").0, "");
}

#[test]
fn output_lines_are_always_printable() {
    let clean = |bytes: &[u8]| lines(bytes, false);
    assert_eq!(clean(b"a\r\nb\r50%\r100%\n\x1b[31mred\x1b[0m\x07\n"), ["a", "100%", "red\u{fffd}"]);
    assert_eq!(clean(b"\x1b]0;title\x07x\n\xff\xfe\n"), ["x", "\u{fffd}\u{fffd}"]);
    assert_eq!(lines(b"half\nwhole\n", true), ["whole"]);
    assert_eq!(lines(b"all there is", true), ["all there is"]);
    assert_eq!(clean(b""), [""; 0]);
    let long = clean(&[b'x'; 1 << 20]);
    assert!(long.len() == 1 && long[0].chars().count() < 1100 && long[0].contains("characters ..."));
}

fn candidate(rank: usize, class: Class, time: i64) -> Candidate {
    Candidate { rank, class, stopped: false, suspect_rank: None, time }
}

#[test]
fn independent_failure_outranks_consequences_whatever_the_timestamps() {
    let lost = |rank, suspect_rank| Candidate { suspect_rank, ..candidate(rank, Class::PeerLost, 0) };
    let stopped = |rank, class| Candidate { stopped: true, ..candidate(rank, class, 0) };
    assert_eq!(select_root_cause(&[]), None);
    assert_eq!(select_root_cause(&[lost(0, Some(1)), candidate(1, Class::Exit, 9)]), Some(1));
    assert_eq!(select_root_cause(&[stopped(0, Class::Stopped), lost(1, None)]), Some(1));
    assert_eq!(
        select_root_cause(&[lost(0, None), stopped(1, Class::Exception)]),
        Some(1),
        "it was about to fail anyway"
    );
    assert_eq!(select_root_cause(&[stopped(1, Class::Segfault), candidate(0, Class::Exit, 9)]), Some(1));
    assert_eq!(
        select_root_cause(&[lost(2, Some(1)), lost(1, Some(7))]),
        Some(1),
        "who knows of a rank elsewhere"
    );
    assert_eq!(select_root_cause(&[candidate(0, Class::Exit, 5), candidate(1, Class::Segfault, 4)]), Some(1));
    assert_eq!(
        select_root_cause(&[candidate(0, Class::Exit, 5), candidate(1, Class::Exit, 5)]),
        Some(0),
        "order"
    );
    assert_eq!(select_root_cause(&[lost(0, Some(1)), candidate(1, Class::EarlyExit, 9)]), Some(1));
}

#[test]
fn documented_failure_classes_match_the_code() {
    let document = include_str!("../../../docs/reference/failure-model.md");
    let section = document.split("\n## Causes\n").nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let documented: BTreeSet<String> = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`').map(|(name, _)| name.to_owned()))
        .collect();
    let in_code: BTreeSet<String> = Class::ALL.iter().map(ToString::to_string).collect();
    assert_eq!(documented, in_code);
    for class in Class::ALL {
        let json = serde_json::to_string(&class).unwrap_or_default();
        assert_eq!(json, format!("\"{class}\""));
    }
    assert_eq!(serde_json::from_str::<Class>("\"from-the-future\"").ok(), Some(Class::Unknown));
}

proptest::proptest! {
    /// Any output of a worker gives a diagnosis and never a panic.
    #[test]
    fn any_stderr_text_is_classified_without_panic(
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400),
        words in proptest::collection::vec(0usize..12, 0..12),
        code in 1..256,
    ) {
        const FRAGMENTS: [&str; 12] = [
            "Traceback (most recent call last):\n", "  File \"x\"\n", "ValueError: x\n", "\n", "[rank3]: ",
            "thread 'main' panicked at x:1:1:\n", "  + Exception Group ", "  | ", "SyntaxError: ", "rank 3 at ",
            "During handling of the above exception, another exception occurred:\n", "PeerLost { rank: ",
        ];
        let text: Vec<u8> = words.iter().flat_map(|&at| FRAGMENTS[at].bytes()).chain(bytes).collect();
        let all = lines(&text, false);
        let log = LogEvidence::from_lines(&all);
        if let Some(range) = &log.traceback_range {
            format_traceback(&all, range);
        }
        for cause in [ExitCause::Code(code), ExitCause::Signal(code)] {
            for stopped in [false, true] {
                diagnose(&Facts { cause, stopped, assumed_python: stopped, evidence: &Evidence::default(), log: &log });
            }
        }
    }
}
