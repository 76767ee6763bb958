//! How a group ends: one cause, told to everybody, agreed through the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::Engine;
use super::ticket::Ticket;
use crate::call::Call;
use crate::cause::{Cause, NAMED_RANKS, Report};
use crate::error::{CommError, Loss, Place};
use crate::frame::Kind;
use crate::links::conn::Broken;

/// How long the store may take to confirm the cause.
const CONFIRM: Duration = Duration::from_millis(100);
/// How long the launcher may take to say how a rank died whose connections have closed.
const VERDICT: Duration = Duration::from_millis(60);
/// How long a control connection may take to explain why a data connection ended.
const EXPLAIN: Duration = Duration::from_millis(500);
/// Most turns that calls get to use what has already arrived when the group fails.
const LAST_TURNS: u32 = 64;
/// How long data that is already here may keep a dead peer from being noticed.
const SILENCE: Duration = Duration::from_millis(50);

/// A call that was taken out of the engine: which one, its number, bytes received and expected, and
/// who waits for it.
type Ended = (Call, u64, (u64, u64), Arc<Ticket>);

/// Why the group has ended.
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
    /// Ends the group: tells the others, agrees on the cause, and answers everybody who waits.
    pub(super) fn fail(&mut self, report: Report) {
        if self.failure.is_some() {
            return;
        }
        // First, so that the others learn of it even if this process dies of it at once. A placeholder
        // keeps what comes in meanwhile from failing again.
        self.failure = Some(Failure { report: report.clone(), confirmed: false });
        let abort = self.frame(Kind::Abort, 0);
        self.tell_all(&abort, &report.encode());
        let failure = self.confirm(report);
        failure.report.note(self.settings.me);
        log::error!("{}", self.error(&failure, None, 0, (0, 0)));
        self.failure = Some(failure);
        // A call whose data is all here has succeeded, though the news of a later failure overtook it.
        let _ = (0..LAST_TURNS).find(|_| !self.turn());
        self.answer_everybody();
    }

    /// Ends all calls if the group has failed.
    pub(super) fn answer_everybody(&mut self) {
        let Some(failure) = self.failure.clone() else { return };
        for (call, seq, received, ticket) in self.end_everything() {
            ticket.complete(Err(self.error(&failure, Some(call), seq, received)));
        }
    }

    /// The first cause that any rank wrote to the store is that of all ranks.
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

    /// A thread panicked while it drove: its memory may be gone, so no task may be touched again.
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
            let abort = self.frame(Kind::Abort, 0);
            self.tell_all(&abort, &report.encode());
        }
    }

    /// Takes all tasks out of the engine and closes the data lanes.
    fn end_everything(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        for collective in self.collectives.drain(..) {
            let run = collective.run;
            ended.push((run.call, run.seq, run.received(), collective.ticket));
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

    /// What a call returns after `failure`.
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

    /// Of receives from anybody, and of probes.
    fn open_tickets(&self) -> impl Iterator<Item = &Ticket> {
        let recvs = self.open.recvs.iter().map(|recv| &*recv.ticket);
        recvs.chain(self.probes.iter().map(|probe| &*probe.ticket))
    }

    /// A data connection has ended. That is no verdict: the control connection of that peer must say
    /// whether it died, left, or closed because of somebody else.
    pub(super) fn suspect(&mut self, peer: usize, why: &Broken) {
        self.read_control(peer);
        let until = Instant::now() + EXPLAIN;
        self.peers[peer].suspect.get_or_insert((until, why.to_string()));
    }

    /// Nothing moves: is it because somebody is gone?
    pub(super) fn look_for_losses(&mut self, now: Instant) {
        let gone = |peer: &super::state::Peer| peer.silent.is_some() && !peer.left;
        if let Some(rank) = self.peers.iter().position(gone) {
            self.wait_for_verdict(rank, now + VERDICT);
            let how = match &self.peers[rank].silent {
                Some((_, Broken::Failed(error))) => Loss::Unreachable { what: error.to_string() },
                Some((_, Broken::Closed)) | None => Loss::Disconnected,
            };
            self.fail(Report::new(self.settings.me, Cause::PeerLost { rank, how }));
            return;
        }
        // Peers that left in good order, but are needed.
        let awaited = self.collectives.front().into_iter().flat_map(|first| first.run.awaited());
        let mut awaited = awaited.filter(|&rank| self.peers[rank].collective.is_none());
        let messages = self.peers.iter().position(|peer| {
            let waits = !peer.messages.sends.is_empty() || !peer.messages.recvs.is_empty();
            peer.left && waits && peer.messages.conn.is_none()
        });
        let gone = |rank: usize| self.peers[rank].left && self.peers[rank].messages.conn.is_none();
        let mut others = (0..self.settings.size).filter(|&rank| rank != self.settings.me);
        let probed = self.probes.iter().filter_map(|probe| probe.from).find(|&rank| gone(rank));
        let open = self.open_tickets().next().and_then(|_| others.clone().next());
        let nobody = open.filter(|_| others.all(gone));
        if let Some(rank) = awaited.find(|&rank| self.peers[rank].left).or(messages).or(probed).or(nobody) {
            drop(awaited);
            self.fail(Report::new(self.settings.me, Cause::PeerLost { rank, how: Loss::Left }));
        }
    }

    /// Waits until somebody says how `rank` went, or why.
    fn wait_for_verdict(&mut self, rank: usize, until: Instant) {
        self.read_all_controls();
        self.look_at_agent();
        while self.failure.is_none() && self.settings.agent.is_some() && !self.peers[rank].left {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.poller.sleep(&[], left.min(Duration::from_millis(5)));
            self.read_all_controls();
            self.look_at_agent();
        }
    }

    /// Whose time is over?
    pub(super) fn look_for_overdue(&mut self, now: Instant) {
        let silent = |peer: &super::state::Peer| {
            peer.silent.as_ref().is_some_and(|(since, _)| now >= *since + SILENCE && !peer.left)
        };
        if self.tickets().next().is_some() && self.peers.iter().any(silent) {
            self.look_for_losses(now);
        }
        let unexplained = self.peers.iter().position(|peer| {
            let late = peer.suspect.as_ref().is_some_and(|(until, _)| now >= *until);
            late && !peer.left && peer.silent.is_none()
        });
        if let Some(rank) = unexplained {
            let what = self.peers[rank].suspect.take().map(|(_, what)| what).unwrap_or_default();
            let cause = Cause::PeerLost { rank, how: Loss::Unreachable { what } };
            self.fail(Report::new(self.settings.me, cause));
        }
        for peer in &mut self.peers {
            peer.suspect.take_if(|(until, _)| now >= *until);
        }
        let overdue = self.collectives.iter().find(|collective| now >= collective.ticket.deadline);
        if let Some(collective) = overdue {
            let after_ms = collective.ticket.timeout.as_millis() as u64;
            let missing = self.missing();
            self.fail(Report::new(self.settings.me, Cause::Timeout { missing, after_ms }));
        }
        let overdue = self.peers.iter().enumerate().find_map(|(rank, peer)| {
            let sends = peer.messages.sends.iter().map(|send| &send.ticket);
            let mut tickets = sends.chain(peer.messages.recvs.iter().map(|recv| &recv.ticket));
            tickets.find(|ticket| now >= ticket.deadline).map(|ticket| (rank, ticket.timeout))
        });
        let overdue = overdue.map(|(rank, timeout)| (vec![rank], timeout));
        let others =
            || (0..self.settings.size).filter(|&rank| rank != self.settings.me && !self.peers[rank].left);
        let open = self.open_tickets().find(|ticket| now >= ticket.deadline);
        let open = open.map(|ticket| (others().take(NAMED_RANKS).collect(), ticket.timeout));
        let probed = self.probes.iter().find(|probe| now >= probe.ticket.deadline);
        let probed = probed.and_then(|probe| Some((vec![probe.from?], probe.ticket.timeout)));
        if let Some((missing, timeout)) = overdue.or(probed).or(open) {
            let cause = Cause::Timeout { missing, after_ms: timeout.as_millis() as u64 };
            self.fail(Report::new(self.settings.me, cause));
        }
    }

    /// Ranks on which the first collective waits in the end: from those it waits for, follow what they
    /// have said they wait for; whoever has not said that it is there is missing.
    fn missing(&self) -> Vec<usize> {
        let Some(first) = self.collectives.front() else { return Vec::new() };
        let mut seen = vec![false; self.settings.size];
        seen[self.settings.me] = true;
        let mut queue: Vec<usize> = first.run.awaited().collect();
        let mut missing = Vec::new();
        while let Some(rank) = queue.pop() {
            if std::mem::replace(&mut seen[rank], true) {
                continue;
            }
            match &self.peers[rank].state {
                Some(state) if state.seq == first.run.seq => queue.extend(&state.awaits),
                Some(_) | None => missing.push(rank),
            }
        }
        if missing.is_empty() {
            missing.extend(first.run.awaited());
        }
        missing.sort_unstable();
        missing.dedup();
        missing.truncate(NAMED_RANKS);
        missing
    }
}
