//! Monitored barriers: each rank tells every other that it has arrived, so that each rank knows all missing
//! ranks.
//!
//! The frames travel on the control connections, which every pair of ranks has. A rank passes when it has the
//! frames of all others. No rank collects them, so each rank that times out can name all missing ranks.

use super::core::Engine;
use super::state::{Collective, Peer};
use crate::call::CallKind;
use crate::frame::{Frame, Kind};

impl Engine {
    /// Tells all others that this rank has arrived, when a monitored barrier is the current collective.
    pub(super) fn sign(&mut self) {
        let Some(first) = self.collectives.front_mut() else { return };
        if !first.is_roll_call() || first.signed {
            return;
        }
        first.signed = true;
        let (seq, call) = (first.run.seq(), first.run.call().encode());
        let sign = Frame { call, ..self.frame(Kind::State, seq) };
        self.tell_all(&sign, &[]);
    }
}

impl Collective {
    fn is_roll_call(&self) -> bool {
        self.run.call().kind == CallKind::MonitoredBarrier
    }

    /// Returns the ranks that it waits for.
    pub(super) fn awaited(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        self.run.awaited().into_iter().chain(self.absent(me, peers))
    }

    /// Returns the ranks that have not arrived, if it is a monitored barrier.
    pub(super) fn absent(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        let peers = if self.is_roll_call() { peers } else { &[] };
        // A rank that has arrived at a later barrier had passed this one.
        let absent = move |&rank: &usize| rank != me && peers[rank].signed < Some(self.run.seq());
        (0..peers.len()).filter(absent)
    }

    /// Returns whether all others have arrived, and this rank's frames are sent: between calls nothing moves.
    ///
    /// After a failure it returns `false`: a late rank finds the frames of all others, but they wait no more.
    pub(super) fn is_attended(&self, me: usize, peers: &[Peer], failed: bool) -> bool {
        let told = |peer: &Peer| peer.control_out.is_empty() || peer.control.is_none();
        let all = || peers.iter().all(told) && self.absent(me, peers).next().is_none();
        !self.is_roll_call() || (!failed && all())
    }
}
