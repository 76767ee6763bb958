//! State machine of one agent: it decides when rounds start and end, and how the agent ends. Pure: no clock,
//! no handle, no I/O.
//!
//! ```text
//! Joining ─► Running ─► Sweeping ─┬─► Barrier ─► end        all workers succeeded
//!    ▲                            ├─► Waiting ─► end        no restart left, and the others know of no loss
//!    │                            ├─► end                   stopped, or no restarts left
//!    └────────────────────────────┘                         a restart, or all nodes start a new round
//! ```

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::supervise::{FAILURE_GRACE, Failure, Outcome};

/// After a worker succeeds, processes that it started may run this long before the launcher stops and reports
/// them. Helpers such as Python's resource tracker end shortly after their worker.
const ORPHAN_EXIT_WAIT: Duration = Duration::from_millis(250);

/// State of one agent.
#[derive(Debug)]
pub(crate) struct Agent {
    state: State,
    /// `--max-restarts`.
    max_restarts: u32,
    /// True if processes left behind by successful workers are left alone (`--orphans=keep`).
    keep_orphans: bool,
    restarts: u32,
    /// What follows the current round on all nodes; `None` until the rendezvous has decided it.
    decision: Option<RoundDecision>,
    /// True if a failure after which no restart is left becomes final only when the other nodes decide so.
    awaits_decision: bool,
    /// The first signal received that ends the job.
    signalled: Option<Signal>,
    /// True if restarts would be useless, so that the next failure is final.
    restarts_disabled: bool,
    /// True if the job is being drained, so that nothing is restarted.
    draining: bool,
}

/// The decision of the rendezvous, for all nodes, on what follows the current round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoundDecision {
    /// All nodes start a new round.
    Restart,
    /// The job ends because of a failure of this node.
    JobFailed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Joining,
    Running,
    Sweeping(Outcome),
    /// Waits until the other nodes decide whether these failures end the job.
    Waiting(Vec<Failure>),
    Barrier,
    Ended,
}

/// Input of the agent's state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The rendezvous has assigned this node its round. `awaits_decision` is true if a failure without a
    /// remaining restart is final only when the other nodes decide so.
    Joined { awaits_decision: bool },
    /// The rendezvous failed.
    JoinFailed(String),
    /// The job succeeded while this node waited to join a round.
    NotNeeded,
    /// All workers of the round have ended.
    RoundEnded(Outcome),
    /// No process that the workers started remains.
    Swept,
    /// All nodes have succeeded, or waiting for the other nodes is useless.
    BarrierPassed,
    /// A signal ends the job. `at_once` is true if the user has repeated Ctrl-C.
    Signalled { signal: Signal, at_once: bool },
    /// The job has ended on all nodes with an outcome that another node declared.
    JobEnded,
    /// The job has ended on all nodes because of a failure of this node.
    JobFailedHere,
    /// All nodes start a new round, perhaps without this one. If `partitioned`, this node is cut off and must
    /// kill its processes at once.
    NewRound { partitioned: bool },
}

/// Output of the agent's state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Join the other nodes in the rendezvous, for the next round. `restarts` is the number of restarts that
    /// this node has used up; several rounds may have the same number.
    Join { restarts: u32 },
    /// Start the workers.
    Start,
    /// Pass the signal on to the workers. If the workers are already being stopped, `at_once` kills them.
    Stop { signal: Signal, at_once: bool },
    /// Stop the workers: the other nodes have ended the round or the job.
    Abort,
    /// Stop processes that the workers left behind: SIGTERM after `delay`, SIGKILL after another `grace`.
    Sweep { delay: Duration, grace: Duration },
    /// Wait in the rendezvous until all nodes have succeeded.
    Barrier,
    /// End the agent. No action follows.
    End(AgentOutcome),
}

/// How the agent ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AgentOutcome {
    /// All workers of all nodes have succeeded, as far as this node knows.
    Success,
    /// Workers failed and no restart is left.
    Failed(Vec<Failure>),
    /// The agent could not continue. The text gives the reason.
    Error(String),
    /// A signal stopped the workers.
    Stopped(Signal),
    /// A signal came before the workers started or after they ended.
    Interrupted(Signal),
    /// Another node ended the job.
    Aborted,
}

impl AgentOutcome {
    /// Returns the failures because of which the agent ended.
    pub(crate) fn failures(&self) -> Option<&[Failure]> {
        if let Self::Failed(failures) = self { Some(failures) } else { None }
    }
}

impl Agent {
    /// Returns the agent of a node that joins its first round.
    pub(crate) fn new(max_restarts: u32, keep_orphans: bool) -> Self {
        Self {
            state: State::Joining,
            max_restarts,
            keep_orphans,
            restarts: 0,
            decision: None,
            awaits_decision: false,
            signalled: None,
            restarts_disabled: false,
            draining: false,
        }
    }

    /// Processes `event`. Returns the resulting action, if any.
    pub(crate) fn handle(&mut self, event: Event) -> Option<Action> {
        if let Event::Signalled { signal, .. } = event {
            self.signalled.get_or_insert(signal);
        }
        let (next, action) = match (std::mem::replace(&mut self.state, State::Ended), event) {
            (State::Ended, _) => (State::Ended, None),

            (State::Joining, Event::Joined { awaits_decision }) => {
                (self.decision, self.awaits_decision) = (None, awaits_decision);
                (State::Running, Some(Action::Start))
            }
            (State::Joining, Event::JoinFailed(error)) => end(AgentOutcome::Error(error)),
            (State::Joining, Event::NotNeeded) => end(AgentOutcome::Success),
            (State::Joining | State::Barrier | State::Waiting(_), Event::Signalled { signal, .. }) => {
                end(AgentOutcome::Interrupted(signal))
            }

            (State::Joining | State::Barrier, Event::JobEnded) => end(AgentOutcome::Aborted),
            (State::Running, Event::JobEnded) => (State::Running, Some(Action::Abort)),
            (State::Sweeping(outcome), Event::JobEnded) => {
                let restarts = matches!(outcome, Outcome::Failed(_)) && self.restarts_left() > 0;
                let goes_on = restarts || outcome == Outcome::Succeeded;
                (State::Sweeping(if goes_on { Outcome::Aborted } else { outcome }), None)
            }

            (State::Waiting(failures), Event::JobEnded | Event::JobFailedHere) => {
                end(AgentOutcome::Failed(failures))
            }

            (State::Running, Event::NewRound { .. }) => {
                self.decision = Some(RoundDecision::Restart);
                (State::Running, Some(Action::Abort))
            }
            (State::Sweeping(outcome), Event::NewRound { partitioned }) => {
                self.decision = Some(RoundDecision::Restart);
                let at_once = Action::Sweep { delay: Duration::ZERO, grace: Duration::ZERO };
                (State::Sweeping(outcome), partitioned.then_some(at_once))
            }
            (State::Waiting(_) | State::Barrier, Event::NewRound { .. }) => self.join(),
            (state @ (State::Running | State::Sweeping(_)), Event::JobFailedHere) => {
                self.decision = Some(RoundDecision::JobFailed);
                (state, None)
            }

            (State::Running, Event::Signalled { signal, at_once }) => {
                (State::Running, Some(Action::Stop { signal, at_once }))
            }
            (State::Running, Event::RoundEnded(Outcome::Succeeded)) if self.keep_orphans => {
                (State::Barrier, Some(Action::Barrier))
            }
            (State::Running, Event::RoundEnded(outcome)) => {
                let delay = if outcome == Outcome::Succeeded { ORPHAN_EXIT_WAIT } else { Duration::ZERO };
                (State::Sweeping(outcome), Some(Action::Sweep { delay, grace: FAILURE_GRACE }))
            }

            (State::Sweeping(outcome), Event::Signalled { at_once, .. }) => {
                let sweep = Action::Sweep { delay: Duration::ZERO, grace: Duration::ZERO };
                (State::Sweeping(outcome), at_once.then_some(sweep))
            }
            (State::Sweeping(outcome), Event::Swept) => self.after_sweep(outcome),

            (State::Barrier, Event::BarrierPassed) => end(AgentOutcome::Success),

            // Late or repeated events change nothing.
            (state, Event::Joined { .. } | Event::JoinFailed(_) | Event::NotNeeded) => (state, None),
            (state, Event::JobFailedHere | Event::NewRound { .. }) => (state, None),
            (state, Event::RoundEnded(_) | Event::Swept | Event::BarrierPassed) => (state, None),
        };
        self.state = next;
        action
    }

    /// Returns how many more times this agent can restart its workers.
    pub(crate) fn restarts_left(&self) -> u32 {
        if self.restarts_disabled || self.draining { 0 } else { self.max_restarts - self.restarts }
    }

    /// Returns true if the job failed alike as often as the user allows, so that restarts were useless.
    pub(crate) fn has_no_progress(&self) -> bool {
        self.restarts_disabled
    }

    /// Makes the next failure final, because the job is being drained.
    pub(crate) fn disable_restarts_for_drain(&mut self) {
        self.draining = true;
    }

    /// Makes the next failure final, because restarts are useless.
    pub(crate) fn disable_restarts(&mut self) {
        self.restarts_disabled = true;
    }

    fn join(&self) -> (State, Option<Action>) {
        (State::Joining, Some(Action::Join { restarts: self.restarts }))
    }

    fn after_sweep(&mut self, outcome: Outcome) -> (State, Option<Action>) {
        match (outcome, self.signalled) {
            (Outcome::Failed(failures), _) if self.restarts_disabled || self.draining => {
                end(AgentOutcome::Failed(failures))
            }
            // After a signal no round follows.
            (Outcome::Failed(failures), Some(_)) => end(AgentOutcome::Failed(failures)),
            // After a signal the agent does not wait for the other nodes either.
            (Outcome::Aborted | Outcome::Succeeded, Some(signal)) => end(AgentOutcome::Stopped(signal)),
            (outcome, _) => self.after_round(outcome),
        }
    }

    fn after_round(&mut self, outcome: Outcome) -> (State, Option<Action>) {
        match outcome {
            Outcome::Failed(_) if self.restarts_left() > 0 => {
                self.restarts += 1;
                self.join()
            }
            Outcome::Succeeded | Outcome::Failed(_) | Outcome::Aborted
                if self.decision == Some(RoundDecision::Restart) =>
            {
                self.join()
            }
            Outcome::Succeeded => (State::Barrier, Some(Action::Barrier)),
            Outcome::Failed(failures) if self.awaits_decision && self.decision.is_none() => {
                (State::Waiting(failures), None)
            }
            Outcome::Failed(failures) => end(AgentOutcome::Failed(failures)),
            Outcome::NotStarted { local_rank, error } => end(AgentOutcome::Error(format!(
                "the worker of local rank {local_rank} could not be started: {error}"
            ))),
            Outcome::Stopped { signal } => end(AgentOutcome::Stopped(signal)),
            Outcome::Aborted => end(AgentOutcome::Aborted),
        }
    }
}

fn end(end: AgentOutcome) -> (State, Option<Action>) {
    (State::Ended, Some(Action::End(end)))
}

#[cfg(test)]
mod tests {
    use convoke_env::ExitCause;

    use super::*;
    use crate::cause::{Class, NotStarted};
    use crate::supervise::FailureOrigin;

    const GRACE: Duration = Duration::from_secs(30);
    const DELAY: Duration = ORPHAN_EXIT_WAIT;
    const SWEEP: Action = Action::Sweep { delay: Duration::ZERO, grace: GRACE };

    fn term() -> Event {
        Event::Signalled { signal: Signal::SIGTERM, at_once: false }
    }

    fn failed() -> Outcome {
        Outcome::Failed(vec![Failure {
            local_rank: 0,
            cause: ExitCause::Code(1),
            stopped: false,
            origin: FailureOrigin::Own,
        }])
    }

    fn story(agent: &mut Agent, steps: &[(Event, Option<Action>)]) {
        for (event, expected) in steps {
            assert_eq!(&agent.handle(event.clone()), expected, "after {event:?}");
        }
    }

    #[test]
    fn successful_node_stops_orphans_and_waits_for_other_nodes() {
        story(
            &mut Agent::new(0, false),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(Outcome::Succeeded), Some(Action::Sweep { delay: DELAY, grace: GRACE })),
                (Event::Swept, Some(Action::Barrier)),
                (Event::BarrierPassed, Some(Action::End(AgentOutcome::Success))),
            ],
        );
    }

    #[test]
    fn orphans_are_kept_only_after_success() {
        story(
            &mut Agent::new(1, true),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::Swept, Some(Action::Join { restarts: 1 })),
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(Outcome::Succeeded), Some(Action::Barrier)),
            ],
        );
    }

    #[test]
    fn max_restarts_allows_exactly_that_many_restarts() {
        let mut agent = Agent::new(2, false);
        for restarts in 1..=2 {
            story(
                &mut agent,
                &[
                    (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                    (Event::RoundEnded(failed()), Some(SWEEP)),
                    (Event::Swept, Some(Action::Join { restarts })),
                ],
            );
        }
        let Outcome::Failed(failures) = failed() else { unreachable!() };
        story(
            &mut agent,
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::Swept, Some(Action::End(AgentOutcome::Failed(failures)))),
                (term(), None),
            ],
        );
    }

    #[test]
    fn signal_during_failure_cleanup_prevents_a_restart() {
        let mut agent = Agent::new(5, false);
        let Outcome::Failed(failures) = failed() else { unreachable!() };
        story(
            &mut agent,
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (term(), None),
                (Event::Swept, Some(Action::End(AgentOutcome::Failed(failures)))),
            ],
        );
    }

    #[test]
    fn signal_during_success_cleanup_skips_the_exit_barrier() {
        let stopped = Some(Action::End(AgentOutcome::Stopped(Signal::SIGTERM)));
        for notification in [Event::NewRound { partitioned: false }, Event::JobFailedHere] {
            let mut agent = Agent::new(5, false);
            agent.handle(Event::Joined { awaits_decision: true });
            agent.handle(Event::RoundEnded(Outcome::Succeeded));
            story(&mut agent, &[(term(), None), (notification, None), (Event::Swept, stopped.clone())]);
        }
    }

    #[test]
    fn signal_never_causes_a_restart() {
        story(
            &mut Agent::new(5, false),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (
                    Event::Signalled { signal: Signal::SIGINT, at_once: false },
                    Some(Action::Stop { signal: Signal::SIGINT, at_once: false }),
                ),
                (Event::RoundEnded(Outcome::Stopped { signal: Signal::SIGINT }), Some(SWEEP)),
                (term(), None),
                (
                    Event::Signalled { signal: Signal::SIGINT, at_once: true },
                    Some(Action::Sweep { delay: Duration::ZERO, grace: Duration::ZERO }),
                ),
                (Event::Swept, Some(Action::End(AgentOutcome::Stopped(Signal::SIGINT)))),
            ],
        );
    }

    #[test]
    fn signal_without_running_workers_ends_the_agent_at_once() {
        let interrupted = Some(Action::End(AgentOutcome::Interrupted(Signal::SIGTERM)));
        story(&mut Agent::new(5, false), &[(term(), interrupted)]);
    }

    #[test]
    fn final_job_outcome_ends_every_state_and_prevents_restarts() {
        let aborted = Some(Action::End(AgentOutcome::Aborted));
        story(&mut Agent::new(5, false), &[(Event::JobEnded, aborted.clone())]);
        story(
            &mut Agent::new(5, false),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::JobEnded, Some(Action::Abort)),
                (Event::RoundEnded(Outcome::Aborted), Some(SWEEP)),
                (Event::Swept, aborted.clone()),
            ],
        );
        story(
            &mut Agent::new(5, false),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::JobEnded, None),
                (Event::Swept, aborted.clone()),
            ],
        );
        story(
            &mut Agent::new(5, true),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(Outcome::Succeeded), Some(Action::Barrier)),
                (Event::JobEnded, aborted),
            ],
        );
    }

    #[test]
    fn final_failure_of_this_node_stays_its_result() {
        let Outcome::Failed(failures) = failed() else { unreachable!() };
        story(
            &mut Agent::new(0, false),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::JobEnded, None),
                (Event::Swept, Some(Action::End(AgentOutcome::Failed(failures)))),
            ],
        );
    }

    #[test]
    fn round_started_by_other_nodes_uses_no_restart() {
        let (joined, join) = (Event::Joined { awaits_decision: true }, Some(Action::Join { restarts: 0 }));
        let stopped = [
            (joined.clone(), Some(Action::Start)),
            (Event::NewRound { partitioned: false }, Some(Action::Abort)),
            (Event::RoundEnded(Outcome::Aborted), Some(SWEEP)),
            (Event::Swept, join.clone()),
        ];
        let mut one = Agent::new(0, false);
        story(&mut one, &stopped);
        story(&mut one, &stopped);
        // All workers of the node had succeeded.
        let done = Event::RoundEnded(Outcome::Succeeded);
        let sweep = Some(Action::Sweep { delay: DELAY, grace: GRACE });
        let at_once = Action::Sweep { delay: Duration::ZERO, grace: Duration::ZERO };
        story(
            &mut one,
            &[
                (joined.clone(), Some(Action::Start)),
                (done.clone(), sweep.clone()),
                (Event::NewRound { partitioned: false }, None),
                // The node has no time left now.
                (Event::NewRound { partitioned: true }, Some(at_once)),
                (Event::Swept, join.clone()),
                (joined, Some(Action::Start)),
                (done, sweep),
                (Event::Swept, Some(Action::Barrier)),
                (Event::NewRound { partitioned: false }, join),
            ],
        );
    }

    #[test]
    fn other_nodes_decide_about_a_failure_without_restarts() {
        let joined = (Event::Joined { awaits_decision: true }, Some(Action::Start));
        let failed = [joined, (Event::RoundEnded(failed()), Some(SWEEP)), (Event::Swept, None)];
        let Outcome::Failed(failures) = self::failed() else { unreachable!() };
        let end = Some(Action::End(AgentOutcome::Failed(failures)));
        for (decision, then) in [
            (Event::JobFailedHere, end.clone()),
            (Event::JobEnded, end.clone()),
            (Event::NewRound { partitioned: false }, Some(Action::Join { restarts: 0 })),
            (term(), Some(Action::End(AgentOutcome::Interrupted(Signal::SIGTERM)))),
        ] {
            let mut agent = Agent::new(0, false);
            story(&mut agent, &failed);
            story(&mut agent, &[(decision, then)]);
        }
        // The decision of the others may come first.
        for (decision, then) in [
            (Event::JobFailedHere, end),
            (Event::NewRound { partitioned: false }, Some(Action::Join { restarts: 0 })),
        ] {
            let mut agent = Agent::new(0, false);
            story(&mut agent, &failed[..2]);
            story(&mut agent, &[(decision, None), (Event::Swept, then)]);
        }
    }

    #[test]
    fn standby_node_succeeds_with_the_job() {
        let success = Some(Action::End(AgentOutcome::Success));
        story(&mut Agent::new(5, false), &[(Event::NotNeeded, success)]);
    }

    #[test]
    fn failed_rendezvous_and_missing_program_are_errors() {
        let late = "node 1 did not come".to_owned();
        story(
            &mut Agent::new(5, false),
            &[(Event::JoinFailed(late.clone()), Some(Action::End(AgentOutcome::Error(late))))],
        );
        let (why, advice) = ("not found".to_owned(), "install it".to_owned());
        let error = NotStarted { class: Class::MissingProgram, reason: why, advice };
        let outcome = Outcome::NotStarted { local_rank: 1, error };
        let text = "the worker of local rank 1 could not be started: not found\n  try: install it".to_owned();
        story(
            &mut Agent::new(5, false),
            &[
                (Event::Joined { awaits_decision: false }, Some(Action::Start)),
                (Event::RoundEnded(outcome), Some(SWEEP)),
                (Event::Swept, Some(Action::End(AgentOutcome::Error(text)))),
            ],
        );
    }
}
