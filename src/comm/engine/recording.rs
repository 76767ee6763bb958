//! What the engine tells the flight recorder.

use convoke_env::flight::layout;

use super::Operation;
use super::core::Engine;
use super::run::Run;
use super::ticket::Ticket;
use crate::call::Call;
use crate::cause::Report;
use crate::flight::{Step, Told};
use crate::plan::Algorithm;
use crate::shm::small::Small;

impl Engine {
    /// A collective has come, and those that are there are before it.
    pub(super) fn record_collective(&self, run: &Run, at_ns: u64) -> Step {
        let told = Told {
            operation: layout::Operation::Collective,
            call: run.call(),
            at_ns,
            seq: run.seq(),
            algorithm: run.algorithm(),
            peer: None,
            to_receive_bytes: run.received().1,
            to_send_bytes: run.sent().1,
            queued: !self.collectives.is_empty(),
        };
        self.settings.flight.begin(&told)
    }

    /// If it is about a message: it has come. Questions that are answered at once are not recorded.
    pub(super) fn record_message(&self, operation: &Operation<'_>, ticket: &Ticket) {
        let (kind, peer, call) = match *operation {
            Operation::Collective { .. } | Operation::Probe { wait: false, .. } => return,
            Operation::Ask(_) | Operation::Leave => return,
            Operation::Send { to, call, .. } => (layout::Operation::Send, Some(to), call),
            Operation::Recv { from, call, .. } => (layout::Operation::Recv, from, call),
            Operation::Probe { from, call, wait: true } => (layout::Operation::Probe, from, call),
        };
        let told = told_of_message(kind, peer, call, self.settings.flight.ns(ticket.made));
        let _ = ticket.step.set(self.settings.flight.begin(&told));
    }

    /// A collective has ended, and it is the turn of the next.
    pub(super) fn record_turn(&self) {
        if let Some(step) = self.collectives.front().and_then(|first| first.ticket.step.get()) {
            step.start();
        }
    }

    /// Nothing moves: for whom, and how far the collective in progress is.
    pub(super) fn record_waiting(&self) {
        let Some(first) = self.collectives.front() else { return };
        if let Some(step) = first.ticket.step.get() {
            step.wait(
                first.awaited(self.settings.me, &self.peers),
                first.run.received().0,
                first.run.sent().0,
            );
        }
    }

    /// The group fails.
    pub(super) fn record_failure(&self, report: &Report) {
        self.record_waiting();
        self.settings.flight.failed(report);
    }
}

/// What a message says of itself.
pub(super) fn told_of_message(
    operation: layout::Operation,
    peer: Option<usize>,
    call: Call,
    at_ns: u64,
) -> Told {
    let bytes = |of: layout::Operation| if operation == of { call.bytes() } else { 0 };
    Told {
        operation,
        call,
        at_ns,
        seq: 0,
        algorithm: None,
        peer,
        to_receive_bytes: bytes(layout::Operation::Recv),
        to_send_bytes: bytes(layout::Operation::Send),
        queued: false,
    }
}

/// What a small call in memory says of itself; nothing is before it.
pub(super) fn told_of_small(call: Call, small: &Small, at_ns: u64) -> Told {
    let (to_send_bytes, to_receive_bytes) = small.volume();
    Told {
        operation: layout::Operation::Collective,
        call,
        at_ns,
        seq: small.seq,
        algorithm: Some(Algorithm::Memory),
        peer: None,
        to_receive_bytes,
        to_send_bytes,
        queued: false,
    }
}
