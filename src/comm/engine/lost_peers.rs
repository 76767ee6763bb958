//! Lost peers: passes to [`Liveness`](super::liveness::Liveness) what the connections show, and fails the
//! group if a peer is lost, or has left although a call needs it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::completion::Completion;
use super::liveness::{Decision, Evidence};
use super::peer::Peer;
use super::state::Engine;
use crate::collectives::plan::Algorithm;
use crate::error::LossReason;
use crate::error::cause::Cause;
use crate::transport::links::conn::ConnError;

struct Connections<'a> {
    peers: &'a [Peer],
    addresses: &'a [SocketAddr],
    has_agent: bool,
}

impl Evidence for Connections<'_> {
    fn may_report_exits(&self) -> bool {
        self.has_agent
    }

    fn share_host(&self, a: usize, b: usize) -> bool {
        self.addresses[a].ip() == self.addresses[b].ip()
    }

    fn has_control(&self, rank: usize) -> bool {
        self.peers[rank].control.is_some()
    }

    fn time_since_ack(&self, rank: usize) -> Option<Duration> {
        self.peers[rank].control.as_ref()?.time_since_ack()
    }

    fn is_flushed(&self, rank: usize) -> bool {
        let peer = &self.peers[rank];
        peer.control_out.is_empty() && peer.control.as_ref().is_some_and(|control| control.is_flushed())
    }
}

impl Engine {
    /// Handles the end of a data connection.
    pub(super) fn on_data_closed(&mut self, peer: usize, why: &ConnError) {
        self.read_control(peer);
        self.liveness.on_data_closed(peer, Instant::now(), why.to_string());
    }

    /// Fails the group if a peer is lost, or has left although a call of this rank needs it. This is checked
    /// when nothing moves.
    pub(super) fn check_lost_peers(&mut self, now: Instant) {
        if self.moves_in_memory() {
            return;
        }
        self.check_liveness(now, false);
        if self.failure.is_some() || self.liveness.is_undecided() {
            return;
        }
        if let Some(rank) = self.missed_peer() {
            self.fail_for(Cause::PeerLost { rank, how: LossReason::Left });
        }
    }

    /// Checks for peers whose connections have ended, also while data keeps moving.
    pub(super) fn check_closed_peers(&mut self, now: Instant) {
        let is_pending = self.completions().next().is_some();
        if is_pending && !(self.liveness.is_any_closed() && self.moves_in_memory()) {
            self.check_liveness(now, true);
        }
    }

    /// Waits until it is decided whether a rank whose connection has ended is lost.
    #[cfg(feature = "nccl")]
    pub(super) fn decide_lost_peers(&mut self) {
        loop {
            let now = Instant::now();
            self.check_lost_peers(now);
            if self.failure.is_some() || !self.liveness.is_undecided() {
                return;
            }
            self.nap(&[], self.wake_at(now).saturating_duration_since(now));
        }
    }

    fn check_liveness(&mut self, now: Instant, is_moving: bool) {
        if self.liveness.is_any_closed() {
            // A peer or the launcher may have reported the cause already.
            self.read_all_controls();
            self.handle_events(self.links.poll_agent());
            if self.failure.is_some() {
                return;
            }
        }
        let (peers, addresses) = (&*self.peers, &*self.settings.addresses);
        let connections = Connections { peers, addresses, has_agent: self.links.has_agent() };
        match self.liveness.check(now, is_moving, &connections) {
            Some(Decision::Ask(ranks)) => {
                // The kernels of the other hosts acknowledge the query even if no process reads it.
                let query = self.wait_query();
                ranks.iter().for_each(|&rank| self.send_control(rank, &query, &[]));
            }
            Some(Decision::Lost { rank, how }) => self.fail_for(Cause::PeerLost { rank, how }),
            None => {}
        }
    }

    fn is_in_memory(&self) -> bool {
        let first = self.collectives.queue.front();
        first.is_some_and(|first| first.execution.algorithm() == Some(Algorithm::Memory))
    }

    /// Moves data of a collective in shared memory, which may hold what a rank wrote before it ended.
    fn moves_in_memory(&mut self) -> bool {
        self.is_in_memory() && self.progress()
    }

    /// Returns a peer that has left with a goodbye although a call of this rank waits for it.
    fn missed_peer(&self) -> Option<usize> {
        let (first, in_memory) = (self.collectives.queue.front(), self.is_in_memory());
        let awaited = first.into_iter().flat_map(|first| first.execution.awaited());
        let awaited = awaited.filter(|&rank| in_memory || self.peers[rank].collective.is_none());
        let absent = first.into_iter().flat_map(|first| first.not_arrived(self.settings.me, &self.peers));
        let mut awaited = awaited.chain(absent).filter(|&rank| self.liveness.has_left(rank));
        let is_gone =
            |&rank: &usize| self.liveness.has_left(rank) && self.peers[rank].messages.conn.is_none();
        let waits = |&rank: &usize| self.peers[rank].messages.has_posted();
        let messages = (0..self.settings.size).filter(is_gone).find(waits);
        let mut others = (0..self.settings.size).filter(|&rank| rank != self.settings.me);
        let probed = self.any_source.probes.iter().filter_map(|probe| probe.from).find(is_gone);
        // Until a caller waits for the message, it may still send it to itself.
        let is_awaited = |open: &&Completion| self.driver.has_waiter || open.is_awaited();
        let open = self.any_source_completions().find(is_awaited).and_then(|_| others.clone().next());
        let nobody = open.filter(|_| others.all(|rank| is_gone(&rank)));
        awaited.next().or(messages).or(probed).or(nobody)
    }
}
