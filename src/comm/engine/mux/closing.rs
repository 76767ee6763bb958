//! Closes connections without loss of the bytes that were sent.
//!
//! Closing a connection that holds unread bytes resets it, and a reset discards bytes that the peer's kernel
//! has not accepted yet. So a rank sends its last frames, reads and drops incoming bytes, and waits until the
//! peer's kernel has accepted everything. (It does not wait until the peer reads it.) Then it closes: a reset
//! does no harm any more, and it leaves no port in TIME_WAIT.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use crate::engine::poller::Poller;
use crate::transport::links::conn::Conn;

/// Longest wait for the peers' kernels to accept sent data. Then the connections are closed anyway.
const LINGER: Duration = Duration::from_secs(2);

/// A connection that is about to be closed.
pub(crate) struct ClosingConn {
    conn: Conn,
    /// Bytes that the connection has not taken yet: a Goodbye frame, or the cause of the group's failure.
    unsent: Vec<u8>,
    /// A channel: the connection below stays open, so only its last frame must be handed to the kernel.
    is_channel: bool,
    /// The connection is closed for writing.
    closed: bool,
}

impl ClosingConn {
    pub(crate) fn new(conn: Conn, unsent: Vec<u8>, is_channel: bool) -> Self {
        Self { conn, unsent, is_channel, closed: false }
    }

    /// Closes `closing`, for at most two seconds.
    pub(crate) fn close_all(poller: &Poller, mut closing: Vec<Self>) {
        let deadline = Instant::now() + LINGER;
        loop {
            closing.retain_mut(|closing| !closing.try_close());
            if closing.is_empty() || Instant::now() >= deadline {
                return;
            }
            let fds: Vec<_> = closing.iter().filter_map(Self::poll).collect();
            // No descriptor becomes ready when a peer's kernel accepts data, so the loop checks again soon.
            poller.sleep([None, None], &fds, Duration::from_millis(1));
        }
    }

    /// Sends what it can, and reads and drops incoming bytes. Returns whether the connection can be closed.
    fn try_close(&mut self) -> bool {
        while !self.unsent.is_empty() {
            match self.conn.send(&[IoSlice::new(&self.unsent)]) {
                Ok(0) => break,
                Ok(sent) => drop(self.unsent.drain(..sent)),
                // Nobody will read the rest.
                Err(_) => self.unsent.clear(),
            }
        }
        let sent_all = self.unsent.is_empty();
        let closes = sent_all && (self.is_channel || !self.conn.is_flushed());
        if closes && !std::mem::replace(&mut self.closed, true) {
            // The peer's kernel acknowledges the end of a connection at once, and data only after a delay.
            self.conn.close_write();
        }
        if self.is_channel {
            return sent_all && !self.conn.has_unsent();
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
