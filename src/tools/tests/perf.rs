//! Tests of `convoke-perf` as its users see it. Jobs are real processes with torchrun's variables.
#![allow(clippy::unwrap_used, clippy::panic)] // in a test a broken expectation ends it

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output};
use std::{fs, thread};

use convoke_store::StoreServer;
use serde_json::Value;

use convoke_testkit::process::{self, Process};

/// Flags for few and short calls. The tests check that everything is measured and reported.
const SHORT: [&str; 4] = ["--iters=2", "--warmup=1", "--max-bytes=4K", "--factor=32"];
const COLLECTIVES: [&str; 17] = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "scan",
    "exclusive_scan",
    "barrier",
    "send_recv",
    "all_gather_v",
    "reduce_scatter_v",
    "all_to_all_v",
    "gather_v",
    "scatter_v",
];

fn perf<A: AsRef<str>>(arguments: &[A]) -> Command {
    let mut command = process::program(env!("CARGO_BIN_EXE_convoke-perf"));
    command.args(arguments.iter().map(AsRef::as_ref));
    command
}

/// Starts a job. `change` may give a rank other arguments or variables.
fn start<A: AsRef<str>>(
    store: &StoreServer,
    world: usize,
    arguments: &[A],
    mut change: impl FnMut(usize, &mut Command),
) -> Vec<Process> {
    let mut start_one = |rank: usize| {
        let mut command = perf(arguments);
        process::set_rank_variables(&mut command, rank, world, store.port());
        change(rank, &mut command);
        Process::start(&mut command)
    };
    (0..world).map(&mut start_one).collect()
}

/// Returns the output of each rank, in order.
fn outputs(workers: Vec<Process>) -> Vec<Output> {
    // Each rank has a reader thread, so that a full pipe of one rank does not block the others.
    let waiting: Vec<_> = workers.into_iter().map(|worker| thread::spawn(|| worker.wait())).collect();
    waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn server() -> StoreServer {
    StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap()
}

/// Runs a job that must succeed, and returns rank 0's output.
fn run<A: AsRef<str>>(world: usize, arguments: &[A]) -> String {
    let outputs = outputs(start(&server(), world, arguments, |_, _| {}));
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {} {}", output.status, text(&output.stderr));
        assert!(rank == 0 || output.stdout.is_empty(), "only rank 0 prints: {}", text(&output.stdout));
        assert_eq!(text(&output.stderr), "", "rank {rank}");
    }
    text(&outputs[0].stdout).to_owned()
}

fn run_short(world: usize, arguments: &[&str]) -> String {
    run(world, &[arguments, &SHORT].concat())
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Returns the fields of each line of a CSV in the format of launcher-tests/peers/README.md.
fn csv(text: &str) -> Vec<Vec<&str>> {
    let (last, lines) = text.lines().collect::<Vec<_>>().split_last().map(|(l, r)| (*l, r.to_vec())).unwrap();
    assert_eq!(last, "# done");
    let rows: Vec<Vec<&str>> = lines.into_iter().map(|line| line.split(',').collect()).collect();
    for row in &rows {
        assert_eq!(row.len(), 11, "{row:?}");
        assert!([3, 5, 6].iter().all(|&whole| row[whole].parse::<u64>().is_ok()), "{row:?}");
        assert!((7..11).all(|number| row[number].parse::<f64>().is_ok_and(f64::is_finite)), "{row:?}");
    }
    rows
}

#[test]
fn every_collective_is_checked_timed_and_written_as_csv() {
    for world in [2, 3, 4] {
        let text = run_short(world, &["--csv", "--system=this", "--transport=wire"]);
        let rows = csv(&text);
        assert!(rows.iter().all(|row| row[..2] == ["this", "wire"] && row[3] == world.to_string()));
        let measured: BTreeSet<&str> = rows.iter().map(|row| row[2]).collect();
        assert_eq!(measured, COLLECTIVES.into(), "{text}");
        let sizes: Vec<_> = rows.iter().filter(|row| row[2] == "all_reduce").map(|row| row[5]).collect();
        assert_eq!(sizes, ["4", "128", "4096"]);
        let barrier: Vec<_> = rows.iter().filter(|row| row[2] == "barrier").collect();
        assert!(barrier.len() == 1 && barrier[0][5] == "0", "{barrier:?}");
        assert!(rows.iter().all(|row| row[6] == "2"), "as many calls as were asked for");
    }
}

#[test]
fn every_valid_type_and_operation_is_correct() {
    let what =
        ["all_reduce,reduce_scatter,scan,exclusive_scan,broadcast", "--dtype=all", "--op=all", "--json"];
    let lines = run_short(2, &what);
    let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let pairs = |collective: &str| {
        let of = rows.iter().filter(|row| row["collective"] == collective);
        of.map(|row| format!("{} {}", row["dtype"], row["op"])).collect::<BTreeSet<_>>()
    };
    // Counts of operations from docs/reference/collectives.md: 8 for each integer type, 6 for floats and
    // 16-bit types, 4 for complex types, 7 for bool.
    assert_eq!(pairs("all_reduce").len(), 8 * 8 + 4 * 6 + 2 * 4 + 7);
    assert_eq!(pairs("all_reduce"), pairs("reduce_scatter"));
    assert_eq!(pairs("scan").len(), pairs("all_reduce").len() - 6, "a scan has no avg");
    assert_eq!(pairs("broadcast").len(), 15);
    assert!(rows.iter().all(|row| row["p50_us"].as_f64() > Some(0.0) && row["iterations"] == 2));
    // The first column of the CSV names the operation.
    let text = run_short(2, &["all_reduce", "--op=sum,max", "--csv"]);
    let systems: BTreeSet<_> = csv(&text).into_iter().map(|row| row[0].to_owned()).collect();
    assert_eq!(systems, ["convoke-max".to_owned(), "convoke-sum".to_owned()].into());
}

#[test]
fn one_run_compares_all_algorithms_of_a_collective() {
    let what = ["all_reduce,broadcast,barrier", "--algorithms=ring,direct", "--csv"];
    let text = run_short(4, &what);
    let of = |collective: &str| {
        let of = csv(&text).into_iter().filter(|row| row[2] == collective);
        of.map(|row| row[0].to_owned()).collect::<BTreeSet<_>>()
    };
    assert_eq!(of("all_reduce"), ["convoke-direct".to_owned(), "convoke-ring".to_owned()].into());
    assert_eq!(
        (of("broadcast"), of("barrier")),
        (["convoke".to_owned()].into(), ["convoke".to_owned()].into())
    );
    let table = run_short(2, &["all_gather_v", "--algorithms=all"]);
    for name in ["algorithm", "table", "ring", "direct", "doubling", "hierarchy"] {
        assert!(table.contains(name), "{name}:\n{table}");
    }
}

#[test]
fn nonblocking_calls_are_correct_singly_and_concurrently() {
    for flags in [&["--nonblocking"][..], &["--in-flight=3"], &["--in-flight=2", "--root=1"]] {
        let text = run_short(2, &[flags, &["--csv"]].concat());
        assert_eq!(
            csv(&text).iter().map(|row| row[2]).collect::<BTreeSet<_>>(),
            COLLECTIVES.into(),
            "{flags:?}"
        );
    }
}

#[test]
fn table_header_describes_the_measurement() {
    let text = run(4, &["all_reduce", "reduce", "-b4", "-e4K", "-f32", "--time-ms=0.5", "--min-iters=2"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("# convoke-perf {}: 4 ranks on 1 host, shm", env!("CARGO_PKG_VERSION")));
    assert!(lines[1].ends_with(": ranks 0-3"), "{text}");
    assert!(lines[2].contains("about 0.5 ms of each size") && lines[2].contains("results checked"), "{text}");
    let at = lines.iter().position(|line| *line == "reduce").unwrap();
    assert!(lines[at + 1].contains("root") && lines[at + 3].contains(" each "), "{text}");
    assert!(lines[at + 5].trim_start().starts_with("4 KiB") && !text.contains('█'), "{text}");
    let tail = lines.last().unwrap();
    assert!(
        tail.starts_with("# average bus bandwidth, GB/s: all_reduce ") && tail.contains(", reduce "),
        "{text}"
    );
    // A single rank works as well.
    let alone = run(1, &["all", "--root=0", "--step-bytes=2K", "--max-bytes=5K", "--iters=2"]);
    assert!(alone.contains("1 rank on 1 host"), "{alone}");
}

#[test]
fn terminal_shows_progress_and_then_bars() {
    let size = nix::pty::Winsize { ws_row: 40, ws_col: 110, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = nix::pty::openpty(&size, None).unwrap();
    let mut line = Some(pty.slave);
    let store = server();
    let workers = start(&store, 1, &["all_reduce", "-e4K", "-f32", "-n2"], |_, command| {
        command.env("TERM", "xterm").env_remove("NO_COLOR").stdout(line.take().unwrap());
    });
    let mut seen = Vec::new();
    // The read ends with EIO when the last process has closed its end.
    let _ = fs::File::from(pty.master).read_to_end(&mut seen);
    let output = outputs(workers).remove(0);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let seen = text(&seen);
    assert!(seen.contains("all_reduce of 4 KiB of f32: 3 of 3 sizes"), "{seen:?}");
    let (_, bars) = seen.split_once("\x1b[3A").expect(seen);
    assert_eq!(bars.lines().filter(|line| line.contains("f32")).count(), 3, "{seen:?}");
}

#[test]
fn plot_file_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("speed.svg");
    run_short(2, &["all_reduce", "gather", "--dtype=f32,i8", &format!("--plot={}", path.display())]);
    let svg = fs::read_to_string(path).unwrap();
    for word in ["<svg", "bus bandwidth, GB/s", "all_reduce f32", "gather i8"] {
        assert!(svg.contains(word), "{word}:\n{svg}");
    }
}

#[test]
fn usage_errors_exit_with_2_and_state_the_remedy() {
    for (arguments, told) in [
        (&["all_redcue"][..], "all_reduce"),
        (&["--dtype=f31"], "\"f31\" is unknown: choose i8, "),
        (&["--op=mean"], "\"mean\" is unknown: choose sum, "),
        (
            &["all_reduce", "--op=min", "--dtype=complex_f32"],
            "all_reduce of complex_f32 by min has no meaning",
        ),
        (&["scan", "--op=avg"], "scan of f32 by avg has no meaning"),
        (&["--max-bytes=1.5K"], "whole number and K, M, G"),
        (&["-b8", "-e4"], "--min-bytes 8 B is more than --max-bytes 4 B"),
        (&["-b0"], "stays 0"),
        (&["-i0"], "--step-bytes 0"),
        (&["-f1"], "a whole number of at least 2"),
        (&["-f2", "-i4"], "cannot be used with"),
        (&["--csv", "--json"], "cannot be used with"),
        (&["--check=2"], "0 or 1"),
        (&["--time-ms=0"], "a number above 0"),
        (&["--algorithms=fast"], "\"fast\" is unknown: choose table, ring, "),
        (&["--root=1"], "--root 1: ranks are 0 to 0"),
        (&["send_recv"], "send_recv needs 2 ranks"),
        (&["pairs"], "`pairs` needs at least two hosts"),
    ] {
        let output = perf(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(told), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{arguments:?}: {}", text(&output.stdout));
    }
}

#[test]
fn help_is_printed_once_and_lists_all_collectives() {
    let outputs = outputs(start(&server(), 2, &["--help"], |_, _| {}));
    assert!(outputs.iter().all(|output| output.status.success()) && outputs[1].stdout.is_empty());
    let help = text(&outputs[0].stdout);
    let words = ["--min-bytes", "--algorithms", "--plot", "premul_sum", "Sizes:", "Hosts:", "exclusive_scan"];
    assert!(words.iter().all(|word| help.contains(word)), "{help}");
    let version = perf(&["--version"]).env("CONVOKE_NCCL_SO", "/nowhere/nccl.so").output().unwrap();
    let told = text(&version.stdout);
    let expected =
        format!("convoke-perf {}\nNCCL was not found: tried /nowhere/nccl.so: ", env!("CARGO_PKG_VERSION"));
    assert!(told.starts_with(&expected), "{told}");
}

#[test]
fn insufficient_memory_is_an_error_on_all_ranks() {
    let outputs = outputs(start(&server(), 2, &["all_reduce", "-b1T", "-e900000T"], |_, _| {}));
    for output in &outputs {
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    }
    assert!(outputs.iter().any(|output| text(&output.stderr).contains("take a smaller --max-bytes")));
}

#[test]
fn dead_rank_ends_perf_and_is_named() {
    let store = server();
    let mut workers = start(&store, 2, &["broadcast", "-n1000000", "-e4", "--root=0"], |_, _| {});
    let victim = workers.pop().unwrap();
    // After the first line of output the ranks are connected.
    let mut first = String::new();
    let mut stdout = BufReader::new(workers[0].child().stdout.take().unwrap());
    stdout.read_line(&mut first).unwrap();
    assert!(first.starts_with("# convoke-perf"), "{first}");
    drop(victim);
    let output = outputs(workers).remove(0);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("rank 1"), "{}", text(&output.stderr));
}
