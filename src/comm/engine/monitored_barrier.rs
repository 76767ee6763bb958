//! Monitored barriers: each rank tells every other rank that it has arrived, so that each rank knows all
//! missing ranks.
//!
//! The State frames that announce an arrival travel on the control connections, which every pair of ranks
//! has. A rank passes the barrier when it has the frames of all other ranks. No single rank collects them, so
//! each rank that times out can name all missing ranks.

use super::progress::Engine;
use super::state::{Collective, Peer};
use crate::collectives::call::CallKind;
use crate::transport::frame::{Frame, Kind};
use crate::transport::links::conn::Conn;

impl Engine {
    /// If the current collective is a monitored barrier, tells all other ranks once that this rank has
    /// arrived.
    pub(super) fn announce_arrival(&mut self) {
        let Some(first) = self.collectives.front_mut() else { return };
        if !first.is_monitored_barrier() || first.arrival_announced {
            return;
        }
        first.arrival_announced = true;
        let (seq, call) = (first.execution.seq(), first.execution.call().encode());
        let frame = Frame { call, ..self.frame(Kind::State, seq) };
        self.broadcast_control(&frame, &[]);
    }
}

impl Collective {
    fn is_monitored_barrier(&self) -> bool {
        self.execution.call().kind == CallKind::MonitoredBarrier
    }

    /// Returns the ranks that this collective waits for; `me` is this rank.
    pub(super) fn awaited(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        self.execution.awaited().into_iter().chain(self.not_arrived(me, peers))
    }

    /// Returns the ranks that have not arrived at this monitored barrier; none for another collective.
    pub(super) fn not_arrived(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        let peers = if self.is_monitored_barrier() { peers } else { &[] };
        // A rank that has arrived at a later monitored barrier has passed this one.
        let absent = move |&rank: &usize| rank != me && peers[rank].last_barrier < Some(self.execution.seq());
        (0..peers.len()).filter(absent)
    }

    /// Returns whether all other ranks have arrived at this monitored barrier and the frames of this rank are
    /// sent; `true` for another collective. Unsent frames would stay unsent: no thread sends after the call.
    ///
    /// After a failure it returns `false` for a monitored barrier: a late rank may have the frames of all
    /// other ranks, although these have given up waiting for it.
    pub(super) fn is_barrier_complete(&self, me: usize, peers: &[Peer], failed: bool) -> bool {
        let is_sent = |peer: &Peer| {
            let in_kernel = |control: &Conn| peer.control_out.is_empty() && !control.has_unsent();
            peer.control.as_ref().is_none_or(in_kernel) || peer.control_closed.is_some()
        };
        let all = || peers.iter().all(is_sent) && self.not_arrived(me, peers).next().is_none();
        !self.is_monitored_barrier() || (!failed && all())
    }
}
