//! The end of a group by failure: one cause, told to every rank, agreed through the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Presence;
use super::control::ask_at;
use super::core::Engine;
use super::messages::Haste;
use super::missing::missing;
use super::ticket::Ticket;
use crate::call::Call;
use crate::cause::{Cause, NAMED_RANKS, Report};
use crate::error::{CommError, Place};
use crate::fault::moment;
use crate::frame::Kind;

/// Longest time for the store to confirm the cause.
const CONFIRM: Duration = Duration::from_millis(100);
/// Most turns in which calls may use data that has already arrived when the group fails.
const LAST_TURNS: u32 = 64;

/// A call that was taken out of the engine: the call, its number, bytes received and expected, and its
/// ticket.
pub(super) type Ended = (Call, u64, (u64, u64), Arc<Ticket>);

/// The reason why the group has ended.
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
    /// Ends the group: tells the others, agrees on the cause, and completes every waiting call.
    pub(super) fn fail(&mut self, report: Report) {
        if self.failure.is_some() {
            return;
        }
        // The others are told first, so that they learn the cause even if this process dies at once. The
        // placeholder keeps incoming frames from failing the group again.
        self.failure = Some(Failure { report: report.clone(), confirmed: false });
        moment("failing", 0, 0);
        self.announce_failure(&report);
        moment("told", 0, 0);
        let failure = self.confirm(report);
        failure.report.note(self.settings.me);
        log::error!("{}", self.error(&failure, None, 0, (0, 0)));
        self.failure = Some(failure);
        // A call whose data has all arrived succeeds, even if the report of a later failure came first.
        let _ = (0..LAST_TURNS).find(|_| !self.turn());
        self.answer_everybody();
        self.settings.flight.save();
    }

    /// Tells the other ranks, the shared memory and the flight recorder.
    fn announce_failure(&mut self, report: &Report) {
        let abort = self.frame(Kind::Abort, 0);
        self.tell_all(&abort, &report.encode());
        if let Some(node) = &self.node {
            node.fail();
        }
        self.record_failure(report);
    }

    /// Ends all calls if the group has failed.
    pub(super) fn answer_everybody(&mut self) {
        let Some(failure) = self.failure.clone() else { return };
        for (call, seq, received, ticket) in self.end_everything() {
            ticket.complete(Err(self.error(&failure, Some(call), seq, received)));
        }
    }

    /// Confirms the cause through the store. The first cause that any rank writes there holds for all ranks.
    fn confirm(&self, report: Report) -> Failure {
        let served_by = self.settings.store_rank;
        if matches!(report.cause, Cause::PeerLost { rank, .. } if Some(rank) == served_by) {
            return Failure { report, confirmed: false };
        }
        let key = &self.settings.abort_key;
        let deadline = Instant::now() + CONFIRM;
        let winner = self.settings.store.compare_set(key, b"", &report.encode(), deadline);
        match winner.ok().and_then(|bytes| Report::decode(&bytes).ok()) {
            Some(report) => Failure { report, confirmed: true },
            None => Failure { report, confirmed: false },
        }
    }

    /// Handles a panic of the driving thread: the memory of its tasks may be gone, so no task may be touched
    /// again.
    pub(super) fn forget_all_tasks(&mut self) {
        let me = self.settings.me;
        let cause = Cause::Aborted { reason: format!("a thread of rank {me} panicked inside a call") };
        let report = Report::new(me, cause);
        let told = self.failure.is_some();
        self.failure.get_or_insert_with(|| Failure::new(report.clone()));
        let tasks = self.mailbox.collect().map(|(tasks, _)| tasks);
        self.answer_everybody();
        for task in tasks.into_iter().flatten() {
            self.start(task);
        }
        if !told {
            self.announce_failure(&report);
            self.settings.flight.save();
        }
    }

    pub(super) fn presence(&mut self) -> Presence {
        self.read_all_controls();
        let lost = match self.failure.as_ref().map(|failure| &failure.report.cause) {
            Some(Cause::PeerLost { rank, .. }) => Some(*rank),
            Some(_) | None => None,
        };
        let is_here = |rank: &usize| !self.peers[*rank].left && self.peers[*rank].silent.is_none();
        Presence { here: (0..self.peers.len()).filter(is_here).collect(), lost }
    }

    /// Returns `Ok` if the group still works, else the error for `call`.
    #[cfg(feature = "nccl")]
    pub(super) fn check(&mut self, call: Option<Call>) -> Result<(), CommError> {
        if self.left {
            return Err(CommError::Destroyed { group: self.settings.name.clone() });
        }
        self.read_all_controls();
        self.look_for_losses(Instant::now());
        match &self.failure {
            Some(failure) => Err(self.error(failure, call, self.next_seq, (0, 0))),
            None => Ok(()),
        }
    }

    /// Ends the group, unless it has ended already.
    #[cfg(feature = "nccl")]
    pub(super) fn end(&mut self, cause: Cause) {
        self.fail(Report::new(self.settings.me, cause));
    }

    /// Takes all tasks out of the engine and closes the data lanes.
    pub(super) fn end_everything(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        for collective in self.collectives.drain(..) {
            let run = collective.run;
            ended.push((run.call(), run.seq(), run.received(), collective.ticket));
        }
        for peer in &mut self.peers {
            for send in peer.messages.sends.drain(..) {
                ended.push((send.call, send.seq, (0, 0), send.ticket));
            }
            for recv in peer.messages.recvs.drain(..) {
                ended.push((recv.call, 0, (recv.done as u64, recv.call.bytes()), recv.ticket));
            }
            peer.messages.stop();
        }
        let open = self.open.recvs.drain(..).map(|recv| (recv.call, recv.ticket));
        let open = open.chain(self.probes.drain(..).map(|probe| (probe.call, probe.ticket)));
        ended.extend(open.map(|(call, ticket)| (call, 0, (0, call.bytes()), ticket)));
        ended
    }

    /// Returns the error of a call after `failure`.
    pub(super) fn error(
        &self,
        failure: &Failure,
        call: Option<Call>,
        seq: u64,
        received: (u64, u64),
    ) -> CommError {
        let place = Place {
            group: self.settings.name.clone(),
            call,
            seq,
            received_bytes: received.0,
            expected_bytes: received.1,
            reported_by: failure.report.by,
            confirmed: failure.confirmed,
        };
        let addresses = &self.settings.addresses;
        failure.report.error(place, |rank| addresses.get(rank).map_or_else(String::new, ToString::to_string))
    }

    pub(super) fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        let collectives = self.collectives.iter().map(|collective| &*collective.ticket);
        let messages = self.peers.iter().map(|peer| &peer.messages).filter(|messages| messages.is_busy());
        let messages = messages.flat_map(|messages| {
            let sends = messages.sends.iter().map(|send| &*send.ticket);
            sends.chain(messages.recvs.iter().map(|recv| &*recv.ticket))
        });
        collectives.chain(messages).chain(self.open_tickets())
    }

    /// Returns a bound for all pending calls: at most the shortest timeout, and at most the earliest time to
    /// ask.
    pub(super) fn haste(&self) -> Option<Haste> {
        let few = self.collectives.iter().map(|collective| &*collective.ticket).chain(self.open_tickets());
        let few = few.map(|ticket| Haste { shortest: ticket.timeout, ask_at: ask_at(ticket) });
        let all = few.chain(self.peers.iter().filter_map(|peer| peer.messages.haste()));
        all.reduce(|a, b| Haste { shortest: a.shortest.min(b.shortest), ask_at: a.ask_at.min(b.ask_at) })
    }

    /// Returns the tickets of receives from any rank, and of probes.
    pub(super) fn open_tickets(&self) -> impl Iterator<Item = &Ticket> {
        let recvs = self.open.recvs.iter().map(|recv| &*recv.ticket);
        recvs.chain(self.probes.iter().map(|probe| &*probe.ticket))
    }

    /// Fails the group if a call is overdue or a peer has been silent for too long.
    pub(super) fn look_for_overdue(&mut self, now: Instant) {
        self.look_for_silence(now);
        if let Some((awaited, timeout)) = self.overdue(now) {
            let (missing, after_ms) = (self.missing(&awaited), timeout.as_millis() as u64);
            self.fail(Report::new(self.settings.me, Cause::Timeout { missing, after_ms }));
        }
    }

    /// Returns the ranks for which an overdue call waits, and its timeout.
    fn overdue(&self, now: Instant) -> Option<(Vec<usize>, Duration)> {
        let late = |ticket: &Ticket| now >= self.due(ticket);
        if let Some(collective) = self.collectives.iter().find(|collective| late(&collective.ticket)) {
            let awaited =
                self.collectives.front().map(|first| first.awaited(self.settings.me, &self.peers).collect());
            return Some((awaited.unwrap_or_default(), collective.ticket.timeout));
        }
        // The bound of all messages is checked first, because there may be many.
        if self.haste().is_none_or(|haste| now < haste.ask_at) || !self.tickets().any(late) {
            return None;
        }
        let mut messages = self.message_waits();
        messages.find_map(|(ticket, _, awaited)| late(ticket).then_some((awaited, ticket.timeout)))
    }

    /// Returns all sends, receives and probes, and the ranks for which they wait. Calls of sends are
    /// [marked](Call::of_sender).
    pub(super) fn message_waits(&self) -> impl Iterator<Item = (&Arc<Ticket>, Call, Vec<usize>)> {
        let alone = self.settings.size == 1;
        let here = move |&rank: &usize| alone || rank != self.settings.me && !self.peers[rank].left;
        let anybody = move || (0..self.settings.size).filter(here).take(NAMED_RANKS).collect::<Vec<_>>();
        let with = self.peers.iter().enumerate().flat_map(|(rank, peer)| {
            let sends = peer.messages.sends.iter().map(|send| (&send.ticket, send.call.of_sender()));
            let all = sends.chain(peer.messages.recvs.iter().map(|recv| (&recv.ticket, recv.call)));
            all.map(move |(ticket, call)| (ticket, call, vec![rank]))
        });
        let open = self.open.recvs.iter().map(move |recv| (&recv.ticket, recv.call, anybody()));
        let probes = self.probes.iter().map(move |probe| {
            (&probe.ticket, probe.call, probe.from.map_or_else(anybody, |from| vec![from]))
        });
        with.chain(open).chain(probes)
    }

    /// Returns the ranks at which the wait chains from `awaited` end.
    fn missing(&self, awaited: &[usize]) -> Vec<usize> {
        // Answers from before the question may be out of date.
        let answer =
            |rank: usize| self.peers[rank].state.as_ref().filter(|said| Some(said.heard) >= self.asked);
        let waits = |rank| answer(rank).map(|said| said.awaits.as_slice());
        missing(self.settings.me, awaited, waits).into_iter().take(NAMED_RANKS).collect()
    }
}
