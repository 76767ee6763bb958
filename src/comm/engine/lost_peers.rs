//! Detection of lost peers: which connections have ended, and what that proves.

use std::time::{Duration, Instant};

use super::progress::Engine;
use super::state::Peer;
use crate::cause::{Cause, Report};
use crate::error::LossReason;
use crate::links::conn::{Conn, ConnError};

/// Longest time for the launcher to say how a rank died whose connections have closed.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_millis(60);
/// Longest time for a control connection to explain why a data connection ended.
const CONTROL_EVIDENCE_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest time for which data that has already arrived may delay the detection of a dead peer.
const MAX_DETECTION_DELAY: Duration = Duration::from_millis(50);
/// Longest time for the kernels of other hosts to show that they are alive.
const LIVENESS_TIMEOUT: Duration = Duration::from_millis(500);
/// If a connection ends after this long a silence, the other end may have given it up.
const STALE_AFTER: Duration = Duration::from_millis(500);

impl Engine {
    /// Handles the end of a data connection. This alone proves nothing: the control connection of that peer
    /// must show whether it died, left, or closed because of another rank.
    pub(super) fn suspect(&mut self, peer: usize, why: &ConnError) {
        self.read_control(peer);
        let until = Instant::now() + CONTROL_EVIDENCE_TIMEOUT;
        self.peers[peer].suspect.get_or_insert((until, why.to_string()));
    }

    /// Checks, when nothing moves, whether a peer is gone.
    pub(super) fn check_lost_peers(&mut self, now: Instant) {
        // A peer that is gone may have written the needed data before: shared memory keeps it.
        if self.collectives.front().is_some_and(|first| first.execution.is_in_memory()) && self.progress() {
            return;
        }
        let is_gone = |peer: &Peer| peer.control_closed.is_some() && !peer.left;
        if let Some(rank) = self.peers.iter().position(is_gone) {
            self.wait_for_exit_report(rank, now + EXIT_REPORT_TIMEOUT);
            let how = match &self.peers[rank].control_closed {
                Some((_, ConnError::Failed(error))) => LossReason::Unreachable { what: error.to_string() },
                Some((_, ConnError::Closed)) | None => LossReason::Disconnected,
            };
            let since = self.peers[rank].control_closed.as_ref().map_or(now, |(since, _)| *since);
            self.declare_lost(rank, how, since);
            return;
        }
        // Awaited peers that have left in good order.
        let first = self.collectives.front();
        let awaited = first.into_iter().flat_map(|first| first.execution.awaited());
        let in_memory = first.is_some_and(|first| first.execution.is_in_memory());
        let awaited = awaited.filter(|&rank| in_memory || self.peers[rank].collective.is_none());
        let absent = first.into_iter().flat_map(|first| first.not_arrived(self.settings.me, &self.peers));
        let mut awaited = awaited.chain(absent);
        let messages = self.peers.iter().position(|peer| {
            let waits = !peer.messages.sends.is_empty() || !peer.messages.recvs.is_empty();
            peer.left && waits && peer.messages.conn.is_none()
        });
        let is_gone = |rank: usize| self.peers[rank].left && self.peers[rank].messages.conn.is_none();
        let mut others = (0..self.settings.size).filter(|&rank| rank != self.settings.me);
        let probed = self.probes.iter().filter_map(|probe| probe.from).find(|&rank| is_gone(rank));
        let open = self.any_source_completions().next().and_then(|_| others.clone().next());
        let nobody = open.filter(|_| others.all(is_gone));
        if let Some(rank) = awaited.find(|&rank| self.peers[rank].left).or(messages).or(probed).or(nobody) {
            drop(awaited);
            self.fail(Report::new(self.settings.me, Cause::PeerLost { rank, how: LossReason::Left }));
        }
    }

    /// Checks whether a peer has been silent for too long though data keeps moving.
    pub(super) fn check_closed_peers(&mut self, now: Instant) {
        let closed = |peer: &Peer| {
            peer.control_closed
                .as_ref()
                .is_some_and(|(since, _)| now >= *since + MAX_DETECTION_DELAY && !peer.left)
        };
        if self.completions().next().is_some() && self.peers.iter().any(closed) {
            self.check_lost_peers(now);
        }
        let unexplained = self.peers.iter_mut().enumerate().find_map(|(rank, peer)| {
            let may_live = !peer.left && peer.control_closed.is_none();
            let (_, what) = peer.suspect.take_if(|(until, _)| may_live && now >= *until)?;
            Some((rank, what))
        });
        if let Some((rank, what)) = unexplained {
            self.declare_lost(rank, LossReason::Unreachable { what }, now - CONTROL_EVIDENCE_TIMEOUT);
        }
        for peer in &mut self.peers {
            peer.suspect.take_if(|(until, _)| now >= *until);
        }
    }

    /// Waits until the launcher or a peer reports how `rank` ended.
    fn wait_for_exit_report(&mut self, rank: usize, until: Instant) {
        self.read_all_controls();
        self.poll_agent();
        while self.failure.is_none() && self.settings.agent.is_some() && !self.peers[rank].left {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.poller.sleep(&[], left.min(Duration::from_millis(5)));
            self.read_all_controls();
            self.poll_agent();
        }
    }

    /// Fails the group because `rank` was given up at `since`, or because this rank is cut off. Without this
    /// check, a rank that hears nobody, or that nobody hears, would accuse others.
    fn declare_lost(&mut self, rank: usize, how: LossReason, since: Instant) {
        let time_since_ack = self.peers[rank].control.as_ref().and_then(Conn::time_since_ack);
        let doubtful = how != LossReason::Disconnected
            || time_since_ack.is_some_and(|time_since_ack| time_since_ack > STALE_AFTER);
        let (rank, how) = if doubtful && self.is_partitioned(rank, since) {
            let what = "no other host receives from it, or it receives from none: is it partitioned from \
                        the network?"
                .to_owned();
            (self.settings.me, LossReason::Unreachable { what })
        } else {
            (rank, how)
        };
        self.fail(Report::new(self.settings.me, Cause::PeerLost { rank, how }));
    }

    /// Returns whether no other host is heard, though there are some besides that of `lost`. With only that
    /// host the question cannot be decided.
    fn is_partitioned(&mut self, lost: usize, since: Instant) -> bool {
        let host = |rank: usize| self.settings.addresses[rank].ip();
        let (ours, theirs) = (host(self.settings.me), host(lost));
        let elsewhere = |&rank: &usize| {
            let peer = &self.peers[rank];
            ours != theirs && ![ours, theirs].contains(&host(rank)) && peer.control.is_some() && !peer.left
        };
        let others: Vec<usize> = (0..self.peers.len()).filter(elsewhere).collect();
        // The kernels of the others acknowledge the question even if no process reads it.
        let query = self.wait_query();
        others.iter().for_each(|&rank| self.send_control(rank, &query, &[]));
        let until = Instant::now() + LIVENESS_TIMEOUT;
        while self.failure.is_none() && !others.is_empty() && Instant::now() < until {
            if others.iter().any(|&rank| self.has_acknowledged(rank, since)) {
                return false;
            }
            self.poller.sleep(&[], Duration::from_millis(5));
            self.read_all_controls();
            others.iter().for_each(|&rank| self.flush_control(rank));
        }
        !others.is_empty()
    }

    /// Returns whether the host of `rank` has acknowledged all that this rank sent it. Incoming data proves
    /// only that the host is heard, not that it hears. A connection that has ended counts if its end came
    /// after `since`.
    fn has_acknowledged(&self, rank: usize, since: Instant) -> bool {
        let peer = &self.peers[rank];
        let Some(control) = &peer.control else { return false };
        match control.time_since_ack() {
            Some(time_since_ack) if peer.control_closed.is_some() => time_since_ack < since.elapsed(),
            Some(_) => peer.control_out.is_empty() && control.is_flushed(),
            None => true,
        }
    }
}
