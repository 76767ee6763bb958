//! Programs in C, compiled as C and as C++, on the library.

#![allow(clippy::unwrap_used, clippy::panic)] // a broken expectation ends the test

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use convoke_testkit::process::{Process, program, set_rank_variables};
use convoke_testkit::programs::repository_root;
use convoke_testkit::{free_port, skip};

const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
const C: [&str; 2] = ["cc", "-std=c11"];
const CPP: [&str; 5] = ["c++", "-std=c++20", "-Wno-missing-field-initializers", "-x", "c++"];

fn folder() -> PathBuf {
    repository_root().join("src/capi")
}

/// Returns the folder into which Cargo has built the library together with this test.
fn library_folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// Compiles a program into `into` and links it with the library of this build.
fn compile(compiler: &[&str], source: &str, into: &Path) -> PathBuf {
    let (library, output) = (library_folder(), into.join("program"));
    assert!(library.join("libconvoke.so").exists(), "Cargo builds the library with its tests");
    let mut command = Command::new(compiler[0]);
    command.args(WARNINGS).args(&compiler[1..]).arg("-O1").arg("-g");
    command.arg(folder().join(source)).arg("-I").arg(folder().join("include"));
    command
        .arg("-o")
        .arg(&output)
        .args(["-x", "none"])
        .arg("-L")
        .arg(&library)
        .arg("-lconvoke")
        .arg("-pthread");
    command.arg(format!("-Wl,-rpath,{}", library.display()));
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&done.stderr));
    output
}

/// Runs a program as `ranks` ranks, which all end well. Returns the output of rank 0.
fn run(path: &Path, ranks: usize, variables: &[(&str, &str)]) -> String {
    let port = free_port();
    let start = |rank| {
        let mut command = program(path);
        set_rank_variables(&mut command, rank, ranks, port);
        // Rank 0 serves the store.
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.envs(variables.iter().copied());
        Process::start(&mut command)
    };
    let started: Vec<_> = (0..ranks).map(start).collect();
    let outputs: Vec<Output> = started.into_iter().map(Process::wait).collect();
    let failed = outputs.iter().any(|output| !output.status.success() || !output.stderr.is_empty());
    let all = outputs
        .iter()
        .map(|output| format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr)));
    assert!(!failed, "{}", all.collect::<Vec<_>>().join("\n"));
    String::from_utf8(outputs[0].stdout.clone()).unwrap()
}

#[test]
fn c_program_calls_every_function() {
    let into = tempfile::tempdir().unwrap();
    let program = compile(&C, "tests/every_call.c", into.path());
    assert_eq!(run(&program, 3, &[]), "rank 0 of 3 called every function\n");
}

#[test]
fn c_program_calls_every_function_over_tcp() {
    let into = tempfile::tempdir().unwrap();
    let program = compile(&C, "tests/every_call.c", into.path());
    run(&program, 3, &[("CONVOKE_SHM", "off")]);
}

#[test]
fn cpp_program_calls_every_function() {
    let into = tempfile::tempdir().unwrap();
    let program = compile(&CPP, "tests/every_call.c", into.path());
    run(&program, 2, &[]);
}

#[test]
fn c_program_leaves_no_memory_error_to_the_address_sanitizer() {
    let into = tempfile::tempdir().unwrap();
    let sanitized = [&C[..], &["-fsanitize=address"]].concat();
    let empty = into.path().join("empty.c");
    std::fs::write(&empty, "int main(void) { return 0; }").unwrap();
    let probe = Command::new("cc")
        .arg("-fsanitize=address")
        .arg(&empty)
        .arg("-o")
        .arg(into.path().join("probe"))
        .output();
    if !probe.unwrap().status.success() {
        return skip("cc has no address sanitizer (libasan)");
    }
    for source in ["tests/every_call.c", "tests/stress.c"] {
        run(&compile(&sanitized, source, into.path()), 2, &[]);
    }
}

#[test]
fn threads_of_a_c_program_use_groups_at_the_same_time() {
    let into = tempfile::tempdir().unwrap();
    run(&compile(&C, "tests/stress.c", into.path()), 3, &[]);
}

#[test]
fn example_runs_as_its_comment_says() {
    let into = tempfile::tempdir().unwrap();
    for compiler in [&C[..], &CPP[..]] {
        let program = compile(compiler, "examples/average.c", into.path());
        assert_eq!(run(&program, 4, &[]), "average 1.5\nthe ranks to the left add up to 6\n");
    }
    let lines = std::fs::read_to_string(folder().join("examples/average.c")).unwrap().lines().count();
    assert!(lines <= 60, "the example has {lines} lines");
}

#[test]
fn example_in_cpp_runs_as_its_comment_says() {
    let into = tempfile::tempdir().unwrap();
    let program = compile(&CPP, "examples/overlap.cpp", into.path());
    assert_eq!(run(&program, 4, &[]), "6 and 4002\n");
}

/// A symbol that programs use must stay. Add new ones to the list; remove one only with a new version.
#[test]
fn library_exports_the_listed_symbols_only() {
    let library = library_folder().join("libconvoke.so");
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().unwrap();
    let mut symbols: Vec<_> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| !name.starts_with("rust_") && !name.starts_with("_R"))
        .map(str::to_owned)
        .collect();
    symbols.sort();
    let listed = std::fs::read_to_string(folder().join("tests/symbols.txt")).unwrap();
    assert_eq!(symbols, listed.lines().collect::<Vec<_>>());
}
