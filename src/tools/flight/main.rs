//! `convoke-flight`: shows what the workers of a job do in their groups, or did when the job ended.

mod json;
mod text;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

use clap::Parser;
use convoke_recorder::Recording;
use convoke_recorder::folder::{self, FoundRecordings};
use convoke_recorder::process::{self, ProcessStatus};
use convoke_recorder::snapshot::{GroupSnapshot, Observer, snapshots};

/// Shows which ranks wait for which others in a job, from what convoke's runtime records in its workers.
///
/// Prints one line for each group: which ranks are in no call, which wait in which call for whom, and which
/// died. Then prints the last calls of each worker. The job may be running: it is not disturbed.
/// Recordings of several nodes, given together, are read together. The folder is in the launcher's
/// report, and in CONVOKE_FLIGHT_DIR of each worker.
///
/// Ends with exit code 0, or 1 if a file could not be read or nothing was found.
#[derive(Debug, Parser)]
#[command(name = "convoke-flight", version)]
struct Flags {
    /// Folders with recordings (*.flight, also in folders below), or recordings
    #[arg(required = true)]
    paths: Vec<PathBuf>,

    /// Show this many of the last calls of each worker; in JSON all by default, else 8
    #[arg(long, value_name = "CALLS")]
    last: Option<usize>,

    /// Write one JSON object, with all that is known
    #[arg(long)]
    json: bool,
}

struct View {
    groups: Vec<GroupSnapshot>,
    workers: Vec<Worker>,
    skipped: Vec<(PathBuf, String)>,
    /// Maximum number of calls shown for each worker.
    last: usize,
}

struct Worker {
    path: PathBuf,
    recording: Recording,
    status: ProcessStatus,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let view = View::new(
        folder::read(&flags.paths, |_| true),
        flags.last.unwrap_or(if flags.json { usize::MAX } else { 8 }),
    );
    for (path, why) in &view.skipped {
        print_stderr(&format!("warning: {}: {why}; skipped", path.display()));
    }
    let found = !view.workers.is_empty();
    if !found {
        print_stderr(
            "error: no recordings were found there: do the workers use convoke's runtime, and are they \
             running?",
        );
    }
    let written = match (flags.json, found) {
        (true, _) => print(&json::json(&view)),
        (false, true) => print(&text::text(&view)),
        (false, false) => Ok(()),
    };
    match written {
        Ok(()) if found && view.skipped.is_empty() => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            print_stderr(&format!("error: cannot write to stdout: {error}"));
            ExitCode::FAILURE
        }
    }
}

impl View {
    fn new(found: FoundRecordings, last: usize) -> Self {
        let here = process::current();
        let status = |recording: &Recording| process::status(&recording.header.process, &here);
        let mut workers: Vec<Worker> = (found.recordings.into_iter())
            .map(|(path, recording)| Worker { status: status(&recording), path, recording })
            .collect();
        // Orders workers by round, as far as restart counts tell the round, and then by rank.
        workers.sort_by_key(|worker| {
            let header = &worker.recording.header;
            (header.restart_count, header.generation, header.rank, header.started_unix_ns)
        });
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let observers: Vec<Observer<'_>> = workers
            .iter()
            .map(|worker| Observer { recording: &worker.recording, status: worker.status })
            .collect();
        Self { groups: snapshots(&observers, now), workers, skipped: found.skipped, last }
    }
}

impl Worker {
    /// Converts `ns`, a time of the recording's monotonic clock, to nanoseconds since 1970. `None` if the
    /// event of this time has not happened.
    fn unix_ns(&self, ns: u64) -> Option<i128> {
        let header = &self.recording.header;
        let since = i128::from(ns) - i128::from(header.started_ns);
        (ns > 0).then(|| i128::from(header.started_unix_ns) + since)
    }
}

/// Writes to stdout. A reader that closes early (`| head`) is not an error.
fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Writes a line to stderr. A failed write is ignored, because it means that nobody reads stderr.
fn print_stderr(line: &str) {
    let _ = writeln!(io::stderr(), "convoke-flight: {line}");
}
