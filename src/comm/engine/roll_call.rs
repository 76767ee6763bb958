//! Monitored barriers: each rank tells every other that it is there, so that all know all who are not.
//!
//! The signs travel on the control connections, which every rank has with every other, and a rank is through
//! when it has those of all. No rank collects them for the others: whose patience ends first can name
//! everybody.

use super::core::Engine;
use super::state::{Collective, Peer};
use crate::call::CallKind;
use crate::frame::{Frame, Kind};

impl Engine {
    /// Tells all others that this rank is there, when it is the turn of a monitored barrier.
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

    /// Ranks that it waits for.
    pub(super) fn awaited(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        self.run.awaited().into_iter().chain(self.absent(me, peers))
    }

    /// Ranks that have not given their signs, if it is a monitored barrier.
    pub(super) fn absent(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        let peers = if self.is_roll_call() { peers } else { &[] };
        // A rank that gave the sign of a later one was through with this one.
        let absent = move |&rank: &usize| rank != me && peers[rank].signed < Some(self.run.seq());
        (0..peers.len()).filter(absent)
    }

    /// Whether all others have given their signs, and ours is on its way to them: nothing happens between
    /// calls.
    ///
    /// Not after a failure: who comes too late finds all signs there, and the news that nobody waits any
    /// more.
    pub(super) fn is_attended(&self, me: usize, peers: &[Peer], failed: bool) -> bool {
        let told = |peer: &Peer| peer.control_out.is_empty() || peer.control.is_none();
        let all = || peers.iter().all(told) && self.absent(me, peers).next().is_none();
        !self.is_roll_call() || (!failed && all())
    }
}
