//! The report as data: the content of `--report-file` and of messages between agents. Pure.
//!
//! Fields may be added within a version of the JSON form; readers ignore fields that they do not know.

use convoke_env::ExitCause;
use serde::{Deserialize, Serialize};

use crate::cause::{Candidate, Class, select_root_cause};

/// Version of the report's JSON form.
pub(crate) const VERSION: u32 = 1;
/// Longest JSON form that agents send to each other, in bytes.
pub(crate) const MESSAGE_MAX_BYTES: usize = 64 << 10;

/// How the job ended on one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) version: u32,
    pub(crate) outcome: Outcome,
    /// The program, as the user wrote it.
    pub(crate) title: String,
    pub(crate) run_id: String,
    /// Rank of this node, and number of nodes; `None` before the nodes have met.
    pub(crate) node: Option<usize>,
    pub(crate) nodes: Option<usize>,
    pub(crate) host: String,
    pub(crate) restarts: u32,
    pub(crate) max_restarts: u32,
    /// The time at which the report was made, in milliseconds since 1970.
    pub(crate) time_unix_ms: i64,
    /// The launcher's own message, if the job ended without a failed worker or because of another node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<String>,
    /// Workers that failed or were stopped, in the order in which their ends were noticed.
    #[serde(default)]
    pub(crate) failures: Vec<Failure>,
    /// Index of the root cause in `failures`; `None` if there is none.
    #[serde(default)]
    pub(crate) root_cause: Option<usize>,
    /// Number of failures left out to keep the report short.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) failures_left_out: usize,
    /// What the flight recordings show about the communication groups of this node's workers, if they
    /// recorded any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) flight: Option<FlightSummary>,
    /// Notes on settings that the launcher made for the workers although the user did not ask for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
}

/// What the flight recordings show about a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FlightSummary {
    pub(crate) folder: String,
    /// One line for each communication group in which a rank waited or died.
    pub(crate) groups: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    Succeeded,
    /// All workers have stopped because the job was drained.
    Drained,
    Failed,
    /// A signal to the launcher ended the job.
    Stopped,
    /// The launcher could not continue: the rendezvous failed, the guard ended, ...
    Error,
    #[serde(other)]
    Unknown,
}

/// A worker that failed, or that the launcher stopped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) local_rank: usize,
    pub(crate) node: usize,
    pub(crate) host: String,
    /// Process id; 0 if the worker was never started.
    pub(crate) pid: i32,
    /// Exit code in Python's form, negative for signals; `None` if the worker was never started.
    pub(crate) exitcode: Option<i32>,
    pub(crate) signal: Option<SignalName>,
    /// Time of the failure: the one in the error file, else the time at which the worker's end was noticed.
    pub(crate) time_unix_ms: i64,
    pub(crate) class: Class,
    pub(crate) explanation: String,
    pub(crate) advice: Option<String>,
    /// The rank that this worker reports as lost.
    #[serde(default, rename = "blames")]
    pub(crate) suspect_rank: Option<usize>,
    /// Path of the worker's error file, if it wrote one.
    pub(crate) error_file: Option<String>,
    /// The traceback in the worker's error file, else the one found in its stderr.
    pub(crate) traceback: Option<String>,
    /// Last lines of the worker's stderr, oldest first, without the traceback.
    #[serde(default)]
    pub(crate) stderr_tail: Vec<String>,
    /// The driver's messages about the worker's GPUs while the job ran, and errors of their memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) gpu: Vec<String>,
    #[serde(default)]
    pub(crate) core_dumped: bool,
    /// True if the launcher was already stopping the workers when this one ended.
    #[serde(default)]
    pub(crate) stopped_by_us: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SignalName {
    pub(crate) number: i32,
    /// Name such as `SIGKILL`; `None` for real-time signals.
    pub(crate) name: Option<String>,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// Limits of a shortened report: number of failures, and bytes of each text of the root cause and of other
/// failures.
#[derive(Debug, Clone, Copy)]
struct SizeLimits {
    failures: usize,
    root_bytes: usize,
    other_bytes: usize,
}

impl Report {
    /// Serializes the whole report for people and programs, with a newline at its end.
    pub(crate) fn to_pretty_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report is plain data") + "\n"
    }

    /// Serializes the report in at most [`MESSAGE_MAX_BYTES`]. Shortens long texts and leaves out failures;
    /// shortens the root cause last.
    pub(crate) fn to_json(&self) -> String {
        let mut limits = SizeLimits { failures: 256, root_bytes: MESSAGE_MAX_BYTES, other_bytes: 16 << 10 };
        loop {
            let json = serde_json::to_string(&self.cut(limits)).expect("a report is plain data");
            if json.len() <= MESSAGE_MAX_BYTES {
                return json;
            }
            // Shortens the texts of other failures first, then leaves out some of these failures, then
            // shortens the root cause's texts.
            if limits.other_bytes > 256 {
                limits.other_bytes /= 2;
            } else if limits.failures > 8 {
                limits.failures /= 2;
            } else if limits.root_bytes > 512 {
                limits.root_bytes /= 2;
            } else if limits.failures > 1 {
                limits.failures /= 2;
            } else {
                limits.root_bytes /= 2;
                limits.other_bytes /= 2;
            }
        }
    }

    pub(crate) fn from_json(json: &str) -> Result<Self, String> {
        let report: Self = serde_json::from_str(json).map_err(|error| error.to_string())?;
        match report.root_cause {
            Some(at) if at >= report.failures.len() => Err(format!("no failure {at}")),
            Some(_) | None => Ok(report),
        }
    }

    /// Returns this report with only the root cause among its failures, for nodes that report their own
    /// failures themselves.
    pub(crate) fn root_only(&self) -> Self {
        let failures: Vec<Failure> = self.root().cloned().into_iter().collect();
        let root_cause = (!failures.is_empty()).then_some(0);
        Self { failures_left_out: 0, failures, root_cause, flight: None, ..self.clone() }
    }

    pub(crate) fn root(&self) -> Option<&Failure> {
        self.root_cause.and_then(|at| self.failures.get(at))
    }

    /// Returns this report with the root cause of `other`, the report on which all nodes agreed.
    pub(crate) fn with_root_of(mut self, other: &Self) -> Self {
        let Some(root) = other.root() else { return self };
        let same = |mine: &Failure| (mine.node, mine.rank, mine.pid) == (root.node, root.rank, root.pid);
        let at = self.failures.iter().position(same).unwrap_or_else(|| {
            self.failures.push(root.clone());
            self.failures.len() - 1
        });
        self.root_cause = Some(at);
        self
    }

    fn cut(&self, limits: SizeLimits) -> Self {
        let mut report = Self { failures: Vec::new(), root_cause: None, ..self.clone() };
        for (at, failure) in self.failures.iter().enumerate() {
            let root = self.root_cause == Some(at);
            // Keeps room for the root cause if it comes later.
            let root_to_come = self.root_cause.is_some_and(|root| root > at);
            if !root && report.failures.len() + usize::from(root_to_come) >= limits.failures {
                report.failures_left_out += 1;
                continue;
            }
            if root {
                report.root_cause = Some(report.failures.len());
            }
            let bytes = if root { limits.root_bytes } else { limits.other_bytes };
            report.failures.push(failure.cut(bytes));
        }
        let short = limits.root_bytes.min(4096);
        for text in [&mut report.title, &mut report.run_id, &mut report.host] {
            shorten(text, short);
        }
        report.message.iter_mut().for_each(|message| shorten(message, limits.root_bytes));
        report
    }
}

impl Failure {
    /// Describes the end of the process as a verb, such as `exited with code 3`.
    pub(crate) fn describe(&self) -> String {
        match (&self.signal, self.exitcode) {
            (Some(signal), _) => super::describe(ExitCause::Signal(signal.number)),
            (None, Some(code)) => super::describe(ExitCause::Code(code)),
            (None, None) => "could not be started".to_owned(),
        }
    }

    /// Returns the name of the signal that ended the process; `None` if none did.
    pub(super) fn signal_name(&self) -> Option<&str> {
        self.signal.as_ref().map(|signal| signal.name.as_deref().unwrap_or("<N/A>"))
    }

    /// Returns which lines of stderr the report shows: not those of a traceback that was found there.
    pub(super) fn stderr_heading(&self) -> &'static str {
        if self.traceback.is_some() && self.error_file.is_none() { "other lines:" } else { "last lines:" }
    }

    fn cut(&self, bytes: usize) -> Self {
        let mut failure = self.clone();
        keep_last_lines(&mut failure.stderr_tail, usize::MAX, bytes);
        let optional = [&mut failure.advice, &mut failure.error_file, &mut failure.traceback];
        let texts = [&mut failure.host, &mut failure.explanation];
        texts.into_iter().chain(optional.into_iter().flatten()).for_each(|text| shorten(text, bytes));
        failure
    }
}

/// Keeps the last `count` lines, and at most `bytes` bytes of them.
pub(super) fn keep_last_lines(lines: &mut Vec<String>, count: usize, bytes: usize) {
    let mut total = 0;
    let fits = |line: &&String| {
        total += line.len() + 1;
        total <= bytes
    };
    let kept = lines.iter().rev().take(count).take_while(fits).count();
    lines.drain(..lines.len() - kept);
}

/// Shortens `text` to its start and its end, about `bytes` bytes in total.
fn shorten(text: &mut String, bytes: usize) {
    if text.len() <= bytes {
        return;
    }
    let half = bytes / 2;
    let (start, end) = (text.floor_char_boundary(half), text.ceil_char_boundary(text.len() - half));
    *text = format!("{} [... {} bytes ...] {}", &text[..start], end - start, &text[end..]);
}

/// Returns the index of the root cause among failures of one or more nodes.
pub(crate) fn root_cause_of(failures: &[Failure]) -> Option<usize> {
    let candidate = |failure: &Failure| Candidate {
        rank: failure.rank,
        class: failure.class,
        stopped: failure.stopped_by_us,
        suspect_rank: failure.suspect_rank,
        // Times are compared in seconds, because error files give no more.
        time: failure.time_unix_ms.div_euclid(1000),
    };
    select_root_cause(&failures.iter().map(candidate).collect::<Vec<_>>())
}
