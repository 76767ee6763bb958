//! `convoke check`: looks on all hosts of a job for what would fail it, and starts nothing.
//!
//! Each node starts as it would start for the job (`session`). Threads check the host itself (`host`) while the
//! node joins the others and tries the connections to them (`connections`, `probe`). Node 0 judges the
//! connections (`links`), compares facts (`compare`), and gives everybody one report (`report`). `problem`,
//! `links`, `compare` and `report` are pure.

mod compare;
mod connections;
mod host;
mod links;
#[cfg(test)]
mod links_tests;
mod options;
mod peer;
mod probe;
mod problem;
mod report;
mod session;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;

use crate::cli::CliError;
use crate::config::{Config, Machine};
use crate::host_name::host_name;
use crate::limits::Limits;
use crate::messages::print_message;
use crate::report::write_termination_text;
use host::HostChecks;
pub(crate) use options::Options;
use problem::Problem;
use report::Report;
use session::{Outcome, Session};

/// SCRIPT of a check that has none.
pub(crate) const NO_PROGRAM: &str = "/proc/self/exe";
/// Longest wait of a check for NVIDIA's driver.
pub(crate) const DRIVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Exit code of a check that has found a failure.
const UNHEALTHY: u8 = 1;
/// Exit code of a check that could not begin.
pub(crate) const NOT_DONE: u8 = 2;

/// Runs the check of this node. `unfulfilled` is the error about flags that this host cannot fulfil. Returns 0 if
/// there is no failure, 1 if there is one.
pub(crate) fn run(
    config: &Config,
    options: &Options,
    limits: &Limits,
    machine: &Machine,
    unfulfilled: Option<&CliError>,
) -> ExitCode {
    // The launcher blocks the signals that end a job. Here they end this process.
    let _ = SigSet::all().thread_unblock();
    let start = Instant::now();
    let named = config.scheduled.as_ref().and_then(|job| job.hosts.get(job.node).cloned());
    let host = named.unwrap_or_else(host_name);
    let mut checks = HostChecks::start(config, machine, limits, &host);
    checks.add(unfulfilled.map(|error| Problem::fail_of_message("layout", &host, error.message())));
    let session = Session { config, options, host, start };
    let Outcome { report, is_complete, is_node_0 } = session.run(checks);
    // A scheduler and --hosts show the output of all nodes, so node 0 speaks for all.
    let others_are_seen = config.scheduled.is_some() && !options.is_pod;
    if is_node_0 || !(options.json || others_are_seen) {
        print(&report, options);
    } else if !is_complete {
        // Standard output has the report of node 0 alone.
        crate::messages::print_raw(&report.text());
    }
    let is_written = !is_node_0 || write_failed_hosts(&report, options);
    write_termination_log(&report, config);
    exit_code(&report, is_written)
}

/// Writes the problems of an unhealthy check to where Kubernetes looks for the reason of a pod's end.
fn write_termination_log(report: &Report, config: &Config) {
    let Some(file) = config.termination_log.as_ref().filter(|_| !report.healthy) else { return };
    if let Err(error) = write_termination_text(&report.text(), file) {
        print_message(&format!("warning: {error}"));
    }
}

/// Prints the report of a check on hosts that `--hosts` has started. `output` is what node 0 printed, and
/// `unreachable` has the hosts on which nothing could be started.
pub(crate) fn finish_remote(output: &[u8], unreachable: &[String], options: &Options, code: u8) -> ExitCode {
    let Ok(report) = serde_json::from_slice::<Report>(output) else {
        let _ = std::io::stdout().write_all(output);
        if let Some(file) = &options.failed_hosts {
            // The exit code tells of a failure in any case.
            let _ = write_lines(file, unreachable.iter().map(String::as_str));
        }
        return ExitCode::from(code.max(UNHEALTHY));
    };
    print(&report, options);
    let is_written = write_failed_hosts(&report, options);
    exit_code(&report, is_written)
}

/// Returns the exit code. A job script would read a list of failed hosts that is not written.
fn exit_code(report: &Report, is_written: bool) -> ExitCode {
    match (report.healthy, is_written) {
        (false, _) => ExitCode::from(UNHEALTHY),
        (true, false) => ExitCode::from(NOT_DONE),
        (true, true) => ExitCode::SUCCESS,
    }
}

fn print(report: &Report, options: &Options) {
    let text = if options.json { report.json() } else { report.text() };
    // A reader that has closed its end (`| head`) is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Returns false if the file cannot be written.
fn write_failed_hosts(report: &Report, options: &Options) -> bool {
    let failed = || report.failed_hosts().into_iter();
    options.failed_hosts.as_ref().is_none_or(|file| write_lines(file, failed()))
}

/// Returns false, and prints why, if the file cannot be written.
fn write_lines<'a>(file: &Path, lines: impl Iterator<Item = &'a str>) -> bool {
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    let written = std::fs::write(file, text);
    if let Err(error) = &written {
        print_message(&format!("error: cannot write --failed-hosts={}: {error}", file.display()));
    }
    written.is_ok()
}
