//! Decides about the workers of one node in one round, from spawn to outcome. Pure: no clock, no handle, no
//! I/O.
//!
//! The event loop passes events in and carries out the resulting actions, so a test simulates an hour of
//! failures in a microsecond. Each worker has its own state. When one worker fails, only this module decides
//! what happens to the other workers.

use std::time::{Duration, Instant};

use convoke_env::ExitCause;
use nix::sys::signal::Signal;

use crate::cause::NotStarted;

/// If workers failed only because they lost a peer, the launcher waits this long before it stops workers,
/// here or on other nodes. The peer's own failure may still be reported in this time. This exceeds the time
/// in which the loss of a launcher or its host is detected.
pub(crate) const ROOT_CAUSE_WAIT: Duration = Duration::from_secs(5);
/// Time from SIGTERM to SIGKILL for the remaining workers after a worker failed; torchrun's fixed value.
pub(crate) const FAILURE_GRACE: Duration = Duration::from_secs(30);

/// State machine of the workers of one node in one round.
#[derive(Debug)]
pub(crate) struct Supervisor {
    workers: Vec<Worker>,
    phase: Phase,
    /// Failures within this time after the first count as simultaneous. The remaining workers are stopped
    /// when it is over.
    simultaneity_window: Duration,
    /// The workers that ended other than with exit code 0, in the order in which their ends were noticed.
    pub(crate) failures: Vec<Failure>,
}

/// The worker that a failed worker blames for its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureOrigin {
    /// The worker blames no other worker: it failed by itself.
    Own,
    /// The worker blames another worker. The number is the local rank if that worker belongs to this node.
    Peer(Option<usize>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worker {
    /// The guard was asked to start the worker and has not answered.
    Starting,
    Running,
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// No worker has failed.
    Running,
    /// All failed workers blame others. This phase ends at `until`, or when a worker fails by itself, or when
    /// all blamed workers have ended.
    AwaitingRootCause { until: Instant },
    /// A worker failed. Every worker that fails before `until` counts as failed by itself, not as stopped.
    CollectingFailures { until: Instant },
    /// The workers were sent `signal`. Those that still run at `kill_at` get SIGKILL. After that `kill_at` is
    /// `None`, and they only need to be reaped. `outcome` is `None` if workers failed.
    Stopping { signal: Signal, kill_at: Option<Instant>, outcome: Option<Outcome> },
    /// All workers have ended.
    Done,
}

/// Input of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The worker is running.
    Started { local_rank: usize },
    /// The worker could not be started.
    StartFailed { local_rank: usize, error: NotStarted },
    /// The worker ended and has been reaped. `origin` is used only if it failed.
    Exited { local_rank: usize, cause: ExitCause, origin: FailureOrigin },
    /// The launcher received a signal: pass it on to the workers, and end the round within `grace`. If
    /// workers are already being stopped, they do not get it. `at_once` (a user has repeated Ctrl-C) then
    /// kills them.
    Stop { signal: Signal, grace: Duration, at_once: bool },
    /// Other nodes ended the round: stop the workers by `signal` within `grace`. No worker of this node is
    /// the cause.
    Abort { signal: Signal, grace: Duration },
    /// The time that [`Supervisor::wake_at`] returned may have come.
    Tick,
}

/// Output of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send `signal` to the worker's process group.
    Signal { local_rank: usize, signal: Signal },
    /// This failure ends the round. It is the first failure of a worker that failed by itself, or else the
    /// first of all failures.
    RoundFailed { local_rank: usize, cause: ExitCause },
    /// All workers have ended. This is the last action of a round.
    Finish(Outcome),
}

/// Result of a round on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All workers exited with 0.
    Succeeded,
    /// Workers failed. The failures are in the order in which they were noticed.
    Failed(Vec<Failure>),
    /// A worker could not be started.
    NotStarted { local_rank: usize, error: NotStarted },
    /// A signal to the launcher ended the round.
    Stopped { signal: Signal },
    /// Other nodes ended the round.
    Aborted,
}

/// A worker that ended other than with exit code 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) local_rank: usize,
    pub(crate) cause: ExitCause,
    /// True if the launcher was already stopping the workers when this one ended.
    pub(crate) stopped: bool,
    pub(crate) origin: FailureOrigin,
}

impl Supervisor {
    /// Returns the supervisor of a round with `count` workers. The guard was asked to start all of them.
    pub(crate) fn new(count: usize, simultaneity_window: Duration) -> Self {
        let workers = vec![Worker::Starting; count];
        Self { workers, phase: Phase::Running, simultaneity_window, failures: Vec::new() }
    }

    /// Returns the time at which the next [`Event::Tick`] is due; `None` if the current phase has no time
    /// limit.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        match &self.phase {
            Phase::AwaitingRootCause { until } | Phase::CollectingFailures { until } => Some(*until),
            Phase::Stopping { kill_at, .. } => *kill_at,
            Phase::Running | Phase::Done => None,
        }
    }

    /// Returns true if the workers are being stopped, or have ended.
    pub(crate) fn is_stopping(&self) -> bool {
        matches!(self.phase, Phase::Stopping { .. } | Phase::Done)
    }

    /// Processes `event` and appends the resulting actions to `out`.
    pub(crate) fn handle(&mut self, now: Instant, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Started { local_rank } => self.started(local_rank, out),
            Event::StartFailed { local_rank, error } => {
                self.workers[local_rank] = Worker::Ended;
                self.stop_after_failure(now, Some(Outcome::NotStarted { local_rank, error }), out);
            }
            Event::Exited { local_rank, cause, origin } => self.exited(now, local_rank, cause, origin, out),
            Event::Stop { signal, grace, at_once } => match &mut self.phase {
                Phase::Stopping { kill_at: Some(kill_at), outcome, .. } => {
                    // If a failure is the reason for the stop, it stays so. A round that other nodes ended
                    // would be followed by another round, so the signal replaces that reason. Workers that
                    // save their state then have the grace period of the signal.
                    if *outcome == Some(Outcome::Aborted) {
                        *outcome = Some(Outcome::Stopped { signal });
                        *kill_at = now + grace;
                    } else {
                        *kill_at = (*kill_at).min(now + grace);
                    }
                    if at_once {
                        self.kill(out);
                    }
                }
                _ => self.stop(signal, now + grace, Some(Outcome::Stopped { signal }), out),
            },
            Event::Abort { signal, grace } => match &mut self.phase {
                Phase::Stopping { kill_at: Some(kill_at), .. } => *kill_at = (*kill_at).min(now + grace),
                _ => self.stop(signal, now + grace, Some(Outcome::Aborted), out),
            },
            Event::Tick if self.wake_at().is_none_or(|at| now < at) => {}
            Event::Tick => match self.phase {
                Phase::AwaitingRootCause { .. } => self.fail_round(now, 0, out),
                Phase::CollectingFailures { .. } => self.stop_after_failure(now, None, out),
                Phase::Stopping { .. } => self.kill(out),
                Phase::Running | Phase::Done => {}
            },
        }
        self.finish_if_all_ended(out);
    }

    fn started(&mut self, local_rank: usize, out: &mut Vec<Action>) {
        self.workers[local_rank] = Worker::Running;
        // The workers may have been stopped while this worker was starting.
        if let Phase::Stopping { signal, .. } = self.phase {
            out.push(Action::Signal { local_rank, signal });
        }
    }

    fn exited(
        &mut self,
        now: Instant,
        local_rank: usize,
        cause: ExitCause,
        origin: FailureOrigin,
        out: &mut Vec<Action>,
    ) {
        self.workers[local_rank] = Worker::Ended;
        if cause != ExitCause::Code(0) {
            let last = self.failures.len();
            self.failures.push(Failure { local_rank, cause, stopped: self.is_stopping(), origin });
            match (&self.phase, origin) {
                (Phase::Running | Phase::AwaitingRootCause { .. }, FailureOrigin::Own) => {
                    self.fail_round(now, last, out)
                }
                (Phase::Running, FailureOrigin::Peer(_)) => {
                    let wait = self.simultaneity_window.max(ROOT_CAUSE_WAIT);
                    self.phase = Phase::AwaitingRootCause { until: now + wait };
                }
                (Phase::AwaitingRootCause { .. }, FailureOrigin::Peer(_)) => {}
                (Phase::CollectingFailures { .. } | Phase::Stopping { .. } | Phase::Done, _) => {}
            }
        }
        // A worker that the failed workers blame may have exited with 0.
        if matches!(self.phase, Phase::AwaitingRootCause { .. }) && self.have_all_suspects_ended() {
            self.fail_round(now, 0, out);
        }
    }

    /// Returns true if all workers that failed workers blame have ended. Until then one of them may still
    /// fail and show the root cause.
    fn have_all_suspects_ended(&self) -> bool {
        let has_ended = |local_rank: usize| self.workers[local_rank] == Worker::Ended;
        self.failures.iter().all(|failure| match failure.origin {
            FailureOrigin::Own => true,
            FailureOrigin::Peer(Some(blamed)) => has_ended(blamed),
            FailureOrigin::Peer(None) => (0..self.workers.len()).all(has_ended),
        })
    }

    /// Ends the round because of the failure at `index` in `failures`.
    fn fail_round(&mut self, now: Instant, index: usize, out: &mut Vec<Action>) {
        let Failure { local_rank, cause, .. } = self.failures[index];
        out.push(Action::RoundFailed { local_rank, cause });
        if self.simultaneity_window.is_zero() {
            self.stop_after_failure(now, None, out);
        } else {
            self.phase = Phase::CollectingFailures { until: now + self.simultaneity_window };
        }
    }

    fn stop_after_failure(&mut self, now: Instant, outcome: Option<Outcome>, out: &mut Vec<Action>) {
        self.stop(Signal::SIGTERM, now + FAILURE_GRACE, outcome, out);
    }

    /// Stops the workers, unless they are being stopped or have ended.
    fn stop(&mut self, signal: Signal, kill_at: Instant, outcome: Option<Outcome>, out: &mut Vec<Action>) {
        if !self.is_stopping() {
            self.signal_running(signal, out);
            self.phase = Phase::Stopping { signal, kill_at: Some(kill_at), outcome };
        }
    }

    fn kill(&mut self, out: &mut Vec<Action>) {
        self.signal_running(Signal::SIGKILL, out);
        if let Phase::Stopping { signal, kill_at, .. } = &mut self.phase {
            (*signal, *kill_at) = (Signal::SIGKILL, None);
        }
    }

    fn signal_running(&self, signal: Signal, out: &mut Vec<Action>) {
        let running = self.workers.iter().enumerate().filter(|&(_, worker)| *worker == Worker::Running);
        out.extend(running.map(|(local_rank, _)| Action::Signal { local_rank, signal }));
    }

    fn finish_if_all_ended(&mut self, out: &mut Vec<Action>) {
        if self.phase == Phase::Done || self.workers.iter().any(|worker| *worker != Worker::Ended) {
            return;
        }
        let outcome = match std::mem::replace(&mut self.phase, Phase::Done) {
            Phase::Stopping { outcome: Some(outcome), .. } => outcome,
            _ if self.failures.is_empty() => Outcome::Succeeded,
            _ => Outcome::Failed(self.failures.clone()),
        };
        out.push(Action::Finish(outcome));
    }
}

#[cfg(test)]
mod tests;
