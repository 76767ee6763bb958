//! Teardown of an engine: it says goodbye and leaves no connection open.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::core::Engine;
use crate::call::CallKind;
use crate::cause::{Cause, Report};
use crate::error::{CommError, Loss};
use crate::fault::moment;
use crate::frame::Kind;
use crate::links::conn::Conn;

/// Longest time for peers to accept data that was sent to them. After it the connections are closed anyway.
const LINGER: Duration = Duration::from_secs(2);

/// Delay after the last bytes sent to a waiting rank before it is asked what it waits for, and interval of
/// further questions. When it answers, it has received all that was on the way.
const SETTLE: Duration = Duration::from_millis(250);

/// The state of a rank that leaves when its operations are done.
#[derive(Debug)]
pub(super) struct Finishing {
    since: Instant,
    /// The time at which the others were last asked what they wait in.
    asked: Instant,
    /// For each peer, the time at which bytes were last on the way to it.
    busy: Vec<Instant>,
}

impl Finishing {
    /// Returns when to ask again.
    pub(super) fn wake_at(&self) -> Instant {
        self.asked + SETTLE
    }
}

impl Engine {
    /// Leaves because the thread that held this rank's last handle panics. This ends the group for all ranks.
    /// Without it the others would assume that this rank has left in good order.
    pub(crate) fn leave_in_panic(&mut self) {
        if !self.left {
            let rank = self.settings.me;
            self.fail(Report::new(rank, Cause::PeerLost { rank, how: Loss::Panicked }));
        }
        self.leave();
    }

    /// Prepares to leave when the last handle is dropped: pending operations are finished first. Receives are
    /// given up, because nobody holds the buffers that they would fill.
    pub(super) fn finish(&mut self) {
        let given_up = self.peers.iter_mut().flat_map(|peer| peer.messages.give_up_receives());
        let given_up: Vec<_> = given_up.chain(self.open.recvs.drain(..).map(|recv| recv.ticket)).collect();
        given_up.iter().for_each(|ticket| ticket.complete(Err(self.destroyed())));
        let now = Instant::now();
        self.finishing = Some(Finishing { since: now, asked: now, busy: vec![now; self.settings.size] });
        // The others may have told their state before, and will not repeat it unasked.
        let ask = self.question();
        self.tell_all(&ask, &[]);
    }

    /// Returns whether this rank must leave before all is done, because another rank waits for a call that
    /// will never come. Pending operations then end.
    pub(super) fn gives_up_finishing(&mut self) -> bool {
        let Some((rank, since)) = self.is_missed_by() else { return false };
        let ended = self.end_everything();
        log::warn!(
            "{}: rank {} leaves after {} ms with {} operations undone: rank {rank} waits for another call of it. \
             Wait for what was begun (`Work::wait`) before the group is dropped",
            self.settings.name,
            self.settings.me,
            since.elapsed().as_millis(),
            ended.len()
        );
        ended.iter().for_each(|(.., ticket)| ticket.complete(Err(self.destroyed())));
        true
    }

    /// Returns a rank that waits for an operation which this finishing rank has not begun, and the time since
    /// which this rank finishes.
    fn is_missed_by(&mut self) -> Option<(usize, Instant)> {
        let now = Instant::now();
        let finishing = self.finishing.as_mut()?;
        for (busy, peer) in finishing.busy.iter_mut().zip(&self.peers) {
            if peer.messages.has_bytes_on_the_way() {
                *busy = now;
            }
        }
        if now >= finishing.wake_at() {
            finishing.asked = now;
            let ask = self.question();
            self.tell_all(&ask, &[]);
        }
        let Finishing { since, busy, .. } = self.finishing.as_ref()?;
        self.peers.iter().enumerate().find_map(|(rank, peer)| {
            let said = peer.state.as_ref().filter(|said| said.heard >= *since)?;
            let has_begun = match said.call.kind {
                CallKind::PointToPoint => {
                    peer.messages.is_owed(&said.call) || said.heard < busy[rank] + SETTLE
                }
                _ => said.seq < self.next_seq,
            };
            (said.awaits.contains(&self.settings.me) && !has_begun).then_some((rank, *since))
        })
    }

    fn destroyed(&self) -> CommError {
        CommError::Destroyed { group: self.settings.name.clone() }
    }

    /// Says goodbye and closes all connections.
    ///
    /// Closing a connection that holds unread bytes resets it, and a reset discards bytes that the peer's
    /// kernel has not accepted yet. So the engine announces the end, reads and drops incoming bytes, and
    /// waits until the peer's kernel has accepted everything. (It does not wait until the peer reads it.)
    /// Then it closes: a reset does no harm any more, and it leaves no port in TIME_WAIT.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        moment("leaving", 0, 0);
        if self.failure.is_none() {
            let goodbye = self.frame(Kind::Goodbye, 0);
            self.tell_all(&goodbye, &[]);
        }
        let mut parting: Vec<Parting> = Vec::new();
        for peer in &mut self.peers {
            let words = std::mem::take(&mut peer.control_out);
            parting.extend(peer.control.take().map(|conn| Parting { conn, words, closed: false }));
            let data = [peer.collective.take(), peer.messages.conn.take()].into_iter().flatten();
            parting.extend(data.map(|conn| Parting { conn, words: Vec::new(), closed: false }));
        }
        for conn in parting.iter().filter_map(|parting| parting.conn.pollable()) {
            self.poller.remove(conn);
        }
        moment("left", 0, 0);
        let deadline = Instant::now() + LINGER;
        loop {
            parting.retain_mut(|parting| !parting.is_over());
            if parting.is_empty() || Instant::now() >= deadline {
                break;
            }
            let fds: Vec<_> = parting.iter().filter_map(Parting::poll).collect();
            // Acceptance makes no descriptor ready, so the loop looks again soon.
            self.poller.sleep(&fds, Duration::from_millis(1));
        }
        self.door.close();
        self.unregister_agent();
    }
}

/// A connection that is about to be closed.
struct Parting {
    conn: Conn,
    /// Bytes that the connection has not taken yet: a farewell, or the cause of the failure.
    words: Vec<u8>,
    /// The write side is closed.
    closed: bool,
}

impl Parting {
    /// Takes one step of the close. Returns whether the connection can be closed.
    fn is_over(&mut self) -> bool {
        while !self.words.is_empty() {
            // A broken connection is detected when reading.
            let sent = self.conn.send(&[IoSlice::new(&self.words)]).unwrap_or(0);
            if sent == 0 {
                break;
            }
            self.words.drain(..sent);
        }
        let said = self.words.is_empty();
        if said && !self.conn.is_flushed() && !std::mem::replace(&mut self.closed, true) {
            // The peer's kernel acknowledges the end of a connection at once, and data only after a delay.
            self.conn.close_write();
        }
        let over = self.conn.discard() || said && self.conn.is_flushed();
        if over {
            self.conn.give_up_port();
        }
        over
    }

    fn poll(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let flags = if self.closed { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        Some((self.conn.pollable()?, flags))
    }
}
