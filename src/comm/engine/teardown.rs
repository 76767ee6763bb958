//! Teardown of an engine: it sends a Goodbye frame to each peer and leaves no connection open.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::progress::Engine;
use crate::collectives::call::CallKind;
use crate::error::cause::{Cause, Report};
use crate::error::{CommError, LossReason};
use crate::fault::fault_point;
use crate::transport::frame::Kind;
use crate::transport::links::conn::Conn;

/// Longest wait for the peers' kernels to accept data that was sent to them. After it the connections are
/// closed anyway.
const LINGER: Duration = Duration::from_secs(2);

/// Interval at which a leaving rank asks the other ranks which calls they wait in. A reported wait for a
/// message counts only if it comes this long after the last bytes were on the way to that rank: it then has
/// them.
const SETTLE: Duration = Duration::from_millis(250);

/// The state of a rank that leaves the group as soon as its operations are done.
#[derive(Debug)]
pub(super) struct Finishing {
    since: Instant,
    /// The time at which this rank last asked the other ranks which calls they wait in.
    queried_at: Instant,
    /// For each peer, the time at which bytes that this rank sent were last seen on the way to the peer.
    last_in_flight: Vec<Instant>,
}

impl Finishing {
    /// Returns when to ask the other ranks again which calls they wait in.
    pub(super) fn wake_at(&self) -> Instant {
        self.queried_at + SETTLE
    }
}

impl Engine {
    /// Leaves because the thread that held this rank's last handle panics. This ends the group for all ranks.
    /// Else the other ranks would assume that this rank has left in good order.
    pub(crate) fn leave_on_panic(&mut self) {
        if !self.left {
            let rank = self.settings.me;
            self.fail(Report::new(rank, Cause::PeerLost { rank, how: LossReason::Panicked }));
        }
        self.leave();
    }

    /// Prepares to leave when the last handle is dropped: pending operations are finished first. Receives
    /// that no message has matched are cancelled, because the program has dropped the handles that give
    /// access to their buffers.
    pub(super) fn finish(&mut self) {
        let cancelled = self.peers.iter_mut().flat_map(|peer| peer.messages.cancel_receives());
        let cancelled: Vec<_> =
            cancelled.chain(self.any_source.recvs.drain(..).map(|recv| recv.completion)).collect();
        cancelled.iter().for_each(|completion| completion.complete(Err(self.destroyed())));
        let now = Instant::now();
        self.finishing =
            Some(Finishing { since: now, queried_at: now, last_in_flight: vec![now; self.settings.size] });
        // The other ranks may have reported their waits before, and do not repeat a report unless they are
        // asked.
        let query = self.wait_query();
        self.broadcast_control(&query, &[]);
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
        let finishing = self.finishing.as_mut()?;
        for (last_in_flight, peer) in finishing.last_in_flight.iter_mut().zip(&self.peers) {
            if peer.messages.has_bytes_in_flight() {
                *last_in_flight = now;
            }
        }
        if now >= finishing.wake_at() {
            finishing.queried_at = now;
            let query = self.wait_query();
            self.broadcast_control(&query, &[]);
        }
        let Finishing { since, last_in_flight, .. } = self.finishing.as_ref()?;
        self.peers.iter().enumerate().find_map(|(rank, peer)| {
            let report = peer.wait_report.as_ref().filter(|report| report.received_at >= *since)?;
            let has_begun = match report.call.kind {
                CallKind::PointToPoint => {
                    peer.messages.has_message_for(&report.call)
                        || report.received_at < last_in_flight[rank] + SETTLE
                }
                _ => report.seq < self.next_seq,
            };
            (report.awaits.contains(&self.settings.me) && !has_begun).then_some((rank, *since))
        })
    }

    fn destroyed(&self) -> CommError {
        CommError::Destroyed { group: self.settings.name.clone() }
    }

    /// Sends a Goodbye frame to every peer and closes all connections.
    ///
    /// Closing a connection that holds unread bytes resets it, and a reset discards bytes that the peer's
    /// kernel has not accepted yet. So the engine sends a Goodbye frame, reads and drops incoming bytes, and
    /// waits until the peer's kernel has accepted everything. (It does not wait until the peer reads it.)
    /// Then it closes: a reset does no harm any more, and it leaves no port in TIME_WAIT.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        fault_point("leaving", 0, 0);
        if self.failure.is_none() {
            let goodbye = self.frame(Kind::Goodbye, 0);
            self.broadcast_control(&goodbye, &[]);
        }
        let mut closing: Vec<ClosingConn> = Vec::new();
        for peer in &mut self.peers {
            let unsent = std::mem::take(&mut peer.control_out);
            closing.extend(peer.control.take().map(|conn| ClosingConn { conn, unsent, closed: false }));
            let data = [peer.collective.take(), peer.messages.conn.take()].into_iter().flatten();
            closing.extend(data.map(|conn| ClosingConn { conn, unsent: Vec::new(), closed: false }));
        }
        for conn in closing.iter().filter_map(|closing| closing.conn.pollable()) {
            self.poller.remove(conn);
        }
        fault_point("left", 0, 0);
        let deadline = Instant::now() + LINGER;
        loop {
            closing.retain_mut(|closing| !closing.try_close());
            if closing.is_empty() || Instant::now() >= deadline {
                break;
            }
            let fds: Vec<_> = closing.iter().filter_map(ClosingConn::poll).collect();
            // No descriptor becomes ready when a peer's kernel accepts data, so the loop checks again soon.
            self.poller.sleep(&fds, Duration::from_millis(1));
        }
        self.handshakes.close();
        self.unregister_agent();
    }
}

/// A connection that is about to be closed.
struct ClosingConn {
    conn: Conn,
    /// Bytes that the connection has not taken yet: a Goodbye frame, or the cause of the group's failure.
    unsent: Vec<u8>,
    /// The connection is closed for writing.
    closed: bool,
}

impl ClosingConn {
    /// Sends what the connection takes now, and reads and drops incoming bytes. Returns whether the
    /// connection can be closed.
    fn try_close(&mut self) -> bool {
        while !self.unsent.is_empty() {
            // A send error is ignored here: a broken connection is detected when it is read.
            let sent = self.conn.send(&[IoSlice::new(&self.unsent)]).unwrap_or(0);
            if sent == 0 {
                break;
            }
            self.unsent.drain(..sent);
        }
        let sent_all = self.unsent.is_empty();
        if sent_all && !self.conn.is_flushed() && !std::mem::replace(&mut self.closed, true) {
            // The peer's kernel acknowledges the end of a connection at once, and data only after a delay.
            self.conn.close_write();
        }
        let over = self.conn.discard() || sent_all && self.conn.is_flushed();
        if over {
            self.conn.skip_time_wait();
        }
        over
    }

    fn poll(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let flags = if self.closed { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        Some((self.conn.pollable()?, flags))
    }
}
