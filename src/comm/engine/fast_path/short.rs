//! Collectives over connections that exchange a few bytes with one peer, run inline.

use std::sync::Arc;

use super::budget::RetryBudget;
use super::conditions::shares_core;
use super::results::SmallResult;
use crate::buffer::{BorrowedBuffer, SendRecvBuffers};
use crate::collectives::call::Call;
use crate::collectives::kernels::Kernel;
use crate::engine::completion::{Completion, TimeLimit};
use crate::engine::execution::PeerConnections;
use crate::engine::recording::short_entry;
use crate::engine::state::Engine;
use crate::engine::streams::{QueuedExchange, Shape, ShortExchange};
use crate::engine::wait_policy::WaitMedium;
use crate::error::ExecutionError;
use crate::fault::fault_point;
use crate::flight::{CallRecord, now_ns};
use crate::transport::links::hello::ConnectionKind;

/// The remaining work of a short exchange: its flight recorder entry, and the error that stopped it, if any.
struct Rest {
    exchange: ShortExchange,
    step: CallRecord,
    error: Option<ExecutionError>,
}

impl Engine {
    /// Runs a short exchange of this `shape` inline, if nothing is queued. If it must wait, it is queued with the time limit
    /// that `limit` returns.
    #[inline]
    pub(crate) fn try_short(
        &mut self,
        call: Call,
        shape: Shape,
        buffers: &mut SendRecvBuffers<'static>,
        kernel: Option<&Kernel>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> SmallResult {
        if !self.may_run_inline(WaitMedium::Connection, call) {
            return SmallResult::NotInline;
        }
        let Some(rest) = self.run_short(call, shape, buffers, kernel) else { return SmallResult::Done };
        let buffer = buffers.take(call.kind);
        SmallResult::Pending(self.enqueue_short(call, rest, buffer, kernel.cloned(), limit()))
    }

    /// Runs a short exchange as far as possible with short waits only. Returns the rest of it; `None` if it is done.
    #[inline(always)]
    fn run_short(
        &mut self,
        call: Call,
        shape: Shape,
        buffers: &mut SendRecvBuffers<'static>,
        kernel: Option<&Kernel>,
    ) -> Option<Rest> {
        let (peer, seq) = (shape.peer, self.collectives.number(call));
        self.ensure_connected(peer, ConnectionKind::Collective);
        let Self { settings, peers, host, driver, .. } = self;
        let mut exchange = ShortExchange::new(&settings.credentials, call, seq, shape, settings.me);
        let mut result = match peers.connection(peer) {
            Some(conn) => exchange.send(conn, buffers),
            None => Ok(false),
        };
        // The data is on its way now. This rank uses the time to copy its own block, and for the flight recorder.
        buffers.copy_own();
        let entry = short_entry((call, seq), &exchange, now_ns());
        if result.is_ok() && exchange.is_finished() {
            fault_point("moved", seq, 0);
            let _ = settings.flight.done(&entry);
            return None;
        }
        let step = settings.flight.begin(&entry);
        let mut budget = RetryBudget::new(settings, driver, WaitMedium::Connection, call.bytes());
        let error = loop {
            // The data of the peer may have come already, so this rank looks before it yields.
            if let (Ok(_), Some(conn)) = (&result, peers.connection(peer)) {
                result = exchange.progress(conn, buffers, kernel);
            }
            match result {
                Ok(_) if exchange.is_finished() => {
                    fault_point("moved", seq, 0);
                    step.end(true);
                    return None;
                }
                Ok(moved) if budget.may_retry(moved, || shares_core(&mut host.memory, [peer])) => {}
                Ok(_) => break None,
                Err(error) => break Some(error),
            }
        };
        Some(Rest { exchange, step, error })
    }

    /// Queues a short exchange that was begun inline.
    #[cold]
    fn enqueue_short(
        &mut self,
        call: Call,
        Rest { exchange, step, error }: Rest,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
        limit: TimeLimit,
    ) -> Arc<Completion> {
        let seq = exchange.seq();
        let run = QueuedExchange::new(exchange, buffer, kernel, error.is_some());
        self.enqueue((call, seq), Box::new(run), limit, step, error)
    }
}
