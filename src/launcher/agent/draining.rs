//! Carries out a drain on this node: tells the workers, counts their exit codes, and stops those that are late.

use std::time::Duration;

use convoke_env::{ExitCause, ToWorker};
use nix::sys::signal::Signal;

use super::drain::{Announcement, DrainEvent, Draining};
use super::event_loop::EventLoop;
use super::state_machine::{AgentOutcome, Event};
use crate::formatting;
use crate::host_name::full_host_name;
use crate::messages::print_message;

impl EventLoop {
    pub(super) fn handle_drain_event(&mut self, event: DrainEvent) -> Option<AgentOutcome> {
        match event {
            DrainEvent::Requested { by } => self.request_drain(&by),
            DrainEvent::Announced(announcement) => {
                self.start_drain(announcement);
                None
            }
            DrainEvent::Late => self.stop_late_workers(),
        }
    }

    /// Handles a drain signal. Its second one is a plain stop, as a user means it.
    pub(super) fn handle_drain_signal(&mut self, signal: Signal) -> Option<AgentOutcome> {
        self.drain.signals += 1;
        if self.drain.signals > 1 && self.drain.state.is_some() {
            print_message(&format!("{signal} for the second time: the workers are stopped"));
            return self.stop_job(Signal::SIGTERM, false);
        }
        self.request_drain(signal.as_str())
    }

    /// Begins a drain on all nodes.
    fn request_drain(&mut self, what: &str) -> Option<AgentOutcome> {
        if self.drain.state.is_some() {
            return None;
        }
        let Some(assignment) = self.rounds.assignment() else {
            print_message(&format!("{what} asks for a drain before the workers started, so none starts"));
            return self.decide(Event::Signalled { signal: Signal::SIGTERM, at_once: false });
        };
        let by = match assignment.group_world_size {
            1 => what.to_owned(),
            _ => format!("{what} on node {} ({})", assignment.group_rank, full_host_name()),
        };
        self.drain.announce(by);
        None
    }

    fn start_drain(&mut self, announcement: Announcement) {
        if self.drain.state.is_some() {
            return;
        }
        let Announcement { by, left_ms } = announcement;
        let left = Duration::from_millis(left_ms);
        if self.speaks_for_all() {
            print_message(&format!(
                "drain, asked for by {by}: the workers have {} s to stop",
                left.as_secs()
            ));
        }
        self.drain.state = Some(Draining::new(by, left));
        self.agent.disable_restarts_for_drain();
        if let Err(error) = std::fs::write(self.drain.file(), b"") {
            let file = self.drain.file().display();
            print_message(&format!(
                "warning: workers that look for {file} do not learn of the drain: {error}"
            ));
        }
        if let Some(round) = &self.rounds.current {
            round.tell_workers(&ToWorker::Drain { left_ms });
        }
        // Only processes with a handler get the signal; others would die of it.
        if let Some(&signal) = self.config.drain.signals.first() {
            self.forward_quietly(signal);
        }
    }

    /// Returns how a worker's end counts. During a drain, the exit code of a drain counts as success.
    pub(super) fn count_drained(&mut self, cause: ExitCause) -> ExitCause {
        if cause != ExitCause::Code(self.config.drain.exit_code.into()) {
            return cause;
        }
        // The workers of all nodes stop at one step, which may be before this launcher hears of the drain.
        if self.drain.state.is_none()
            && let Some(announcement) = self.drain.read_announcement()
        {
            self.start_drain(announcement);
        }
        if self.drain.state.is_some() { ExitCause::Code(0) } else { cause }
    }

    /// Returns true if this node prints what all nodes know.
    fn speaks_for_all(&self) -> bool {
        self.rounds.assignment().is_none_or(|assignment| assignment.group_rank == 0)
    }

    fn stop_late_workers(&mut self) -> Option<AgentOutcome> {
        let late: Vec<usize> = self.running_workers().into_iter().map(|(_, rank)| rank).collect();
        if late.is_empty() {
            return None;
        }
        let state = self.drain.state.as_ref().expect("only a drain makes workers late");
        print_message(&format!(
            "error: the drain has not stopped {}, {:.1} s after it began; SIGTERM now, SIGKILL in {:.1} s",
            formatting::ranks(&late),
            state.began.elapsed().as_secs_f64(),
            state.grace.as_secs_f64()
        ));
        // This shows the calls in which the late ranks wait, if they use convoke's runtime.
        self.report_flight();
        self.stop_job(Signal::SIGTERM, false)
    }

    /// Returns the exit code of a drained job after its workers have ended as they were asked; `None` for
    /// another end. Says how long they took.
    pub(super) fn drained(&self, end: &AgentOutcome) -> Option<u8> {
        let state = self.drain.state.as_ref().filter(|_| *end == AgentOutcome::Success)?;
        let seconds = state.began.elapsed().as_secs_f64();
        if self.speaks_for_all() {
            print_message(&format!(
                "drained: all workers have stopped {seconds:.1} s after {} asked for it",
                state.by
            ));
        }
        Some(self.config.drain.exit_code)
    }
}
