//! Starts operations.

use std::sync::Arc;

use super::completion::Completion;
use super::execution::Execution;
use super::operation::{Operation, Task, Transport};
use super::state::Engine;
use super::streams::Streams;
use crate::buffer::BorrowedBuffer;
use crate::collectives::call::{Call, Status};
use crate::collectives::kernels::Kernel;
use crate::error::CommError;
use crate::fault::fault_point;
use crate::shm::collective::ShmCollective;
use crate::transport::links::hello::ConnectionKind;

impl Engine {
    pub(super) fn start(&mut self, task: Task) {
        let Task { operation, completion } = task;
        let operation = match operation {
            Operation::Leave => return self.lifecycle.leaving.push(completion),
            Operation::Request(request) => {
                let outcome = self.answer(request);
                return completion.complete(outcome);
            }
            other => other,
        };
        let call = match &operation {
            Operation::Leave | Operation::Request(_) => unreachable!("both have returned above"),
            Operation::Collective { call, .. } | Operation::Probe { call, .. } => *call,
            Operation::Send { call, .. } | Operation::Recv { call, .. } => *call,
        };
        if self.lifecycle.left {
            completion.complete(Err(CommError::Destroyed { group: self.settings.name.clone() }));
            return;
        }
        if matches!(operation, Operation::Collective { transport: Transport::SharedMemory, .. }) {
            self.wait_for_failure_report();
        }
        if let Some(failure) = &self.failure {
            completion.complete(Err(self.error(failure, Some(call), self.collectives.next_seq(), (0, 0))));
            return;
        }
        self.record_message(&operation, &completion);
        match operation {
            Operation::Collective { call, transport, buffer, kernel } => {
                let run = self.start_collective(call, transport, buffer, kernel);
                let step = self.record_collective(&*run, self.settings.flight.ns(completion.started_at));
                let _ = completion.step.set(step);
                self.collectives.push(run, completion);
                self.compare_with_reports();
            }
            Operation::Send { to, call, buffer } if to == self.settings.me => {
                let sent =
                    self.peers[to].messages.send_to_self(&mut self.any_source, call, buffer, completion);
                if let Err(error) = sent {
                    self.message_failed(to, error);
                }
            }
            Operation::Send { to, call, buffer } => {
                self.ensure_connected(to, ConnectionKind::Message);
                self.peers[to].messages.post_send(&self.settings.credentials, call, buffer, completion);
            }
            Operation::Recv { from: Some(from), call, buffer } => {
                let order = self.any_source.order();
                self.receive(from, order, call, buffer, completion);
            }
            Operation::Recv { from: None, call, buffer } => {
                self.ensure_message_connections();
                match self.first_unexpected(None, call.root) {
                    Some(Status { source: from, .. }) => {
                        let order = self.any_source.order();
                        self.receive(from, order, call, buffer, completion);
                    }
                    None => self.any_source.post(call, buffer, completion),
                }
            }
            Operation::Probe { from, call, wait } => self.probe(from, call, wait, completion),
            Operation::Request(_) | Operation::Leave => unreachable!("both have returned above"),
        }
    }

    /// Starts the next collective: gives it a sequence number and opens the connections that it needs.
    fn start_collective(
        &mut self,
        call: Call,
        transport: Transport,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> Box<dyn Execution> {
        match transport {
            Transport::SharedMemory => Box::new(self.start_in_memory(call, buffer, kernel)),
            Transport::Connections(plan) => {
                let (seq, ours) = (self.next_number(call), &self.settings.credentials);
                let streams = Streams::new(ours, call, seq, plan, buffer, kernel, self.settings.me);
                for peer in streams.peers().collect::<Vec<_>>() {
                    self.ensure_connected(peer, ConnectionKind::Collective);
                }
                Box::new(streams)
            }
        }
    }

    /// Starts the next collective in shared memory.
    pub(super) fn start_in_memory(
        &mut self,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> ShmCollective {
        let seq = self.next_number(call);
        let Some(memory) = &mut self.host.memory else {
            unreachable!("only groups whose ranks all share memory run collectives there")
        };
        ShmCollective::new(memory, call, seq, buffer, kernel)
    }

    /// Returns the sequence number of the next collective, `call`.
    pub(super) fn next_number(&mut self, call: Call) -> u64 {
        let seq = self.collectives.number(call);
        fault_point("calling", seq, 0);
        seq
    }

    pub(super) fn receive(
        &mut self,
        from: usize,
        order: u64,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
    ) {
        self.ensure_connected(from, ConnectionKind::Message);
        let ours = &self.settings.credentials;
        if let Err(error) = self.peers[from].messages.post_recv(ours, order, call, buffer, completion) {
            self.message_failed(from, error);
        }
    }
}
