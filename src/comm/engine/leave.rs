//! The end of an engine: farewell, and nothing left behind.

use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::core::Engine;
use crate::frame::Kind;
use crate::links::conn::Conn;

/// How long peers may take to accept what was sent to them, before the connections are closed anyway.
const LINGER: Duration = Duration::from_secs(2);

impl Engine {
    /// Says goodbye and closes all connections.
    ///
    /// Closing a connection that holds unread bytes resets it, and a reset discards what the peer's
    /// kernel has not accepted yet. So: say that nothing more comes, read away what comes, wait until
    /// all that was sent is accepted (not until it is read), then close.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        if self.failure.is_none() {
            let goodbye = self.frame(Kind::Goodbye, 0);
            self.tell_all(&goodbye, &[]);
        }
        let mut conns: Vec<Conn> = Vec::new();
        for peer in &mut self.peers {
            let lanes = [peer.control.take(), peer.collective.take(), peer.messages.conn.take()];
            conns.extend(lanes.into_iter().flatten());
        }
        for conn in &mut conns {
            if let Some(fd) = conn.pollable() {
                self.poller.remove(fd);
            }
            conn.close_write();
        }
        let deadline = Instant::now() + LINGER;
        loop {
            conns.retain_mut(|conn| !conn.discard() && !conn.is_flushed());
            if conns.is_empty() || Instant::now() >= deadline {
                break;
            }
            let fds: Vec<_> =
                conns.iter().filter_map(Conn::pollable).map(|fd| (fd, PollFlags::POLLIN)).collect();
            // Acceptance makes no descriptor ready, so look again soon.
            self.poller.sleep(&fds, Duration::from_millis(1));
        }
        self.unregister_agent();
    }
}
