//! Starts a round: sends the guard a spawn request for each worker.

use std::os::fd::AsFd;
use std::time::Instant;

use super::environment::{command_line, variables};
use super::event_loop::{EventLoop, FAILURE_GRACE, ROOT_CAUSE_WAIT};
use super::rounds::Round;
use super::workers::Workers;
use crate::fault;
use crate::guard::{SpawnRequest, ToGuard};
use crate::logs::StdioTarget;
use crate::rendezvous::Assignment;
use crate::supervise::{Policy, Supervisor};

impl EventLoop {
    /// Prepares a round. Its workers are not started yet.
    pub(super) fn prepare(&mut self, assignment: Assignment) {
        self.events.joined(&assignment, self.rounds.restarts);
        let policy = Policy {
            simultaneity_window: self.config.monitor_interval.unwrap_or_default(),
            root_cause_wait: ROOT_CAUSE_WAIT,
            failure_grace: FAILURE_GRACE,
        };
        let supervisor = Supervisor::new(self.config.nproc_per_node, policy);
        let workers = Workers::new(self.rounds.next_worker_id, assignment.base_rank, assignment.generation);
        self.rounds.current = Some(Round {
            assignment,
            supervisor,
            workers,
            tee: None,
            began: Instant::now(),
            first_failed: None,
            no_process_left: false,
        });
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
            let rank = round.workers.rank(local_rank);
            let stdio = attempt.worker(local_rank, rank).map_err(|error| error.to_string())?;
            let error_file = stdio.error_file.clone();
            let variables = variables(
                config,
                &round.assignment,
                local_rank,
                restarts,
                error_file.as_deref(),
                self.flight.folder(),
                &parent,
            )?;
            let added = round.workers.add(self.token.as_ref(), error_file, stdio.stderr_tail.clone());
            let (id, channel) =
                added.map_err(|error| format!("cannot create the channel to a worker: {error}"))?;
            let mut descriptors = vec![channel.as_fd()];
            let given = |target: &StdioTarget| target.as_fd().is_some();
            let (stdout, stderr) = (given(&stdio.stdout), given(&stdio.stderr));
            descriptors.extend(stdio.stdout.as_fd());
            descriptors.extend(stdio.stderr.as_fd());
            let request = ToGuard::Spawn(SpawnRequest {
                id,
                argv: command_line(config, local_rank),
                vars: variables.set,
                unset: variables.unset,
                cpus: config.cpus.get(local_rank).cloned().unwrap_or_default(),
                own_session: config.own_sessions,
                stdout,
                stderr,
            });
            self.guard.send(&request, &descriptors);
            if self.guard.has_ended() {
                return Ok(());
            }
        }
        round.tee = attempt.start_tee().map_err(|error| error.to_string())?;
        let next_id = round.workers.next_id();
        self.rounds.next_worker_id = next_id;
        fault::point("running");
        Ok(())
    }
}
