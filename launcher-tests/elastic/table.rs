//! Rows of the table in docs/measurements/faults.md.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use super::cluster::{Backend, FaultTimes};

/// The observations of one case.
pub struct Row {
    /// The outcome of the job.
    pub outcome: &'static str,
    pub times: FaultTimes,
    /// The message that the user reads.
    pub message: String,
}

pub fn write_row(fault: &str, backend: Backend, row: &Row) {
    let time = |time: Option<Duration>| match time {
        Some(time) if time < Duration::from_secs(1) => format!("{} ms", time.as_millis()),
        Some(time) => format!("{:.2} s", time.as_secs_f64()),
        None => String::new(),
    };
    let Row { outcome, times, message } = row;
    let (detected, restarted) = (time(times.detected), time(times.restarted));
    let line = format!("| {fault} | {} | {outcome} | {detected} | {restarted} | {message} |", backend.name());
    eprintln!("{line}");
    if let Some(path) = std::env::var_os("CONVOKE_ELASTIC_TABLE") {
        let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

/// Returns the first line of `message` that contains one of `words`, without parts that differ from run
/// to run.
pub fn find_line(message: &str, words: &[&str]) -> String {
    let line = message.lines().find(|line| words.iter().any(|word| line.contains(word)));
    let line = line.unwrap_or_else(|| panic!("none of {words:?} in\n{message}"));
    let line = line.trim_start_matches("convoke: ").replace('|', "\\|");
    let mut out = String::new();
    for (index, part) in line.split("(pid ").enumerate() {
        match part.split_once(')') {
            Some((pid, rest)) if index > 0 && pid.bytes().all(|byte| byte.is_ascii_digit()) => {
                out.truncate(out.trim_end().len());
                out.push_str(rest);
            }
            _ if index > 0 => out.push_str(&format!("(pid {part}")),
            _ => out.push_str(part),
        }
    }
    out
}
