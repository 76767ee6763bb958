//! Ends the launcher, at the end of the job or after the loss of its guard.

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::event_loop::{EventLoop, LauncherExit};
use super::job_outcome::report_of;
use super::signals::SignalAction;
use super::state_machine::AgentOutcome;
use crate::guard::{FromGuard, ToGuard, kill_all};
use crate::messages::print_message;
use crate::rendezvous::ClusterCommand;
use crate::{fault, supervise};

/// Longest time that the guard may take to exit after the launcher told it to.
const GUARD_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time that output which workers have already written may take to reach its file or the console.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

impl EventLoop {
    pub(super) async fn end(&mut self, end: AgentOutcome) -> LauncherExit {
        fault::point("ending");
        self.close_output();
        self.drain.remove_file();
        if let Err(error) = self.stop_guard(&end).await {
            print_message(&format!(
                "warning: cannot stop the guard process: {error}; killing the remaining processes"
            ));
            kill_all();
        }
        let other_jobs = self.leave(&end).await;
        let mut report = None;
        if let Some(job_outcome) = &self.job_outcome {
            print_message(&format!("error: {job_outcome}; so this node ends as well"));
            report = report_of(&job_outcome.kind).map(|theirs| match end.failures() {
                Some(failures) => self.report(failures, None).0.with_root_of(&theirs),
                None => theirs,
            });
            if let Some(report) = &mut report {
                report.flight = self.flight(end.failures());
                self.print(report);
            }
        }
        let (assignment, restarts) = (self.rounds.assignment(), self.rounds.restarts);
        let mut exit = LauncherExit::Code(ExitCode::FAILURE);
        match &end {
            AgentOutcome::Success => {
                self.events.agent_ended(assignment, restarts, true);
                exit = LauncherExit::Code(ExitCode::SUCCESS);
            }
            AgentOutcome::Failed(failures) => {
                self.events.agent_ended(assignment, restarts, false);
                // If other nodes caused the failure, their report has been printed above.
                if self.job_outcome.is_none() {
                    report = Some(self.report_failures(failures));
                }
            }
            AgentOutcome::Error(error) => {
                print_message(&format!("error: {error}"));
                self.report_flight();
            }
            AgentOutcome::Stopped(signal) => {
                print_message(&format!("stopped by {signal}"));
                self.report_flight();
            }
            AgentOutcome::Aborted => {
                self.events.agent_ended(assignment, restarts, false);
                if report.is_none() {
                    self.report_flight();
                }
            }
            AgentOutcome::Interrupted(signal) if self.restart_delay.cancel().is_some() => {
                print_message(&format!("stopped by {signal} before the workers were restarted"));
            }
            AgentOutcome::Interrupted(signal) if self.rounds.current.is_some() => {
                print_message(&format!("stopped by {signal} while waiting for other nodes"));
            }
            AgentOutcome::Interrupted(signal) => {
                print_message(&format!("{signal} while waiting for other nodes"));
                exit = LauncherExit::Signal(*signal as i32);
            }
        }
        if let Some(code) = self.write_outcome(&end, report) {
            exit = LauncherExit::Code(code.into());
        }
        if let Some(code) = self.drained(&end) {
            exit = LauncherExit::Code(code.into());
            self.after_drain().await;
        }
        self.serve_other_jobs(other_jobs).await;
        self.signals.fatal.map_or(exit, LauncherExit::Signal)
    }

    /// Copies the remaining output of the workers, which have all ended, to console and files. Processes that
    /// they left behind may continue to write.
    pub(super) fn finish_output(&mut self) {
        if let Some(tee) = self.rounds.tee() {
            tee.drain(Instant::now() + DRAIN_TIMEOUT);
        }
        self.run_dir.check_space();
    }

    /// Copies the remaining output of the workers to console and files, and stops reading it.
    fn close_output(&mut self) {
        if let Some(tee) = self.rounds.current.as_mut().and_then(|round| round.tee.take()) {
            tee.finish(Instant::now() + DRAIN_TIMEOUT);
        }
    }

    /// Tells the guard to exit and waits until it has. While the guard exits, closes the rendezvous and
    /// removes files that nobody needs.
    async fn stop_guard(&mut self, end: &AgentOutcome) -> io::Result<()> {
        self.guard.try_send(&ToGuard::Exit, &[])?;
        self.cluster.send(ClusterCommand::Close);
        if matches!(end, AgentOutcome::Success) {
            self.flight.discard();
        }
        self.run_dir.remove_empty();
        let deadline = tokio::time::Instant::now() + GUARD_EXIT_TIMEOUT;
        let mut closed = false;
        // The guard's socket closes a moment before the guard exits. Only when the guard has been reaped is
        // no process left.
        while self.guard.exit_cause().is_none() {
            tokio::select! {
                message = self.guard.receive(), if !closed => closed = message?.is_none(),
                (_, action) = self.signals.next() => {
                    if action == SignalAction::Child {
                        self.reap_children();
                    }
                }
                () = tokio::time::sleep_until(deadline) => {
                    let limit = GUARD_EXIT_TIMEOUT.as_secs();
                    return Err(io::Error::other(format!("it did not exit within {limit} s")));
                }
            }
        }
        Ok(())
    }

    /// Handles the unexpected end of the guard. The kernel has killed the workers, and this process kills
    /// their descendants.
    pub(super) async fn handle_guard_loss(&mut self) -> LauncherExit {
        // The guard's socket may have closed a moment before the guard could be reaped. `kill_all` waits for
        // the guard too.
        let reaped = kill_all();
        // The wait is bounded only in case another process holds the far end of the socket open, which none
        // should.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, self.drain_guard_messages()).await;
        self.record_reaped(&reaped);
        self.close_output();
        self.report_guard_loss();
        LauncherExit::Code(ExitCode::FAILURE)
    }

    /// Records the guard's last messages about its workers. The actions that the supervisor derives from them
    /// are dropped.
    async fn drain_guard_messages(&mut self) {
        while let Ok(Some(message)) = self.guard.receive().await {
            match message {
                FromGuard::Spawned { id, pid } => {
                    if let Some((round, local_rank)) = self.rounds.of_worker(id) {
                        round.workers[local_rank].pid = Some(pid);
                    }
                }
                FromGuard::Exited { id, cause, evidence, .. } => {
                    if let Some((round, local_rank)) = self.rounds.of_worker(id) {
                        round.record_exit(local_rank, cause, evidence);
                        let origin = supervise::FailureOrigin::Own;
                        let exited = supervise::Event::Exited { local_rank, cause, origin };
                        round.supervisor.handle(Instant::now(), exited, &mut Vec::new());
                    }
                }
                FromGuard::SpawnFailed { .. } | FromGuard::Forwarded { .. } | FromGuard::Swept { .. } => {}
            }
        }
    }
}
