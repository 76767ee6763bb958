//! The workers of one node in one round, from spawn to outcome. Pure: no clock, no handle, no I/O.
//!
//! The shell feeds events in and carries actions out, so a test lives through an hour of failures in a
//! microsecond. Each worker is a machine of its own; what happens to the others when one fails is
//! decided here and nowhere else.

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

/// How patient the supervisor is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Failures this long after the first count as simultaneous: the others are stopped only then.
    pub(crate) settle: Duration,
    /// How long a worker that only lost a peer stops nobody: the peer may still be about to say why it ends.
    pub(crate) culprit: Duration,
    /// From SIGTERM to SIGKILL after a failure.
    pub(crate) failure_grace: Duration,
}

/// What a failed worker blames for its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// Nobody else: it failed by itself.
    Itself,
    /// Another worker: one of this node, if it names one.
    Other(Option<usize>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worker {
    /// Asked for, no pid yet.
    Starting,
    Running,
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Running,
    /// All who failed blame others. This lasts until one fails by itself, or all whom they blame have ended.
    Suspecting {
        until: Instant,
    },
    /// Somebody failed; who else fails until then fails by itself.
    Settling {
        until: Instant,
    },
    /// `signal` was sent; whoever still lives at `kill_at` gets SIGKILL.
    Stopping {
        signal: Signal,
        kill_at: Instant,
        why: Why,
    },
    /// SIGKILL was sent; only the reaping is left.
    Killing {
        why: Why,
    },
    Done,
}

/// Why the round ends before its workers do.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Why {
    Failure,
    Launch { local_rank: usize, error: NotStarted },
    Signal(Signal),
    Abort,
}

/// What happens to the workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The worker runs.
    Started { local_rank: usize },
    /// It could not be started.
    StartFailed { local_rank: usize, error: NotStarted },
    /// It ended and has been reaped. `blame` counts if it failed.
    Exited { local_rank: usize, cause: ExitCause, blame: Blame },
    /// A signal to the launcher: pass it on, and end the round within `grace`. If workers are being stopped already, that is
    /// one stop; only a user who repeats Ctrl-C wants it to end `at_once`.
    Stop { signal: Signal, grace: Duration, at_once: bool },
    /// The round is over for reasons of other nodes: stop the workers by `signal` within `grace`, nobody here is to blame.
    Abort { signal: Signal, grace: Duration },
    /// Time has passed.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send `signal` to the worker's process group.
    Signal { local_rank: usize, signal: Signal },
    /// This failure ends the round: the first of a worker that failed by itself, else the first.
    Failing { local_rank: usize, cause: ExitCause },
    /// No worker is left. The last action of a round.
    Finish(Outcome),
}

/// How a round ended on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All workers exited with 0.
    Succeeded,
    /// Workers failed, in the order in which it was noticed.
    Failed(Vec<Failure>),
    /// A worker could not even be started.
    NotStarted { local_rank: usize, error: NotStarted },
    /// A signal to the launcher ended it.
    Stopped { signal: Signal },
    /// Other nodes ended it.
    Aborted,
}

/// A worker that ended otherwise than by exit code 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) local_rank: usize,
    pub(crate) cause: ExitCause,
    /// We had already told it to stop.
    pub(crate) stopped: bool,
    pub(crate) blame: Blame,
}

impl Supervisor {
    /// A round of `count` workers, all of them asked for.
    pub(crate) fn new(count: usize, policy: Policy) -> Self {
        Self { workers: vec![Worker::Starting; count], phase: Phase::Running, policy, failures: Vec::new() }
    }

    /// When `handle` next wants a [`Event::Tick`]; `None` when time cannot change anything.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Suspecting { until } | Phase::Settling { until } => Some(*until),
            Phase::Stopping { kill_at, .. } => Some(*kill_at),
            Phase::Running | Phase::Killing { .. } | Phase::Done => None,
        }
    }

    /// Whether the workers are being stopped, or have ended.
    pub(crate) fn is_stopping(&self) -> bool {
        match self.phase {
            Phase::Running | Phase::Suspecting { .. } | Phase::Settling { .. } => false,
            Phase::Stopping { .. } | Phase::Killing { .. } | Phase::Done => true,
        }
    }

    /// Who has ended otherwise than by exit code 0, in the order in which it was noticed.
    pub(crate) fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// Takes in `event` and appends what is to be done.
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
                    // A failure stays the reason. What other nodes ended would begin anew; workers that save have the
                    // time of this stop then.
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
        // The round may have turned while this worker was still being started.
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
        // Also one that exits with 0 may be whom they blame.
        if matches!(self.phase, Phase::Suspecting { .. }) && self.have_all_blamed_ended() {
            self.failing(now, 0, out);
        }
    }

    /// Whether nobody of this node is left who may still say why the others failed.
    fn have_all_blamed_ended(&self) -> bool {
        let has_ended = |local_rank: usize| self.workers[local_rank] == Worker::Ended;
        self.failures.iter().all(|failure| match failure.blame {
            Blame::Itself => true,
            Blame::Other(Some(blamed)) => has_ended(blamed),
            Blame::Other(None) => (0..self.workers.len()).all(has_ended),
        })
    }

    /// The failure `index` ends the round.
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
