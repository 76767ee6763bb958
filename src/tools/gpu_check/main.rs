//! `convoke-gpu-check`: checks that need a machine with a GPU. It can run alone; `scripts/gpu-check` runs it
//! together with all other GPU tests.
//!
//! `order` checks that another CUDA stream sees the result of an operation. `speed` compares the times of
//! operations and training steps with those of cudarc's own calls of NCCL, in one process. `aborts` checks
//! that operations that never end by themselves can be ended. Outcomes go into a `report`. `kernels` keep the
//! GPU busy.

mod aborts;
mod gpu;
mod kernels;
mod order;
mod report;
mod speed;

use std::env;
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use convoke_comm::nccl::Library;

use gpu::{CheckError, Gpu};
use report::{Outcome, Report};
use speed::SpeedCheck;

/// Environment variable that marks a process in which cudarc finds NCCL.
const CHILD_VARIABLE: &str = "CONVOKE_GPU_CHECK";

/// Checks convoke's GPU side on this machine's first GPU.
#[derive(Debug, Parser)]
#[command(name = "convoke-gpu-check", version)]
struct Flags {
    /// Write what came of it to this file, as Markdown
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Calls in a stream, and times that the order of streams is checked
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    calls: u32,
    /// Rounds of that many calls; the calls of a round are timed in turns of 50
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Size of large buffers
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(4..=1 << 34))]
    large_bytes: u64,
    /// Report times, but judge only whether results are right and ends come
    #[arg(long)]
    no_limits: bool,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let outcome = if env::var_os(CHILD_VARIABLE).is_none() { run_with_nccl() } else { run(&flags) };
    outcome.unwrap_or_else(|error| {
        // If this write fails, no other channel for errors is left.
        let _ = writeln!(io::stderr().lock(), "convoke-gpu-check: error: {error}");
        ExitCode::FAILURE
    })
}

/// Runs this program again, so that cudarc finds the NCCL library that convoke has found. The library
/// `libnccl.so` must be in the loader's search path for cudarc, and that path is fixed at program start.
fn run_with_nccl() -> Result<ExitCode, CheckError> {
    let library = Library::load()?;
    let folder = tempfile::Builder::new().prefix("convoke-gpu-check-").tempdir()?;
    symlink(library.path(), folder.path().join("libnccl.so"))?;
    let mut folders = vec![folder.path().to_owned()];
    folders.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));
    let folders = env::join_paths(folders).map_err(io::Error::other)?;
    let mut again = Command::new(env::current_exe()?);
    again.args(env::args_os().skip(1)).env("LD_LIBRARY_PATH", folders).env(CHILD_VARIABLE, "1");
    let status = again.env("CONVOKE_NCCL_SO", library.path()).status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run(flags: &Flags) -> Result<ExitCode, CheckError> {
    let gpu = Gpu::new()?;
    let mut report = Report::new(&gpu)?;
    let elements = usize::try_from(flags.large_bytes / 4).unwrap_or(usize::MAX);
    let speed = SpeedCheck { calls: flags.calls, rounds: flags.rounds, enforced: !flags.no_limits };
    let mut add = |name, outcome: Result<Outcome, CheckError>| {
        // A check that cannot run counts as failed; the other checks still run.
        let outcome = outcome.unwrap_or_else(|error| Outcome { passed: false, details: error.to_string() });
        report.add(name, &outcome)?;
        // The report is written after each check, so that results are kept if a later check hangs.
        flags.report.as_ref().map_or(Ok(()), |path| report.write(path))
    };
    add("a result on another stream", order::check(&gpu, flags.calls))?;
    for elements in [1, elements] {
        add("calls in a stream", speed.calls(elements))?;
        add("calls as one", speed.grouped(elements))?;
        add("training steps", speed.steps(elements))?;
    }
    add("an abort while a rank is absent", aborts::abort_with_absent_rank(&gpu))?;
    add("the deadline while a rank is absent", aborts::deadline_with_absent_rank(&gpu))?;
    add("an abort behind a kernel that does not end", aborts::abort_behind_running_kernel(&gpu))?;
    Ok(if report.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
