//! Trains a small network on real images of handwritten digits, on one worker or on many.
//!
//! It is a complete data-parallel program. Each rank computes on its share of every batch, and gradients are
//! averaged during the backward pass (`train`; on GPUs `device`). Rank 0 writes a checkpoint (`checkpoint`),
//! from which a restarted job continues. At the end all ranks verify that their parameters are equal.

mod arguments;
mod checkpoint;
mod device;
mod gradient_averages;
mod hash;
mod network;
mod train;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use arguments::Arguments;
use train::{Outcome, TrainError};

/// Exit code after a drain, as the launcher expects it (`--drain-exit-code`).
const EXIT_DRAINED: u8 = 75;
/// Exit code for a wrong command line.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args_os().skip(1)) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => return print_help(),
        Err(error) => {
            report_error(&format!("{error}; see digits --help"));
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let outcome =
        convoke_comm::init().map_err(TrainError::from).and_then(|world| train::train(&arguments, &world));
    match outcome {
        Ok(Outcome::Finished) => ExitCode::SUCCESS,
        Ok(Outcome::Drained) => ExitCode::from(EXIT_DRAINED),
        Err(error) => {
            report_error(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn print_help() -> ExitCode {
    match io::stdout().write_all(arguments::HELP.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Reports the error of this worker on stderr, and to the launcher through the error file.
fn report_error(message: &str) {
    // If these writes fail, no other channel is left. The exit code still reports the failure.
    let _ = writeln!(io::stderr().lock(), "digits: error: {message}");
    if let Some(path) = std::env::var_os(convoke_env::vars::ERROR_FILE).filter(|path| !path.is_empty()) {
        let _ = convoke_env::error_file::write(Path::new(&path), message, "");
    }
}
