//! Messages to and from one rank, run inline.

use std::sync::Arc;

use convoke_recorder::layout;

use super::budget::RetryBudget;
use super::conditions::{first_attempts, ready_attempts, shares_core};
use super::results::{FastPath, MessageResult, OperationSlot};
use crate::buffer::{BorrowedBuffer, SendRecvBuffers};
use crate::collectives::call::{Call, Status};
use crate::engine::completion::{Completion, TimeLimit};
use crate::engine::messages::direct::{RecvProgress, SendProgress};
use crate::engine::messages::{MessageError, PostedCall, is_large};
use crate::engine::operation::Operation;
use crate::engine::recording::call_entry;
use crate::engine::state::Engine;
use crate::engine::wait_policy::WaitMedium;
use crate::flight::{CallRecord, now_ns};
use crate::shm::copy_reduce::Buffers;

/// A receive that was begun inline and must be queued: the result of its last attempt, and its flight recorder entry.
struct RecvRest {
    received: Result<RecvProgress, MessageError>,
    step: CallRecord,
}

impl Engine {
    /// Sends an eager message, if nothing is queued: inside a host by a cell. What a connection does not take at once is
    /// queued with the time limit that `limit` returns.
    #[inline]
    pub(crate) fn try_send_eager(
        &mut self,
        to: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'static>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> MessageResult {
        if !self.host.ranks.contains(&to) {
            return self.try_send_over_connection(to, call, buffers, limit);
        }
        if !self.may_run_inline(WaitMedium::SharedMemory, call) {
            return MessageResult::NotInline;
        }
        let bytes = buffers.sent(0..call.bytes() as usize);
        // A broken connection is reported by the next way that the caller tries.
        if !matches!(self.peers[to].messages.send_cell(call, bytes), Ok(true)) {
            return MessageResult::NotInline;
        }
        self.record_sent(to, call);
        MessageResult::Done
    }

    /// Sends an eager message over a connection as [`Self::try_send_eager`] does.
    #[inline(never)]
    fn try_send_over_connection(
        &mut self,
        to: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'static>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> MessageResult {
        if !self.may_run_inline(WaitMedium::Connection, call) {
            return MessageResult::NotInline;
        }
        let bytes = buffers.sent(0..call.bytes() as usize);
        match self.peers[to].messages.send_direct(call, bytes) {
            Ok(SendProgress::Nothing) => MessageResult::NotInline,
            Ok(SendProgress::Complete) => {
                self.record_sent(to, call);
                MessageResult::Done
            }
            sent => {
                let buffer = buffers.take(call.kind);
                MessageResult::Queued(Box::new(self.queue_send(to, call, buffer, sent, limit())))
            }
        }
    }

    /// Records a send that is done already.
    fn record_sent(&self, to: usize, call: Call) {
        let entry = call_entry(layout::Operation::Send, Some(to), call, now_ns());
        let _ = self.settings.flight.done(&entry);
    }

    /// Receives an eager message, if nothing is queued: inside a host by a cell. If it must wait, it is queued with the time
    /// limit that `limit` returns.
    #[inline]
    pub(crate) fn try_recv_eager(
        &mut self,
        from: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'static>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> MessageResult {
        if !self.host.ranks.contains(&from) {
            return self.try_recv_over_connection(from, call, buffers, limit);
        }
        if !self.may_run_inline(WaitMedium::SharedMemory, call) {
            return MessageResult::NotInline;
        }
        let messages = &mut self.peers[from].messages;
        let mut into = buffers.received(0..call.bytes() as usize);
        // The message is on its way now, so reading the time costs less than when it has come.
        let entry = call_entry(layout::Operation::Recv, Some(from), call, now_ns());
        let rest = 'attempts: {
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
                        return MessageResult::Done;
                    }
                    Ok(RecvProgress::Nothing) => {}
                    rest => break 'attempts rest,
                }
            }
            Ok(RecvProgress::Nothing)
        };
        drop(into);
        self.continue_recv(from, call, buffers, rest, limit)
    }

    /// Receives an eager message over a connection as [`Self::try_recv_eager`] does.
    #[inline(never)]
    fn try_recv_over_connection(
        &mut self,
        from: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'static>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> MessageResult {
        if self.peers[from].messages.conn.is_none() || !self.may_run_inline(WaitMedium::Connection, call) {
            return MessageResult::NotInline;
        }
        let mut into = buffers.received(0..call.bytes() as usize);
        let received = self.peers[from].messages.recv_direct(&self.any_source, call, &mut into);
        drop(into);
        let result = self.continue_recv(from, call, buffers, received, limit);
        if matches!(result, MessageResult::Done) {
            self.count_inline_receive(from);
        }
        result
    }

    /// Continues a receive, whose first attempts had the result `received`. If it must wait, it is queued with the time
    /// limit that `limit` returns.
    #[inline(never)]
    fn continue_recv(
        &mut self,
        from: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'static>,
        received: Result<RecvProgress, MessageError>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> MessageResult {
        let Some(rest) = self.wait_recv(from, call, buffers, received) else { return MessageResult::Done };
        let buffer = buffers.take(call.kind);
        MessageResult::Queued(Box::new(self.queue_recv(from, call, buffer, rest, limit())))
    }

    pub(super) fn try_send_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> FastPath {
        let Some(Operation::Send { to, call, buffer }) = operation else { return FastPath::NotInline };
        let (to, call, len) = (*to, *call, buffer.len());
        let exposes = self.peers[to].messages.exposes(call);
        if is_large(call) && !exposes {
            // The receiver may have told that it is ready, or may do so at once.
            for _ in 0..ready_attempts(&self.settings) {
                self.progress_messages(to);
                if self.failure.is_some() {
                    return FastPath::NotInline;
                }
                if !self.peers[to].messages.expects_ready() {
                    break;
                }
            }
        }
        let bytes = buffer.bytes(0..len);
        // The queues handle a message from several pieces of memory, and one that the receiver reads there.
        let sent = if bytes.len() == len && !exposes {
            self.peers[to].messages.send_direct(call, bytes)
        } else {
            Ok(SendProgress::Nothing)
        };
        if let Ok(SendProgress::Complete) = sent {
            self.record_sent(to, call);
            return FastPath::Done(None);
        }
        let buffer = std::mem::take(buffer);
        self.queue_send(to, call, buffer, sent, limit)
    }

    /// Queues a send that was begun inline, whose first attempt had the result `sent`.
    #[inline(never)]
    fn queue_send(
        &mut self,
        to: usize,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        sent: Result<SendProgress, MessageError>,
        limit: TimeLimit,
    ) -> FastPath {
        let entry = call_entry(layout::Operation::Send, Some(to), call, now_ns());
        let step = self.settings.flight.begin(&entry);
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
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
        let (from, call, len) = (*from, *call, buffer.len());
        let mut into = buffer.bytes_mut(0..len);
        // The queues handle a message into several pieces of memory.
        let received = if into.len() == len {
            self.peers[from].messages.recv_direct(&self.any_source, call, &mut into)
        } else {
            Ok(RecvProgress::UseQueues)
        };
        drop(into);
        match self.wait_recv(from, call, buffer, received) {
            None => FastPath::Done(Some(Status { source: from, call })),
            Some(rest) => {
                let buffer = std::mem::take(buffer);
                self.queue_recv(from, call, buffer, rest, limit)
            }
        }
    }

    /// Continues a receive, whose first attempts had the result `received`, with short waits only. Returns what is left of
    /// it; `None` if a message of the length of the buffer was received.
    fn wait_recv<B: Buffers>(
        &mut self,
        from: usize,
        call: Call,
        buffers: &mut B,
        mut received: Result<RecvProgress, MessageError>,
    ) -> Option<RecvRest> {
        let entry = || call_entry(layout::Operation::Recv, Some(from), call, now_ns());
        let (mut step, mut done) = (None, 0);
        let mut budget = RetryBudget::new(&self.settings, &self.driver, self.medium(from), call.bytes());
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
            let mut into = buffers.received(0..call.bytes() as usize);
            received = match state {
                RecvProgress::Partial(done) => messages.recv_rest(done, &mut into),
                _ => messages.recv_direct(&self.any_source, call, &mut into),
            };
        }
        if let Ok(RecvProgress::Complete) = received {
            step.map_or_else(|| drop(self.settings.flight.done(&entry())), |step| budget.end(&step));
            if self.peers[from].messages.is_busy() {
                // The receive may have queued a frame that returns credit to the peer.
                self.progress_messages(from);
            }
            return None;
        }
        let step = step.unwrap_or_else(|| self.settings.flight.begin(&entry()));
        Some(RecvRest { received, step })
    }

    /// Queues a receive that was begun inline.
    #[inline(never)]
    fn queue_recv(
        &mut self,
        from: usize,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        RecvRest { received, step }: RecvRest,
        limit: TimeLimit,
    ) -> FastPath {
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
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
        self.set_awaited(call, Some(peer));
        let mut budget = RetryBudget::new(&self.settings, &self.driver, self.medium(peer), call.bytes());
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
