//! Commands and scripts copied from tutorials work unchanged.

use std::path::PathBuf;
use std::process::Command;

use convoke_launcher_tests::harness::{Job, ProcessOutput};
use convoke_testkit::programs::user_program;
use convoke_testkit::{free_port, skip};

/// Returns true if Python is installed; otherwise reports a skipped test.
fn has_python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        skip("scripts of tutorials: no python3");
    }
    found
}

/// Writes a Python script that parses its arguments with `parse` and prints its rank.
fn script(job: &Job, parse: &str) -> PathBuf {
    let path = job.path("train.py");
    let text = format!(
        r#"import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
{parse}
args = parser.parse_args()
local_rank = getattr(args, "local_rank", int(os.environ["LOCAL_RANK"]))
assert local_rank == int(os.environ["LOCAL_RANK"]) and args.lr == 0.1
# In one piece: two workers share the stdout, and print writes each word by itself.
os.write(1, "rank {{RANK}} of {{WORLD_SIZE}}\n".format_map(os.environ).encode())
"#
    );
    std::fs::write(&path, text).unwrap();
    path
}

const UNDERSCORE: &str = "parser.add_argument('--local_rank', type=int, default=-1)";
const BOTH: &str = "parser.add_argument('--local-rank', '--local_rank', type=int, default=-1)";

/// Runs the launcher with `flags` and the script for `parse`.
fn run(job: &Job, flags: &str, parse: &str) -> ProcessOutput {
    let mut command = job.command(flags.split_whitespace());
    command.arg(script(job, parse)).args(["--lr", "0.1"]);
    job.start(command).wait()
}

fn expect_two_ranks(ended: ProcessOutput) {
    let ended = ended.expect_exit_code(0);
    let mut lines: Vec<_> = ended.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["rank 0 of 2", "rank 1 of 2"], "{}", ended.stderr);
}

#[test]
fn single_node_tutorial_scripts_run() {
    if !has_python() {
        return;
    }
    for (flags, parse) in [
        ("--nproc_per_node 2", ""),
        ("--standalone --nnodes=1 --nproc_per_node=2", ""),
        ("--nnodes 1 --nproc_per_node 2 --rdzv_id 100 --rdzv_backend c10d --rdzv_endpoint localhost:0", ""),
        ("--pass-local-rank=underscore --nproc_per_node=2", UNDERSCORE),
        ("--pass-local-rank --nproc_per_node=2", BOTH),
        ("--pass-local-rank=both --nproc_per_node=2", BOTH),
        ("--pass-local-rank --use_env --nproc_per_node=2", ""),
    ] {
        expect_two_ranks(run(&Job::new(), flags, parse));
    }
}

#[test]
fn two_nodes_accept_underscores_in_all_flags() {
    if !has_python() {
        return;
    }
    let job = Job::new();
    let script = script(&job, UNDERSCORE);
    let port = free_port().to_string();
    let nodes = [0, 1].map(|rank| {
        let flags = format!(
            "--pass_local_rank=underscore --nproc_per_node=1 --nnodes=2 --node_rank={rank} --master_addr=127.0.0.1 --master_port {port}"
        );
        let mut command = job.command(flags.split(' '));
        command.arg(&script).args(["--lr", "0.1"]);
        job.start(command)
    });
    for (rank, node) in nodes.into_iter().enumerate() {
        assert_eq!(node.wait().expect_exit_code(0).stdout, format!("rank {rank} of 2\n"));
    }
}

#[test]
fn launcher_called_torchrun_behaves_the_same() {
    if !has_python() {
        return;
    }
    let job = Job::new();
    let link = job.path("torchrun");
    std::os::unix::fs::symlink(user_program("convoke"), &link).unwrap();
    let through = "shift; exec \"$@\"";
    let mut command = job
        .wrapped_command(&["sh", "-c", through, "sh"], ["./torchrun", "--standalone", "--nproc_per_node=2"]);
    command.arg(script(&job, "")).args(["--lr", "0.1"]);
    expect_two_ranks(job.start(command).wait());
}

#[test]
fn script_rejecting_local_rank_argument_gets_advice() {
    if !has_python() {
        return;
    }
    for (flag, parse, advice) in [
        ("--pass-local-rank", UNDERSCORE, "give convoke --pass-local-rank=underscore"),
        ("--pass-local-rank=underscore", "", "leave --pass-local-rank out"),
    ] {
        let ended = run(&Job::new(), flag, parse).expect_exit_code(1);
        let given = if parse.is_empty() { "--local_rank=0" } else { "--local-rank=0" };
        assert!(ended.stderr.contains(&format!("unrecognized arguments: {given}")), "{}", ended.stderr);
        let report = ended.stderr.split("Root Cause").nth(1).unwrap_or_default();
        assert!(report.contains(advice), "{}", ended.stderr);
    }
}
