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

impl EventLoop {
    pub(super) fn handle_signal(&mut self, (number, action): (i32, SignalAction)) -> Option<AgentOutcome> {
        match (action, Signal::try_from(number)) {
            (SignalAction::Stop, Ok(signal)) => {
                // A scheduler may signal every process of a job, and repeat that: all these signals are one
                // request to stop. A user at the terminal who repeats Ctrl-C wants an immediate end.
                self.signals.interrupts += u32::from(signal == Signal::SIGINT);
                let at_once = signal == Signal::SIGINT && self.signals.interrupts > 1 && has_terminal();
                return self.stop_job(signal, at_once);
            }
            (SignalAction::Drain, Ok(signal)) => return self.handle_drain_signal(signal),
            (SignalAction::Forward, Ok(signal)) => self.forward(signal),
            (SignalAction::Suspend, _) => self.suspend(),
            (SignalAction::Resize, _) => {
                if let Some(tee) = self.rounds.tee() {
                    tee.resize();
                    self.signal_workers(Signal::SIGWINCH);
                }
            }
            (SignalAction::Child, _) => self.reap_children(),
            (SignalAction::Die | SignalAction::Stop | SignalAction::Forward | SignalAction::Drain, _) => {
                if self.signals.fatal.is_none() {
                    print_message(&format!(
                        "error: {} ends the launcher; first it stops the workers",
                        formatting::signal(number)
                    ));
                    self.signals.fatal = Some(number);
                }
                return self.stop_job(Signal::SIGTERM, false);
            }
        }
        None
    }

    /// Stops the workers of this node by a signal, and tells the other nodes.
    pub(super) fn stop_job(&mut self, signal: Signal, at_once: bool) -> Option<AgentOutcome> {
        self.declare_stop(signal);
        self.decide(Event::Signalled { signal, at_once })
    }

    /// Returns the id and rank of each worker that may be running.
    pub(super) fn running_workers(&self) -> Vec<(WorkerId, usize)> {
        let Some(round) = &self.rounds.current else { return Vec::new() };
        let running = round.workers.iter().enumerate().filter(|(_, worker)| worker.ended.is_none());
        running.map(|(local_rank, _)| (round.id(local_rank), round.rank(local_rank))).collect()
    }

    fn signal_workers(&mut self, signal: Signal) {
        for (id, _) in self.running_workers() {
            self.guard.send(&ToGuard::Signal { id, signal: signal as i32 }, &[]);
        }
    }

    /// Forwards a signal to the workers that have a handler for it.
    fn forward(&mut self, signal: Signal) {
        let waiting = self.running_workers();
        if waiting.is_empty() {
            print_message(&format!("{signal} was not forwarded: no worker is running"));
            return;
        }
        self.forward_quietly(signal);
        self.signals.forwarded.add(signal, waiting);
    }

    /// Forwards a signal to the workers that have a handler for it, and names no other workers: they learn of
    /// a drain in other ways.
    pub(super) fn forward_quietly(&mut self, signal: Signal) {
        for (id, _) in self.running_workers() {
            self.guard.send(&ToGuard::Forward { id, signal: signal as i32 }, &[]);
        }
    }

    /// Handles Ctrl-Z: stops the workers, then this process. Continues the workers once this process is
    /// continued.
    fn suspend(&mut self) {
        self.signal_workers(Signal::SIGSTOP);
        let several = self.rounds.assignment().is_some_and(|assignment| assignment.group_world_size > 1);
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
