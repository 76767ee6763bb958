//! Runs collectives and messages inline: on the calling thread, while they need not wait.
//!
//! A call is run inline if no operation is queued. It then needs no task in the submission queue; a
//! collective needs no completion either. If the other ranks do not arrive soon, it is queued.

mod budget;
mod conditions;
mod messages;
mod results;
mod short;
mod small;

use std::sync::Arc;

use super::completion::{Completion, TimeLimit};
use super::execution::{Execution, Paths};
use super::operation::{Operation, Transport};
use super::state::Engine;
use super::wait_policy::WaitMedium;
use crate::buffer::{BorrowedBuffer, CollectiveBuffers, SendRecvBuffers};
use crate::collectives::call::{Call, CallKind};
use crate::collectives::kernels::Kernel;
use crate::error::ExecutionError;
use crate::fault::fault_point;
use crate::flight::{self, now_ns};
use crate::shm::collective::ShmCollective;
use budget::RetryBudget;
use conditions::{runs_function, shares_core};
use results::OperationSlot;
pub(super) use results::{FastPath, MessageResult, SmallResult};
use small::{PendingSmall, SmallCallResult};

impl Engine {
    /// Runs a collective inline if it is small, uses shared memory, and nothing is queued. If it must wait, it is
    /// queued with the time limit that `limit` returns.
    #[inline]
    pub(crate) fn try_small(
        &mut self,
        call: Call,
        buffers: &mut SendRecvBuffers<'static>,
        kernel: Option<&Kernel>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> SmallResult {
        if !self.may_run_inline(WaitMedium::SharedMemory, call) {
            return SmallResult::NotInline;
        }
        match self.try_small_inline(call, buffers, kernel) {
            SmallCallResult::Done => SmallResult::Done,
            SmallCallResult::NotSmall => SmallResult::NotInline,
            SmallCallResult::Pending(rest) => {
                let buffer = buffers.take(call.kind);
                SmallResult::Pending(self.enqueue_small(call, *rest, buffer, kernel.cloned(), limit()))
            }
        }
    }

    /// Runs `operation` inline if nothing is queued and it is a message to or from one rank, or a collective.
    pub(super) fn try_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> FastPath {
        let (medium, call) = match operation {
            Some(Operation::Collective { call, transport: Transport::SharedMemory, .. }) => {
                (WaitMedium::SharedMemory, *call)
            }
            // The driver exchanges the arrivals of a monitored barrier.
            Some(Operation::Collective { call, .. }) if call.kind != CallKind::MonitoredBarrier => {
                (WaitMedium::Connection, *call)
            }
            Some(Operation::Send { to: peer, call, .. } | Operation::Recv { from: Some(peer), call, .. }) => {
                (self.medium(*peer), *call)
            }
            _ => return FastPath::NotInline,
        };
        if !self.may_run_inline(medium, call) {
            return FastPath::NotInline;
        }
        match operation {
            Some(Operation::Collective { transport: Transport::SharedMemory, .. }) => {
                self.try_collective_inline(operation, limit)
            }
            Some(Operation::Collective { .. }) => self.try_connections_inline(operation, limit),
            Some(Operation::Send { to: peer, .. }) if self.peers[*peer].messages.conn.is_some() => {
                self.try_send_inline(operation, limit)
            }
            Some(Operation::Recv { from: Some(peer), .. }) if self.peers[*peer].messages.conn.is_some() => {
                self.try_recv_inline(operation, limit)
            }
            _ => FastPath::NotInline,
        }
    }

    fn try_collective_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> FastPath {
        let Some(Operation::Collective { call, buffers, kernel, .. }) = operation else {
            return FastPath::NotInline;
        };
        let tried = match buffers {
            CollectiveBuffers::SendRecv(buffers) => self.try_small_inline(*call, buffers, kernel.as_ref()),
            CollectiveBuffers::Parts(buffer) => self.try_small_inline(*call, buffer, kernel.as_ref()),
        };
        let rest = match tried {
            SmallCallResult::Done => return FastPath::Done(None),
            SmallCallResult::NotSmall => None,
            SmallCallResult::Pending(rest) => Some(*rest),
        };
        let Some(Operation::Collective { call, buffers, kernel, .. }) = operation.take() else {
            return FastPath::NotInline;
        };
        let buffer = buffers.into_borrowed(call.kind);
        match rest {
            Some(rest) => FastPath::Pending(self.enqueue_small(call, rest, buffer, kernel, limit)),
            None => {
                let started_ns = now_ns();
                let run = self.start_in_memory(call, buffer, kernel);
                self.run_inline((call, run.seq), run, WaitMedium::SharedMemory, started_ns, limit)
            }
        }
    }

    /// Runs a collective over connections as far as possible with short waits only.
    fn try_connections_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> FastPath {
        let Some(Operation::Collective { call, transport: Transport::Connections(plan), buffers, kernel }) =
            operation.take()
        else {
            unreachable!("the caller has seen that it is a collective over connections");
        };
        let started_ns = now_ns();
        let (seq, run) = self.start_over_connections(call, plan, buffers.into_borrowed(call.kind), kernel);
        self.run_inline((call, seq), run, WaitMedium::Connection, started_ns, limit)
    }

    /// Queues a small call that was begun inline.
    #[cold]
    fn enqueue_small(
        &mut self,
        call: Call,
        PendingSmall { small, step, error }: PendingSmall,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
        limit: TimeLimit,
    ) -> Arc<Completion> {
        let Some(memory) = &mut self.host.memory else { unreachable!("the call was started in this memory") };
        let run = ShmCollective::from_small(memory, call, &small, buffer, kernel, error.is_some());
        self.enqueue((call, run.seq), Box::new(run), limit, step, error)
    }

    fn paths(&mut self) -> Paths<'_> {
        Paths { connections: &mut self.peers, memory: self.host.memory.as_mut() }
    }

    /// Runs a collective that was started, as far as possible with short waits only.
    #[inline(always)]
    fn run_inline<E: Execution + 'static>(
        &mut self,
        (call, seq): (Call, u64),
        mut run: E,
        medium: WaitMedium,
        started_ns: u64,
        limit: TimeLimit,
    ) -> FastPath {
        let recorded = runs_function(call).then(|| self.record_collective((call, seq), &run, started_ns));
        let mut result = run.poll(self.paths());
        let step = recorded.unwrap_or_else(|| self.record_collective((call, seq), &run, started_ns));
        let mut budget = RetryBudget::new(&self.settings, &self.driver, medium, call.bytes());
        let error = loop {
            match result {
                Ok(_) if run.is_finished() => {
                    fault_point("moved", seq, 0);
                    step.end(true);
                    return FastPath::Done(None);
                }
                Ok(moved)
                    if budget.may_retry(moved, || shares_core(&mut self.host.memory, run.awaited())) => {}
                Ok(_) => break None,
                Err(error) => break Some(error),
            }
            result = run.poll(self.paths());
        };
        FastPath::Pending(self.enqueue((call, seq), Box::new(run), limit, step, error))
    }

    /// Queues a collective that was begun inline, and handles the `error` that stopped it, if any.
    #[cold]
    fn enqueue(
        &mut self,
        (call, seq): (Call, u64),
        run: Box<dyn Execution>,
        limit: TimeLimit,
        step: flight::CallRecord,
        error: Option<ExecutionError>,
    ) -> Arc<Completion> {
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
        self.set_awaited(call, None);
        self.collectives.push((call, seq), run, Arc::clone(&completion));
        self.compare_with_reports();
        if let Some(error) = error {
            self.execution_failed(error);
        }
        completion
    }
}
