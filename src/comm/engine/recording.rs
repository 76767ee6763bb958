//! Entries of the engine in the flight recorder.

use convoke_recorder::layout;

use super::completion::Completion;
use super::execution::Execution;
use super::operation::Operation;
use super::state::Engine;
use super::streams::ShortExchange;
use crate::collectives::call::Call;
use crate::collectives::plan::{Algorithm, Direction};
use crate::flight::{CallInfo, CallRecord};
use crate::shm::small_call::SmallCall;

impl Engine {
    /// Records a new collective, begun at the time `at_ns`, which runs after the queued ones.
    pub(super) fn record_collective(
        &self,
        (call, seq): (Call, u64),
        run: &dyn Execution,
        at_ns: u64,
    ) -> CallRecord {
        self.settings.flight.begin(&CallInfo {
            seq,
            algorithm: run.algorithm(),
            to_receive_bytes: run.bytes(Direction::Recv).1,
            to_send_bytes: run.bytes(Direction::Send).1,
            queued: !self.collectives.queue.is_empty(),
            ..call_entry(layout::Operation::Collective, None, call, at_ns)
        })
    }

    /// Records a new send, receive or waiting probe in the flight recorder; others are not recorded here.
    pub(super) fn record_message(&self, operation: &Operation<'_>, completion: &Completion) {
        let (kind, peer, call) = match *operation {
            Operation::Collective { .. } | Operation::Probe { wait: false, .. } => return,
            Operation::Request(_) | Operation::Leave => return,
            Operation::Send { to, call, .. } => (layout::Operation::Send, Some(to), call),
            Operation::Recv { from, call, .. } => (layout::Operation::Recv, from, call),
            Operation::Probe { from, call, wait: true } => (layout::Operation::Probe, from, call),
        };
        let entry = call_entry(kind, peer, call, self.settings.flight.ns(completion.started_at));
        let _ = completion.step.set(self.settings.flight.begin(&entry));
    }

    /// Records in the flight recorder that the first queued collective starts.
    pub(super) fn record_start(&self) {
        if let Some(step) = self.collectives.queue.front().and_then(|first| first.completion.step.get()) {
            step.start();
        }
    }

    /// Records that the current collective waits: for which ranks, and the bytes received and sent so far.
    pub(super) fn record_waiting(&self) {
        if let Some(first) = self.collectives.queue.front()
            && let Some(step) = first.completion.step.get()
        {
            step.wait(
                first.awaited(self.settings.me, &self.peers),
                first.execution.bytes(Direction::Recv).0,
                first.execution.bytes(Direction::Send).0,
            );
        }
    }
}

/// Returns the flight recorder entry of a message or probe; of a collective, without number and bytes.
pub(super) fn call_entry(
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

/// Returns the flight recorder entry of a short exchange over a connection. No queued operation precedes it.
pub(super) fn short_entry((call, seq): (Call, u64), exchange: &ShortExchange, at_ns: u64) -> CallInfo {
    let (to_send_bytes, to_receive_bytes) = exchange.shape().volume();
    let algorithm = exchange.shape().algorithm;
    let entry = call_entry(layout::Operation::Collective, None, call, at_ns);
    CallInfo { seq, algorithm, to_receive_bytes, to_send_bytes, ..entry }
}

/// Returns the flight recorder entry of a small collective in shared memory. No queued operation precedes it.
pub(super) fn small_entry(call: Call, small: &SmallCall, at_ns: u64) -> CallInfo {
    let (to_send_bytes, to_receive_bytes) = small.schedule.volume();
    let (seq, algorithm) = (small.seq, Some(Algorithm::Memory));
    let entry = call_entry(layout::Operation::Collective, None, call, at_ns);
    CallInfo { seq, algorithm, to_receive_bytes, to_send_bytes, ..entry }
}
