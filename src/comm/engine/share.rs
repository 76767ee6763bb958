//! Shared memory with the other ranks of the host: how the engine sets it up and uses it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::core::Engine;
use super::poller::Source;
use super::seat::Goal;
use crate::cause::{Cause, Report};
use crate::error::CommError;
use crate::frame::Kind;
use crate::links::conn::{Broken, Conn};
use crate::shm::allocations::Allocations;
use crate::shm::meeting::{self, Joining, Leading, Meeting, Party};
use crate::shm::obstacle::Obstacle;
use crate::shm::{Layout, Node, RingLane};

/// Longest time for the report of a failure to arrive on a connection inside the host.
const NEWS: Duration = Duration::from_millis(100);

impl Engine {
    /// Sets up shared memory with the other `ranks` of this host (this one is among them), which then carries
    /// the data. If one of them cannot, all of them use connections, and the result says why.
    pub(crate) fn share(
        &mut self,
        ranks: &[usize],
        until: Instant,
    ) -> Result<Result<(), Obstacle>, CommError> {
        let Some(me) = ranks.iter().position(|&rank| rank == self.settings.me) else { return Ok(Ok(())) };
        let layout = Layout::new(ranks.len());
        let opened = self.open_meeting(ranks, me, layout);
        let mut meeting = match opened {
            Ok(meeting) => meeting,
            Err(reason) => return Ok(Err(reason)),
        };
        let began = Instant::now();
        loop {
            let now = Instant::now();
            ranks.iter().for_each(|&rank| self.flush_control(rank));
            self.look_around(now);
            self.look_for_losses(now);
            if let Some(failure) = &self.failure {
                return Err(self.error(failure, None, 0, (0, 0)));
            }
            if let Meeting::Joining(joining) = &mut meeting
                && let Some(offer) = self.peers[ranks[0]].offer.take()
                && let Err(reason) = joining.accept(&offer)
            {
                return Ok(Err(reason));
            }
            match meeting.turn() {
                Some(Ok(met)) => {
                    self.use_memory(Node::new(met, layout, ranks.to_vec(), me));
                    return Ok(Ok(()));
                }
                Some(Err(reason)) => return Ok(Err(reason)),
                None if now >= until => {
                    let after_ms = began.elapsed().as_millis() as u64;
                    let cause = Cause::Timeout { missing: meeting.missing(), after_ms };
                    return Err(self.give_up(Report::new(self.settings.me, cause)));
                }
                None => {}
            }
            let wake = self.wake_at(now).min(until);
            let unsaid = self.peers.iter().filter(|peer| !peer.control_out.is_empty());
            let unsaid = unsaid.filter_map(|peer| peer.control.as_ref().and_then(Conn::pollable));
            let others = meeting.descriptors().into_iter().map(|descriptor| (descriptor, PollFlags::POLLIN));
            let others = others.chain(unsaid.map(|conn| (conn, PollFlags::POLLOUT)));
            self.poller.sleep(&others.collect::<Vec<_>>(), wake.saturating_duration_since(now));
        }
    }

    /// Returns the registry of user memory that the ranks of the host share, if they share any.
    pub(crate) fn allocations(&self) -> Option<Arc<Allocations>> {
        self.node.as_ref().map(|node| Arc::clone(node.allocations()))
    }

    fn open_meeting(&mut self, ranks: &[usize], me: usize, layout: Layout) -> Result<Meeting, Obstacle> {
        let bell =
            self.mailbox.bell().try_clone_to_owned().map_err(|source| Obstacle::Descriptors { source });
        let process =
            rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
        let party = bell.map(|bell| Party { ranks: ranks.to_vec(), me, layout, bell, process: process.ok() });
        if me > 0 {
            return Ok(Meeting::Joining(Joining::new(party?)));
        }
        let opened = party.and_then(Leading::open);
        let (offer, meeting) = match opened {
            Ok((leading, offer)) => (offer, Ok(Meeting::Leading(leading))),
            Err(reason) => (meeting::no(&reason.to_string()), Err(reason)),
        };
        let frame = self.frame(Kind::Share, 0);
        for &rank in &ranks[1..] {
            self.tell(rank, &frame, &offer);
        }
        meeting
    }

    fn use_memory(&mut self, node: Node) {
        let roughened = |conn: Conn| {
            #[cfg(test)]
            let conn = crate::links::rough::roughened(conn);
            conn
        };
        for (place, rank) in node.others() {
            let conn = |lane: RingLane| roughened(Conn::new(Box::new(node.way(lane, place))));
            self.peers[rank].messages.conn = Some(conn(RingLane::Messages));
            self.peers[rank].collective = Some(conn(RingLane::Collectives));
        }
        for (rank, process) in node.processes().filter(|&(rank, _)| rank != self.settings.me) {
            // If the process cannot be watched, its connection reports its end.
            let _ = self.poller.add(process, Source::Process(rank), false);
        }
        self.beside = node.others().map(|(_, rank)| rank).collect();
        self.node = Some(node);
    }

    /// Handles the end of a rank's process. Its connection ends too, unless another process still holds that.
    pub(super) fn process_ended(&mut self, rank: usize) {
        if let Some(process) = self.node.as_ref().and_then(|node| node.process(rank)) {
            self.poller.remove(process);
        }
        self.read_control(rank);
        if !self.peers[rank].left && self.peers[rank].silent.is_none() {
            self.silenced(rank, Broken::Closed);
        }
    }

    /// Asks the other ranks of the host to ring the doorbell when they write to shared memory. Returns
    /// whether their earlier writes leave nothing to do.
    pub(super) fn may_sleep_beside(&mut self, goal: &Goal<'_>) -> bool {
        let Some(node) = &self.node else { return true };
        node.fall_asleep();
        self.heard = false;
        let moved = self.turn_beside() | self.turn();
        // A control frame may have arrived that the goal waits for, and no descriptor will report it again.
        let still = !moved && !self.heard && self.failure.is_none() && !goal.is_reached();
        still && self.node.as_ref().is_some_and(Node::is_asleep)
    }

    pub(super) fn wake_up_beside(&self) {
        if let Some(node) = &self.node {
            node.wake_up();
        }
    }

    /// Waits for the report of why another rank of the host has ended the group, if one has. After that no
    /// later collective in shared memory succeeds, though the stamps that it needs may be there from before.
    pub(super) fn hear_of_failure(&mut self) {
        let until = Instant::now() + NEWS;
        while self.failure.is_none() && self.node.as_ref().is_some_and(Node::has_failed) {
            self.read_all_controls();
            if Instant::now() >= until {
                return;
            }
            self.poller.sleep(&[], Duration::from_millis(1));
        }
    }

    /// Moves messages with the ranks of this host, which no descriptor announces.
    pub(super) fn turn_beside(&mut self) -> bool {
        let mut moved = false;
        for index in 0..self.beside.len() {
            moved |= self.turn_messages(self.beside[index]);
        }
        moved
    }
}
