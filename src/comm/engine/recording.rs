//! Entries of the engine in the flight recorder.

use convoke_recorder::layout;

use super::completion::Completion;
use super::execution::Execution;
use super::operation::Operation;
use super::state::Engine;
use crate::collectives::call::Call;
use crate::collectives::plan::Algorithm;
use crate::error::cause::Report;
use crate::flight::{CallInfo, CallRecord};
use crate::shm::small_call::SmallCall;

impl Engine {
    /// Records a new collective in the flight recorder, begun at the time `at_ns`. It runs after the
    /// collectives that are queued.
    pub(super) fn record_collective(&self, run: &dyn Execution, at_ns: u64) -> CallRecord {
        let entry = CallInfo {
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
        self.settings.flight.begin(&entry)
    }

    /// Records a new send, receive or waiting probe in the flight recorder. Other probes and engine functions
    /// are not recorded.
    pub(super) fn record_message(&self, operation: &Operation<'_>, completion: &Completion) {
        let (kind, peer, call) = match *operation {
            Operation::Collective { .. } | Operation::Probe { wait: false, .. } => return,
            Operation::Request(_) | Operation::Leave => return,
            Operation::Send { to, call, .. } => (layout::Operation::Send, Some(to), call),
            Operation::Recv { from, call, .. } => (layout::Operation::Recv, from, call),
            Operation::Probe { from, call, wait: true } => (layout::Operation::Probe, from, call),
        };
        let entry = message_entry(kind, peer, call, self.settings.flight.ns(completion.started_at));
        let _ = completion.step.set(self.settings.flight.begin(&entry));
    }

    /// Records in the flight recorder that the first queued collective starts.
    pub(super) fn record_start(&self) {
        if let Some(step) = self.collectives.first().and_then(|first| first.completion.step.get()) {
            step.start();
        }
    }

    /// Records in the flight recorder that the current collective waits: for which ranks, and how many bytes
    /// it has received and sent.
    pub(super) fn record_waiting(&self) {
        let Some(first) = self.collectives.first() else { return };
        if let Some(step) = first.completion.step.get() {
            step.wait(
                first.awaited(self.settings.me, &self.peers),
                first.execution.received().0,
                first.execution.sent().0,
            );
        }
    }

    /// Records the failure of the group in the flight recorder.
    pub(super) fn record_failure(&self, report: &Report) {
        self.record_waiting();
        self.settings.flight.failed(report);
    }
}

/// Returns the flight recorder entry of a send, receive or probe.
pub(super) fn message_entry(
    operation: layout::Operation,
    peer: Option<usize>,
    call: Call,
    at_ns: u64,
) -> CallInfo {
    let bytes = |of: layout::Operation| if operation == of { call.bytes() } else { 0 };
    CallInfo {
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

/// Returns the flight recorder entry of a small collective in shared memory. No queued operation precedes it.
pub(super) fn small_entry(call: Call, small: &SmallCall, at_ns: u64) -> CallInfo {
    let (to_send_bytes, to_receive_bytes) = small.volume();
    CallInfo {
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
