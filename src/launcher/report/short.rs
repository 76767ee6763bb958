//! Formats the report for one screen: the root cause, then all other workers in a few lines. Pure.
//!
//! Workers with similar failures share one entry. The full report and the JSON form list every worker.

use std::collections::{BTreeMap, BTreeSet};

use jiff::tz::TimeZone;

use super::model::{Failure, FlightSummary, Report};
use super::text::{LINE_CHARS, borders, local_time, shorten};
use crate::cause::Class;
use crate::formatting;

/// Most lines of the root cause's traceback.
const TRACEBACK_LINES: usize = 12;
/// Most lines that explain the root cause.
const CAUSE_LINES: usize = 4;
/// Most lines of the root cause's stderr if the report shows no traceback above them.
const STDERR_LINES: usize = 10;
/// Most lines of the root cause's stderr below its traceback.
const STDERR_LINES_BELOW_TRACEBACK: usize = 5;
/// Most entries for workers that failed otherwise than the root cause.
const ENTRIES: usize = 4;
/// Most of these entries that show the end of a traceback.
const ENTRIES_WITH_TRACEBACK: usize = 1;
const ENTRY_TRACEBACK_LINES: usize = 4;
/// Most lines of the driver's messages about GPUs.
const GPU_LINES: usize = 2;
/// Most lines about communication groups from the flight recordings.
const CALL_LINES: usize = 4;
/// Most characters of such a line: its middle names ranks and calls, so it must not be cut at the length of a
/// worker's lines.
const CALL_CHARS: usize = 600;
/// Most hosts that an entry names.
const HOSTS: usize = 4;

/// Formats the report, with an empty line before it and a newline at its end.
pub(super) fn report(report: &Report, zone: &TimeZone) -> String {
    let mut screen = Screen { lines: Vec::new(), cut: report.failures_left_out > 0 };
    let title = format!("{} FAILED", report.title);
    screen.line("Root Cause (first observed failure):");
    match report.root_cause.and_then(|at| Some((at, report.failures.get(at)?))) {
        Some((at, root)) => screen.root_cause(at, root, zone),
        None => screen.line("  <NONE>"),
    }
    if let Some(flight) = &report.flight {
        screen.calls(flight);
    }
    let root_lines = screen.lines.len();
    screen.line("Failures:");
    screen.others(report);
    if screen.cut {
        screen.line("  more: --report=full prints all workers, --report-file=FILE writes them as JSON");
    }
    let lines = || screen.lines.iter().map(String::as_str);
    let (border, section) = borders(lines().chain([title.as_str()]));
    let text = |lines: &[String]| lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect::<String>();
    let (root, others) = screen.lines.split_at(root_lines);
    format!("\n{border}\n{title}\n{section}\n{}{section}\n{}{border}\n", text(root), text(others))
}

/// Lines of the report to be printed.
struct Screen {
    lines: Vec<String>,
    /// True if something was left out of the report.
    cut: bool,
}

impl Screen {
    fn line(&mut self, line: &str) {
        self.line_of(line, LINE_CHARS);
    }

    /// Adds `line`, shortened to `most` characters.
    fn line_of(&mut self, line: &str, most: usize) {
        self.lines.push(shorten(line, most).trim_end().to_owned());
    }

    fn field(&mut self, name: &str, value: &str) {
        self.field_of(name, value, LINE_CHARS);
    }

    /// Adds a field of at most `most` characters.
    fn field_of(&mut self, name: &str, value: &str, most: usize) {
        self.line_of(&format!("  {name:<10}: {value}"), most);
    }

    /// Returns the first of `lines`, at most `most`. Notes whether some are left out.
    fn first<'a, L>(&mut self, lines: &'a [L], most: usize) -> &'a [L] {
        self.cut |= lines.len() > most;
        &lines[..lines.len().min(most)]
    }

    /// Returns the last of `lines`, at most `most`. Notes whether some are left out.
    fn last<'a, L>(&mut self, lines: &'a [L], most: usize) -> &'a [L] {
        self.cut |= lines.len() > most;
        &lines[lines.len().saturating_sub(most)..]
    }

    fn root_cause(&mut self, index: usize, root: &Failure, zone: &TimeZone) {
        let Failure { local_rank, rank, pid, host, .. } = root;
        self.line(&format!("[{index}]:"));
        self.field("time", &local_time(root.time_unix_ms.div_euclid(1000), zone));
        self.field("host", host);
        self.field("rank", &format!("{rank} (local_rank: {local_rank})"));
        if let Some(code) = root.exitcode {
            let signal = root.signal_name().map_or_else(String::new, |name| format!("  ({name})"));
            self.field("exitcode", &format!("{code} (pid: {pid}){signal}"));
        }
        if let Some(file) = &root.error_file {
            self.field("error_file", file);
        }
        let (traceback, cause) = traceback_and_cause(root);
        self.traceback(&traceback);
        if !cause.is_empty() {
            let core = if root.core_dumped { " (core dumped)" } else { "" };
            let cause = self.first(&cause, CAUSE_LINES);
            self.field("cause", &format!("{}: {}{core}", root.class, cause[0]));
            cause[1..].iter().for_each(|line| self.line(&format!("    {line}")));
        }
        for line in self.first(&root.gpu, GPU_LINES) {
            self.field("gpu", line);
        }
        if let Some(advice) = &root.advice {
            self.field("advice", advice);
        }
        self.stderr(root, !traceback.is_empty());
    }

    /// Adds the first line of a traceback and the last ones.
    fn traceback(&mut self, lines: &[&str]) {
        let Some((first, rest)) = lines.split_first() else { return };
        self.field("traceback", first);
        let most = TRACEBACK_LINES - 2;
        let skipped = if rest.len() > most + 1 { rest.len() - most } else { 0 };
        if skipped > 0 {
            self.cut = true;
            self.line(&format!("    [... {skipped} lines ...]"));
        }
        rest[skipped..].iter().for_each(|line| self.line(&format!("  {line}")));
    }

    fn stderr(&mut self, root: &Failure, below_traceback: bool) {
        let is_word =
            |line: &&String| !line.trim().is_empty() && !line.starts_with("note: run with `RUST_BACKTRACE");
        let tail: Vec<&String> = root.stderr_tail.iter().filter(is_word).collect();
        if tail.is_empty() {
            return;
        }
        let most = if below_traceback { STDERR_LINES_BELOW_TRACEBACK } else { STDERR_LINES };
        self.field("stderr", root.stderr_heading());
        self.last(&tail, most).iter().for_each(|line| self.line(&format!("    {line}")));
    }

    /// Adds which ranks waited for which other ranks in their communication groups.
    fn calls(&mut self, flight: &FlightSummary) {
        for (at, line) in self.first(&flight.groups, CALL_LINES).iter().enumerate() {
            self.field_of(if at == 0 { "calls" } else { "" }, line, CALL_CHARS);
        }
        self.field("recorded", &format!("convoke-flight {}", flight.folder));
    }

    fn others(&mut self, report: &Report) {
        let others = report.failures.iter().enumerate().filter(|&(at, _)| report.root_cause != Some(at));
        let (stopped, failed): (Vec<_>, Vec<_>) =
            others.map(|(_, failure)| failure).partition(|failure| failure.class == Class::Stopped);
        let mut groups = Vec::<(String, Vec<&Failure>)>::new();
        for failure in failed {
            let key = key(failure);
            match groups.iter_mut().find(|(other, _)| *other == key) {
                Some((_, group)) => group.push(failure),
                None => groups.push((key, vec![failure])),
            }
        }
        if stopped.is_empty() && groups.is_empty() && report.failures_left_out == 0 {
            self.line("  <NO_OTHER_FAILURES>");
        }
        let alike = report.root().map(key);
        for (at, (key, group)) in groups.iter().take(ENTRIES).enumerate() {
            self.entry(group, alike.as_ref() == Some(key), at < ENTRIES_WITH_TRACEBACK);
        }
        let rest = groups.get(ENTRIES..).unwrap_or_default();
        if !rest.is_empty() {
            self.cut = true;
            let workers: usize = rest.iter().map(|(_, group)| group.len()).sum();
            self.line(&format!("  {workers} workers failed in {} other ways", rest.len()));
        }
        if !stopped.is_empty() {
            let ranks = ranks_and_hosts(&stopped);
            self.line(&format!("  {ranks}: stopped by the launcher, after another had failed"));
        }
        if report.failures_left_out > 0 {
            self.line(&format!("  ... and {} more", report.failures_left_out));
        }
    }

    /// Adds an entry for workers with similar failures. `as_root` says that they failed like the root cause.
    fn entry(&mut self, group: &[&Failure], as_root: bool, with_traceback: bool) {
        let [first, ..] = group else { return };
        if as_root {
            self.line(&format!("  {}: as above", ranks_and_hosts(group)));
            return;
        }
        let (traceback, cause) = traceback_and_cause(first);
        let cause = cause.first().map_or(String::new(), |cause| format!(" ({}: {cause})", first.class));
        self.line(&format!("  {}: {}{cause}", ranks_and_hosts(group), first.describe()));
        // A failure caused by the end of another process needs no traceback.
        if with_traceback && first.class != Class::PeerLost {
            let end = self.last(&traceback, ENTRY_TRACEBACK_LINES);
            end.iter().for_each(|line| self.line(&format!("    {line}")));
        }
    }
}

/// Returns a key that is equal for similar failures, which differ at most in numbers. If there is an
/// explanation, the key omits the exit code or signal: workers with the same exception may exit or be
/// stopped.
fn key(failure: &Failure) -> String {
    let (_, cause) = traceback_and_cause(failure);
    let how = if cause.is_empty() { failure.describe() } else { String::new() };
    let text = format!("{how} {} {}", failure.class, cause.join("\n"));
    let mut key = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '0'..='9' if key.ends_with('0') => {}
            '0'..='9' => key.push('0'),
            _ => key.push(c),
        }
    }
    key
}

/// Returns the lines of the traceback and of the cause. No line is in both.
fn traceback_and_cause(failure: &Failure) -> (Vec<&str>, Vec<&str>) {
    let mut traceback: Vec<&str> = failure.traceback.as_deref().unwrap_or_default().lines().collect();
    let mut cause: Vec<&str> = failure.explanation.lines().collect();
    let said = cause.first().copied().unwrap_or_default();
    if said.starts_with("panicked at ")
        && traceback.first().is_some_and(|line| line.contains(" panicked at "))
    {
        // The traceback's first two lines are the place of the panic and its message, which the cause also
        // has.
        traceback.drain(..traceback.len().min(2));
    } else if let Some(at) = traceback.iter().rposition(|line| *line == said) {
        cause = traceback.split_off(at);
    }
    // For a plain exit code without stderr, the cause would repeat the exit code line of the report.
    if failure.class == Class::Exit && failure.stderr_tail.is_empty() {
        cause.clear();
    }
    (traceback, cause)
}

/// Formats ranks by host, as `ranks 0-2,5 on node7; rank 8 on node8`.
fn ranks_and_hosts(failures: &[&Failure]) -> String {
    let mut hosts = BTreeMap::<(usize, &str), BTreeSet<usize>>::new();
    for failure in failures {
        hosts.entry((failure.node, failure.host.as_str())).or_default().insert(failure.rank);
    }
    let more = hosts.len().saturating_sub(HOSTS);
    let mut parts: Vec<String> = hosts
        .into_iter()
        .take(HOSTS)
        .map(|((_, host), ranks)| {
            format!("{} on {host}", formatting::ranks(&ranks.into_iter().collect::<Vec<_>>()))
        })
        .collect();
    if more > 0 {
        parts.push(format!("workers on {more} other hosts"));
    }
    parts.join("; ")
}
