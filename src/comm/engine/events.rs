//! Polls for all events except the data of the current collective, and sleeps until there is something to do.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::handshake::HandshakeEvent;
use super::message_watch::INLINE_RECEIVES;
use super::mux::Event;
use super::peer::Peer;
use super::progress_lock::Goal;
use super::state::Engine;
use crate::collectives::plan::Direction;
use crate::error::cause::Cause;
use crate::limits;
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::ConnectionKind;

impl Engine {
    /// Handles all events except the data of the current collective: descriptors, handshakes, timers.
    pub(super) fn poll_events(&mut self, now: Instant) {
        self.poll_ready();
        self.poll_handshakes(now);
        self.check_timers(now);
    }

    pub(super) fn poll_ready(&mut self) {
        self.handle_events(self.links.poll_ready());
        for peer in self.watch.ready() {
            self.progress_messages(peer);
        }
        self.progress_local_messages();
    }

    pub(super) fn poll_handshakes(&mut self, now: Instant) {
        self.handle_events(self.links.poll_handshakes(now));
    }

    pub(super) fn handle_events(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Control(peer) => self.read_control(peer),
                Event::Connected(peer) => {
                    self.peers[peer].control = Some(self.links.channel(peer));
                    self.flush_control(peer);
                }
                Event::Room => self.flush_all_controls(),
                Event::Data(peer) => drop(self.progress_messages(peer)),
                Event::NeedsConnection(peer, conn_kind) => self.open_connection(peer, conn_kind),
                Event::Exited(rank, how) => self.rank_exited(rank, how),
                Event::Handshake(HandshakeEvent::Opened { peer, conn_kind, conn }) => {
                    self.connection_opened(peer, conn_kind, conn);
                }
                Event::Handshake(HandshakeEvent::Unauthorized { from, error }) => {
                    self.fail_for(Cause::Unauthorized { from, what: error.to_string() });
                }
                // Without a descriptor no connection can be accepted. That does no harm if none is expected.
                Event::Handshake(HandshakeEvent::Exhausted { outgoing, source }) => {
                    if outgoing || self.expects_connection() {
                        self.out_of_descriptors(&source);
                    }
                }
            }
        }
    }

    /// Returns whether this rank waits for another rank to open a connection.
    fn expects_connection(&self) -> bool {
        let asked = |peer: &Peer| {
            let mut kinds = peer.requested.iter().zip(ConnectionKind::ALL);
            kinds.any(|(&requested, conn_kind)| requested && !peer.is_open(conn_kind))
        };
        self.lifecycle.connecting || self.peers.iter().any(asked)
    }

    fn connection_opened(&mut self, peer: usize, conn_kind: ConnectionKind, conn: Conn) {
        if self.peers[peer].is_open(conn_kind) {
            return;
        }
        if conn_kind == ConnectionKind::Message
            && let Err(error) = self.watch_messages(peer, &conn)
        {
            return self.out_of_descriptors(&error);
        }
        let place = match conn_kind {
            ConnectionKind::Control => unreachable!("control connections belong to the multiplexer"),
            ConnectionKind::Collective => &mut self.peers[peer].collective,
            ConnectionKind::Message => &mut self.peers[peer].messages.conn,
        };
        match place {
            Some(link) => link.adopt(conn),
            None => *place = Some(conn),
        }
        if conn_kind == ConnectionKind::Message {
            self.progress_messages(peer);
        }
    }

    fn out_of_descriptors(&mut self, error: &std::io::Error) {
        let (size, local) = (self.settings.size, self.host.ranks.len() + 1);
        let limit = limits::descriptor_limit_message(error, size, local);
        self.fail_for(Cause::Exhausted { what: format!("file descriptors: {limit}") });
    }

    /// Watches a new connection for messages.
    fn watch_messages(&mut self, peer: usize, conn: &Conn) -> std::io::Result<()> {
        conn.pollable().map_or(Ok(()), |fd| self.watch.add(peer, fd))
    }

    /// Counts a short message that a caller has received from `peer` by itself. After [`INLINE_RECEIVES`] of them, the
    /// connection needs no events.
    #[inline(always)]
    pub(super) fn count_inline_receive(&mut self, peer: usize) {
        let receives = &mut self.peers[peer].inline_receives;
        *receives += 1;
        if *receives == INLINE_RECEIVES {
            *receives = 0;
            self.stop_watching(peer);
        }
    }

    #[cold]
    fn stop_watching(&mut self, peer: usize) {
        if let Some(fd) = self.peers[peer].message_fd() {
            self.watch.remove(peer, fd);
        }
    }

    /// Watches the connections to busy peers again, before this thread sleeps. The group fails if the system refuses that.
    fn watch_busy_peers(&mut self) {
        for peer in self.watch.take_busy() {
            let added = self.peers[peer].message_fd().map(|fd| self.watch.add(peer, fd));
            if let Some(Err(error)) = added {
                self.out_of_descriptors(&error);
            }
        }
    }

    /// Sleeps until data can move, a timer expires, another thread has a request, or `goal` no longer lets
    /// this thread drive. Then polls once.
    pub(super) fn sleep(&mut self, goal: &Goal<'_>) {
        let now = Instant::now();
        self.waits.stalled_since.get_or_insert(now);
        self.check_lost_peers(now);
        self.watch_busy_peers();
        if self.failure.is_some() {
            return;
        }
        self.record_waiting();
        let wake = goal.until.into_iter().fold(self.wake_at(now), Instant::min);
        let timeout = wake.saturating_duration_since(now);
        let mut registered = true;
        let mut sleep = self.links.begin_sleep();
        if let Some(sleep) = &mut sleep
            && self.submissions.prepare_sleep(|| goal.should_release())
            && self.may_sleep_on_memory(goal)
        {
            let mut others = Vec::new();
            let first = self.collectives.queue.front().into_iter();
            for (peer, direction) in first.flat_map(|first| first.execution.blocked()) {
                let flags = match direction {
                    Direction::Send => PollFlags::POLLOUT,
                    Direction::Recv => PollFlags::POLLIN,
                };
                let conn = self.peers[peer].collective.as_ref();
                others.extend(conn.and_then(|conn| conn.pollable()).map(|fd| (fd, flags)));
            }
            for peer in &self.peers {
                let full = Some(peer).filter(|peer| peer.messages.write_blocked);
                others.extend(full.and_then(Peer::message_fd).map(|fd| (fd, PollFlags::POLLOUT)));
            }
            registered = self.links.sleep(sleep, self.watch.poller(), &others, timeout);
        }
        if let Some(sleep) = sleep {
            self.links.end_sleep(sleep);
        }
        self.host.memory.iter().for_each(|node| node.doorbells.clear_sleeping());
        self.submissions.end_sleep();
        self.flush_all_controls();
        let now = Instant::now();
        // As a rule data of the current collective has woken the thread. Then the registered descriptors need
        // no poll.
        if registered || self.links.wake_at().is_some_and(|at| now >= at) {
            self.poll_events(now);
        } else {
            self.check_timers(now);
        }
    }

    /// Sleeps until an event comes or one of `others` is ready, at most `timeout`, and handles the events.
    pub(super) fn nap(&mut self, others: &[(BorrowedFd<'_>, PollFlags)], timeout: Duration) {
        if let Some(mut sleep) = self.links.begin_sleep() {
            self.links.sleep(&mut sleep, None, others, timeout);
            self.links.end_sleep(sleep);
        }
        self.handle_events(self.links.poll_ready());
    }
}
