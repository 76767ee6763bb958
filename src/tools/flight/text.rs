//! The text output of `convoke-flight`, for people.

use std::fmt::Write;

use convoke_env::ExitCause;
use convoke_recorder::layout::{Entry, Exit, Header, Operation, State};
use convoke_recorder::process::ProcessStatus;
use convoke_recorder::{RankList, format_duration};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use nix::sys::signal::Signal;

use super::{View, Worker};

pub(super) fn text(view: &View) -> String {
    let mut out = String::new();
    for group in &view.groups {
        let round = if group.superseded { "earlier " } else { "" };
        let _ = writeln!(out, "{round}{group}");
    }
    if view.groups.is_empty() {
        out.push_str("no groups yet\n");
    }
    for worker in &view.workers {
        let _ = writeln!(out, "\n{}", worker_line(worker));
        let entries = &worker.recording.entries;
        let zone = TimeZone::system();
        for entry in &entries[entries.len().saturating_sub(view.last)..] {
            let _ = writeln!(out, "  {}", call_line(worker, entry, &zone));
        }
    }
    out
}

fn worker_line(worker: &Worker) -> String {
    let Worker { path, recording, status } = worker;
    let Header { rank, world_size, restart_count, process, host, .. } = &recording.header;
    let mut out = match (rank, world_size) {
        (Some(rank), Some(size)) => format!("rank {rank} of {size}"),
        _ => "a process without a rank".to_owned(),
    };
    if *restart_count > 0 {
        let _ = write!(out, " after restart {restart_count}");
    }
    let lives = match (status, recording.exit) {
        (_, Some(Exit { stopped: true, .. })) => "stopped".to_owned(),
        (_, Some(Exit { cause: ExitCause::Code(code), .. })) => format!("ended with exit code {code}"),
        (_, Some(Exit { cause: ExitCause::Signal(number), .. })) => {
            let name =
                Signal::try_from(number).map_or_else(|_| number.to_string(), |signal| signal.to_string());
            format!("ended by signal {name}")
        }
        (ProcessStatus::Alive, None) => "alive".to_owned(),
        (ProcessStatus::Gone, None) => "gone".to_owned(),
        (ProcessStatus::Unknown, None) => "not visible from here, in another host or container".to_owned(),
    };
    let calls = if recording.calls == 1 { "call" } else { "calls" };
    let _ = write!(out, ", pid {} on {host}, {lives}: {} {calls}", process.pid, recording.calls);
    if recording.torn > 0 {
        let _ = write!(out, ", {} cut short", recording.torn);
    }
    if recording.lost > 0 {
        let _ = write!(out, ", {} not recorded", recording.lost);
    }
    let _ = write!(out, " ({})", path.display());
    out
}

fn call_line(worker: &Worker, entry: &Entry, zone: &TimeZone) -> String {
    let recording = &worker.recording;
    let at = worker.unix_ns(entry.enqueued_ns).and_then(|ns| Timestamp::from_nanosecond(ns).ok());
    let at = at.map_or_else(String::new, |at| at.to_zoned(zone.clone()).strftime("%H:%M:%S%.3f").to_string());
    let state = match entry.state {
        State::Queued => "queued",
        State::Running => "running",
        State::Done => "done",
        State::Failed => "failed",
    };
    let took = match (entry.started_ns, entry.ended_ns) {
        (0, _) | (_, 0) => "-".to_owned(),
        (start, end) => format_duration(end.saturating_sub(start)),
    };
    let group =
        recording.group(entry.group).map_or_else(|| format!("#{}", entry.group), |group| group.name.clone());
    let seq = match entry.operation {
        Operation::Collective => format!("seq {} ", entry.seq),
        Operation::Send | Operation::Recv | Operation::Probe => String::new(),
    };
    let call = recording.describe(entry);
    let mut out = format!("{at} {state:<7} {took:>9}  {group}: {seq}{call}");
    if let Some(algorithm) = recording.names.algorithm(entry.algorithm) {
        let _ = write!(out, " by {algorithm}");
    }
    let moved = |done: u64, all: u64, way: &str| match (done, all) {
        (_, 0) => String::new(),
        (done, all) if done == all => format!(", {} {way}", bytes(all)),
        (done, all) => format!(", {} of {} {way}", bytes(done), bytes(all)),
    };
    out.push_str(&moved(entry.received_bytes, entry.to_receive_bytes, "in"));
    out.push_str(&moved(entry.sent_bytes, entry.to_send_bytes, "out"));
    if entry.operation == Operation::Collective && entry.waits_for > 0 && entry.state != State::Done {
        let more = if entry.waits_for as usize > entry.listed_peers().len() { " and others" } else { "" };
        let _ = write!(out, ", waits for {}{more}", RankList(&recording.waits_for(entry)));
    }
    out
}

/// Formats a size: `12 B`, `1.5 KiB`, `20 MiB`.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let (mut value, mut unit) = (count as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    if value < 10.0 { format!("{value:.1} {}", UNITS[unit]) } else { format!("{value:.0} {}", UNITS[unit]) }
}
