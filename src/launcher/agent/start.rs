//! Starts a round: sends the guard a spawn request for each worker.

use std::os::fd::AsFd;

use super::environment::{WorkerFiles, command_line, variables};
use super::event_loop::EventLoop;
use crate::fault;
use crate::guard::{SpawnRequest, ToGuard};
use crate::rendezvous::Assignment;
use crate::supervise::Supervisor;

impl EventLoop {
    /// Prepares a round. Its workers are not started yet.
    pub(super) fn prepare(&mut self, assignment: Assignment) {
        self.events.joined(&assignment, self.rounds.restarts);
        self.drain.watch(&assignment);
        let simultaneity_window = self.config.monitor_interval.unwrap_or_default();
        let supervisor = Supervisor::new(self.config.nproc_per_node, simultaneity_window);
        self.rounds.begin(assignment, supervisor);
    }

    /// Asks the guard to start all workers of the round.
    pub(super) fn start(&mut self) -> Result<(), String> {
        let restarts = self.rounds.restarts;
        let Some(round) = self.rounds.current.as_mut() else { return Ok(()) };
        let config = &self.config;
        let parent = |name: &str| std::env::var_os(name);
        let mut attempt = self.run_dir.attempt(restarts, config.nproc_per_node);
        for local_rank in 0..config.nproc_per_node {
            fault::point("spawning");
            let rank = round.rank(local_rank);
            let stdio = attempt.worker(local_rank, rank).map_err(|error| error.to_string())?;
            let error_file = stdio.error_file.clone();
            let files = WorkerFiles {
                error: error_file.as_deref(),
                flight: self.flight.folder(),
                drain: Some(self.drain.file()),
            };
            let variables = variables(config, &round.assignment, local_rank, restarts, &files, &parent)?;
            let added = round.add_worker(self.token.as_ref(), error_file, stdio.stderr_tail.clone());
            let (id, channel) =
                added.map_err(|error| format!("cannot create the channel to a worker: {error}"))?;
            let (stdout, stderr) = (stdio.stdout.as_fd(), stdio.stderr.as_fd());
            let descriptors: Vec<_> = [Some(channel.as_fd()), stdout, stderr].into_iter().flatten().collect();
            let request = ToGuard::Spawn(SpawnRequest {
                id,
                argv: command_line(config, local_rank),
                vars: variables.set,
                unset: variables.unset,
                cpus: config.cpus.get(local_rank).cloned().unwrap_or_default(),
                own_session: config.own_sessions,
                stdout: stdout.is_some(),
                stderr: stderr.is_some(),
            });
            self.guard.send(&request, &descriptors);
            if self.guard.has_ended() {
                return Ok(());
            }
        }
        round.tee = attempt.start_tee().map_err(|error| error.to_string())?;
        fault::point("running");
        Ok(())
    }
}
