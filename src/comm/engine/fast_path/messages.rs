//! Messages between ranks of one host, run inline.

use std::sync::Arc;

use convoke_recorder::layout;

use super::budget::RetryBudget;
use super::conditions::{MESSAGES_BETWEEN_CORE_CHECKS, first_attempts, shares_core};
use super::results::{FastPath, OperationSlot};
use crate::buffer::SendRecvBuffers;
use crate::collectives::call::{Call, Status};
use crate::engine::completion::{Completion, TimeLimit};
use crate::engine::messages::direct::{RecvProgress, SendProgress};
use crate::engine::messages::{PostedCall, is_large};
use crate::engine::operation::Operation;
use crate::engine::recording::call_entry;
use crate::engine::state::Engine;
use crate::flight::now_ns;

impl Engine {
    /// Sends a message through a cell to a rank of this host, if nothing is queued. Returns whether it was sent; if not,
    /// nothing has happened.
    #[inline]
    pub(crate) fn try_send_short(&mut self, to: usize, call: Call, buffers: &SendRecvBuffers<'_>) -> bool {
        if !self.may_run_inline(MESSAGES_BETWEEN_CORE_CHECKS) || !self.host.ranks.contains(&to) {
            return false;
        }
        let bytes = buffers.sent(0..call.bytes() as usize);
        // A broken connection is reported by the next way that the caller tries.
        if !matches!(self.peers[to].messages.send_cell(call, bytes), Ok(true)) {
            return false;
        }
        let entry = call_entry(layout::Operation::Send, Some(to), call, now_ns());
        let _ = self.settings.flight.done(&entry);
        true
    }

    /// Receives a message through a cell from a rank of this host, if nothing is queued and the message comes soon.
    /// Returns whether it was received; if not, nothing has happened.
    #[inline]
    pub(crate) fn try_recv_short(
        &mut self,
        from: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'_>,
    ) -> bool {
        if !self.may_run_inline(MESSAGES_BETWEEN_CORE_CHECKS) || !self.host.ranks.contains(&from) {
            return false;
        }
        let messages = &mut self.peers[from].messages;
        let mut into = buffers.received(0..call.bytes() as usize);
        // The message is on its way now, so reading the time costs less than when it has come.
        let entry = call_entry(layout::Operation::Recv, Some(from), call, now_ns());
        for _ in 0..first_attempts(&self.settings) {
            match messages.recv_cell(&self.any_source, call, &mut into) {
                Ok(RecvProgress::Complete) => {
                    drop(into);
                    let is_busy = messages.is_busy();
                    let _ = self.settings.flight.done(&entry);
                    if is_busy {
                        // The receive has queued a frame that returns credit to the peer.
                        self.progress_messages(from);
                    }
                    return true;
                }
                Ok(RecvProgress::Nothing) => {}
                _ => return false,
            }
        }
        false
    }

    pub(super) fn try_send_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> FastPath {
        let Some(Operation::Send { to, call, buffer }) = operation else { return FastPath::NotInline };
        let (to, call) = (*to, *call);
        let entry = || call_entry(layout::Operation::Send, Some(to), call, now_ns());
        if is_large(call) {
            // The receiver may have told that it is ready.
            self.progress_messages(to);
            if self.failure.is_some() {
                return FastPath::NotInline;
            }
        }
        let sent = self.peers[to].messages.send_direct(call, buffer);
        if let Ok(SendProgress::Complete) = sent {
            let _ = self.settings.flight.done(&entry());
            return FastPath::Done(None);
        }
        let step = self.settings.flight.begin(&entry());
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
        let Some(Operation::Send { buffer, .. }) = operation.take() else { return FastPath::NotInline };
        let posted = PostedCall { call, buffer, completion: Arc::clone(&completion) };
        let messages = &mut self.peers[to].messages;
        match sent {
            Ok(SendProgress::Partial { seq, frame }) => messages.post_partial_send(seq, frame, posted),
            other => {
                messages.post_send(posted);
                if let Err(error) = other {
                    self.message_failed(to, error);
                }
            }
        }
        self.progress_message(to, call, completion)
    }

    pub(super) fn try_recv_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> FastPath {
        let Some(Operation::Recv { from: Some(from), call, buffer }) = operation else {
            return FastPath::NotInline;
        };
        let (from, call) = (*from, *call);
        let entry = || call_entry(layout::Operation::Recv, Some(from), call, now_ns());
        let (mut step, mut done) = (None, 0);
        let mut budget = RetryBudget::new(&self.settings, &self.driver, call.bytes());
        let mut received = self.peers[from].messages.recv_direct(&self.any_source, call, buffer);
        while let Ok(state @ (RecvProgress::Nothing | RecvProgress::Partial(_))) = received {
            if is_large(call) {
                // A posted receive lets the sender send at once.
                break;
            }
            step.get_or_insert_with(|| self.settings.flight.begin(&entry()));
            let received_bytes = if let RecvProgress::Partial(bytes) = state { bytes } else { 0 };
            let node = &mut self.host.memory;
            if !budget.may_retry(received_bytes > std::mem::replace(&mut done, received_bytes), || {
                shares_core(node, [from])
            }) {
                break;
            }
            let messages = &mut self.peers[from].messages;
            received = match state {
                RecvProgress::Partial(done) => messages.recv_rest(done, buffer),
                _ => messages.recv_direct(&self.any_source, call, buffer),
            };
        }
        if let Ok(RecvProgress::Complete) = received {
            step.map_or_else(|| drop(self.settings.flight.done(&entry())), |step| budget.end(&step));
            if self.peers[from].messages.is_busy() {
                // The receive may have queued a frame that returns credit to the peer.
                self.progress_messages(from);
            }
            return FastPath::Done(Some(Status { source: from, call }));
        }
        let step = step.unwrap_or_else(|| self.settings.flight.begin(&entry()));
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
        let Some(Operation::Recv { buffer, .. }) = operation.take() else { return FastPath::NotInline };
        let posted = PostedCall { call, buffer, completion: Arc::clone(&completion) };
        if let Ok(RecvProgress::Partial(done)) = received {
            let order = self.any_source.order();
            self.peers[from].messages.post_partial_recv(order, posted, done);
        } else {
            self.receive(from, posted);
        }
        if let Err(error) = received {
            self.message_failed(from, error);
        }
        self.progress_message(from, call, completion)
    }

    /// Moves messages with `peer` until `completion` is done; `Pending` if that requires a longer wait.
    fn progress_message(&mut self, peer: usize, call: Call, completion: Arc<Completion>) -> FastPath {
        self.driver.wait_policy.set_bytes(call.bytes());
        let mut budget = RetryBudget::new(&self.settings, &self.driver, call.bytes());
        loop {
            match completion.take() {
                Some(Ok(status)) => return FastPath::Done(status),
                Some(Err(error)) => return FastPath::Failed(Box::new(error)),
                None => {}
            }
            let moved = self.progress_messages(peer);
            let node = &mut self.host.memory;
            if self.failure.is_some() || !budget.may_retry(moved, || shares_core(node, [peer])) {
                return FastPath::Pending(completion);
            }
        }
    }
}
