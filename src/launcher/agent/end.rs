//! The end of the launcher, regular or after the loss of its guard.

use std::io;
use std::time::{Duration, Instant, SystemTime};

use super::machine::End;
use super::run::{Exit, News, Shell};
use super::signals::Meaning;
use super::trial::told_by;
use crate::guard::{FromGuard, ToGuard, kill_all};
use crate::say::say;
use crate::{exit, fault, supervise};

/// Longest time that the guard may take to exit.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time that output that is already written may take to reach its file or the console.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

impl Shell {
    pub(super) async fn end(&mut self, end: End) -> Exit {
        fault::point("ending");
        self.close_output();
        if let Err(error) = self.dismiss_guard(&end).await {
            say(&format!("warning: guard: {error}"));
            kill_all(|_, _| {});
        }
        self.leave_court(&end);
        let mut report = None;
        if let Some(verdict) = &self.verdict {
            say(&format!("error: {verdict}; so this node ends as well"));
            report = told_by(&verdict.what).map(|theirs| match &end {
                End::Failed(failures) => self.report(failures).0.with_root_of(&theirs),
                End::Success | End::Error(_) | End::Stopped(_) | End::Interrupted(_) | End::Aborted => theirs,
            });
            if let Some(report) = &mut report {
                report.flight = match &end {
                    End::Failed(failures) => self.flight(Some(failures)),
                    End::Success | End::Error(_) | End::Stopped(_) | End::Interrupted(_) | End::Aborted => {
                        self.flight(None)
                    }
                };
                self.print(report);
            }
        }
        let exit = match &end {
            End::Success => {
                self.events
                    .agent_succeeded(self.round.as_ref().map(|round| &round.assignment), self.restarts);
                Exit::Code(exit::SUCCESS)
            }
            End::Failed(failures) => {
                self.events.agent_failed(self.round.as_ref().map(|round| &round.assignment), self.restarts);
                // The report of the other nodes covers failures that they caused.
                if self.verdict.is_none() {
                    report = Some(self.report_failures(failures));
                }
                Exit::Code(exit::FAILURE)
            }
            End::Error(error) => {
                say(&format!("error: {error}"));
                self.tell_flight();
                Exit::Code(exit::FAILURE)
            }
            End::Stopped(signal) => {
                say(&format!("stopped by {signal}"));
                self.tell_flight();
                Exit::Code(exit::FAILURE)
            }
            End::Aborted => {
                self.events.agent_failed(self.round.as_ref().map(|round| &round.assignment), self.restarts);
                if report.is_none() {
                    self.tell_flight();
                }
                Exit::Code(exit::FAILURE)
            }
            End::Interrupted(signal) if self.pause.take().is_some() => {
                say(&format!("stopped by {signal} before the workers were restarted"));
                Exit::Code(exit::FAILURE)
            }
            End::Interrupted(signal) if self.round.is_some() => {
                say(&format!("stopped by {signal} while waiting for other nodes"));
                Exit::Code(exit::FAILURE)
            }
            End::Interrupted(signal) => {
                say(&format!("{signal} while waiting for other nodes"));
                Exit::Signal(*signal as i32)
            }
        };
        self.write_report(&end, report);
        self.leave_guests(&end).await;
        self.signals.fatal.map_or(exit, Exit::Signal)
    }

    /// Forwards the remaining output of the workers, which have all ended. Processes that they left behind
    /// may continue to write.
    pub(super) fn finish_output(&mut self) {
        if let Some(tee) = self.round.as_ref().and_then(|round| round.tee.as_ref()) {
            tee.drain(Instant::now() + DRAIN_TIMEOUT);
        }
        self.run_dir.check_space();
    }

    /// Forwards the remaining output and closes it for good.
    fn close_output(&mut self) {
        if let Some(tee) = self.round.as_mut().and_then(|round| round.tee.take()) {
            tee.finish(Instant::now() + DRAIN_TIMEOUT);
        }
    }

    /// Tells the guard to exit and waits until it has. Meanwhile closes the rendezvous and removes the files
    /// that nobody needs.
    async fn dismiss_guard(&mut self, end: &End) -> io::Result<()> {
        self.link.send(&ToGuard::Leave, &[])?;
        if let Ok(mut rendezvous) = self.rendezvous.try_lock() {
            rendezvous.close();
        }
        if matches!(end, End::Success) {
            self.flight.discard();
        }
        self.run_dir.remove_empty();
        let deadline = tokio::time::Instant::now() + LEAVE_TIMEOUT;
        let mut closed = false;
        // The guard's socket closes a moment before the guard exits. Only its reaping shows that no process
        // is left.
        while self.guard_end.is_none() {
            tokio::select! {
                message = self.link.receive(), if !closed => closed = message?.is_none(),
                Some(news) = self.news.recv() => if matches!(news, News::Signal(_, Meaning::Child)) { self.hear(news); },
                () = tokio::time::sleep_until(deadline) => return Err(io::Error::other("it does not leave")),
            }
        }
        Ok(())
    }

    /// Handles the unexpected end of the guard. The kernel has killed the workers, and this process ends
    /// their descendants.
    pub(super) async fn guard_lost(&mut self) -> Exit {
        let mut reaped = Vec::new();
        // The guard's socket may have closed a moment before the guard could be reaped.
        kill_all(|pid, cause| reaped.push((pid, cause)));
        // No other process should hold the far end of the socket open.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, self.hear_last_words()).await;
        self.note_reaped(&reaped);
        self.close_output();
        self.tell_guard_lost();
        Exit::Code(exit::FAILURE)
    }

    /// Records the guard's last messages about its workers. They lead to no actions any more.
    async fn hear_last_words(&mut self) {
        while let Ok(Some(message)) = self.link.receive().await {
            let Some(round) = &mut self.round else { continue };
            match message {
                FromGuard::Spawned { id, pid } => {
                    if let Some(local_rank) = round.workers.local_rank(id) {
                        round.workers.started(local_rank, pid);
                    }
                }
                FromGuard::Exited { id, cause, evidence, .. } => {
                    if let Some(local_rank) = round.workers.local_rank(id) {
                        round.workers.ended(local_rank, SystemTime::now(), cause, evidence);
                        let blame = supervise::Blame::Itself;
                        let exited = supervise::Event::Exited { local_rank, cause, blame };
                        round.supervisor.handle(Instant::now(), exited, &mut Vec::new());
                    }
                }
                FromGuard::SpawnFailed { .. } | FromGuard::Forwarded { .. } | FromGuard::Swept { .. } => {}
            }
        }
    }
}
