//! The end of a group by a failure: a rank that detects a failure sends its cause to every rank, and
//! completes every pending call with an error.

use std::sync::Arc;

use super::collectives::Collective;
use super::completion::{Completion, Outcome};
use super::failure::Failure;
use super::operation::{LiveRanks, Request};
use super::state::Engine;
use crate::collectives::call::Call;
use crate::collectives::plan::Direction;
use crate::error::CommError;
use crate::error::cause::{Cause, Report};
use crate::fault::fault_point;
use crate::transport::frame::Kind;

/// Most attempts to move data after the group has failed: calls whose data has arrived then succeed.
const FINAL_ROUNDS: u32 = 64;

/// A call that was taken out of the engine: its number, bytes received and expected, and completion.
pub(super) type TakenOperation = (Call, u64, (u64, u64), Arc<Completion>);

impl Engine {
    /// Ends the group with `report`: sends it to the other ranks, agrees with them on one cause, and
    /// completes every pending call with an error.
    pub(super) fn fail(&mut self, report: Report) {
        if self.failure.is_some() {
            return;
        }
        // The other ranks are told first, so that they learn the cause even if this process dies at once.
        // `failure` is set before that, so that incoming frames do not fail the group again.
        self.failure = Some(Failure::unconfirmed(report.clone()));
        fault_point("failing", 0, 0);
        self.announce_failure(&report);
        fault_point("told", 0, 0);
        let failure = Failure::confirm(&self.settings, report);
        failure.report.record(self.settings.me);
        log::error!("{}", failure.error(&self.settings, None, 0, (0, 0)));
        self.failure = Some(failure);
        // A call whose data has all arrived succeeds, even if this rank learned of a later failure first.
        let _ = (0..FINAL_ROUNDS).find(|_| !self.progress());
        self.fail_pending();
        self.settings.flight.save();
    }

    /// Ends the group for a cause that this rank has detected.
    pub(super) fn fail_for(&mut self, cause: Cause) {
        self.fail(Report::new(self.settings.me, cause));
    }

    /// Sends `report` to the other ranks, marks the shared memory as failed, and records the failure in the
    /// flight recorder.
    fn announce_failure(&mut self, report: &Report) {
        self.broadcast_control(&self.frame(Kind::Abort, 0), &report.encode());
        if let Some(node) = &self.host.memory {
            node.fail();
        }
        self.record_waiting();
        self.settings.flight.failed(report);
    }

    /// Completes all pending calls with an error if the group has failed.
    pub(super) fn fail_pending(&mut self) {
        let Some(failure) = self.failure.clone() else { return };
        for (call, seq, received, completion) in self.take_all_operations() {
            completion.complete(Err(failure.error(&self.settings, Some(call), seq, received)));
        }
    }

    /// Handles a panic of the thread that drove the engine: ends all tasks with an error. Their memory may be
    /// freed next, so no task may be touched again.
    pub(super) fn fail_after_panic(&mut self) {
        let me = self.settings.me;
        let cause = Cause::Aborted { reason: format!("a thread of rank {me} panicked inside a call") };
        let report = Report::new(me, cause);
        let announced = self.failure.is_some();
        if let Some(node) = &self.host.memory {
            // Other ranks may read the memory of a task. What they read from now on is not valid.
            node.fail();
        }
        self.failure.get_or_insert_with(|| Failure::unconfirmed(report.clone()));
        let tasks = self.submissions.collect().map(|(tasks, _)| tasks);
        self.fail_pending();
        for task in tasks.into_iter().flatten() {
            self.start(task);
        }
        if !announced {
            self.announce_failure(&report);
            self.settings.flight.save();
        }
    }

    /// Answers a request, also after the group has ended.
    pub(super) fn answer(&mut self, request: &Request) -> Outcome {
        match request {
            Request::Finish => self.finish(),
            // A request has one answer, so the cell is empty.
            Request::ParentLinks(answer) => drop(answer.set(self.parent_links())),
            Request::LiveRanks(answer) => drop(answer.set(self.live_ranks())),
            #[cfg(feature = "nccl")]
            Request::Check(call) => {
                if !self.lifecycle.left {
                    self.read_all_controls();
                    self.decide_lost_peers();
                }
                self.check_usable(*call)?;
            }
            #[cfg(feature = "nccl")]
            Request::End(cause) => self.fail_for(cause.clone()),
        }
        Ok(None)
    }

    fn live_ranks(&mut self) -> LiveRanks {
        self.read_all_controls();
        let lost = self.failure.as_ref().and_then(Failure::lost_rank);
        let is_live = |rank: &usize| !self.liveness.has_left(*rank) && !self.liveness.is_closed(*rank);
        LiveRanks { live: (0..self.peers.len()).filter(is_live).collect(), lost }
    }

    /// Fails with the error that `call` returns if this rank has left the group or the group has failed.
    pub(super) fn check_usable(&self, call: Option<Call>) -> Result<(), CommError> {
        match &self.failure {
            _ if self.lifecycle.left => Err(self.destroyed()),
            Some(failure) => Err(failure.error(&self.settings, call, self.collectives.next_seq, (0, 0))),
            None => Ok(()),
        }
    }

    pub(super) fn destroyed(&self) -> CommError {
        CommError::Destroyed { group: self.settings.name.clone() }
    }

    /// Takes all pending operations out of the engine and closes the connections for messages.
    pub(super) fn take_all_operations(&mut self) -> Vec<TakenOperation> {
        let mut ended = Vec::new();
        for Collective { call, seq, execution, completion, .. } in self.collectives.queue.drain(..) {
            ended.push((call, seq, execution.bytes(Direction::Recv), completion));
        }
        for peer in &mut self.peers {
            let sends = peer.messages.sends.drain(..);
            ended.extend(sends.map(|send| (send.posted.call, send.seq, (0, 0), send.posted.completion)));
            ended.extend(peer.messages.recvs.drain(..).map(|recv| {
                let bytes = recv.posted.call.bytes();
                (recv.posted.call, 0, ((recv.done as u64).min(bytes), bytes), recv.posted.completion)
            }));
            peer.messages.stop();
        }
        let open = self.any_source.recvs.drain(..).map(|recv| (recv.posted.call, recv.posted.completion));
        let open = open.chain(self.any_source.probes.drain(..).map(|probe| (probe.call, probe.completion)));
        ended.extend(open.map(|(call, completion)| (call, 0, (0, call.bytes()), completion)));
        ended
    }
}
