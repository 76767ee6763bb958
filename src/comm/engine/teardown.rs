//! Teardown of an engine: it sends a Goodbye frame to each peer and leaves no connection open.

use std::time::Instant;

use super::lifecycle::{Finishing, SETTLE};
use super::message_watch::MessageWatch;
use super::mux::ClosingConn;
use super::state::Engine;
use crate::collectives::call::CallKind;
use crate::error::LossReason;
use crate::error::cause::Cause;
use crate::fault::fault_point;
use crate::transport::frame::Kind;

impl Engine {
    /// Leaves because the thread that held this rank's last handle panics. This ends the group for all ranks.
    /// Else the other ranks would assume that this rank has left in good order.
    pub(crate) fn leave_on_panic(&mut self) {
        if !self.lifecycle.left {
            self.fail_for(Cause::PeerLost { rank: self.settings.me, how: LossReason::Panicked });
        }
        self.leave();
    }

    /// Prepares to leave when the last handle is dropped: pending operations are finished first. Receives
    /// that no message has matched are cancelled, because the program has dropped the handles that give
    /// access to their buffers.
    pub(super) fn finish(&mut self) {
        let cancelled = self.peers.iter_mut().flat_map(|peer| peer.messages.cancel_receives());
        let cancelled: Vec<_> =
            cancelled.chain(self.any_source.recvs.drain(..).map(|recv| recv.posted.completion)).collect();
        cancelled.iter().for_each(|completion| completion.complete(Err(self.destroyed())));
        let now = Instant::now();
        self.lifecycle.finishing =
            Some(Finishing { since: now, queried_at: now, last_in_flight: vec![now; self.settings.size] });
        // The other ranks may have reported their waits before, and repeat a report only if asked.
        self.broadcast_control(&self.wait_query(), &[]);
    }

    /// Returns whether this rank must leave although operations are pending, because another rank waits for a
    /// call that this rank will not make. The pending operations then end with an error.
    pub(super) fn abandons_pending(&mut self) -> bool {
        let Some((rank, since)) = self.waiting_peer() else { return false };
        let ended = self.take_all_operations();
        log::warn!(
            "{}: rank {} leaves the group after {} ms with {} operations incomplete: rank {rank} waits for \
             another call of it. Wait for every started operation (`Work::wait`) before the group is \
             dropped",
            self.settings.name,
            self.settings.me,
            since.elapsed().as_millis(),
            ended.len()
        );
        ended.iter().for_each(|(.., completion)| completion.complete(Err(self.destroyed())));
        true
    }

    /// Returns a rank that waits for an operation which this finishing rank has not begun, and the time since
    /// which this rank is finishing.
    fn waiting_peer(&mut self) -> Option<(usize, Instant)> {
        let now = Instant::now();
        let finishing = self.lifecycle.finishing.as_mut()?;
        for (last_in_flight, peer) in finishing.last_in_flight.iter_mut().zip(&self.peers) {
            if peer.messages.has_bytes_in_flight() {
                *last_in_flight = now;
            }
        }
        if now >= finishing.wake_at() {
            finishing.queried_at = now;
            self.broadcast_control(&self.wait_query(), &[]);
        }
        let Finishing { since, last_in_flight, .. } = self.lifecycle.finishing.as_ref()?;
        self.peers.iter().enumerate().find_map(|(rank, peer)| {
            let report = peer.wait_report.as_ref().filter(|report| report.received_at >= *since)?;
            let has_begun = match report.call.kind {
                CallKind::PointToPoint => {
                    peer.messages.has_message_for(&report.call)
                        || report.received_at < last_in_flight[rank] + SETTLE
                }
                _ => report.seq < self.collectives.next_seq,
            };
            (report.awaits.contains(&self.settings.me) && !has_begun).then_some((rank, *since))
        })
    }

    /// Sends a Goodbye frame to every peer and closes the channels and connections of the group.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.lifecycle.left, true) {
            return;
        }
        fault_point("leaving", 0, 0);
        if self.failure.is_none() {
            self.broadcast_control(&self.frame(Kind::Goodbye, 0), &[]);
        }
        let mut closing: Vec<ClosingConn> = Vec::new();
        for peer in &mut self.peers {
            let unsent = std::mem::take(&mut peer.control_out);
            closing.extend(peer.control.take().map(|conn| ClosingConn::new(conn, unsent, true)));
            let data = [peer.collective.take(), peer.messages.conn.take()].into_iter().flatten();
            let own = data.filter(|conn| !conn.awaits_connection());
            closing.extend(own.map(|conn| ClosingConn::new(conn, Vec::new(), false)));
        }
        self.watch = MessageWatch::default();
        fault_point("left", 0, 0);
        self.links.close(closing);
    }
}
