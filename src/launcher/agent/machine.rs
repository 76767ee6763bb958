//! State machine of one agent: the order of its rounds, and how it ends. Pure: no clock, no handle, no I/O.
//!
//! ```text
//! Joining ─► Running ─► Sweeping ─┬─► Barrier ─► end        all workers succeeded
//!    ▲                            ├─► Waiting ─► end        no restart left, and the others know of no loss
//!    │                            ├─► end                   stopped, or no restarts left
//!    └────────────────────────────┘                         a restart, or all nodes begin anew
//! ```

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::supervise::{Failure, Outcome};

/// State of one agent.
#[derive(Debug)]
pub(crate) struct Agent {
    state: State,
    rules: Rules,
    restarts: u32,
    /// Decision of the other nodes about this round.
    word: Option<Word>,
    /// True if a failure without a remaining restart is final only when the other nodes say so.
    last_word: bool,
    /// A signal that ends the job, if one has come.
    signalled: Option<Signal>,
    /// True if another restart would be useless.
    given_up: bool,
}

/// Decision of the other nodes about a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    /// All nodes restart.
    Again,
    /// A failure of this node has ended the job.
    Final,
}

/// Command-line settings for restarts and leftover processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// `--max-restarts`.
    pub(crate) max_restarts: u32,
    /// Time that processes left behind by successful workers have to end by themselves.
    pub(crate) sweep_patience: Duration,
    /// Time from SIGTERM to SIGKILL for leftover processes.
    pub(crate) sweep_grace: Duration,
    /// Leaves such processes alone if the workers succeeded (`--orphans=keep`).
    pub(crate) keep_orphans: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Joining,
    Running,
    Sweeping(Outcome),
    /// Waits for the decision of the other nodes about a failure.
    Waiting(Vec<Failure>),
    Barrier,
    Ended,
}

/// Input of the agent's state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The nodes of the round are known. `last_word` is true if a failure without a remaining restart is
    /// final only when the other nodes say so.
    Joined { last_word: bool },
    /// The rendezvous failed.
    JoinFailed(String),
    /// The job succeeded while this node waited for a round.
    NotNeeded,
    /// All workers of the round have ended.
    RoundEnded(Outcome),
    /// No process that the workers started remains.
    Swept,
    /// All nodes have succeeded, or waiting for them is useless.
    BarrierPassed,
    /// A signal ends the job; `at_once` if the user has asked for an immediate end.
    Signalled { signal: Signal, at_once: bool },
    /// The job is over on all nodes.
    Verdict,
    /// The job is over because of a failure of this node.
    Final,
    /// All nodes restart, perhaps without this one. A node that is `alone` has no time left.
    NewRound { alone: bool },
}

/// Output of the agent's state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Meet the other nodes, for a round with this restart count.
    Join { restarts: u32 },
    /// Start the workers.
    Start,
    /// Pass the signal on to the workers.
    Stop { signal: Signal, at_once: bool },
    /// Stop the workers: their work is no longer needed.
    Abort,
    /// End what the workers left behind: SIGTERM after `patience`, SIGKILL after another `grace`.
    Sweep { patience: Duration, grace: Duration },
    /// Wait for the other nodes.
    Barrier,
    /// End the agent. This is the last action.
    End(End),
}

/// Result of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// All workers of all nodes have succeeded, as far as is known.
    Success,
    /// Workers failed and no restart is left.
    Failed(Vec<Failure>),
    /// The agent could not continue. The text says why.
    Error(String),
    /// A signal stopped the workers.
    Stopped(Signal),
    /// A signal came before the workers started or after they ended.
    Interrupted(Signal),
    /// Another node ended the job.
    Aborted,
}

impl Agent {
    /// Returns a new agent and its first action.
    pub(crate) fn new(rules: Rules) -> (Self, Action) {
        let (state, word, last_word) = (State::Joining, None, false);
        (
            Self { state, rules, restarts: 0, word, last_word, signalled: None, given_up: false },
            Action::Join { restarts: 0 },
        )
    }

    /// Processes `event`. Returns an action, if any.
    pub(crate) fn handle(&mut self, event: Event) -> Option<Action> {
        if let Event::Signalled { signal, .. } = event {
            self.signalled.get_or_insert(signal);
        }
        let (next, action) = match (std::mem::replace(&mut self.state, State::Ended), event) {
            (State::Ended, _) => (State::Ended, None),

            (State::Joining, Event::Joined { last_word }) => {
                (self.word, self.last_word) = (None, last_word);
                (State::Running, Some(Action::Start))
            }
            (State::Joining, Event::JoinFailed(error)) => end(End::Error(error)),
            (State::Joining, Event::NotNeeded) => end(End::Success),
            (State::Joining | State::Barrier | State::Waiting(_), Event::Signalled { signal, .. }) => {
                end(End::Interrupted(signal))
            }

            (State::Joining | State::Barrier, Event::Verdict) => end(End::Aborted),
            (State::Running, Event::Verdict) => (State::Running, Some(Action::Abort)),
            (State::Sweeping(outcome), Event::Verdict) => {
                let goes_on = match &outcome {
                    Outcome::Succeeded => true,
                    Outcome::Failed(_) => self.restarts_left() > 0,
                    Outcome::NotStarted { .. } | Outcome::Stopped { .. } | Outcome::Aborted => false,
                };
                (State::Sweeping(if goes_on { Outcome::Aborted } else { outcome }), None)
            }

            (State::Waiting(failures), Event::Verdict | Event::Final) => end(End::Failed(failures)),

            (State::Running, Event::NewRound { .. }) => {
                self.word = Some(Word::Again);
                (State::Running, Some(Action::Abort))
            }
            (State::Sweeping(outcome), Event::NewRound { alone }) => {
                self.word = Some(Word::Again);
                let at_once = Action::Sweep { patience: Duration::ZERO, grace: Duration::ZERO };
                (State::Sweeping(outcome), alone.then_some(at_once))
            }
            (State::Waiting(_) | State::Barrier, Event::NewRound { .. }) => self.join(),
            (state @ (State::Running | State::Sweeping(_)), Event::Final) => {
                self.word = Some(Word::Final);
                (state, None)
            }

            (State::Running, Event::Signalled { signal, at_once }) => {
                (State::Running, Some(Action::Stop { signal, at_once }))
            }
            (State::Running, Event::RoundEnded(Outcome::Succeeded)) if self.rules.keep_orphans => {
                (State::Barrier, Some(Action::Barrier))
            }
            (State::Running, Event::RoundEnded(outcome)) => {
                let patience = match outcome {
                    Outcome::Succeeded => self.rules.sweep_patience,
                    Outcome::Failed(_)
                    | Outcome::NotStarted { .. }
                    | Outcome::Stopped { .. }
                    | Outcome::Aborted => Duration::ZERO,
                };
                (State::Sweeping(outcome), Some(Action::Sweep { patience, grace: self.rules.sweep_grace }))
            }

            (State::Sweeping(outcome), Event::Signalled { at_once, .. }) => {
                let sweep = Action::Sweep { patience: Duration::ZERO, grace: Duration::ZERO };
                (State::Sweeping(outcome), at_once.then_some(sweep))
            }
            (State::Sweeping(outcome), Event::Swept) => self.after(outcome),

            (State::Barrier, Event::BarrierPassed) => end(End::Success),

            // Late or repeated events change nothing.
            (state, Event::Joined { .. } | Event::JoinFailed(_) | Event::NotNeeded) => (state, None),
            (state, Event::Final | Event::NewRound { .. }) => (state, None),
            (state, Event::RoundEnded(_) | Event::Swept | Event::BarrierPassed) => (state, None),
        };
        self.state = next;
        action
    }

    /// Returns the number of failures after which this agent can still restart.
    pub(crate) fn restarts_left(&self) -> u32 {
        if self.given_up { 0 } else { self.rules.max_restarts - self.restarts }
    }

    /// Makes the next failure final.
    pub(crate) fn give_up(&mut self) {
        self.given_up = true;
    }

    fn join(&self) -> (State, Option<Action>) {
        (State::Joining, Some(Action::Join { restarts: self.restarts }))
    }

    fn after(&mut self, outcome: Outcome) -> (State, Option<Action>) {
        match (outcome, self.signalled) {
            (Outcome::Failed(failures), _) if self.given_up => end(End::Failed(failures)),
            // A signal never leads to another round.
            (Outcome::Failed(failures), Some(_)) => end(End::Failed(failures)),
            // A signal does not lead to a wait for the others either.
            (Outcome::Aborted | Outcome::Succeeded, Some(signal)) => end(End::Stopped(signal)),
            (outcome, _) => self.after_round(outcome),
        }
    }

    fn after_round(&mut self, outcome: Outcome) -> (State, Option<Action>) {
        match outcome {
            Outcome::Failed(_) if self.restarts_left() > 0 => {
                self.restarts += 1;
                self.join()
            }
            Outcome::Succeeded | Outcome::Failed(_) | Outcome::Aborted if self.word == Some(Word::Again) => {
                self.join()
            }
            Outcome::Succeeded => (State::Barrier, Some(Action::Barrier)),
            Outcome::Failed(failures) if self.last_word && self.word.is_none() => {
                (State::Waiting(failures), None)
            }
            Outcome::Failed(failures) => end(End::Failed(failures)),
            Outcome::NotStarted { local_rank, error } => end(End::Error(format!(
                "the worker of local rank {local_rank} could not be started: {error}"
            ))),
            Outcome::Stopped { signal } => end(End::Stopped(signal)),
            Outcome::Aborted => end(End::Aborted),
        }
    }
}

fn end(end: End) -> (State, Option<Action>) {
    (State::Ended, Some(Action::End(end)))
}

#[cfg(test)]
mod tests {
    use convoke_env::ExitCause;

    use super::*;
    use crate::cause::{Class, NotStarted};
    use crate::supervise::Blame;

    const GRACE: Duration = Duration::from_secs(30);
    const PATIENCE: Duration = Duration::from_millis(200);
    const SWEEP: Action = Action::Sweep { patience: Duration::ZERO, grace: GRACE };

    fn agent(max_restarts: u32, keep_orphans: bool) -> Agent {
        let (agent, action) =
            Agent::new(Rules { max_restarts, sweep_patience: PATIENCE, sweep_grace: GRACE, keep_orphans });
        assert_eq!(action, Action::Join { restarts: 0 });
        agent
    }

    fn term() -> Event {
        Event::Signalled { signal: Signal::SIGTERM, at_once: false }
    }

    fn failed() -> Outcome {
        Outcome::Failed(vec![Failure {
            local_rank: 0,
            cause: ExitCause::Code(1),
            stopped: false,
            blame: Blame::Itself,
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
            &mut agent(0, false),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (
                    Event::RoundEnded(Outcome::Succeeded),
                    Some(Action::Sweep { patience: PATIENCE, grace: GRACE }),
                ),
                (Event::Swept, Some(Action::Barrier)),
                (Event::BarrierPassed, Some(Action::End(End::Success))),
            ],
        );
    }

    #[test]
    fn orphans_are_kept_only_after_success() {
        story(
            &mut agent(1, true),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::Swept, Some(Action::Join { restarts: 1 })),
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(Outcome::Succeeded), Some(Action::Barrier)),
            ],
        );
    }

    #[test]
    fn max_restarts_allows_exactly_that_many_restarts() {
        let mut agent = agent(2, false);
        for restarts in 1..=2 {
            story(
                &mut agent,
                &[
                    (Event::Joined { last_word: false }, Some(Action::Start)),
                    (Event::RoundEnded(failed()), Some(SWEEP)),
                    (Event::Swept, Some(Action::Join { restarts })),
                ],
            );
        }
        let Outcome::Failed(failures) = failed() else { unreachable!() };
        story(
            &mut agent,
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::Swept, Some(Action::End(End::Failed(failures)))),
                (term(), None),
            ],
        );
    }

    #[test]
    fn signal_during_failure_cleanup_prevents_a_restart() {
        let mut agent = agent(5, false);
        let Outcome::Failed(failures) = failed() else { unreachable!() };
        story(
            &mut agent,
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (term(), None),
                (Event::Swept, Some(Action::End(End::Failed(failures)))),
            ],
        );
    }

    #[test]
    fn signal_during_success_cleanup_skips_the_exit_barrier() {
        let stopped = Some(Action::End(End::Stopped(Signal::SIGTERM)));
        for news in [Event::NewRound { alone: false }, Event::Final] {
            let mut agent = agent(5, false);
            agent.handle(Event::Joined { last_word: true });
            agent.handle(Event::RoundEnded(Outcome::Succeeded));
            story(&mut agent, &[(term(), None), (news, None), (Event::Swept, stopped.clone())]);
        }
    }

    #[test]
    fn signal_never_causes_a_restart() {
        story(
            &mut agent(5, false),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (
                    Event::Signalled { signal: Signal::SIGINT, at_once: false },
                    Some(Action::Stop { signal: Signal::SIGINT, at_once: false }),
                ),
                (Event::RoundEnded(Outcome::Stopped { signal: Signal::SIGINT }), Some(SWEEP)),
                (term(), None),
                (
                    Event::Signalled { signal: Signal::SIGINT, at_once: true },
                    Some(Action::Sweep { patience: Duration::ZERO, grace: Duration::ZERO }),
                ),
                (Event::Swept, Some(Action::End(End::Stopped(Signal::SIGINT)))),
            ],
        );
    }

    #[test]
    fn signal_without_running_workers_ends_the_agent_at_once() {
        let interrupted = Some(Action::End(End::Interrupted(Signal::SIGTERM)));
        story(&mut agent(5, false), &[(term(), interrupted)]);
    }

    #[test]
    fn final_job_outcome_ends_every_state_and_prevents_restarts() {
        let aborted = Some(Action::End(End::Aborted));
        story(&mut agent(5, false), &[(Event::Verdict, aborted.clone())]);
        story(
            &mut agent(5, false),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::Verdict, Some(Action::Abort)),
                (Event::RoundEnded(Outcome::Aborted), Some(SWEEP)),
                (Event::Swept, aborted.clone()),
            ],
        );
        story(
            &mut agent(5, false),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::Verdict, None),
                (Event::Swept, aborted.clone()),
            ],
        );
        story(
            &mut agent(5, true),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(Outcome::Succeeded), Some(Action::Barrier)),
                (Event::Verdict, aborted),
            ],
        );
    }

    #[test]
    fn final_failure_of_this_node_stays_its_result() {
        let Outcome::Failed(failures) = failed() else { unreachable!() };
        story(
            &mut agent(0, false),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(failed()), Some(SWEEP)),
                (Event::Verdict, None),
                (Event::Swept, Some(Action::End(End::Failed(failures)))),
            ],
        );
    }

    #[test]
    fn round_started_by_other_nodes_uses_no_restart() {
        let (joined, join) = (Event::Joined { last_word: true }, Some(Action::Join { restarts: 0 }));
        let stopped = [
            (joined.clone(), Some(Action::Start)),
            (Event::NewRound { alone: false }, Some(Action::Abort)),
            (Event::RoundEnded(Outcome::Aborted), Some(SWEEP)),
            (Event::Swept, join.clone()),
        ];
        let mut one = agent(0, false);
        story(&mut one, &stopped);
        story(&mut one, &stopped);
        // All workers of the node had succeeded.
        let done = Event::RoundEnded(Outcome::Succeeded);
        let sweep = Some(Action::Sweep { patience: PATIENCE, grace: GRACE });
        let at_once = Action::Sweep { patience: Duration::ZERO, grace: Duration::ZERO };
        story(
            &mut one,
            &[
                (joined.clone(), Some(Action::Start)),
                (done.clone(), sweep.clone()),
                (Event::NewRound { alone: false }, None),
                // The node has no time left now.
                (Event::NewRound { alone: true }, Some(at_once)),
                (Event::Swept, join.clone()),
                (joined, Some(Action::Start)),
                (done, sweep),
                (Event::Swept, Some(Action::Barrier)),
                (Event::NewRound { alone: false }, join),
            ],
        );
    }

    #[test]
    fn other_nodes_decide_about_a_failure_without_restarts() {
        let joined = (Event::Joined { last_word: true }, Some(Action::Start));
        let failed = [joined, (Event::RoundEnded(failed()), Some(SWEEP)), (Event::Swept, None)];
        let Outcome::Failed(failures) = self::failed() else { unreachable!() };
        let end = Some(Action::End(End::Failed(failures)));
        for (word, then) in [
            (Event::Final, end.clone()),
            (Event::Verdict, end.clone()),
            (Event::NewRound { alone: false }, Some(Action::Join { restarts: 0 })),
            (term(), Some(Action::End(End::Interrupted(Signal::SIGTERM)))),
        ] {
            let mut agent = agent(0, false);
            story(&mut agent, &failed);
            story(&mut agent, &[(word, then)]);
        }
        // The decision of the others may come first.
        for (word, then) in
            [(Event::Final, end), (Event::NewRound { alone: false }, Some(Action::Join { restarts: 0 }))]
        {
            let mut agent = agent(0, false);
            story(&mut agent, &failed[..2]);
            story(&mut agent, &[(word, None), (Event::Swept, then)]);
        }
    }

    #[test]
    fn standby_node_succeeds_with_the_job() {
        let success = Some(Action::End(End::Success));
        story(&mut agent(5, false), &[(Event::NotNeeded, success)]);
    }

    #[test]
    fn failed_rendezvous_and_missing_program_are_errors() {
        let late = "node 1 did not come".to_owned();
        story(
            &mut agent(5, false),
            &[(Event::JoinFailed(late.clone()), Some(Action::End(End::Error(late))))],
        );
        let (why, advice) = ("not found".to_owned(), "install it".to_owned());
        let error = NotStarted { class: Class::MissingProgram, why, advice };
        let outcome = Outcome::NotStarted { local_rank: 1, error };
        let text = "the worker of local rank 1 could not be started: not found\n  try: install it".to_owned();
        story(
            &mut agent(5, false),
            &[
                (Event::Joined { last_word: false }, Some(Action::Start)),
                (Event::RoundEnded(outcome), Some(SWEEP)),
                (Event::Swept, Some(Action::End(End::Error(text)))),
            ],
        );
    }
}
