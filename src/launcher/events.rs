//! Implements `--event-log-handler=console`: prints events on stderr as JSON lines, as torchrun does.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::Instant;

use convoke_env::ExitCause;
use nix::libc::SIGTERM;
use serde::Serialize;

use crate::config::{Config, Endpoint, EventHandler, Rendezvous};
use crate::formatting::python_json;
use crate::host_name::full_host_name;
use crate::rendezvous::Assignment;
use crate::report::describe;

/// Writes events to stderr, or drops them.
#[derive(Debug)]
pub(crate) struct Events {
    /// Fields common to all events. If `None`, events are dropped.
    job: Option<Job>,
    started: Instant,
    /// Time at which the current rendezvous began: when the launcher started, or when the last worker ended.
    rendezvous_started: Cell<Instant>,
}

/// The fields that are equal in all events.
#[derive(Debug, Clone)]
struct Job {
    run_id: String,
    role: String,
    host: String,
    backend: &'static str,
    entry_point: String,
}

#[derive(Debug, Serialize)]
struct Event<'a> {
    name: String,
    source: &'static str,
    timestamp: u64,
    metadata: Metadata<'a>,
}

#[derive(Debug, Serialize)]
struct Metadata<'a> {
    run_id: &'a str,
    global_rank: Option<usize>,
    group_rank: Option<usize>,
    worker_id: Option<String>,
    role: &'a str,
    hostname: &'a str,
    state: &'static str,
    total_run_time: u64,
    rdzv_backend: &'static str,
    raw_error: Option<String>,
    metadata: String,
    agent_restarts: u32,
    duration_ms: Option<u64>,
}

/// Details of an event: a JSON text inside the JSON event, as in torch. Ranks are lists of one number, as
/// torch writes them because of a comma too many.
#[derive(Debug, Serialize)]
struct Details<'a> {
    group_world_size: Option<usize>,
    entry_point: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    local_rank: Option<[usize; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role_rank: Option<[usize; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role_world_size: Option<[usize; 1]>,
}

/// A change of a worker's or the agent's state, and its details as far as known.
#[derive(Debug, Default)]
struct StatusChange<'a> {
    state: &'static str,
    assignment: Option<&'a Assignment>,
    /// Global rank and pid of the worker; `None` if the agent's state changed.
    worker: Option<(usize, i32)>,
    error: Option<String>,
    restarts: u32,
    total_s: u64,
    duration_ms: Option<u64>,
}

impl<'a> StatusChange<'a> {
    fn new(state: &'static str, assignment: Option<&'a Assignment>, restarts: u32) -> Self {
        Self { state, assignment, restarts, ..Self::default() }
    }
}

impl Events {
    /// Prepares the events of the job that `config` describes.
    pub(crate) fn new(config: &Config) -> Self {
        let job = (config.events == EventHandler::Console).then(|| Job {
            run_id: config.run_id.clone(),
            role: config.role.clone(),
            host: full_host_name(),
            backend: match &config.rendezvous {
                Rendezvous::Static { .. } => "static",
                Rendezvous::Elastic { endpoint: Endpoint::Etcd(_), .. } => "etcd",
                Rendezvous::Standalone | Rendezvous::Elastic { .. } => "c10d",
            },
            entry_point: config.program.title.clone(),
        });
        let now = Instant::now();
        Self { job, started: now, rendezvous_started: Cell::new(now) }
    }

    /// Writes the events that the nodes have met in the rendezvous, and that the workers have got their
    /// ranks.
    pub(crate) fn joined(&self, assignment: &Assignment, restarts: u32) {
        let took = self.rendezvous_started.get().elapsed().as_millis();
        let took = u64::try_from(took).unwrap_or(u64::MAX);
        for (state, duration_ms) in [("RENDEZVOUS", Some(took)), ("ASSIGN_WORKER_RANKS", Some(0))] {
            self.write(StatusChange { duration_ms, ..StatusChange::new(state, Some(assignment), restarts) });
        }
    }

    /// Writes the event that a worker has been started.
    pub(crate) fn started(&self, assignment: &Assignment, rank: usize, pid: i32, restarts: u32) {
        let worker = Some((rank, pid));
        self.write(StatusChange { worker, ..StatusChange::new("START", Some(assignment), restarts) });
    }

    /// Writes the event that a worker has ended: by exit code 0, by SIGTERM as the launcher stops workers, or
    /// by failure.
    pub(crate) fn ended(
        &self,
        assignment: &Assignment,
        rank: usize,
        pid: i32,
        cause: ExitCause,
        restarts: u32,
    ) {
        self.rendezvous_started.set(Instant::now());
        let worker = Some((rank, pid));
        let (state, error) = match cause {
            ExitCause::Code(0) => ("SUCCEEDED", None),
            ExitCause::Signal(SIGTERM) => ("TERMINATED", None),
            ExitCause::Code(_) | ExitCause::Signal(_) => ("FAILED", Some(describe(cause))),
        };
        self.write(StatusChange { worker, error, ..StatusChange::new(state, Some(assignment), restarts) });
    }

    /// Writes the event that the job has succeeded or failed on this node.
    pub(crate) fn agent_ended(&self, assignment: Option<&Assignment>, restarts: u32, has_succeeded: bool) {
        let state = if has_succeeded { "SUCCEEDED" } else { "FAILED" };
        self.write(StatusChange::new(state, assignment, restarts));
    }

    fn write(&self, change: StatusChange<'_>) {
        let Some(job) = &self.job else { return };
        let mut line = line(job, &StatusChange { total_s: self.started.elapsed().as_secs(), ..change });
        line.push('\n');
        // If stderr is closed, the write fails, which must not end the job.
        let _ = io::stderr().lock().write_all(line.as_bytes());
    }
}

/// Formats one event as one line, without newline.
fn line(job: &Job, change: &StatusChange<'_>) -> String {
    let StatusChange { state, assignment, worker, error, restarts, total_s, duration_ms } = change;
    // Computes a value of the single worker that the event is about. `None` without a worker or an
    // assignment.
    let own = |of: fn(&Assignment, usize) -> usize| {
        assignment.zip(*worker).map(|(assignment, (rank, _))| [of(assignment, rank)])
    };
    let details = Details {
        group_world_size: assignment.map(|assignment| assignment.group_world_size),
        entry_point: &job.entry_point,
        local_rank: own(|assignment, rank| rank.saturating_sub(assignment.base_rank)),
        role_rank: own(|assignment, rank| {
            assignment.base_role_rank + rank.saturating_sub(assignment.base_rank)
        }),
        role_world_size: own(|assignment, _| assignment.role_world_size),
    };
    let error = error.as_ref().map(|error| python_json(&serde_json::json!({ "message": error })));
    python_json(&Event {
        name: format!("torchelastic.worker.status.{state}"),
        source: if worker.is_some() { "WORKER" } else { "AGENT" },
        timestamp: 0,
        metadata: Metadata {
            run_id: &job.run_id,
            global_rank: worker.map(|(rank, _)| rank),
            group_rank: assignment.map(|assignment| assignment.group_rank),
            worker_id: worker.map(|(_, pid)| pid.to_string()),
            role: &job.role,
            hostname: &job.host,
            state,
            total_run_time: *total_s,
            rdzv_backend: job.backend,
            raw_error: error,
            metadata: python_json(&details),
            agent_restarts: *restarts,
            duration_ms: *duration_ms,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        Job {
            run_id: "ev1".to_owned(),
            role: "default".to_owned(),
            host: "node7".to_owned(),
            backend: "static",
            entry_point: "train.py".to_owned(),
        }
    }

    fn assignment() -> Assignment {
        Assignment {
            round: 0,
            restarts: None,
            group_rank: 1,
            group_world_size: 2,
            base_rank: 4,
            world_size: 8,
            base_role_rank: 2,
            role_world_size: 6,
            master_addr: "localhost".to_owned(),
            master_port: 1,
            use_agent_store: true,
            generation: None,
            protocol: crate::rendezvous::FailureProtocol::None,
            token: None,
        }
    }

    #[test]
    fn worker_event_contains_its_ranks() {
        let (assignment, worker) = (assignment(), Some((5, 321)));
        let change =
            StatusChange { state: "START", assignment: Some(&assignment), worker, ..StatusChange::default() };
        assert_eq!(
            line(&job(), &change),
            r#"{"name": "torchelastic.worker.status.START", "source": "WORKER", "timestamp": 0, "metadata": {"#.to_owned()
                + r#""run_id": "ev1", "global_rank": 5, "group_rank": 1, "worker_id": "321", "role": "default", "#
                + r#""hostname": "node7", "state": "START", "total_run_time": 0, "rdzv_backend": "static", "#
                + r#""raw_error": null, "metadata": "{\"group_world_size\": 2, \"entry_point\": \"train.py\", "#
                + r#"\"local_rank\": [1], \"role_rank\": [3], \"role_world_size\": [6]}", "#
                + r#""agent_restarts": 0, "duration_ms": null}}"#
        );
    }

    #[test]
    fn agent_event_has_no_worker_even_before_the_first_round() {
        let change = StatusChange { state: "FAILED", restarts: 2, total_s: 7, ..StatusChange::default() };
        let line = line(&job(), &change);
        assert!(
            line.contains(r#""source": "AGENT""#)
                && line.contains(r#""global_rank": null, "group_rank": null"#)
        );
        assert!(line.contains(r#""total_run_time": 7"#) && line.contains(r#""agent_restarts": 2"#));
        assert!(line.contains(r#"{\"group_world_size\": null, \"entry_point\": \"train.py\"}"#), "{line}");
    }

    #[test]
    fn event_error_is_nested_json() {
        let change = StatusChange {
            state: "FAILED",
            error: Some("was \"hurt\"".to_owned()),
            ..StatusChange::default()
        };
        let line = line(&job(), &change);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
        assert_eq!(value["metadata"]["raw_error"], r#"{"message": "was \"hurt\""}"#);
    }
}
