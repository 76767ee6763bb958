//! `convoke-perf`: how fast the ranks of a job work together. Run it as a worker, one process for each rank.
//!
//! It keeps to the rules at the top of `peers/collectives/mpi_bench.c`: in place, iterations back to back, rotating
//! roots, an iteration's time is the mean over the ranks, every size verified outside of the timed loop.
//!
//! `flags`, made of `words`, say what is measured and `run` does it: `measure` checks (`check`, `values`) and times
//! (`stats`) the calls (`call`) of a `collective` for each of the `sizes`, on buffers of a `place`, the host or a `device`; `pairs` measures hosts, in the order of a
//! `tournament`. What comes of it are `rows`, which the `report` prints, as a `table` for people, and `plot` draws.

mod call;
mod check;
mod collective;
mod device;
mod error;
mod flags;
mod measure;
mod memory;
mod pairs;
mod place;
mod plot;
mod report;
mod rows;
mod run;
mod sizes;
mod stats;
mod table;
mod tournament;
mod values;
mod words;

use std::env;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use convoke_comm::nccl::Library;

use error::PerfError;
use flags::Flags;

/// A wrong command line.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        // Help, version and what is wrong with the command line: once for the whole job.
        Err(said) => {
            let others = env::var("RANK").is_ok_and(|rank| rank != "0");
            let printed = others || said.print().is_ok() && also(said.kind()).is_ok();
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
            complain(&error.to_string());
            if matches!(error, PerfError::Usage(_)) { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE }
        }
    }
}

/// What else is said: beside the version, which NCCL there is.
fn also(said: ErrorKind) -> io::Result<()> {
    if said != ErrorKind::DisplayVersion {
        return Ok(());
    }
    match Library::load() {
        Ok(library) => writeln!(io::stdout(), "NCCL {} ({})", library.version(), library.path().display()),
        Err(error) => writeln!(io::stdout(), "{error}"),
    }
}

/// Says why this rank fails: on stderr, and to the launcher for its report.
fn complain(message: &str) {
    // When even these fail there is nobody left to tell; the exit code still says it.
    let _ = writeln!(io::stderr().lock(), "convoke-perf: error: {message}");
    if let Some(path) = env::var_os(convoke_env::vars::ERROR_FILE).filter(|path| !path.is_empty()) {
        let _ = convoke_env::error_file::write(Path::new(&path), message, "");
    }
}
