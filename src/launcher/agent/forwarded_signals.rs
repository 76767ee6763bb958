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
    /// True if a worker got the signal.
    is_caught: bool,
    /// Ranks that do not catch the signal.
    not_caught: Vec<usize>,
}

impl ForwardedSignals {
    /// Adds a signal that the guard is to forward to these workers, given by id and rank.
    pub(super) fn add(&mut self, signal: Signal, waiting: Vec<(WorkerId, usize)>) {
        self.0.push(ForwardedSignal { signal, waiting, is_caught: false, not_caught: Vec::new() });
    }

    /// Records the guard's answer for one worker, and prints which workers did not get the signal once all
    /// answers are there. `caught` is false if no process of the worker has a handler for it.
    pub(super) fn record_answer(&mut self, id: WorkerId, caught: bool) {
        let position = |one: &ForwardedSignal| one.waiting.iter().position(|(waiting, _)| *waiting == id);
        let mut signals = self.0.iter().enumerate();
        let Some((at, worker)) = signals.find_map(|(at, one)| Some((at, position(one)?))) else { return };
        let one = &mut self.0[at];
        let (_, rank) = one.waiting.swap_remove(worker);
        if caught {
            one.is_caught = true;
        } else {
            one.not_caught.push(rank);
        }
        if one.waiting.is_empty() {
            let ForwardedSignal { signal, is_caught, not_caught, .. } = self.0.remove(at);
            if !not_caught.is_empty() {
                let whom = formatting::ranks(&not_caught);
                let others = if is_caught { "; the other workers got it" } else { "" };
                print_message(&format!(
                    "{signal} was not sent to {whom}, which would be killed by it: no handler is installed there{others}"
                ));
            }
        }
    }
}
