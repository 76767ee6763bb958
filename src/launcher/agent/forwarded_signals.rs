//! Signals that are being forwarded to workers.

use nix::sys::signal::Signal;

use crate::formatting;
use crate::guard::WorkerId;
use crate::messages::print_message;

/// Signals for which the guard has not answered for all workers, oldest first.
#[derive(Debug, Default)]
pub(super) struct ForwardedSignals(Vec<ForwardedSignal>);

/// A signal that is being forwarded to the workers of a round.
#[derive(Debug)]
struct ForwardedSignal {
    signal: Signal,
    /// Workers for which the guard has not answered: id and rank.
    waiting: Vec<(WorkerId, usize)>,
    caught: usize,
    /// Ranks that do not catch the signal.
    not_caught: Vec<usize>,
}

impl ForwardedSignals {
    /// Adds a signal that the guard is to forward to these workers, given by id and rank.
    pub(super) fn add(&mut self, signal: Signal, waiting: Vec<(WorkerId, usize)>) {
        self.0.push(ForwardedSignal { signal, waiting, caught: 0, not_caught: Vec::new() });
    }

    /// Records the guard's answer for one worker, and prints which workers did not get the signal once all
    /// answers are there. `caught` is false if no process of the worker has a handler for it.
    pub(super) fn record_answer(&mut self, id: WorkerId, caught: bool) {
        let is_waiting = |one: &ForwardedSignal| one.waiting.iter().any(|(waiting, _)| *waiting == id);
        let Some(at) = self.0.iter().position(is_waiting) else { return };
        let one = &mut self.0[at];
        one.waiting.retain(|&(waiting, rank)| {
            if waiting == id && !caught {
                one.not_caught.push(rank);
            }
            waiting != id
        });
        one.caught += usize::from(caught);
        if one.waiting.is_empty() {
            let ForwardedSignal { signal, caught, not_caught, .. } = self.0.remove(at);
            if !not_caught.is_empty() {
                let whom = formatting::ranks(&not_caught);
                let others = if caught == 0 { "" } else { "; the other workers got it" };
                print_message(&format!(
                    "{signal} was not sent to {whom}, which would be killed by it: no handler is installed there{others}"
                ));
            }
        }
    }
}
