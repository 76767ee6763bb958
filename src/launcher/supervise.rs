//! The workers of one node in one round, from spawn to outcome. Pure: no clock, no handle, no I/O.
//!
//! The shell feeds events in and carries actions out, so a test simulates an hour of failures in a
//! microsecond. Each worker has its own state. Only this module decides what happens to the others when one
//! fails.

use std::time::{Duration, Instant};

use convoke_env::ExitCause;
use nix::sys::signal::Signal;

use crate::cause::NotStarted;

/// The workers of one node in one round.
#[derive(Debug)]
pub(crate) struct Supervisor {
    workers: Vec<Worker>,
    phase: Phase,
    policy: Policy,
    failures: Vec<Failure>,
}

/// Delays of the supervisor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Failures within this time after the first count as simultaneous. The other workers are stopped only
    /// then.
    pub(crate) settle: Duration,
    /// Time for which a worker that only lost a peer stops no others: the peer's own failure may still be
    /// reported.
    pub(crate) culprit: Duration,
    /// Time from SIGTERM to SIGKILL after a failure.
    pub(crate) failure_grace: Duration,
}

/// The worker that a failed worker blames for its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// No other worker: it failed by itself.
    Itself,
    /// Another worker: one of this node if a local rank is given.
    Other(Option<usize>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worker {
    /// Requested, without a pid yet.
    Starting,
    Running,
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Running,
    /// All failed workers blame others. This lasts until one fails by itself, or all blamed workers have
    /// ended.
    Suspecting {
        until: Instant,
    },
    /// A worker failed. Every worker that fails before `until` counts as failed by itself.
    Settling {
        until: Instant,
    },
    /// `signal` was sent. Workers that still live at `kill_at` get SIGKILL.
    Stopping {
        signal: Signal,
        kill_at: Instant,
        why: Why,
    },
    /// SIGKILL was sent. The workers only need to be reaped.
    Killing {
        why: Why,
    },
    Done,
}

/// Reason for which the round ends before its workers do.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Why {
    Failure,
    Launch { local_rank: usize, error: NotStarted },
    Signal(Signal),
    Abort,
}

/// Input of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The worker is running.
    Started { local_rank: usize },
    /// The worker could not be started.
    StartFailed { local_rank: usize, error: NotStarted },
    /// The worker ended and has been reaped. `blame` counts if it failed.
    Exited { local_rank: usize, cause: ExitCause, blame: Blame },
    /// The launcher received a signal: pass it on, and end the round within `grace`. If workers are already
    /// being stopped, that is the stop in progress. Only a user who repeats Ctrl-C wants it to end `at_once`.
    Stop { signal: Signal, grace: Duration, at_once: bool },
    /// Other nodes ended the round: stop the workers by `signal` within `grace`. No worker of this node is
    /// the cause.
    Abort { signal: Signal, grace: Duration },
    /// Time has passed.
    Tick,
}

/// Output of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send `signal` to the worker's process group.
    Signal { local_rank: usize, signal: Signal },
    /// This failure ends the round. It is the first of a worker that failed by itself, or else the first of
    /// all.
    Failing { local_rank: usize, cause: ExitCause },
    /// No worker is left. The last action of a round.
    Finish(Outcome),
}

/// Result of a round on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All workers exited with 0.
    Succeeded,
    /// Workers failed, in the order in which it was noticed.
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
    /// True if we had already told the worker to stop.
    pub(crate) stopped: bool,
    pub(crate) blame: Blame,
}

impl Supervisor {
    /// Returns the supervisor of a round with `count` workers, all of them requested.
    pub(crate) fn new(count: usize, policy: Policy) -> Self {
        Self { workers: vec![Worker::Starting; count], phase: Phase::Running, policy, failures: Vec::new() }
    }

    /// Returns the time of the next [`Event::Tick`], or `None` if time cannot change anything.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Suspecting { until } | Phase::Settling { until } => Some(*until),
            Phase::Stopping { kill_at, .. } => Some(*kill_at),
            Phase::Running | Phase::Killing { .. } | Phase::Done => None,
        }
    }

    /// Returns true if the workers are being stopped, or have ended.
    pub(crate) fn is_stopping(&self) -> bool {
        match self.phase {
            Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } => false,
            Phase::Stopping { .. } | Phase::Killing { .. } | Phase::Done => true,
        }
    }

    /// Returns the workers that ended other than with exit code 0, in the order in which that was noticed.
    pub(crate) fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// Processes `event` and appends the resulting actions.
    pub(crate) fn handle(&mut self, now: Instant, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Started { local_rank } => self.started(local_rank, out),
            Event::StartFailed { local_rank, error } => {
                self.workers[local_rank] = Worker::Ended;
                self.stop(
                    now,
                    Signal::SIGTERM,
                    self.policy.failure_grace,
                    Why::Launch { local_rank, error },
                    out,
                );
            }
            Event::Exited { local_rank, cause, blame } => self.exited(now, local_rank, cause, blame, out),
            Event::Stop { signal, grace, at_once } => match &mut self.phase {
                Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } => {
                    self.stop(now, signal, grace, Why::Signal(signal), out)
                }
                Phase::Stopping { kill_at, why, .. } => {
                    // A failure remains the reason. A round that other nodes ended would be followed by
                    // another one, so this signal replaces that reason.
                    // Workers that save their state then have the time of this stop.
                    if *why == Why::Abort {
                        *why = Why::Signal(signal);
                        *kill_at = now + grace;
                    } else {
                        *kill_at = (*kill_at).min(now + grace);
                    }
                    if at_once {
                        self.kill(out);
                    }
                }
                Phase::Killing { .. } | Phase::Done => {}
            },
            Event::Abort { signal, grace } => match &mut self.phase {
                Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } => {
                    self.stop(now, signal, grace, Why::Abort, out);
                }
                Phase::Stopping { kill_at, .. } => *kill_at = (*kill_at).min(now + grace),
                Phase::Killing { .. } | Phase::Done => {}
            },
            Event::Tick => match self.phase {
                Phase::Suspecting { until } if now >= until => self.failing(now, 0, out),
                Phase::Settling { until } if now >= until => {
                    self.stop(now, Signal::SIGTERM, self.policy.failure_grace, Why::Failure, out);
                }
                Phase::Stopping { kill_at, .. } if now >= kill_at => self.kill(out),
                Phase::Running
                | Phase::Suspecting { .. }
                | Phase::Settling { .. }
                | Phase::Stopping { .. }
                | Phase::Killing { .. }
                | Phase::Done => {}
            },
        }
        self.finish_if_over(out);
    }

    fn started(&mut self, local_rank: usize, out: &mut Vec<Action>) {
        self.workers[local_rank] = Worker::Running;
        // The phase of the round may have changed while this worker was starting.
        match self.phase {
            Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } | Phase::Done => {}
            Phase::Stopping { signal, .. } => out.push(Action::Signal { local_rank, signal }),
            Phase::Killing { .. } => out.push(Action::Signal { local_rank, signal: Signal::SIGKILL }),
        }
    }

    fn exited(
        &mut self,
        now: Instant,
        local_rank: usize,
        cause: ExitCause,
        blame: Blame,
        out: &mut Vec<Action>,
    ) {
        self.workers[local_rank] = Worker::Ended;
        if cause != ExitCause::Code(0) {
            let last = self.failures.len();
            self.failures.push(Failure { local_rank, cause, stopped: self.is_stopping(), blame });
            match (&self.phase, blame) {
                (Phase::Running | Phase::Suspecting { .. }, Blame::Itself) => self.failing(now, last, out),
                (Phase::Running, Blame::Other(_)) => {
                    let patience = self.policy.settle.max(self.policy.culprit);
                    self.phase = Phase::Suspecting { until: now + patience };
                }
                (Phase::Suspecting { .. }, Blame::Other(_)) => {}
                (
                    Phase::Settling { .. } | Phase::Stopping { .. } | Phase::Killing { .. } | Phase::Done,
                    Blame::Itself | Blame::Other(_),
                ) => {}
            }
        }
        // A worker that exits with 0 may also be one that the others blame.
        if matches!(self.phase, Phase::Suspecting { .. }) && self.have_all_blamed_ended() {
            self.failing(now, 0, out);
        }
    }

    /// Returns true if no worker of this node is left that may still show why the others failed.
    fn have_all_blamed_ended(&self) -> bool {
        let has_ended = |local_rank: usize| self.workers[local_rank] == Worker::Ended;
        self.failures.iter().all(|failure| match failure.blame {
            Blame::Itself => true,
            Blame::Other(Some(blamed)) => has_ended(blamed),
            Blame::Other(None) => (0..self.workers.len()).all(has_ended),
        })
    }

    /// Lets the failure `index` end the round.
    fn failing(&mut self, now: Instant, index: usize, out: &mut Vec<Action>) {
        let Failure { local_rank, cause, .. } = self.failures[index];
        out.push(Action::Failing { local_rank, cause });
        if self.policy.settle.is_zero() {
            self.stop(now, Signal::SIGTERM, self.policy.failure_grace, Why::Failure, out);
        } else {
            self.phase = Phase::Settling { until: now + self.policy.settle };
        }
    }

    fn stop(&mut self, now: Instant, signal: Signal, grace: Duration, why: Why, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } => {
                self.signal_running(signal, out);
                self.phase = Phase::Stopping { signal, kill_at: now + grace, why };
            }
            Phase::Stopping { .. } | Phase::Killing { .. } | Phase::Done => {}
        }
    }

    fn kill(&mut self, out: &mut Vec<Action>) {
        self.signal_running(Signal::SIGKILL, out);
        let why = match &self.phase {
            Phase::Stopping { why, .. } | Phase::Killing { why } => why.clone(),
            Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } | Phase::Done => Why::Failure,
        };
        self.phase = Phase::Killing { why };
    }

    fn signal_running(&self, signal: Signal, out: &mut Vec<Action>) {
        let running = self.workers.iter().enumerate().filter(|&(_, worker)| *worker == Worker::Running);
        out.extend(running.map(|(local_rank, _)| Action::Signal { local_rank, signal }));
    }

    fn finish_if_over(&mut self, out: &mut Vec<Action>) {
        if self.phase == Phase::Done || self.workers.iter().any(|worker| *worker != Worker::Ended) {
            return;
        }
        let failures = self.failures.clone();
        let outcome = match std::mem::replace(&mut self.phase, Phase::Done) {
            Phase::Stopping { why: Why::Launch { local_rank, error }, .. }
            | Phase::Killing { why: Why::Launch { local_rank, error } } => {
                Outcome::NotStarted { local_rank, error }
            }
            Phase::Stopping { why: Why::Signal(signal), .. }
            | Phase::Killing { why: Why::Signal(signal) } => Outcome::Stopped { signal },
            Phase::Stopping { why: Why::Abort, .. } | Phase::Killing { why: Why::Abort } => Outcome::Aborted,
            Phase::Stopping { why: Why::Failure, .. } | Phase::Killing { why: Why::Failure } => {
                Outcome::Failed(failures)
            }
            Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } | Phase::Done
                if failures.is_empty() =>
            {
                Outcome::Succeeded
            }
            Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } | Phase::Done => {
                Outcome::Failed(failures)
            }
        };
        out.push(Action::Finish(outcome));
    }
}

#[cfg(test)]
#[path = "supervise/tests.rs"]
mod tests;
