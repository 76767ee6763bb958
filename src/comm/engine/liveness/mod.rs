//! Decides which ranks are lost. Pure: time and what the connections show are its input.
//!
//! A rank is lost if its control connection ends without a goodbye. Before this rank says so, it waits
//! shortly for a report of how the rank ended, and makes sure that it is not cut off from the network itself.

use std::time::{Duration, Instant};

use crate::error::LossReason;

/// Longest wait for the launcher's report of how a rank ended, after its control connection has closed.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_millis(60);
/// Longest wait for the control connection of a peer to show why a data connection to that peer ended. A
/// process that dies closes both at once. Only a rank that leaves slowly, on a host that pauses it or over a
/// congested connection, needs this time, and must not be reported as unreachable.
const CONTROL_EVIDENCE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time for which data that has already arrived may delay the detection of a dead peer.
const MAX_DETECTION_DELAY: Duration = Duration::from_millis(50);
/// Longest wait for an acknowledgement by the kernel of another host: then this rank is not cut off.
const ACKNOWLEDGEMENT_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval at which acknowledgements are looked for. No event reports one.
const ACKNOWLEDGEMENT_INTERVAL: Duration = Duration::from_millis(5);

/// Keeps which ranks of a group have left or are lost.
#[derive(Debug)]
pub(super) struct Liveness {
    me: usize,
    /// Longest time until a rank gives up a host that does not answer.
    peer_timeout: Duration,
    peers: Vec<PeerLiveness>,
    suspicion: Option<Suspicion>,
}

#[derive(Debug, Clone, Default)]
struct PeerLiveness {
    /// The peer has left the group: its Goodbye frame has arrived.
    left: bool,
    /// When the control connection ended, and what that says of the peer.
    closed: Option<(Instant, LossReason)>,
    /// Set if a data connection has ended: when the control connection must have shown why, and the error.
    unexplained: Option<(Instant, String)>,
}

/// A rank that is lost, unless this rank is cut off itself.
#[derive(Debug)]
struct Suspicion {
    rank: usize,
    how: LossReason,
    /// The time at which its connection ended.
    since: Instant,
    until: Instant,
    awaits: Awaits,
}

/// The event that must come before [`Suspicion::until`].
#[derive(Debug)]
enum Awaits {
    /// The launcher's report of how the rank ended.
    ExitReport,
    /// An acknowledgement of one of these ranks' hosts.
    Acknowledgement(Vec<usize>),
}

/// Tells what the connections and the launcher show.
pub(super) trait Evidence {
    /// Returns whether the launcher may report how a rank ended.
    fn may_report_exits(&self) -> bool;

    /// Returns whether two ranks are on one host.
    fn share_host(&self, a: usize, b: usize) -> bool;

    /// Returns whether there is, or was, a control connection to `rank`.
    fn has_control(&self, rank: usize) -> bool;

    /// Returns the time since the host of `rank` last acknowledged bytes of the control connection; `None` if
    /// the connection does not tell.
    fn time_since_ack(&self, rank: usize) -> Option<Duration>;

    /// Returns whether all that this rank has sent to `rank` is acknowledged.
    fn is_flushed(&self, rank: usize) -> bool;
}

/// The result of [`Liveness::check`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Send a frame to these ranks, so that their hosts acknowledge it.
    Ask(Vec<usize>),
    Lost {
        rank: usize,
        how: LossReason,
    },
}

impl Liveness {
    pub(super) fn new(me: usize, size: usize, peer_timeout: Duration) -> Self {
        Self { me, peer_timeout, peers: vec![PeerLiveness::default(); size], suspicion: None }
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.peers[rank].left
    }

    /// Returns whether the control connection to `rank` has ended.
    pub(super) fn is_closed(&self, rank: usize) -> bool {
        self.peers[rank].closed.is_some()
    }

    /// Returns whether the connection of a rank has ended without a goodbye, or the rank is suspected.
    pub(super) fn is_any_closed(&self) -> bool {
        self.suspicion.is_some() || self.peers.iter().any(|peer| peer.closed.is_some() && !peer.left)
    }

    /// Returns whether it is being decided if a rank is lost.
    pub(super) fn is_undecided(&self) -> bool {
        self.suspicion.is_some()
    }

    pub(super) fn on_goodbye(&mut self, rank: usize) {
        self.peers[rank].left = true;
        self.suspicion.take_if(|suspicion| suspicion.rank == rank);
    }

    pub(super) fn on_control_closed(&mut self, rank: usize, now: Instant, how: LossReason) {
        self.peers[rank].closed = Some((now, how));
    }

    /// Notes the end of a data connection, with its error. The end alone does not prove that the peer is
    /// lost: its control connection must show whether it died, left, or closed because of another rank.
    pub(super) fn on_data_closed(&mut self, rank: usize, now: Instant, error: String) {
        self.peers[rank].unexplained.get_or_insert((now + CONTROL_EVIDENCE_TIMEOUT, error));
    }

    /// Decides whether a rank is lost. `is_moving` says that data moves: it may have come from a rank that is
    /// gone since.
    pub(super) fn check(
        &mut self,
        now: Instant,
        is_moving: bool,
        evidence: &impl Evidence,
    ) -> Option<Decision> {
        let suspicion = self.suspicion.take().or_else(|| self.suspect(now, is_moving))?;
        match &suspicion.awaits {
            Awaits::ExitReport if now >= suspicion.until || !evidence.may_report_exits() => {
                return Some(self.doubt(suspicion, now, evidence));
            }
            Awaits::Acknowledgement(asked) => {
                let Suspicion { rank, ref how, since, until, .. } = suspicion;
                if asked.iter().any(|&asked| self.has_acknowledged(asked, since, now, evidence)) {
                    return Some(Decision::Lost { rank, how: how.clone() });
                }
                if now >= until {
                    let what = "no other host receives from it, or it receives from none: is it partitioned \
                                from the network?";
                    let how = LossReason::Unreachable { what: what.to_owned() };
                    return Some(Decision::Lost { rank: self.me, how });
                }
            }
            Awaits::ExitReport => {}
        }
        self.suspicion = Some(suspicion);
        None
    }

    /// Returns the suspicion of a rank whose control connection has ended without a goodbye, or of one whose
    /// data connection has ended without an explanation in time.
    fn suspect(&mut self, now: Instant, is_moving: bool) -> Option<Suspicion> {
        let delay = if is_moving { MAX_DETECTION_DELAY } else { Duration::ZERO };
        let closed = self.peers.iter().enumerate().filter(|(_, peer)| !peer.left);
        let mut closed = closed.filter_map(|(rank, peer)| peer.closed.clone().map(|closed| (rank, closed)));
        if let Some((rank, (since, how))) = closed.find(|(_, (since, _))| now >= *since + delay) {
            let until = now + EXIT_REPORT_TIMEOUT;
            return Some(Suspicion { rank, how, since, until, awaits: Awaits::ExitReport });
        }
        let overdue = self.peers.iter_mut().enumerate().filter_map(|(rank, peer)| {
            let (_, what) = peer.unexplained.take_if(|(until, _)| now >= *until)?;
            (!peer.left && peer.closed.is_none()).then_some((rank, what))
        });
        let (rank, what) = overdue.reduce(|first, _| first)?;
        // The control connection lives, so no report comes.
        let (how, since) = (LossReason::Unreachable { what }, now - CONTROL_EVIDENCE_TIMEOUT);
        Some(Suspicion { rank, how, since, until: now, awaits: Awaits::ExitReport })
    }

    /// Returns that the rank is lost, or asks other hosts whether this rank is cut off. Without that
    /// question, a rank that is cut off would report others. It cannot be decided without a third host.
    fn doubt(&mut self, suspicion: Suspicion, now: Instant, evidence: &impl Evidence) -> Decision {
        let Suspicion { rank, how, since, .. } = suspicion;
        // The peer may have closed the connection because it received nothing from this rank, but only after
        // `peer_timeout`. On an idle connection, the kernel sends and acknowledges a probe each second.
        let is_stale = |time_since_ack| time_since_ack > self.peer_timeout / 2;
        let is_doubtful =
            how != LossReason::Disconnected || evidence.time_since_ack(rank).is_some_and(is_stale);
        let is_elsewhere = |&other: &usize| {
            ![self.me, rank].iter().any(|&rank| evidence.share_host(other, rank))
                && evidence.has_control(other)
                && !self.peers[other].left
        };
        let is_remote = is_doubtful && !evidence.share_host(self.me, rank);
        let others: Vec<usize> =
            if is_remote { (0..self.peers.len()).filter(is_elsewhere).collect() } else { Vec::new() };
        if others.is_empty() {
            return Decision::Lost { rank, how };
        }
        let (until, awaits) = (now + ACKNOWLEDGEMENT_TIMEOUT, Awaits::Acknowledgement(others.clone()));
        self.suspicion = Some(Suspicion { rank, how, since, until, awaits });
        Decision::Ask(others)
    }

    /// Returns whether the host of `rank` receives from this rank. Incoming data would prove only the other
    /// direction. If the connection has ended, an acknowledgement after `since` suffices.
    fn has_acknowledged(&self, rank: usize, since: Instant, now: Instant, evidence: &impl Evidence) -> bool {
        match evidence.time_since_ack(rank) {
            Some(time_since_ack) if self.is_closed(rank) => time_since_ack < now - since,
            Some(_) => evidence.is_flushed(rank),
            None => true,
        }
    }

    /// Returns the time at which to call [`check`](Self::check) again even if nothing happens.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        match &self.suspicion {
            Some(Suspicion { until, awaits: Awaits::ExitReport, .. }) => Some(*until),
            Some(Suspicion { until, .. }) => Some((*until).min(now + ACKNOWLEDGEMENT_INTERVAL)),
            None => self.peers.iter().filter_map(|peer| Some(peer.unexplained.as_ref()?.0)).min(),
        }
    }
}

#[cfg(test)]
mod tests;
