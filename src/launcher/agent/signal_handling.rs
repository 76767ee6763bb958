//! Reacts to signals that the launcher receives.

use std::time::Instant;

use nix::sys::signal::Signal;

use super::event_loop::EventLoop;
use super::signals::SignalAction;
use super::state_machine::{AgentOutcome, Event};
use crate::formatting;
use crate::guard::{ToGuard, WorkerId};
use crate::messages::print_message;
use crate::os::stop_this_process;

/// State of signals that the launcher has received.
#[derive(Debug, Default)]
pub(super) struct SignalState {
    /// A signal that ends the launcher because no reaction to it is defined. The launcher first stops its
    /// workers, then kills itself by the same signal.
    pub(super) fatal: Option<i32>,
    /// Number of SIGINT received (Ctrl-C).
    interrupts: u32,
    /// Signals that are being forwarded to workers, oldest first.
    forwarded: Vec<ForwardedSignal>,
}

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

impl EventLoop {
    pub(super) fn handle_signal(&mut self, number: i32, meaning: SignalAction) -> Option<AgentOutcome> {
        match (meaning, Signal::try_from(number)) {
            (SignalAction::Stop, Ok(signal)) => {
                // A scheduler may signal every process of a job, and repeat that: all these signals are one
                // request to stop. A user at the terminal who repeats Ctrl-C wants an immediate end.
                self.signals.interrupts += u32::from(signal == Signal::SIGINT);
                let at_once = signal == Signal::SIGINT && self.signals.interrupts > 1 && has_terminal();
                self.declare_stop(signal);
                self.decide(Event::Signalled { signal, at_once })
            }
            (SignalAction::Forward, Ok(signal)) => {
                self.forward(signal);
                None
            }
            (SignalAction::Suspend, _) => {
                self.suspend();
                None
            }
            (SignalAction::Resize, _) => {
                if let Some(tee) = self.round.as_ref().and_then(|round| round.tee.as_ref()) {
                    tee.resize();
                    self.signal_workers(Signal::SIGWINCH);
                }
                None
            }
            (SignalAction::Child, _) => {
                self.reap_children();
                None
            }
            (SignalAction::Die | SignalAction::Stop | SignalAction::Forward, _) => {
                if self.signals.fatal.is_none() {
                    print_message(&format!(
                        "error: {} ends the launcher; first it stops the workers",
                        formatting::signal(number)
                    ));
                    self.signals.fatal = Some(number);
                }
                self.declare_stop(Signal::SIGTERM);
                self.decide(Event::Signalled { signal: Signal::SIGTERM, at_once: false })
            }
        }
    }

    /// Returns the id and rank of each worker that may be running.
    fn running_workers(&self) -> Vec<(WorkerId, usize)> {
        let Some(round) = &self.round else { return Vec::new() };
        let workers = &round.workers;
        let locals = (0..self.config.nproc_per_node).filter(|&local| workers.may_be_running(local));
        locals.map(|local| (workers.id(local), workers.rank(local))).collect()
    }

    fn signal_workers(&mut self, signal: Signal) {
        for (id, _) in self.running_workers() {
            self.send_to_guard(&ToGuard::Signal { id, signal: signal as i32 });
        }
    }

    /// Forwards a signal to the workers that have a handler for it.
    fn forward(&mut self, signal: Signal) {
        let waiting = self.running_workers();
        if waiting.is_empty() {
            print_message(&format!("{signal} was not forwarded: no worker is running"));
            return;
        }
        for &(id, _) in &waiting {
            self.send_to_guard(&ToGuard::Forward { id, signal: signal as i32 });
        }
        self.signals.forwarded.push(ForwardedSignal { signal, waiting, caught: 0, not_caught: Vec::new() });
    }

    /// Handles the guard's answer to a forwarded signal. `caught` is false if no process of the worker has a
    /// handler for it.
    pub(super) fn handle_forwarded(&mut self, id: WorkerId, caught: bool) {
        let is_waiting = |one: &ForwardedSignal| one.waiting.iter().any(|(waiting, _)| *waiting == id);
        let Some(at) = self.signals.forwarded.iter().position(is_waiting) else { return };
        let one = &mut self.signals.forwarded[at];
        one.waiting.retain(|&(waiting, rank)| {
            if waiting == id && !caught {
                one.not_caught.push(rank);
            }
            waiting != id
        });
        one.caught += usize::from(caught);
        if one.waiting.is_empty() {
            let ForwardedSignal { signal, caught, not_caught, .. } = self.signals.forwarded.remove(at);
            if !not_caught.is_empty() {
                let whom = formatting::ranks(&not_caught);
                let others = if caught == 0 { "" } else { "; the other workers got it" };
                print_message(&format!(
                    "{signal} was not sent to {whom}, which would be killed by it: no handler is installed there{others}"
                ));
            }
        }
    }

    /// Handles Ctrl-Z: stops the workers, then this process. Continues the workers once this process is
    /// continued.
    fn suspend(&mut self) {
        self.signal_workers(Signal::SIGSTOP);
        let several = self.round.as_ref().is_some_and(|round| round.assignment.group_world_size > 1);
        let others =
            if several { "; other nodes declare this node lost if it is not continued soon" } else { "" };
        print_message(&format!(
            "the workers of this node are stopped (SIGTSTP), then the launcher; `fg` or `bg` continues them{others}"
        ));
        let since = Instant::now();
        stop_this_process();
        self.signal_workers(Signal::SIGCONT);
        print_message(&format!("continued after {} s", since.elapsed().as_secs()));
    }
}

/// Returns true if this process has a controlling terminal, at which a user can press Ctrl-C.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}
