//! Detection of lost peers: finds connections that have ended, and decides which of the two ranks is lost.

use std::time::{Duration, Instant};

use super::peer::Peer;
use super::state::Engine;
use crate::collectives::plan::Algorithm;
use crate::error::LossReason;
use crate::error::cause::Cause;
use crate::transport::links::conn::ConnError;

/// Longest wait for the launcher's report of how a rank ended, after its control connection has closed.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_millis(60);
/// Longest wait for the control connection of a peer to show why a data connection to that peer ended. A
/// process that dies closes both at once. Only a rank that leaves slowly, on a host that pauses it or over a
/// congested connection, needs this time, and must not be reported as unreachable.
const CONTROL_EVIDENCE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time for which data that has already arrived may delay the detection of a dead peer.
const MAX_DETECTION_DELAY: Duration = Duration::from_millis(50);
/// Longest wait for an acknowledgement by the kernel of another host: then this rank is not cut off.
const LIVENESS_TIMEOUT: Duration = Duration::from_millis(500);
/// If a connection ends this long after the peer's last acknowledgement, the peer may have closed it because
/// it received nothing from this rank.
const STALE_AFTER: Duration = Duration::from_millis(500);

impl Engine {
    /// Handles the end of a data connection. The end alone does not prove that the peer is lost: its control
    /// connection must show whether it died, left, or closed because of another rank.
    pub(super) fn suspect(&mut self, peer: usize, why: &ConnError) {
        self.read_control(peer);
        let until = Instant::now() + CONTROL_EVIDENCE_TIMEOUT;
        self.peers[peer].suspect.get_or_insert((until, why.to_string()));
    }

    /// Fails the group if a peer is lost: its control connection ended without a goodbye, or it has left
    /// although a call of this rank needs it. This is checked when nothing moves.
    pub(super) fn check_lost_peers(&mut self, now: Instant) {
        // A peer that is gone may have written the awaited data before. Shared memory still holds the data.
        let first = self.collectives.queue.front();
        let in_memory = first.is_some_and(|first| first.execution.algorithm() == Some(Algorithm::Memory));
        if in_memory && self.progress() {
            return;
        }
        let is_gone = |peer: &Peer| peer.control_closed.is_some() && !peer.left;
        if let Some(rank) = self.peers.iter().position(is_gone) {
            self.wait_for_exit_report(rank, now + EXIT_REPORT_TIMEOUT);
            let Some(&(since, ref error)) = self.peers[rank].control_closed.as_ref() else {
                unreachable!("a control connection that has ended does not open again")
            };
            let how = match error {
                ConnError::Failed(error) => LossReason::Unreachable { what: error.to_string() },
                ConnError::Closed => LossReason::Disconnected,
            };
            return self.declare_lost(rank, how, since);
        }
        // Next come peers that have left with a goodbye although a call of this rank waits for them.
        let first = self.collectives.queue.front();
        let awaited = first.into_iter().flat_map(|first| first.execution.awaited());
        let awaited = awaited.filter(|&rank| in_memory || self.peers[rank].collective.is_none());
        let absent = first.into_iter().flat_map(|first| first.not_arrived(self.settings.me, &self.peers));
        let mut awaited = awaited.chain(absent);
        let is_gone = |&rank: &usize| self.peers[rank].left && self.peers[rank].messages.conn.is_none();
        let waits = |&rank: &usize| self.peers[rank].messages.has_posted();
        let messages = (0..self.settings.size).filter(is_gone).find(waits);
        let mut others = (0..self.settings.size).filter(|&rank| rank != self.settings.me);
        let probed = self.any_source.probes.iter().filter_map(|probe| probe.from).find(is_gone);
        let open = self.any_source_completions().next().and_then(|_| others.clone().next());
        let nobody = open.filter(|_| others.all(|rank| is_gone(&rank)));
        if let Some(rank) = awaited.find(|&rank| self.peers[rank].left).or(messages).or(probed).or(nobody) {
            drop(awaited);
            self.fail_for(Cause::PeerLost { rank, how: LossReason::Left });
        }
    }

    /// Checks for peers whose connections have ended, also while data keeps moving. If a data connection
    /// ended and the control connection does not show why in time, the peer counts as lost.
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

    /// Waits, at most until `until`, for a report of the launcher or of a peer on how `rank` ended.
    fn wait_for_exit_report(&mut self, rank: usize, until: Instant) {
        loop {
            self.read_all_controls();
            self.handle_events(self.links.poll_agent());
            let time = until.saturating_duration_since(Instant::now());
            let may_come = self.failure.is_none() && self.links.has_agent() && !self.peers[rank].left;
            if !may_come || time.is_zero() {
                return;
            }
            self.nap(&[], time.min(Duration::from_millis(5)));
        }
    }

    /// Fails the group because `rank` is lost since `since` (`how` says in which way), or because this rank
    /// is cut off. Without that check, a rank that is cut off would report others.
    fn declare_lost(&mut self, rank: usize, how: LossReason, since: Instant) {
        let time_since_ack = self.peers[rank].control.as_ref().and_then(|conn| conn.time_since_ack());
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
        self.fail_for(Cause::PeerLost { rank, how });
    }

    /// Returns whether this rank is cut off: no host acknowledges its frames, apart from its own and that of
    /// `lost`. If there is no further host, the question cannot be decided, and the result is `false`.
    fn is_partitioned(&mut self, lost: usize, since: Instant) -> bool {
        let host = |rank: usize| self.settings.addresses[rank].ip();
        let (ours, theirs) = (host(self.settings.me), host(lost));
        let elsewhere = |&rank: &usize| {
            let peer = &self.peers[rank];
            ours != theirs && ![ours, theirs].contains(&host(rank)) && peer.control.is_some() && !peer.left
        };
        let others: Vec<usize> = (0..self.peers.len()).filter(elsewhere).collect();
        // The kernels of the other hosts acknowledge the query even if no process reads it.
        let query = self.wait_query();
        others.iter().for_each(|&rank| self.send_control(rank, &query, &[]));
        let until = Instant::now() + LIVENESS_TIMEOUT;
        while self.failure.is_none() && !others.is_empty() && Instant::now() < until {
            if others.iter().any(|&rank| self.has_acknowledged(rank, since)) {
                return false;
            }
            self.nap(&[], Duration::from_millis(5));
            self.read_all_controls();
            others.iter().for_each(|&rank| self.flush_control(rank));
        }
        !others.is_empty()
    }

    /// Returns whether the host of `rank` has acknowledged all that this rank sent to it. Incoming data would
    /// prove only one direction: that this rank receives from the host. If the connection has ended, an
    /// acknowledgement after `since` suffices.
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
