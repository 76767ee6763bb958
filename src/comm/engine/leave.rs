//! The end of an engine: farewell, and nothing left behind.

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

/// How long peers may take to accept what was sent to them, before the connections are closed anyway.
const LINGER: Duration = Duration::from_secs(2);

/// A rank that waits for a message is asked so long after the last bytes went to it, and again at this interval. When it
/// says then what it waits for, it has received all that was on the way.
const SETTLE: Duration = Duration::from_millis(250);

/// What a rank notes that leaves when its operations are done.
#[derive(Debug)]
pub(super) struct Finishing {
    since: Instant,
    /// When the others were last asked what they wait in.
    asked: Instant,
    /// When bytes were last on the way to each of them.
    busy: Vec<Instant>,
}

impl Finishing {
    /// When to ask again.
    pub(super) fn wake_at(&self) -> Instant {
        self.asked + SETTLE
    }
}

impl Engine {
    /// Leaves because the thread that had this rank's last handle panics. That ends the group for all ranks: without it the
    /// others would take this rank for one that has done its part.
    pub(crate) fn leave_in_panic(&mut self) {
        if !self.left {
            let rank = self.settings.me;
            self.fail(Report::new(rank, Cause::PeerLost { rank, how: Loss::Panicked }));
        }
        self.leave();
    }

    /// The last handle goes: what was begun and nobody waits for is to be done before. Receives are given up, as nobody has
    /// what they would fill.
    pub(super) fn finish(&mut self) {
        let given_up = self.peers.iter_mut().flat_map(|peer| peer.messages.give_up_receives());
        let given_up: Vec<_> = given_up.chain(self.open.recvs.drain(..).map(|recv| recv.ticket)).collect();
        given_up.iter().for_each(|ticket| ticket.complete(Err(self.destroyed())));
        let now = Instant::now();
        self.finishing = Some(Finishing { since: now, asked: now, busy: vec![now; self.settings.size] });
        // They may have told it before, and will not again.
        let ask = self.question();
        self.tell_all(&ask, &[]);
    }

    /// Whether this rank must leave before all is done, since another waits for what it will never do: then what is under
    /// way ends.
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

    /// A rank that has said that it waits for this one, which is finishing, in something that this one has not begun; and
    /// since when this one finishes.
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
    /// Closing a connection that holds unread bytes resets it, and a reset discards what the peer's
    /// kernel has not accepted yet. So: say that nothing more comes, read away what comes, wait until
    /// all that was sent is accepted (not until it is read), then close. Then a reset does no harm any more,
    /// and does good: it leaves no port waiting.
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
            // Acceptance makes no descriptor ready, so look again soon.
            self.poller.sleep(&fds, Duration::from_millis(1));
        }
        self.door.close();
        self.unregister_agent();
    }
}

/// A connection that is about to be closed.
struct Parting {
    conn: Conn,
    /// What the connection has not taken yet: a farewell, or why the group has ended.
    words: Vec<u8>,
    /// Nothing more will be sent.
    closed: bool,
}

impl Parting {
    /// Takes it a step further; whether it can be closed.
    fn is_over(&mut self) -> bool {
        while !self.words.is_empty() {
            // That the connection is gone is found when reading.
            let sent = self.conn.send(&[IoSlice::new(&self.words)]).unwrap_or(0);
            if sent == 0 {
                break;
            }
            self.words.drain(..sent);
        }
        let said = self.words.is_empty();
        if said && !self.conn.is_flushed() && !std::mem::replace(&mut self.closed, true) {
            // The end of a connection is acknowledged at once, a word only after a while.
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
