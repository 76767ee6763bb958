//! The JSON output of `convoke-flight`, for programs. A new field does not change the field `version`.

use convoke_recorder::layout::{Entry, Operation};
use convoke_recorder::process::ProcessStatus;
use serde_json::{Value, json};

use super::{View, Worker};

const VERSION: u32 = 1;

/// Returns the whole JSON object, with a newline at its end.
pub(super) fn json(view: &View) -> String {
    let groups: Vec<Value> = view
        .groups
        .iter()
        .map(|group| {
            let mut value = serde_json::to_value(group).expect("a group is plain data");
            value["line"] = group.to_string().into();
            value
        })
        .collect();
    let workers: Vec<Value> = view.workers.iter().map(|worker| self::worker(worker, view.last)).collect();
    let skipped: Vec<Value> = (view.skipped.iter())
        .map(|(path, why)| json!({ "path": path.display().to_string(), "why": why }))
        .collect();
    let all = json!({ "version": VERSION, "groups": groups, "recordings": workers, "skipped": skipped });
    format!("{all:#}\n")
}

fn worker(worker: &Worker, last: usize) -> Value {
    let Worker { path, recording, status } = worker;
    let header = &recording.header;
    let alive = (*status != ProcessStatus::Unknown).then_some(*status == ProcessStatus::Alive);
    let entries = &recording.entries[recording.entries.len().saturating_sub(last)..];
    json!({
        "path": path.display().to_string(),
        "host": header.host,
        "pid": header.process.pid,
        "alive": alive,
        "exit": recording.exit.map(|exit| json!({
            "unix_ms": exit.unix_ns / 1_000_000,
            "cause": exit.cause,
            "stopped": exit.stopped,
        })),
        "rank": header.rank,
        "world_size": header.world_size,
        "local_rank": header.local_rank,
        "restart_count": header.restart_count,
        "run_id": header.run_id,
        "generation": header.generation,
        "started_unix_ms": header.started_unix_ns / 1_000_000,
        "calls_count": recording.calls,
        "torn_count": recording.torn,
        "lost_count": recording.lost,
        "calls": entries.iter().map(|entry| call(worker, entry)).collect::<Vec<_>>(),
    })
}

fn call(worker: &Worker, entry: &Entry) -> Value {
    let recording = &worker.recording;
    let at = |ns: u64| worker.unix_ns(ns).map(|ns| ns as f64 / 1e6);
    json!({
        "number": entry.number,
        "group": recording.group(entry.group).map(|group| group.name.clone()),
        "operation": entry.operation,
        "seq": (entry.operation == Operation::Collective).then_some(entry.seq),
        "call": recording.describe(entry),
        "algorithm": recording.names.algorithm(entry.algorithm),
        "state": entry.state,
        "enqueued_unix_ms": at(entry.enqueued_ns),
        "started_unix_ms": at(entry.started_ns),
        "ended_unix_ms": at(entry.ended_ns),
        "received_bytes": entry.received_bytes,
        "sent_bytes": entry.sent_bytes,
        "to_receive_bytes": entry.to_receive_bytes,
        "to_send_bytes": entry.to_send_bytes,
        "waits_for_count": entry.waits_for,
        "waits_for": recording.waits_for(entry),
        "thread": entry.thread,
    })
}
