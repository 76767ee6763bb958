//! `convoke-perf`: a benchmark of the collectives of a job. Run it as a worker, one process for each rank.
//!
//! It follows the rules at the top of `peers/collectives/mpi_bench.c`. Calls are in place, iterations run
//! back to back, and roots rotate. An iteration's time is the mean over the ranks. Every size is verified
//! outside of the timed loop.
//!
//! `flags`, parsed with `flag_values`, select what `run` measures. For each of the `sizes`, `measure` checks
//! the calls (`call`) of a `collective` with `verify` and `values`, and times them with `stats`. Calls use
//! `buffers` of the host or `device_buffers`. `pairs` measures pairs of hosts in the order of `round_robin`.
//! Results are `rows`, which `report` prints, as a `table` for people, and `plot` draws.

mod buffers;
mod call;
mod collective;
mod device_buffers;
mod error;
mod flag_values;
mod flags;
mod measure;
mod memory;
mod pairs;
mod plot;
mod report;
mod round_robin;
mod rows;
mod run;
mod sizes;
mod stats;
mod table;
mod values;
mod verify;

use std::env;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use convoke_comm::nccl::Library;

use error::PerfError;
use flags::Flags;

/// Exit code for a wrong command line.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        // Only rank 0 prints help, version or a usage error, so that they appear once for the whole job.
        Err(said) => {
            let others = env::var("RANK").is_ok_and(|rank| rank != "0");
            let printed = others || said.print().is_ok() && print_nccl_version(said.kind()).is_ok();
            return match said.use_stderr() {
                true => ExitCode::from(EXIT_USAGE),
                false if printed => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            };
        }
    };
    match run::run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_error(&error.to_string());
            if matches!(error, PerfError::Usage(_)) { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE }
        }
    }
}

/// Prints the NCCL version after convoke's own version.
fn print_nccl_version(said: ErrorKind) -> io::Result<()> {
    if said != ErrorKind::DisplayVersion {
        return Ok(());
    }
    match Library::load() {
        Ok(library) => writeln!(io::stdout(), "NCCL {} ({})", library.version(), library.path().display()),
        Err(error) => writeln!(io::stdout(), "{error}"),
    }
}

/// Reports the error of this rank on stderr, and to the launcher through the error file.
fn report_error(message: &str) {
    // If these writes fail, no other channel is left. The exit code still reports the failure.
    let _ = writeln!(io::stderr().lock(), "convoke-perf: error: {message}");
    if let Some(path) = env::var_os(convoke_env::vars::ERROR_FILE).filter(|path| !path.is_empty()) {
        let _ = convoke_env::error_file::write(Path::new(&path), message, "");
    }
}
