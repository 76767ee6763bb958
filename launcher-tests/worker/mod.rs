//! `test-worker ROLE ARGUMENTS...`: all workers of the tests in one program, so that Cargo builds it once.

mod channel;
mod collectives;
mod comm;
mod exit;
mod failing;
#[cfg(feature = "faults")]
mod fault;
mod group;
#[cfg(feature = "faults")]
mod killed;
mod plain;
mod timers;
#[cfg(feature = "faults")]
mod training;
mod unauthenticated;

use std::error::Error;
use std::process::ExitCode;

/// Result of a role.
type Outcome = Result<(), Box<dyn Error>>;

/// Runs the role that the command line names.
///
/// # Errors
/// Returns the error of the role; many roles exist to fail.
pub fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let role = words.next().unwrap_or_default();
    let arguments: Vec<String> = words.collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match role.as_str() {
        "channel" => channel::run(&arguments),
        "collectives" => collectives::run(),
        "comm" => comm::run(&arguments),
        "exit" => exit::run(&arguments),
        "failing" => failing::run(&arguments),
        #[cfg(feature = "faults")]
        "fault" => return fault::run(&arguments),
        "group" => group::run(),
        "unauthenticated" => unauthenticated::run(&arguments),
        #[cfg(feature = "faults")]
        "killed" => killed::run(&arguments),
        "plain" => plain::run(&arguments),
        "timers" => timers::run(),
        #[cfg(feature = "faults")]
        "training" => training::run(&arguments),
        other => Err(format!("no role {other:?}; see launcher-tests/worker").into()),
    }?;
    Ok(ExitCode::SUCCESS)
}
