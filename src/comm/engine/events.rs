//! Polls for all events except the data of the current collective, and sleeps until there is something to do.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::mux::Event;
use super::peer::Peer;
use super::poller::{Poller, Source};
use super::progress_lock::Goal;
use super::state::Engine;
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
        let events = self.links.poll_ready();
        self.handle_events(events);
        for source in self.poller.iter().flat_map(Poller::ready).collect::<Vec<_>>() {
            if let Source::Message(peer) = source {
                self.progress_messages(peer);
            }
        }
        self.progress_local_messages();
    }

    pub(super) fn poll_handshakes(&mut self, now: Instant) {
        let events = self.links.poll_handshakes(now);
        self.handle_events(events);
    }

    pub(super) fn handle_events(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Control(peer) => self.read_control(peer),
                Event::Connected(peer) => {
                    self.peers[peer].control = Some(self.links.channel(peer));
                    self.flush_control(peer);
                }
                Event::Room => (0..self.peers.len()).for_each(|peer| self.flush_control(peer)),
                Event::Data(peer) => drop(self.progress_messages(peer)),
                Event::NeedsConnection(peer, conn_kind) => self.open_connection(peer, conn_kind),
                Event::Exited(rank, how) => self.rank_exited(rank, how),
                Event::Opened { peer, conn_kind, conn } => self.connection_opened(peer, conn_kind, conn),
                Event::Unauthorized { from, error } => {
                    let cause = Cause::Unauthorized { from, what: error.to_string() };
                    self.fail(Report::new(self.settings.me, cause));
                }
                // Without a descriptor no incoming connection can be accepted. This does no harm if no rank
                // is expected to connect.
                Event::Exhausted { outgoing, source } if outgoing || self.expects_connection() => {
                    self.out_of_descriptors(&source);
                }
                Event::Exhausted { .. } => {}
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
        let what = format!("file descriptors: {limit}");
        self.fail(Report::new(self.settings.me, Cause::Exhausted { what }));
    }

    /// Watches a connection for messages. The group makes its epoll set for the first of them.
    fn watch_messages(&mut self, peer: usize, conn: &Conn) -> std::io::Result<()> {
        let Some(fd) = conn.pollable() else { return Ok(()) };
        let poller = match self.poller.take() {
            Some(poller) => poller,
            None => Poller::new()?,
        };
        let watched = poller.add(fd, Source::Message(peer), false);
        self.poller = Some(poller);
        watched
    }

    /// Sleeps until data can move, a timer expires, another thread has a request, or `goal` no longer lets
    /// this thread drive. Then polls once.
    pub(super) fn sleep(&mut self, goal: &Goal<'_>) {
        let now = Instant::now();
        self.waits.stalled_since.get_or_insert(now);
        self.check_lost_peers(now);
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
            if let Some(first) = self.collectives.first() {
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
                let full = peer.messages.conn.as_ref().filter(|_| peer.messages.write_blocked);
                others.extend(full.and_then(Conn::pollable).map(|fd| (fd, PollFlags::POLLOUT)));
            }
            registered = self.links.sleep(sleep, self.poller.as_ref(), &others, timeout);
        }
        if let Some(sleep) = sleep {
            self.links.end_sleep(sleep);
        }
        self.end_memory_sleep();
        self.submissions.end_sleep();
        for peer in 0..self.peers.len() {
            self.flush_control(peer);
        }
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
        let events = self.links.poll_ready();
        self.handle_events(events);
    }
}
