//! The collectives of a group, in the order of their calls. Only the first is in progress.

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion::Completion;
use super::execution::Execution;
use super::liveness::Liveness;
use super::peer::Peer;
use crate::collectives::call::{Call, CallKind};
use crate::error::cause::Cause;
use crate::fault::fault_point;
use crate::transport::links::conn::Conn;

/// Number of past collectives that are kept, to compare them with the calls in which other ranks wait.
const HISTORY: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Collectives {
    /// The collectives that are not done; the first is in progress.
    pub(super) queue: VecDeque<Collective>,
    /// The number of the next collective.
    pub(super) next_seq: u64,
    /// The numbers and calls of the latest collectives.
    history: VecDeque<(u64, Call)>,
}

/// One collective.
///
/// A monitored barrier is more than its execution: each rank tells every other rank that it has arrived. It
/// sends a State frame on the control connection, which every pair of ranks has. A rank passes the barrier
/// when it has the frames of all other ranks. So each rank that times out can name all missing ranks.
#[derive(Debug)]
pub(super) struct Collective {
    pub(super) call: Call,
    /// The number of this collective in its group.
    pub(super) seq: u64,
    pub(super) execution: Box<dyn Execution>,
    pub(super) completion: Arc<Completion>,
    /// In a monitored barrier: this rank has told the other ranks that it has arrived.
    arrival_announced: bool,
}

impl Collectives {
    /// Returns the sequence number of the next collective, `call`, and keeps both in the history.
    pub(super) fn number(&mut self, call: Call) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((seq, call));
        fault_point("calling", seq, 0);
        seq
    }

    pub(super) fn push(
        &mut self,
        (call, seq): (Call, u64),
        execution: Box<dyn Execution>,
        completion: Arc<Completion>,
    ) {
        self.queue.push_back(Collective { call, seq, execution, completion, arrival_announced: false });
    }

    /// Compares the calls that other ranks report to wait in with this rank's calls of the same numbers.
    /// Returns the first difference. It is found even if the two ranks exchange no data.
    pub(super) fn mismatch(&self, peers: &[Peer]) -> Option<Cause> {
        peers.iter().enumerate().find_map(|(rank, peer)| {
            let report = peer.wait_report.as_ref()?;
            let (seq, theirs) = (report.seq, report.call);
            let differs = |&&(ours_seq, ours): &&(u64, Call)| {
                theirs.kind != CallKind::PointToPoint && ours_seq == seq && ours != theirs
            };
            let &(_, ours) = self.history.iter().find(differs)?;
            Some(Cause::Mismatch { rank, theirs, theirs_seq: seq, ours, ours_seq: seq })
        })
    }
}

impl Collective {
    /// Returns whether the other ranks must still be told that this rank has arrived at a monitored barrier.
    pub(super) fn must_announce(&mut self) -> bool {
        self.is_monitored_barrier() && !std::mem::replace(&mut self.arrival_announced, true)
    }

    fn is_monitored_barrier(&self) -> bool {
        self.call.kind == CallKind::MonitoredBarrier
    }

    /// Returns the ranks that this collective waits for; `me` is this rank.
    pub(super) fn awaited(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        self.execution.awaited().into_iter().chain(self.not_arrived(me, peers))
    }

    /// Returns the ranks that have not arrived at this monitored barrier; none for another collective.
    pub(super) fn not_arrived(&self, me: usize, peers: &[Peer]) -> impl Iterator<Item = usize> {
        let peers = if self.is_monitored_barrier() { peers } else { &[] };
        // A rank that has arrived at a later monitored barrier has passed this one.
        let absent = move |&rank: &usize| rank != me && peers[rank].last_barrier < Some(self.seq);
        (0..peers.len()).filter(absent)
    }

    /// Returns whether all other ranks have arrived at this monitored barrier and the frames of this rank are
    /// sent; `true` for another collective. Unsent frames would stay unsent: no thread sends after the call.
    ///
    /// After a failure it returns `false` for a monitored barrier: a late rank may have the frames of all
    /// other ranks, although these have given up waiting for it.
    pub(super) fn is_barrier_complete(
        &self,
        me: usize,
        peers: &[Peer],
        liveness: &Liveness,
        failed: bool,
    ) -> bool {
        let is_sent = |(rank, peer): (usize, &Peer)| {
            let in_kernel = |control: &Conn| peer.control_out.is_empty() && !control.has_unsent();
            peer.control.as_ref().is_none_or(in_kernel) || liveness.is_closed(rank)
        };
        let all = || peers.iter().enumerate().all(is_sent) && self.not_arrived(me, peers).next().is_none();
        !self.is_monitored_barrier() || (!failed && all())
    }
}
