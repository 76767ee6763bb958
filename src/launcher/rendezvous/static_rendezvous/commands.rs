//! Carries out the agent's commands in a static job, whose store blocks.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::StaticRendezvous;
use super::completion::Completion;
use super::outcome_store::{DEFER_POLL, OutcomeStore};
use crate::messages::print_message;
use crate::rendezvous::cluster::{EventSender, start_thread};
use crate::rendezvous::{ClusterCommand, ClusterEvent, OutcomeKind, ProposedOutcome};

impl StaticRendezvous {
    /// Carries out the agent's commands, one after the other, until the agent ends.
    pub(in super::super) fn run(mut self, commands: &Receiver<ClusterCommand>, events: &EventSender) {
        let mut deferred = None;
        loop {
            let timeout = if deferred.is_some() { DEFER_POLL } else { Duration::MAX };
            match commands.recv_timeout(timeout) {
                Ok(ClusterCommand::ReportFailure { summary, report, restarts: false, defer_until }) => {
                    let kind = OutcomeKind::Failed { summary, report };
                    deferred = Some(ProposedOutcome { kind, defer_until });
                }
                Ok(command) => self.execute(command, events),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if let (Some(proposed), Some(outcomes)) = (&deferred, self.outcomes())
                && let Some(outcome) = outcomes.try_propose(proposed)
            {
                events.send(ClusterEvent::JobEnded(outcome));
                deferred = None;
            }
        }
    }

    /// Carries out one command. A job with one node, which never waits, needs no thread for that.
    pub(in super::super) fn execute(&mut self, command: ClusterCommand, events: &EventSender) {
        match command {
            ClusterCommand::Join { .. } => {
                let is_first = self.joined.is_none();
                let joined = self.join();
                events.send(ClusterEvent::Joined(joined));
                if let Some(outcomes) = self.outcomes().filter(|_| is_first) {
                    self.watch(Arc::clone(outcomes), events);
                }
            }
            ClusterCommand::Barrier { .. } => self.barrier(events),
            ClusterCommand::ReportSignal(signal) => {
                if let Some(outcomes) = self.outcomes() {
                    outcomes.propose(&OutcomeKind::Stopped { signal }.into());
                }
            }
            ClusterCommand::Leave { proposed } => {
                let outcome = self.outcomes().and_then(|outcomes| {
                    let outcome = proposed.map(|proposed| outcomes.propose(&proposed));
                    outcomes.leave();
                    outcome
                });
                events.send(ClusterEvent::Left { outcome, other_jobs: 0 });
            }
            // A node restarts only its own workers, so other nodes need no report. The store lasts as long as
            // the agent.
            ClusterCommand::ReportFailure { .. } | ClusterCommand::Close => {}
        }
    }

    pub(super) fn outcomes(&self) -> Option<&Arc<OutcomeStore>> {
        self.joined.as_ref()?.outcomes.as_ref()
    }

    /// Starts a thread that tells the agent when another node ends the job.
    fn watch(&self, outcomes: Arc<OutcomeStore>, events: &EventSender) {
        let events = events.clone();
        let started = start_thread("watch", move || {
            if let Some(outcome) = outcomes.watch() {
                events.send(ClusterEvent::JobEnded(outcome));
            }
        });
        if let Err(error) = started {
            print_message(&format!("warning: {error}"));
        }
    }

    /// Starts a thread that waits until all nodes have succeeded. The other commands do not wait for it.
    fn barrier(&self, events: &EventSender) {
        let Some(completion) =
            self.joined.as_ref().filter(|_| self.nodes > 1).map(|joined| Completion::new(self, joined))
        else {
            return events.send(ClusterEvent::Barrier { warning: None });
        };
        let sender = events.clone();
        let started = start_thread("barrier", move || {
            match completion.wait() {
                Ok(true) => sender.send(ClusterEvent::Barrier { warning: None }),
                // The watch of the outcome reports how the job has ended.
                Ok(false) => {}
                Err(error) => sender.send(ClusterEvent::Barrier {
                    warning: Some(format!(
                        "this node has finished, but it is not known whether the others have: {error}"
                    )),
                }),
            }
        });
        if let Err(error) = started {
            events.send(ClusterEvent::Barrier { warning: Some(error.to_string()) });
        }
    }
}
