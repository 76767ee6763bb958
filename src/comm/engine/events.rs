//! Polls for all events except the data of the current collective, and sleeps until there is something to do.

use std::time::Instant;

use nix::poll::PollFlags;

use super::handshake::HandshakeEvent;
use super::poller::Source;
use super::progress::Engine;
use super::progress_lock::Goal;
use super::state::Peer;
use crate::collectives::plan::Direction;
use crate::error::cause::{Cause, Report};
use crate::limits;
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::ConnectionKind;

impl Engine {
    /// Handles all events except the data of the current collective: ready descriptors, handshakes, expired
    /// timers.
    pub(super) fn poll_events(&mut self, now: Instant) {
        self.poll_ready();
        self.poll_handshakes(now);
        self.check_timers(now);
    }

    pub(super) fn poll_ready(&mut self) {
        for source in self.poller.ready() {
            match source {
                Source::Doorbell => self.submissions.clear_doorbell(),
                Source::Listener | Source::Handshake => {}
                Source::Agent => self.poll_agent(),
                Source::Control(peer) => self.read_control(peer),
                Source::Message(peer) => drop(self.progress_messages(peer)),
                Source::Process(peer) => self.process_ended(peer),
            }
        }
        self.progress_local_messages();
    }

    pub(super) fn poll_handshakes(&mut self, now: Instant) {
        let mut events = Vec::new();
        self.handshakes.progress(&self.poller, now, &mut events);
        for event in events {
            match event {
                HandshakeEvent::Opened { peer, conn_kind, conn } => {
                    self.connection_opened(peer, conn_kind, conn)
                }
                HandshakeEvent::Unauthorized { from, error } => {
                    let cause = Cause::Unauthorized { from, what: error.to_string() };
                    self.fail(Report::new(self.settings.me, cause));
                }
                // Without a descriptor no incoming connection can be accepted. This does no harm if no rank
                // is expected to connect.
                HandshakeEvent::Exhausted { outgoing, source } if outgoing || self.expects_connection() => {
                    let what = limits::descriptor_limit_message(
                        &source,
                        self.settings.size,
                        self.local_peers.len() + 1,
                    );
                    self.fail(Report::new(self.settings.me, Cause::Exhausted { what }));
                }
                HandshakeEvent::Exhausted { .. } => {}
            }
        }
    }

    /// Returns whether this rank waits for another rank to open a connection.
    fn expects_connection(&self) -> bool {
        let asked = |peer: &Peer| {
            ConnectionKind::ALL
                .iter()
                .any(|&conn_kind| peer.requested[conn_kind as usize] && !peer.is_open(conn_kind))
        };
        self.connecting || self.peers.iter().any(asked)
    }

    fn connection_opened(&mut self, peer: usize, conn_kind: ConnectionKind, conn: Conn) {
        if self.peers[peer].is_open(conn_kind) {
            return;
        }
        #[cfg(test)]
        let conn = crate::transport::links::fault_injection::with_faults(conn);
        let source = match conn_kind {
            ConnectionKind::Control => Some(Source::Control(peer)),
            ConnectionKind::Message => Some(Source::Message(peer)),
            ConnectionKind::Collective => None,
        };
        if let Some(fd) = conn.pollable() {
            match source {
                Some(source) => drop(self.poller.change(fd, source, false)),
                None => self.poller.remove(fd),
            }
        }
        match conn_kind {
            ConnectionKind::Control => {
                let _ = conn.enable_keepalive(self.settings.peer_timeout);
                self.peers[peer].control = Some(conn);
                self.flush_control(peer);
                // Frames that the peer sent right after its proof may have been read already. No event
                // announces them.
                self.read_control(peer);
            }
            ConnectionKind::Collective => self.peers[peer].collective = Some(conn),
            ConnectionKind::Message => {
                self.peers[peer].messages.conn = Some(conn);
                self.progress_messages(peer);
            }
        }
    }

    /// Sleeps until data can move, a timer expires, another thread has a request, or `goal` no longer lets
    /// this thread drive. Then polls once.
    pub(super) fn sleep(&mut self, goal: &Goal<'_>) {
        let now = Instant::now();
        self.stalled_since.get_or_insert(now);
        self.check_lost_peers(now);
        if self.failure.is_some() {
            return;
        }
        self.record_waiting();
        let wake = goal.until.into_iter().fold(self.wake_at(now), Instant::min);
        let timeout = wake.saturating_duration_since(now);
        let mut registered = true;
        if self.submissions.prepare_sleep(|| goal.should_release()) && self.may_sleep_on_memory(goal) {
            let mut others = Vec::new();
            if let Some(first) = self.collectives.front() {
                for (peer, direction) in first.execution.blocked() {
                    let flags = match direction {
                        Direction::Send => PollFlags::POLLOUT,
                        Direction::Recv => PollFlags::POLLIN,
                    };
                    let conn = self.peers[peer].collective.as_ref();
                    others.extend(conn.and_then(Conn::pollable).map(|fd| (fd, flags)));
                }
            }
            for peer in &self.peers {
                let control = peer.control.as_ref().filter(|_| !peer.control_out.is_empty());
                let messages = peer.messages.conn.as_ref().filter(|_| peer.messages.write_blocked);
                let full = control.into_iter().chain(messages).filter_map(Conn::pollable);
                others.extend(full.map(|fd| (fd, PollFlags::POLLOUT)));
            }
            registered = self.poller.sleep(&others, timeout);
        }
        self.end_memory_sleep();
        self.submissions.end_sleep();
        for peer in 0..self.peers.len() {
            self.flush_control(peer);
        }
        let now = Instant::now();
        // As a rule data of the current collective has woken the thread. Then the registered descriptors need
        // no poll.
        if registered || self.handshakes.wake_at().is_some_and(|at| now >= at) {
            self.poll_events(now);
        } else {
            self.check_timers(now);
        }
    }
}
