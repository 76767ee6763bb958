//! Starts operations.

use std::sync::Arc;

use super::execution::Execution;
use super::messages::PostedCall;
use super::operation::{Operation, Task, Transport};
use super::state::Engine;
use super::streams::Streams;
use crate::buffer::BorrowedBuffer;
use crate::collectives::call::Call;
use crate::collectives::kernels::Kernel;
use crate::collectives::plan::Plan;
use crate::shm::collective::ShmCollective;
use crate::transport::links::hello::ConnectionKind;

impl Engine {
    pub(super) fn start(&mut self, task: Task) {
        let Task { operation, completion } = task;
        let call = match &operation {
            Operation::Leave => return self.lifecycle.leaving.push(completion),
            Operation::Request(request) => {
                let outcome = self.answer(request);
                return completion.complete(outcome);
            }
            Operation::Collective { call, .. } | Operation::Probe { call, .. } => *call,
            Operation::Send { call, .. } | Operation::Recv { call, .. } => *call,
        };
        let in_memory = matches!(operation, Operation::Collective { transport: Transport::SharedMemory, .. });
        if in_memory && !self.lifecycle.left {
            self.wait_for_failure_report();
        }
        if let Err(error) = self.check_usable(Some(call)) {
            return completion.complete(Err(error));
        }
        let peer = match &operation {
            Operation::Send { to: peer, .. } | Operation::Recv { from: Some(peer), .. } => Some(*peer),
            _ => None,
        };
        self.set_awaited(call, peer);
        self.record_message(&operation, &completion);
        match operation {
            Operation::Collective { call, transport, buffers, kernel } => {
                let buffer = buffers.into_borrowed(call.kind);
                let (seq, run) = self.start_collective(call, transport, buffer, kernel);
                let at_ns = self.settings.flight.ns(completion.started_at);
                let _ = completion.step.set(self.record_collective((call, seq), &*run, at_ns));
                self.collectives.push((call, seq), run, completion);
                self.compare_with_reports();
            }
            Operation::Send { to, call, buffer } if to == self.settings.me => {
                let posted = PostedCall { call, buffer, completion };
                if let Err(error) = self.peers[to].messages.send_to_self(&mut self.any_source, posted) {
                    self.message_failed(to, error);
                }
            }
            Operation::Send { to, call, buffer } => {
                self.ensure_connected(to, ConnectionKind::Message);
                self.peers[to].messages.post_send(PostedCall { call, buffer, completion });
            }
            Operation::Recv { from, call, buffer } => {
                if from.is_none() {
                    self.ensure_message_connections();
                }
                let posted = PostedCall { call, buffer, completion };
                match from.or_else(|| Some(self.first_unexpected(None, call.root)?.source)) {
                    Some(from) => self.receive(from, posted),
                    None => self.any_source.post(posted),
                }
            }
            Operation::Probe { from, call, wait } => self.probe(from, call, wait, completion),
            Operation::Request(_) | Operation::Leave => unreachable!("both have returned above"),
        }
    }

    /// Starts the next collective. Returns its sequence number too.
    fn start_collective(
        &mut self,
        call: Call,
        transport: Transport,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> (u64, Box<dyn Execution>) {
        let Transport::Connections(plan) = transport else {
            let run = self.start_in_memory(call, buffer, kernel);
            return (run.seq, Box::new(run));
        };
        let (seq, streams) = self.start_over_connections(call, plan, buffer, kernel);
        (seq, Box::new(streams))
    }

    /// Starts the next collective, which runs `plan` over connections: opens those that it needs. Returns its sequence number
    /// too.
    #[inline(always)]
    pub(super) fn start_over_connections(
        &mut self,
        call: Call,
        plan: Arc<Plan>,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> (u64, Streams) {
        let (seq, ours) = (self.collectives.number(call), &self.settings.credentials);
        let streams = Streams::new(ours, call, seq, plan, buffer, kernel, self.settings.me);
        for peer in streams.peers() {
            self.ensure_connected(peer, ConnectionKind::Collective);
        }
        (seq, streams)
    }

    /// Starts the next collective in shared memory.
    pub(super) fn start_in_memory(
        &mut self,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> ShmCollective {
        let seq = self.collectives.number(call);
        let Some(memory) = &mut self.host.memory else {
            unreachable!("only groups whose ranks all share memory run collectives there")
        };
        ShmCollective::new(memory, call, seq, buffer, kernel)
    }

    pub(super) fn receive(&mut self, from: usize, posted: PostedCall) {
        self.ensure_connected(from, ConnectionKind::Message);
        let order = self.any_source.order();
        if let Err(error) = self.peers[from].messages.post_recv(order, posted) {
            self.message_failed(from, error);
        }
    }
}
