//! Polling for all events but the data in progress, and sleeping until something happens.

use std::time::Instant;

use nix::poll::PollFlags;

use super::core::Engine;
use super::door::DoorEvent;
use super::poller::Source;
use super::seat::Goal;
use super::state::Peer;
use crate::cause::{Cause, Report};
use crate::links::conn::Conn;
use crate::links::hello::Lane;
use crate::plan::Direction;
use crate::room;

impl Engine {
    /// Polls for all events but the data in progress: registered descriptors, acceptor, clock.
    pub(super) fn look_around(&mut self, now: Instant) {
        self.look_at_ready();
        self.look_at_door(now);
        self.look_at_clock(now);
    }

    pub(super) fn look_at_ready(&mut self) {
        for source in self.poller.ready() {
            match source {
                Source::Doorbell => self.mailbox.silence(),
                Source::Listener | Source::Door => {}
                Source::Agent => self.look_at_agent(),
                Source::Control(peer) => self.read_control(peer),
                Source::Message(peer) => drop(self.turn_messages(peer)),
                Source::Process(peer) => self.process_ended(peer),
            }
        }
        self.turn_beside();
    }

    pub(super) fn look_at_door(&mut self, now: Instant) {
        let mut events = Vec::new();
        self.door.turn(&self.poller, now, &mut events);
        for event in events {
            match event {
                DoorEvent::Opened { peer, lane, conn } => self.opened(peer, lane, conn),
                DoorEvent::Unauthorized { from, what } => {
                    self.fail(Report::new(self.settings.me, Cause::Unauthorized { from, what }));
                }
                // An unauthenticated peer that cannot be accepted does no harm if no rank is expected.
                DoorEvent::Exhausted { dials, source } if dials || self.expects_a_connection() => {
                    let what = room::without_descriptors(&source, self.settings.size, self.beside.len() + 1);
                    self.fail(Report::new(self.settings.me, Cause::Exhausted { what }));
                }
                DoorEvent::Exhausted { .. } => {}
            }
        }
    }

    /// Returns whether another rank may be about to connect.
    fn expects_a_connection(&self) -> bool {
        let asked =
            |peer: &Peer| Lane::ALL.iter().any(|&lane| peer.asked[lane as usize] && !peer.is_open(lane));
        self.connecting || self.peers.iter().any(asked)
    }

    fn opened(&mut self, peer: usize, lane: Lane, conn: Conn) {
        if self.peers[peer].is_open(lane) {
            return;
        }
        #[cfg(test)]
        let conn = crate::links::rough::roughened(conn);
        let source = match lane {
            Lane::Control => Some(Source::Control(peer)),
            Lane::Message => Some(Source::Message(peer)),
            Lane::Collective => None,
        };
        if let Some(fd) = conn.pollable() {
            match source {
                Some(source) => drop(self.poller.change(fd, source, false)),
                None => self.poller.remove(fd),
            }
        }
        match lane {
            Lane::Control => {
                let _ = conn.watch_path(self.settings.peer_timeout);
                self.peers[peer].control = Some(conn);
                self.flush_control(peer);
                // The peer may have sent frames right after its proof, for which no event comes.
                self.read_control(peer);
            }
            Lane::Collective => self.peers[peer].collective = Some(conn),
            Lane::Message => {
                self.peers[peer].messages.conn = Some(conn);
                self.turn_messages(peer);
            }
        }
    }

    /// Sleeps until data can move, a time has come or `goal` has changed. Then polls once.
    pub(super) fn sleep(&mut self, goal: &Goal<'_>) {
        let now = Instant::now();
        self.still_since.get_or_insert(now);
        self.look_for_losses(now);
        if self.failure.is_some() {
            return;
        }
        self.record_waiting();
        let wake = goal.until.into_iter().fold(self.wake_at(now), Instant::min);
        let timeout = wake.saturating_duration_since(now);
        let mut registered = true;
        if self.mailbox.fall_asleep(|| goal.is_unwanted()) && self.may_sleep_beside(goal) {
            let mut others = Vec::new();
            if let Some(first) = self.collectives.front() {
                for (peer, direction) in first.run.blocked() {
                    let flags = match direction {
                        Direction::Send => PollFlags::POLLOUT,
                        Direction::Recv => PollFlags::POLLIN,
                    };
                    let lane = self.peers[peer].collective.as_ref();
                    others.extend(lane.and_then(Conn::pollable).map(|fd| (fd, flags)));
                }
            }
            for peer in &self.peers {
                let control = peer.control.as_ref().filter(|_| !peer.control_out.is_empty());
                let messages = peer.messages.conn.as_ref().filter(|_| peer.messages.full);
                let full = control.into_iter().chain(messages).filter_map(Conn::pollable);
                others.extend(full.map(|fd| (fd, PollFlags::POLLOUT)));
            }
            registered = self.poller.sleep(&others, timeout);
        }
        self.wake_up_beside();
        self.mailbox.wake();
        for peer in 0..self.peers.len() {
            self.flush_control(peer);
        }
        let now = Instant::now();
        // As a rule data has woken the thread, and then no other source needs a poll.
        if registered || self.door.wake_at().is_some_and(|at| now >= at) {
            self.look_around(now);
        } else {
            self.look_at_clock(now);
        }
    }
}
