//! The failure of a group: a rank that detects a failure sends its cause to every rank, and all ranks agree
//! on one cause through the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::LiveRanks;
use super::completion::Completion;
use super::control::query_at;
use super::messages::DeadlineBounds;
use super::missing::missing;
use super::progress::Engine;
use crate::collectives::call::Call;
use crate::error::cause::{Cause, MAX_REPORTED_RANKS, Report};
use crate::error::{CallContext, CommError};
use crate::fault::fault_point;
use crate::transport::frame::Kind;

/// Longest wait for the store to answer with the cause that holds for all ranks.
const CONFIRM_TIMEOUT: Duration = Duration::from_millis(100);
/// Most attempts to move data after the group has failed, so that calls whose data has already arrived
/// succeed.
const FINAL_ROUNDS: u32 = 64;

/// A call that was taken out of the engine: the call, its number, bytes received and expected, and its
/// completion.
pub(super) type TakenOperation = (Call, u64, (u64, u64), Arc<Completion>);

/// The reason why the group has failed, and whether the ranks have agreed on it through the store
/// (`confirmed`).
#[derive(Debug, Clone)]
pub(super) struct Failure {
    report: Report,
    confirmed: bool,
}

impl Failure {
    pub(super) fn new(report: Report) -> Self {
        Self { report, confirmed: false }
    }
}

impl Engine {
    /// Ends the group with `report`: sends it to the other ranks, agrees with them on one cause, and
    /// completes every pending call with an error.
    pub(super) fn fail(&mut self, report: Report) {
        if self.failure.is_some() {
            return;
        }
        // The other ranks are told first, so that they learn the cause even if this process dies at once.
        // `failure` is set before that, so that incoming frames do not fail the group again.
        self.failure = Some(Failure { report: report.clone(), confirmed: false });
        fault_point("failing", 0, 0);
        self.announce_failure(&report);
        fault_point("told", 0, 0);
        let failure = self.confirm(report);
        failure.report.record(self.settings.me);
        log::error!("{}", self.error(&failure, None, 0, (0, 0)));
        self.failure = Some(failure);
        // A call whose data has all arrived succeeds, even if this rank handled the report of a later failure
        // first.
        let _ = (0..FINAL_ROUNDS).find(|_| !self.progress());
        self.fail_pending();
        self.settings.flight.save();
    }

    /// Sends `report` to the other ranks, marks the shared memory as failed, and records the failure in the
    /// flight recorder.
    fn announce_failure(&mut self, report: &Report) {
        let abort = self.frame(Kind::Abort, 0);
        self.broadcast_control(&abort, &report.encode());
        if let Some(node) = &self.node {
            node.fail();
        }
        self.record_failure(report);
    }

    /// Completes all pending calls with an error if the group has failed.
    pub(super) fn fail_pending(&mut self) {
        let Some(failure) = self.failure.clone() else { return };
        for (call, seq, received, completion) in self.take_all_operations() {
            completion.complete(Err(self.error(&failure, Some(call), seq, received)));
        }
    }

    /// Agrees with the other ranks on the cause: the first cause that any rank writes to the store holds for
    /// all ranks. The cause is unconfirmed if the store does not answer.
    fn confirm(&self, report: Report) -> Failure {
        let served_by = self.settings.store_rank;
        if matches!(report.cause, Cause::PeerLost { rank, .. } if Some(rank) == served_by) {
            return Failure { report, confirmed: false };
        }
        let key = &self.settings.abort_key;
        let deadline = Instant::now() + CONFIRM_TIMEOUT;
        let winner = self.settings.store.compare_set(key, b"", &report.encode(), deadline);
        match winner.ok().and_then(|bytes| Report::decode(&bytes).ok()) {
            Some(report) => Failure { report, confirmed: true },
            None => Failure { report, confirmed: false },
        }
    }

    /// Handles a panic of the thread that drove the engine: ends all tasks with an error. Their memory may be
    /// freed next, so no task may be touched again.
    pub(super) fn fail_after_panic(&mut self) {
        let me = self.settings.me;
        let cause = Cause::Aborted { reason: format!("a thread of rank {me} panicked inside a call") };
        let report = Report::new(me, cause);
        let announced = self.failure.is_some();
        self.failure.get_or_insert_with(|| Failure::new(report.clone()));
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

    pub(super) fn live_ranks(&mut self) -> LiveRanks {
        self.read_all_controls();
        let lost = match self.failure.as_ref().map(|failure| &failure.report.cause) {
            Some(Cause::PeerLost { rank, .. }) => Some(*rank),
            Some(_) | None => None,
        };
        let is_live = |rank: &usize| !self.peers[*rank].left && self.peers[*rank].control_closed.is_none();
        LiveRanks { live: (0..self.peers.len()).filter(is_live).collect(), lost }
    }

    /// Returns `Ok` if the group still works, else the error that `call` returns in the failed group.
    #[cfg(feature = "nccl")]
    pub(super) fn check(&mut self, call: Option<Call>) -> Result<(), CommError> {
        if self.left {
            return Err(CommError::Destroyed { group: self.settings.name.clone() });
        }
        self.read_all_controls();
        self.check_lost_peers(Instant::now());
        match &self.failure {
            Some(failure) => Err(self.error(failure, call, self.next_seq, (0, 0))),
            None => Ok(()),
        }
    }

    /// Ends the group with `cause`, unless it has ended already.
    #[cfg(feature = "nccl")]
    pub(super) fn end(&mut self, cause: Cause) {
        self.fail(Report::new(self.settings.me, cause));
    }

    /// Takes all pending operations out of the engine and closes the connections for messages.
    pub(super) fn take_all_operations(&mut self) -> Vec<TakenOperation> {
        let mut ended = Vec::new();
        for collective in self.collectives.drain(..) {
            let run = collective.execution;
            ended.push((run.call(), run.seq(), run.received(), collective.completion));
        }
        for peer in &mut self.peers {
            for send in peer.messages.sends.drain(..) {
                ended.push((send.call, send.seq, (0, 0), send.completion));
            }
            for recv in peer.messages.recvs.drain(..) {
                let received = (recv.done as u64).min(recv.call.bytes());
                ended.push((recv.call, 0, (received, recv.call.bytes()), recv.completion));
            }
            peer.messages.stop();
        }
        let open = self.any_source.recvs.drain(..).map(|recv| (recv.call, recv.completion));
        let open = open.chain(self.probes.drain(..).map(|probe| (probe.call, probe.completion)));
        ended.extend(open.map(|(call, completion)| (call, 0, (0, call.bytes()), completion)));
        ended
    }

    /// Returns the error that `call`, with number `seq`, returns because of `failure`. `received` holds the
    /// bytes that the call has received and expects.
    pub(super) fn error(
        &self,
        failure: &Failure,
        call: Option<Call>,
        seq: u64,
        received: (u64, u64),
    ) -> CommError {
        let context = CallContext {
            group: self.settings.name.clone(),
            call,
            seq,
            received_bytes: received.0,
            expected_bytes: received.1,
            reported_by: failure.report.by,
            confirmed: failure.confirmed,
        };
        let addresses = &self.settings.addresses;
        failure
            .report
            .error(context, |rank| addresses.get(rank).map_or_else(String::new, ToString::to_string))
    }

    pub(super) fn completions(&self) -> impl Iterator<Item = &Completion> {
        let collectives = self.collectives.iter().map(|collective| &*collective.completion);
        let messages = self.peers.iter().map(|peer| &peer.messages).filter(|messages| messages.is_busy());
        let messages = messages.flat_map(|messages| {
            let sends = messages.sends.iter().map(|send| &*send.completion);
            sends.chain(messages.recvs.iter().map(|recv| &*recv.completion))
        });
        collectives.chain(messages).chain(self.any_source_completions())
    }

    /// Returns lower bounds for all pending calls: of their timeouts, and of the times to ask other ranks
    /// what they wait in. `None` if no call is pending.
    pub(super) fn deadline_bounds(&self) -> Option<DeadlineBounds> {
        let few = self
            .collectives
            .iter()
            .map(|collective| &*collective.completion)
            .chain(self.any_source_completions());
        let few = few.map(|completion| DeadlineBounds {
            shortest: completion.timeout,
            query_at: query_at(completion),
        });
        let all = few.chain(self.peers.iter().filter_map(|peer| peer.messages.deadline_bounds()));
        all.reduce(|a, b| DeadlineBounds {
            shortest: a.shortest.min(b.shortest),
            query_at: a.query_at.min(b.query_at),
        })
    }

    /// Returns the completions of receives from any rank, and of probes.
    pub(super) fn any_source_completions(&self) -> impl Iterator<Item = &Completion> {
        let recvs = self.any_source.recvs.iter().map(|recv| &*recv.completion);
        recvs.chain(self.probes.iter().map(|probe| &*probe.completion))
    }

    /// Fails the group if a call is overdue or a peer whose connection has ended counts as lost.
    pub(super) fn check_deadlines(&mut self, now: Instant) {
        self.check_closed_peers(now);
        if let Some((awaited, timeout)) = self.overdue(now) {
            let (missing, after_ms) = (self.missing(&awaited), timeout.as_millis() as u64);
            self.fail(Report::new(self.settings.me, Cause::Timeout { missing, after_ms }));
        }
    }

    /// Returns the ranks that an overdue call waits for, and its timeout; `None` if no call is overdue.
    fn overdue(&self, now: Instant) -> Option<(Vec<usize>, Duration)> {
        let late = |completion: &Completion| now >= self.times_out_at(completion);
        if let Some(first) = self.collectives.front()
            && let Some(overdue) = self.collectives.iter().find(|collective| late(&collective.completion))
        {
            let awaited = first.awaited(self.settings.me, &self.peers).collect();
            return Some((awaited, overdue.completion.timeout));
        }
        // The common bound of all messages is checked first, because checking each message may take long.
        if self.deadline_bounds().is_none_or(|bounds| now < bounds.query_at) || !self.completions().any(late)
        {
            return None;
        }
        let mut messages = self.message_waits();
        messages
            .find_map(|(completion, _, awaited)| late(completion).then_some((awaited, completion.timeout)))
    }

    /// Returns the completion and the call of each pending send, receive and probe, and the ranks that it
    /// waits for. Calls of sends are [marked](Call::as_send).
    pub(super) fn message_waits(&self) -> impl Iterator<Item = (&Arc<Completion>, Call, Vec<usize>)> {
        let single = self.settings.size == 1;
        let candidate = move |&rank: &usize| single || rank != self.settings.me && !self.peers[rank].left;
        let candidates =
            move || (0..self.settings.size).filter(candidate).take(MAX_REPORTED_RANKS).collect::<Vec<_>>();
        let with = self.peers.iter().enumerate().flat_map(|(rank, peer)| {
            let sends = peer.messages.sends.iter().map(|send| (&send.completion, send.call.as_send()));
            let all = sends.chain(peer.messages.recvs.iter().map(|recv| (&recv.completion, recv.call)));
            all.map(move |(completion, call)| (completion, call, vec![rank]))
        });
        let open = self.any_source.recvs.iter().map(move |recv| (&recv.completion, recv.call, candidates()));
        let probes = self.probes.iter().map(move |probe| {
            (&probe.completion, probe.call, probe.from.map_or_else(candidates, |from| vec![from]))
        });
        with.chain(open).chain(probes)
    }

    /// Follows the waits that ranks have reported, from the ranks `awaited` on, and returns the ranks that do
    /// not answer: they hold up this rank.
    fn missing(&self, awaited: &[usize]) -> Vec<usize> {
        // A report that came before this rank last asked may be out of date.
        let answer = |rank: usize| {
            self.peers[rank].wait_report.as_ref().filter(|report| Some(report.received_at) >= self.queried_at)
        };
        let waits = |rank| answer(rank).map(|report| report.awaits.as_slice());
        missing(self.settings.me, awaited, waits).into_iter().take(MAX_REPORTED_RANKS).collect()
    }
}
