//! What the launcher says, all of it on stderr.

use std::time::SystemTime;

use convoke_env::vars;

use super::run::Shell;
use crate::guard::Leftover;
use crate::report::{self, Failure};
use crate::say::{say, say_raw};
use crate::supervise;

/// How many leftover processes a message names.
const NAMED_LEFTOVERS: usize = 8;

impl Shell {
    pub(super) fn tell_outcome(&mut self, outcome: &supervise::Outcome) {
        self.succeeded = *outcome == supervise::Outcome::Succeeded;
        let Some(round) = &self.round else { return };
        for local_rank in 0..self.config.nproc_per_node {
            let worker = round.workers.get(local_rank);
            if let (Some(pid), Some((_, cause))) = (worker.pid, worker.ended) {
                self.events.ended(
                    &round.assignment,
                    round.workers.rank(local_rank),
                    pid,
                    cause,
                    self.restarts,
                );
            }
        }
        let supervise::Outcome::Failed(failures) = outcome else { return };
        let left = self.config.max_restarts.saturating_sub(self.restarts);
        if let Some(first) = failures.first().filter(|_| left > 0) {
            let rank = round.workers.rank(first.local_rank);
            say(&format!(
                "warning: rank {rank} (local_rank {}) {}; restarting all {} workers of this node ({left} of {} restarts left)",
                first.local_rank,
                report::describe(first.cause),
                self.config.nproc_per_node,
                self.config.max_restarts
            ));
        }
    }

    pub(super) fn tell_swept(&self, stopped: &[Leftover], stuck: &[Leftover]) {
        let names = |processes: &[Leftover]| {
            let shown = processes.iter().take(NAMED_LEFTOVERS);
            let list: Vec<_> = shown.map(|left| format!("{} (pid {})", left.name, left.pid)).collect();
            let more = processes.len() - list.len();
            list.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
        };
        // What failing workers leave behind is part of their failure.
        if self.succeeded && !stopped.is_empty() {
            say(&format!("warning: stopped processes that outlived their workers: {}", names(stopped)));
        }
        if !stuck.is_empty() {
            say(&format!("warning: processes that SIGKILL does not end: {}", names(stuck)));
        }
    }

    pub(super) fn report_failures(&self, failures: &[supervise::Failure]) {
        let Some(round) = &self.round else { return };
        let failures: Vec<Failure> = failures
            .iter()
            .map(|failure| {
                let worker = round.workers.get(failure.local_rank);
                Failure {
                    local_rank: failure.local_rank,
                    rank: round.workers.rank(failure.local_rank),
                    pid: worker.pid.unwrap_or_default(),
                    cause: failure.cause,
                    time: worker.ended.map_or_else(SystemTime::now, |(time, _)| time),
                    error_file: worker.error_file.clone(),
                }
            })
            .collect();
        let target = std::env::var_os(vars::ERROR_FILE).filter(|path| !path.is_empty());
        if let Some(Err(error)) = target.map(|target| report::hand_on(&failures, target.as_ref())) {
            say(&format!("warning: {error}"));
        }
        match report::render(&self.config.program.title, &failures) {
            Ok(text) => say_raw(&text),
            Err(error) => say(&format!("error: {error}")),
        }
    }
}
