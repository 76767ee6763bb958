//! The membership of a group in the multiplexer of its process.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::channel::Channel;
use super::closing::ClosingConn;
use super::data::DataLink;
use super::inbox::{Inbox, copy_end};
use super::link::ProcessLink;
use super::sleepers::{Sleep, Slot};
use super::state::{Event, GroupState, Mux, State};
use crate::engine::handshake::{ConnectionId, Handshakes};
use crate::engine::poller::{Poller, Source};
use crate::shm::doorbells::Doorbells;
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::ConnectionKind;

/// Longest sleep of a thread that cannot be woken by other threads.
const BRIEF_SLEEP: Duration = Duration::from_millis(1);

/// The membership of one group: its channels exist as long as it does, or until the group is left.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) mux: Arc<Mux>,
    group: u64,
    pub(crate) slot: Arc<Slot>,
    /// The process of each rank of the group.
    pub(crate) processes: Vec<usize>,
}

impl Mux {
    /// Adds a group, whose ranks are `processes` and in which this process is rank `me`. From now on the
    /// frames of the group are kept for it.
    pub(crate) fn join(self: &Arc<Self>, group: u64, me: usize, processes: Vec<usize>) -> Membership {
        let mut state = self.lock();
        let slot = Arc::new(Slot::default());
        let mut joined = GroupState {
            inboxes: processes.iter().map(|_| Inbox::default()).collect(),
            processes: processes.clone(),
            events: Vec::new(),
            slot: Arc::clone(&slot),
            left: false,
        };
        for (rank, &process) in processes.iter().enumerate().filter(|&(rank, _)| rank != me) {
            if let Some(how) = &state.links[process].ended {
                joined.inboxes[rank].ended = Some(copy_end(how));
                joined.announce(rank);
            }
            let exits = state.exits.iter().filter(|(of, _)| *of == process);
            exits.for_each(|(_, how)| joined.push(Event::Exited(rank, how.clone())));
        }
        state.handshakes.groups.insert(group, (me, processes.len()));
        state.groups.insert(group, joined);
        drop(state);
        Membership { mux: Arc::clone(self), group, slot, processes }
    }
}

impl Membership {
    /// Returns the channel to `rank`.
    pub(crate) fn channel(&self, rank: usize) -> Conn {
        Conn::new(Box::new(self.channel_to(rank)))
    }

    /// Returns a data link to `rank`, which has no connection of its own yet.
    pub(crate) fn data_link(&self, rank: usize, kind: ConnectionKind) -> Conn {
        Conn::new(Box::new(DataLink::new(self.channel_to(rank), kind)))
    }

    fn channel_to(&self, rank: usize) -> Channel {
        Channel { mux: Arc::clone(&self.mux), group: self.group, rank }
    }

    /// Polls all descriptors of the process except those of handshakes. Returns the events of this group.
    pub(crate) fn poll_ready(&self) -> Vec<Event> {
        let mut state = self.mux.lock();
        state.poll_ready();
        state.take_events(self.group)
    }

    /// Advances the handshakes of the process. Returns the events of this group.
    pub(crate) fn poll_handshakes(&self, now: Instant) -> Vec<Event> {
        let mut state = self.mux.lock();
        state.poll_handshakes(now);
        state.take_events(self.group)
    }

    /// Reads the launcher's reports. Returns the events of this group.
    pub(crate) fn poll_agent(&self) -> Vec<Event> {
        let mut state = self.mux.lock();
        state.poll_agent();
        state.take_events(self.group)
    }

    /// Returns whether the launcher can report the end of processes.
    pub(crate) fn has_agent(&self) -> bool {
        self.mux.lock().agent.is_some()
    }

    /// Opens a connection to rank `peer`, or with `probe_only` only checks whether its process listens.
    pub(crate) fn connect(&self, peer: usize, kind: ConnectionKind, address: SocketAddr, probe_only: bool) {
        let id = ConnectionId { group: self.group, peer, conn_kind: kind };
        self.mux.lock().handshakes.connect(id, address, probe_only, Instant::now());
    }

    /// Returns when the handshakes must advance even if no descriptor is ready.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.mux.lock().handshakes.wake_at()
    }

    pub(crate) fn with_handshakes<R>(&self, function: impl FnOnce(&Handshakes) -> R) -> R {
        function(&self.mux.lock().handshakes)
    }

    /// Returns a duplicate of the eventfd that other ranks of the host ring.
    pub(crate) fn doorbell(&self) -> std::io::Result<OwnedFd> {
        self.mux.lock().sleepers.doorbell().try_clone_to_owned()
    }

    /// Notes that the ranks of this group ring the process through `memory`.
    pub(crate) fn set_memory(&self, memory: Arc<Doorbells>) {
        let _ = self.slot.memory.set(memory);
    }

    /// Watches the process of `rank`, whose pidfd is `process`.
    pub(crate) fn watch_process(&self, rank: usize, process: OwnedFd) {
        let (mut state, of) = (self.mux.lock(), self.processes[rank]);
        // If the process cannot be watched, the end of its control connection shows that it has ended.
        if state.processes[of].is_none()
            && state.links[of].is_open()
            && self.mux.poller.add(process.as_fd(), Source::Process(of), false).is_ok()
        {
            state.processes[of] = Some(process);
        }
    }

    /// Announces again that frames of `rank` can be read.
    pub(crate) fn announce(&self, rank: usize) {
        if let Some(group) = self.mux.lock().groups.get_mut(&self.group) {
            group.announce(rank);
        }
    }

    /// Registers this thread as the one that sleeps in this group. Returns `None` if the group has an event.
    /// Every later event wakes the thread.
    pub(crate) fn begin_sleep(&self) -> Option<Sleep> {
        let mut state = self.mux.lock();
        let has_events = state.groups.get(&self.group).is_some_and(|group| !group.events.is_empty());
        (!has_events).then(|| state.sleepers.begin(&self.slot))
    }

    /// Sleeps until an event comes, `own` has one, or one of `others` is ready, at most `timeout`. Returns
    /// false if only one of `others` is ready or the time is over.
    pub(crate) fn sleep(
        &self,
        sleep: &mut Sleep,
        own: Option<&Poller>,
        others: &[(BorrowedFd<'_>, PollFlags)],
        mut timeout: Duration,
    ) -> bool {
        if matches!(sleep, Sleep::Brief) {
            timeout = timeout.min(BRIEF_SLEEP);
        }
        loop {
            // Only a follower need read the clock.
            let (bell, begin) = (sleep.bell(), sleep.bell().map(|_| Instant::now()));
            let first = bell.unwrap_or_else(|| self.mux.poller.as_fd());
            let ready = self.mux.poller.sleep([Some(first), own.map(AsFd::as_fd)], others, timeout);
            let Some(begin) = begin.filter(|_| ready) else { return ready };
            if self.mux.lock().sleepers.is_woken(&self.slot, sleep) {
                return true;
            }
            timeout = timeout.saturating_sub(begin.elapsed());
        }
    }

    pub(crate) fn end_sleep(&self, sleep: Sleep) {
        self.mux.lock().sleepers.end(&self.slot, sleep);
    }

    /// Closes the channels and connections of the group, and leaves it.
    pub(crate) fn close(&self, connections: Vec<ClosingConn>) {
        ClosingConn::close_all(&self.mux.poller, connections);
        self.leave();
    }

    /// Leaves the group: closes its channels, and after the last group the connections of the process.
    pub(crate) fn leave(&self) {
        let mut state = self.mux.lock();
        state.leave(self.group);
        if state.groups.values().all(|group| group.left) {
            state.handshakes.close();
            state.unregister_agent();
            let links = state.close_links();
            drop(state);
            ClosingConn::close_all(&self.mux.poller, links);
        }
    }
}

impl State {
    fn take_events(&mut self, group: u64) -> Vec<Event> {
        let Some(group) = self.groups.get_mut(&group) else { return Vec::new() };
        for event in &group.events {
            match event {
                Event::Control(rank) => group.inboxes[*rank].announced = false,
                Event::Data(rank) => group.inboxes[*rank].announced_data = false,
                _ => {}
            }
        }
        std::mem::take(&mut group.events)
    }

    fn leave(&mut self, id: u64) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if std::mem::replace(&mut group.left, true) {
            return;
        }
        group.events.clear();
        for rank in 0..group.processes.len() {
            self.close_channel(id, rank);
        }
        self.handshakes.remove_group(id);
    }

    /// Ends all links. Returns the connections that are still open.
    fn close_links(&mut self) -> Vec<ClosingConn> {
        let close = |link: &mut ProcessLink| {
            let watched = link.pollable().map(|fd| self.poller.remove(fd));
            link.close().filter(|_| watched.is_some())
        };
        self.links.iter_mut().filter_map(close).collect()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave();
        let mut state = self.mux.lock();
        let Some(group) = state.groups.remove(&self.group) else { return };
        for (&process, inbox) in group.processes.iter().zip(&group.inboxes) {
            // The other process may still send frames of this group, until it closes it.
            if inbox.ended.is_none() && state.links[process].is_open() {
                state.links[process].half_closed.insert(self.group);
            }
        }
    }
}
