//! Formats the full report (`--report=full`): torchrun's layout, with convoke's additional lines at the end
//! of each worker's block. Pure.

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::model::{Failure, FlightSummary, Report};
use crate::cause::Class;

/// Most characters of a border, which is otherwise as long as the longest line.
const WIDTH_MAX_CHARS: usize = 60;
/// Most lines of stderr that the full report shows; the JSON report has more.
const STDERR_SHOWN_LINES: usize = 12;
/// Most characters of each such line, and of most lines of the short report.
pub(super) const LINE_CHARS: usize = 240;
const NO_TRACEBACK: &str = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html";

/// Formats the whole report, with an empty line before it and a newline at its end.
pub(super) fn report(report: &Report, zone: &TimeZone) -> String {
    let blocks: Vec<String> = report
        .failures
        .iter()
        .enumerate()
        .map(|(index, failure)| block(index, failure, report.root_cause == Some(index), zone))
        .collect();
    let title = format!("{} FAILED", report.title);
    let (border, section) = borders(blocks.iter().flat_map(|block| block.lines()).chain([title.as_str()]));
    let (mut others, mut root_cause) = (String::new(), String::new());
    for (index, block) in blocks.iter().enumerate() {
        let part = if Some(index) == report.root_cause { &mut root_cause } else { &mut others };
        part.push_str(&format!("{block}\n"));
    }
    if report.failures_left_out > 0 {
        others.push_str(&format!("  ... and {} more\n", report.failures_left_out));
    }
    if others.is_empty() {
        others.push_str("  <NO_OTHER_FAILURES>\n");
    }
    let flight = report.flight.as_ref().map_or_else(String::new, flight);
    let notes: String = report.notes.iter().map(|note| format!("note: {note}\n")).collect();
    format!(
        "\n{border}\n{title}\n{section}\nFailures:\n{others}{section}\nRoot Cause (first observed failure):\n\
         {root_cause}{flight}{border}\n{notes}"
    )
}

/// Returns the lines of `=` around a report that consists of `lines`, and of `-` between its parts.
pub(super) fn borders<'a>(lines: impl Iterator<Item = &'a str>) -> (String, String) {
    let width = lines.map(|line| line.chars().count()).max().unwrap_or(0).min(WIDTH_MAX_CHARS);
    ("=".repeat(width), "-".repeat(width))
}

/// Formats which ranks waited for which other ranks in their communication groups.
fn flight(flight: &FlightSummary) -> String {
    let groups = flight.groups.join("\n              ");
    let calls = if groups.is_empty() { String::new() } else { format!("  calls     : {groups}\n") };
    format!("{calls}  recorded  : convoke-flight {}\n", flight.folder)
}

fn block(index: usize, failure: &Failure, root: bool, zone: &TimeZone) -> String {
    let Failure { local_rank, rank, pid, host, .. } = failure;
    let time = local_time(failure.time_unix_ms.div_euclid(1000), zone);
    let code = failure.exitcode.map_or_else(|| "<N/A>".to_owned(), |code| code.to_string());
    let shown_signal = failure.signal_name().map_or_else(String::new, |name| format!(" ({name})"));
    let file = failure.error_file.as_deref().unwrap_or("<N/A>");
    let traceback = match (failure.traceback.as_deref(), &failure.signal) {
        (Some(text), Some(_)) if failure.error_file.is_none() => format!("{}\n{text}", received(failure)),
        (Some(text), _) => text.to_owned(),
        (None, None) => NO_TRACEBACK.to_owned(),
        (None, Some(_)) => received(failure),
    };
    let traceback = traceback.replace('\n', "\n  ");
    let mut out = format!(
        "[{index}]:\n  time      : {time}\n  host      : {host}\n  rank      : {rank} (local_rank: {local_rank})\n  \
         exitcode  : {code} (pid: {pid}) {shown_signal}\n  error_file: {file}\n  traceback : {traceback}"
    );
    // For a plain exit code without stderr, the explanation would repeat the exit code line of the report.
    let says_more = failure.class != Class::Exit || !failure.stderr_tail.is_empty();
    if says_more {
        let core = if failure.core_dumped { " (core dumped)" } else { "" };
        let explanation = failure.explanation.replace('\n', "\n    ");
        out.push_str(&format!("\n  cause     : {}: {explanation}{core}", failure.class));
    }
    for line in &failure.gpu {
        out.push_str(&format!("\n  gpu       : {line}"));
    }
    if let Some(advice) = failure.advice.as_deref().filter(|_| root) {
        out.push_str(&format!("\n  advice    : {advice}"));
    }
    if root && !failure.stderr_tail.is_empty() {
        let tail = &failure.stderr_tail;
        let skipped = tail.len().saturating_sub(STDERR_SHOWN_LINES);
        out.push_str(&format!("\n  stderr    : {}", failure.stderr_heading()));
        for line in &tail[skipped..] {
            out.push_str(format!("\n    {}", shorten(line, LINE_CHARS)).trim_end_matches(' '));
        }
    }
    out
}

/// Returns the line, or only its start and end if it has more than `most` characters.
pub(super) fn shorten(line: &str, most: usize) -> String {
    let count = line.chars().count();
    if count <= most {
        return line.to_owned();
    }
    let half = most / 2;
    let (start, end): (String, String) =
        (line.chars().take(half).collect(), line.chars().skip(count - half).collect());
    format!("{start} [...] {end}")
}

fn received(failure: &Failure) -> String {
    let number = failure.signal.as_ref().map_or(0, |signal| signal.number);
    let name = failure.signal_name().unwrap_or("<N/A>");
    format!("Signal {number} ({name}) received by PID {}", failure.pid)
}

/// Formats a time as `2026-11-21_08:13:05`, in local time.
pub(super) fn local_time(seconds: i64, zone: &TimeZone) -> String {
    match Timestamp::from_second(seconds) {
        Ok(time) => time.to_zoned(zone.clone()).strftime("%Y-%m-%d_%H:%M:%S").to_string(),
        Err(_) => format!("{seconds} s"), // an error file may hold any number
    }
}
