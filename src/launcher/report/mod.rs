//! The report of a failed job: which worker failed first and why, as text in torchrun's layout and as JSON.
//!
//! ```text
//! what the agent saw, error files, stderr ─► build ─► Report ─► text, JSON
//! ```
//!
//! If a worker has written an error file, the report shows the traceback in it, rather than the one found in
//! stderr. The report also uses its time of failure, if that can be compared with other times.

mod error_file;
mod model;
mod short;
mod termination;
#[cfg(test)]
mod tests;
mod text;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use convoke_env::ExitCause;
use jiff::tz::TimeZone;
use nix::sys::signal::Signal;

use crate::cause::{
    Class, Diagnosis, Evidence, Facts, LogEvidence, NotStarted, diagnose, format_traceback, lines,
};
use crate::config::ReportFormat;
use crate::formatting;
use crate::host_name::full_host_name;
use error_file::ErrorFileContent;
pub(crate) use model::{Failure, FlightSummary, Outcome, Report};
use model::{SignalName, VERSION, keep_last_lines, root_cause_of};

/// Tolerance for the time in an error file. A time further outside the attempt is not of this host's clock.
const CLOCK_SLACK: Duration = Duration::from_secs(5);
/// Maximum number of bytes of stderr lines that a report keeps per worker.
const STDERR_MAX_BYTES: usize = 16 << 10;

/// What a report says about the launcher and its job.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// Name of the program in the report.
    pub(crate) title: String,
    pub(crate) run_id: String,
    pub(crate) node: Option<usize>,
    pub(crate) nodes: Option<usize>,
    pub(crate) restarts: u32,
    pub(crate) max_restarts: u32,
    /// True if the launcher gave the program to Python because no executable of that name exists.
    pub(crate) assumed_python: bool,
    /// The time at which the workers of the attempt were started.
    pub(crate) began: SystemTime,
    /// Most lines of stderr that the report keeps per worker.
    pub(crate) stderr_lines: usize,
    /// Notes on settings that the launcher made for the workers although the user did not ask for them.
    pub(crate) notes: Vec<String>,
}

/// A worker that has ended, or could not be started.
#[derive(Debug, Clone)]
pub(crate) struct EndedWorker {
    /// Local rank on this node, and global rank.
    pub(crate) local_rank: usize,
    pub(crate) rank: usize,
    /// Process id; `None` if the worker was never started.
    pub(crate) pid: Option<i32>,
    pub(crate) end: WorkerEnd,
    /// Time at which the launcher noticed the worker's end.
    pub(crate) time: SystemTime,
    /// True if the launcher was already stopping the workers when this one ended.
    pub(crate) stopped: bool,
    /// Path of the worker's error file. The file need not exist.
    pub(crate) error_file: Option<PathBuf>,
    /// Last bytes of the worker's stderr, and whether others came before them.
    pub(crate) stderr: (Vec<u8>, bool),
    pub(crate) evidence: Evidence,
    /// Lines of evidence about the worker's GPUs.
    pub(crate) gpu: Vec<String>,
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WorkerEnd {
    Exited(ExitCause),
    /// The worker could not be started.
    NotStarted(NotStarted),
}

/// Describes the end of a process as a verb: `exited with code 3`, `was killed by SIGSEGV`.
pub(crate) fn describe(cause: ExitCause) -> String {
    match cause {
        ExitCause::Code(code) => format!("exited with code {code}"),
        ExitCause::Signal(signal) => format!("was killed by {}", formatting::signal(signal)),
    }
}

/// Returns a report without failures: the job succeeded, was stopped, or the launcher could not continue.
pub(crate) fn without_failures(job: &Job, outcome: Outcome, message: Option<String>) -> Report {
    Report {
        version: VERSION,
        outcome,
        title: job.title.clone(),
        run_id: job.run_id.clone(),
        node: job.node,
        nodes: job.nodes,
        host: full_host_name(),
        restarts: job.restarts,
        max_restarts: job.max_restarts,
        time_unix_ms: unix_ms(SystemTime::now()),
        message,
        failures: Vec::new(),
        root_cause: None,
        failures_left_out: 0,
        flight: None,
        notes: job.notes.clone(),
    }
}

/// Builds the report of an attempt in which workers failed. Reads error files and the names of this host.
///
/// `ended` are all workers of this node that have ended, in the order in which their ends were noticed. It
/// includes workers with exit code 0: one that exited too early may be the root cause. The second result is a
/// line about the first error file that cannot be parsed.
pub(crate) fn build(job: &Job, ended: &[EndedWorker]) -> (Report, Option<String>) {
    let failed: Vec<&EndedWorker> =
        ended.iter().filter(|worker| worker.end != WorkerEnd::Exited(ExitCause::Code(0))).collect();
    let (accounts, wrong) = accounts(&failed);
    let times = times(job, &failed, &accounts);
    let mut report = without_failures(job, Outcome::Failed, None);
    for ((worker, account), time_unix_ms) in failed.iter().zip(&accounts).zip(times) {
        report.failures.push(failure(job, &report.host, worker, account.as_ref(), time_unix_ms));
    }
    if let Some(early) = early_exit(ended, &report.failures) {
        let explanation = "exited with code 0 while the others continued, which then lost their connections";
        let advice = "does this rank leave its loop earlier than the others: other data, other step count, an early return?";
        let failure = Failure {
            class: Class::EarlyExit,
            explanation: explanation.to_owned(),
            advice: Some(advice.to_owned()),
            ..failure(job, &report.host, early, None, unix_ms(early.time))
        };
        report.failures.insert(0, failure);
    }
    report.root_cause = root_cause_of(&report.failures);
    (report, wrong)
}

/// Formats the report for stderr.
pub(crate) fn render(report: &Report, form: ReportFormat) -> String {
    match form {
        ReportFormat::Short => short::report(report, &TimeZone::system()),
        ReportFormat::Full => text::report(report, &TimeZone::system()),
    }
}

/// Writes the root cause in a few lines to `path`, which the scheduler has made.
pub(crate) fn write_termination_log(report: &Report, path: &Path) -> Result<(), String> {
    write_termination_text(&termination::message(report), path)
}

/// Writes a text to `path`, cut to what schedulers show of an ended container.
pub(crate) fn write_termination_text(text: &str, path: &Path) -> Result<(), String> {
    let written = fs::write(path, formatting::cut_text(text, termination::MAX_BYTES));
    written.map_err(|error| format!("cannot write the root cause to {}: {error}", path.display()))
}

/// Writes the report as JSON to `path` in one step.
pub(crate) fn write(report: &Report, path: &Path) -> Result<(), String> {
    // A device or a pipe is written directly. A regular file is replaced as a whole.
    let special = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
    let bytes = report.to_pretty_json();
    let written: io::Result<()> =
        if special { fs::write(path, bytes) } else { error_file::replace(path, bytes.as_bytes()) };
    written.map_err(|error| format!("cannot write the report to {}: {error}", path.display()))
}

/// Copies the error file of the root cause to `target`, for the process that started the launcher. `target`
/// is the launcher's own TORCHELASTIC_ERROR_FILE. Adds the exit code as `message.errorCode`.
///
/// Does nothing if the root cause wrote no error file, or is on another node.
pub(crate) fn copy_error_file(report: &Report, ended: &[EndedWorker], target: &Path) -> Result<(), String> {
    let Some(root) = report.root() else { return Ok(()) };
    let worker = ended.iter().find(|worker| (worker.rank, worker.pid) == (root.rank, Some(root.pid)));
    let Some(file) = worker.and_then(|worker| worker.error_file.as_deref()) else { return Ok(()) };
    error_file::copy_error_file(file, root.exitcode.unwrap_or(1), target)
}

/// Returns the contents of the workers' error files, and a line about the first file that cannot be parsed.
fn accounts(failed: &[&EndedWorker]) -> (Vec<Option<ErrorFileContent>>, Option<String>) {
    let mut wrong = None;
    let read = |worker: &&EndedWorker| match worker.error_file.as_deref().map(error_file::read) {
        None | Some(Ok(None)) => None,
        Some(Ok(Some(account))) => Some(account),
        Some(Err(what)) => {
            wrong.get_or_insert(format!("rank {}: {what}", worker.rank));
            None
        }
    };
    let accounts = failed.iter().map(read).collect();
    (accounts, wrong)
}

/// Returns the time of each failure: the one in its error file if these can be compared, else the time at
/// which the worker's end was noticed.
///
/// A time within the attempt counts as one of this host's clock. Other times come from another clock. They
/// are used only if every worker that was not stopped reports such a time.
fn times(job: &Job, failed: &[&EndedWorker], accounts: &[Option<ErrorFileContent>]) -> Vec<i64> {
    let own = |at: usize| accounts[at].as_ref().and_then(|account| account.seconds);
    let by_our_clock = |at: usize| {
        let (first, last) = (job.began - CLOCK_SLACK, failed[at].time + CLOCK_SLACK);
        own(at)
            .is_some_and(|seconds| (unix_ms(first)..=unix_ms(last)).contains(&(seconds.saturating_mul(1000))))
    };
    let all_foreign =
        (0..failed.len()).filter(|&at| !failed[at].stopped).all(|at| own(at).is_some() && !by_our_clock(at));
    let time = |at: usize| match own(at) {
        Some(seconds) if all_foreign || by_our_clock(at) => seconds.saturating_mul(1000),
        Some(_) | None => unix_ms(failed[at].time),
    };
    (0..failed.len()).map(time).collect()
}

fn failure(
    job: &Job,
    host: &str,
    worker: &EndedWorker,
    account: Option<&ErrorFileContent>,
    time_unix_ms: i64,
) -> Failure {
    let (bytes, cut) = &worker.stderr;
    let mut stderr = lines(bytes, *cut);
    let mut log = LogEvidence::from_lines(&stderr);
    let traceback = account.map(|account| account.traceback.as_str()).filter(|text| !text.is_empty());
    let picked = log.traceback_range.clone().map(|range| (format_traceback(&stderr, &range), range));
    if let Some(text) = traceback {
        log = log.overridden_by(LogEvidence::from_lines(&lines(text.as_bytes(), false)));
    }
    log.ignore_own_panic(worker.rank);
    let diagnosis = match &worker.end {
        WorkerEnd::Exited(cause) => {
            let (stopped, assumed_python) = (worker.stopped, job.assumed_python);
            let evidence = &worker.evidence;
            diagnose(&Facts { cause: *cause, stopped, assumed_python, evidence, log: &log })
        }
        WorkerEnd::NotStarted(error) => {
            Diagnosis::new(error.class, format!("could not be started: {}", error.reason))
                .with_advice(error.advice.clone())
        }
    };
    if let Some((_, range)) = &picked {
        stderr.drain(range.clone());
    }
    keep_last_lines(&mut stderr, job.stderr_lines, STDERR_MAX_BYTES);
    let (exitcode, signal) = match worker.end {
        WorkerEnd::Exited(ExitCause::Code(code)) => (Some(code), None),
        WorkerEnd::Exited(ExitCause::Signal(number)) => {
            let name = Signal::try_from(number).ok().map(|signal| signal.as_str().to_owned());
            (Some(-number), Some(SignalName { number, name }))
        }
        WorkerEnd::NotStarted(_) => (None, None),
    };
    Failure {
        rank: worker.rank,
        local_rank: worker.local_rank,
        node: job.node.expect("workers belong to a round, which gives their node its rank"),
        host: host.to_owned(),
        pid: worker.pid.unwrap_or(0),
        exitcode,
        signal,
        time_unix_ms,
        class: diagnosis.class,
        explanation: diagnosis.explanation,
        advice: diagnosis.advice,
        suspect_rank: diagnosis.suspect_rank,
        error_file: account.and(worker.error_file.as_ref()).map(|path| path.display().to_string()),
        traceback: traceback.map(str::to_owned).or(picked.map(|(text, _)| text)),
        stderr_tail: stderr,
        gpu: worker.gpu.clone(),
        core_dumped: worker.evidence.core_dumped,
        stopped_by_us: worker.stopped,
    }
}

/// Returns a worker that exited with code 0 and so caused the other workers to fail. It is one that these
/// name as lost, else the first worker that ended before them.
fn early_exit<'a>(ended: &'a [EndedWorker], failures: &[Failure]) -> Option<&'a EndedWorker> {
    let own: Vec<&Failure> = failures.iter().filter(|failure| !failure.stopped_by_us).collect();
    if failures.is_empty() || own.iter().any(|failure| failure.class != Class::PeerLost) {
        return None;
    }
    let is_well = |worker: &EndedWorker| worker.end == WorkerEnd::Exited(ExitCause::Code(0));
    let named: Vec<usize> = own.iter().filter_map(|failure| failure.suspect_rank).collect();
    if named.is_empty() {
        return ended.first().filter(|worker| is_well(worker));
    }
    // The named worker may have exited after other workers had failed.
    ended.iter().find(|worker| is_well(worker) && named.contains(&worker.rank))
}

/// Converts a time to milliseconds since 1970.
fn unix_ms(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
