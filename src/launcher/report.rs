//! The report of a failed job: torchrun's layout, root cause last.
//!
//! A failure's own account, its error file, wins over what the launcher saw: its time decides who
//! was first, its traceback is shown.

mod error_file;
mod host;
#[cfg(test)]
mod tests;
mod text;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use convoke_env::ExitCause;
use jiff::tz::TimeZone;
use nix::sys::signal::Signal;

use error_file::Account;
pub(crate) use host::{full_host_name, host_name};

/// A worker that failed, or ended otherwise than well when it was stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Index on this node.
    pub(crate) local_rank: usize,
    /// Global rank.
    pub(crate) rank: usize,
    /// Its process.
    pub(crate) pid: i32,
    /// How it ended.
    pub(crate) cause: ExitCause,
    /// When its end was noticed.
    pub(crate) time: SystemTime,
    /// Where it may have written why; the file need not exist.
    pub(crate) error_file: Option<PathBuf>,
}

/// How a process ended, as a verb: `exited with code 3`, `was killed by SIGSEGV`.
pub(crate) fn describe(cause: ExitCause) -> String {
    match cause {
        ExitCause::Code(code) => format!("exited with code {code}"),
        ExitCause::Signal(signal) => match signal_name(signal) {
            Some(name) => format!("was killed by {name}"),
            None => format!("was killed by signal {signal}"),
        },
    }
}

/// The report as it goes to stderr. `failures` stand in the order of their detection.
///
/// Reads the workers' error files and the names of this host.
///
/// # Errors
/// An error file cannot be understood: a line that names it, and the report without it.
pub(crate) fn render(title: &str, failures: &[Failure]) -> Result<String, String> {
    let (accounts, wrong) = accounts(failures);
    let report = text::report(title, failures, &accounts, &full_host_name(), &TimeZone::system());
    match wrong {
        None => Ok(report),
        Some(wrong) => Err(format!("{wrong}; the report without it:\n{report}")),
    }
}

/// Index of the root cause: the earliest by the second, then by detection. `None` if nothing failed.
///
/// The time is the one of the error file, where there is one.
pub(crate) fn root_cause(failures: &[Failure]) -> Option<usize> {
    first(failures, &accounts(failures).0)
}

/// Hands the error file of the root cause on to whoever started the launcher: writes it to `target`
/// (the launcher's own TORCHELASTIC_ERROR_FILE), with the exit code added as `message.errorCode`.
///
/// Does nothing if the root cause wrote none.
///
/// # Errors
/// A line for the user: the file cannot be read or written.
pub(crate) fn hand_on(failures: &[Failure], target: &Path) -> Result<(), String> {
    let Some(failure) = root_cause(failures).and_then(|at| failures.get(at)) else { return Ok(()) };
    let Some(file) = failure.error_file.as_deref() else { return Ok(()) };
    error_file::hand_on(file, exit_code(failure.cause), target)
}

/// What the error files say, and the first that cannot be understood.
fn accounts(failures: &[Failure]) -> (Vec<Option<Account>>, Option<String>) {
    let mut wrong = None;
    let read = |failure: &Failure| match failure.error_file.as_deref().map(error_file::read) {
        None | Some(Ok(None)) => None,
        Some(Ok(Some(account))) => Some(account),
        Some(Err(what)) => {
            wrong.get_or_insert(format!("rank {}: {what}", failure.rank));
            None
        }
    };
    let accounts = failures.iter().map(read).collect();
    (accounts, wrong)
}

fn first(failures: &[Failure], accounts: &[Option<Account>]) -> Option<usize> {
    (0..failures.len()).min_by_key(|&at| text::seconds(&failures[at], accounts[at].as_ref()))
}

/// The exit code as Python shows it: negative for signals.
fn exit_code(cause: ExitCause) -> i32 {
    match cause {
        ExitCause::Code(code) => code,
        ExitCause::Signal(signal) => -signal,
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    Signal::try_from(signal).ok().map(Signal::as_str)
}
