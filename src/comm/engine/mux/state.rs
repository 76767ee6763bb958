//! The state of the multiplexer of a process.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use convoke_env::{AgentChannel, Generation};

use super::inbox::Inbox;
use super::link::ProcessLink;
use super::sleepers::{Doorbell, Sleepers, Slot};
use crate::engine::handshake::{HandshakeEvent, Handshakes};
use crate::engine::poller::{Poller, Source};
use crate::error::{CommError, LossReason};
use crate::transport::links::hello::{ConnectionKind, Credentials};
use crate::transport::links::tcp::Listener;

/// The launcher's channel, and the generation whose reports count.
pub(crate) type Agent = (Arc<Mutex<AgentChannel>>, Generation);

/// An event that concerns one group.
#[derive(Debug)]
pub(crate) enum Event {
    /// Control frames of this rank can be read, or its channel has ended.
    Control(usize),
    /// The control connection to this rank is open. Only the first group opens control connections.
    Connected(usize),
    /// A connection takes bytes again.
    Room,
    /// Bytes of a data link to this rank can be read.
    Data(usize),
    /// A data link to this rank has many bytes to send, and should get a connection of its own.
    NeedsConnection(usize, ConnectionKind),
    /// The launcher has reported the end of this rank's process.
    Exited(usize, LossReason),
    Handshake(HandshakeEvent),
}

#[derive(Debug)]
pub(crate) struct Mux {
    pub(super) poller: Arc<Poller>,
    pub(super) generation: Generation,
    pub(super) state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) poller: Arc<Poller>,
    pub(super) handshakes: Handshakes,
    pub(super) generation: Generation,
    /// The number of the first group.
    pub(super) first: u64,
    /// The control connection to each process.
    pub(super) links: Vec<ProcessLink>,
    /// The pidfd of each process that is watched.
    pub(super) processes: Vec<Option<OwnedFd>>,
    pub(super) groups: HashMap<u64, GroupState>,
    pub(super) agent: Option<Agent>,
    /// The processes whose end the launcher has reported.
    pub(super) exits: Vec<(usize, LossReason)>,
    pub(super) sleepers: Sleepers,
    /// Longest time until a dead host or network path is detected.
    pub(super) peer_timeout: Duration,
}

/// The state of one group.
#[derive(Debug)]
pub(super) struct GroupState {
    /// The process of each rank.
    pub(super) processes: Vec<usize>,
    /// The receiving end of the channel to each rank.
    pub(super) inboxes: Vec<Inbox>,
    pub(super) events: Vec<Event>,
    pub(super) slot: Arc<Slot>,
    /// This process has left the group.
    pub(super) left: bool,
}

impl Mux {
    /// Makes the multiplexer of a process whose job has `size` processes.
    pub(crate) fn new(
        credentials: &Credentials,
        size: usize,
        agent: Option<Agent>,
        peer_timeout: Duration,
        listener: Option<Listener>,
    ) -> Result<Arc<Self>, CommError> {
        let system = |what: &'static str| move |error| CommError::system(what, error);
        let poller = Arc::new(Poller::new().map_err(system("cannot make an epoll set"))?);
        let sleepers = Sleepers::new().map_err(system("cannot make an eventfd"))?;
        let watched = poller.add(sleepers.doorbell(), Source::Doorbell, false);
        watched.map_err(system("cannot watch an eventfd"))?;
        if let Some(listener) = &listener {
            let watched = poller.add(listener.pollable(), Source::Handshake, false);
            watched.map_err(system("cannot watch the listener"))?;
        }
        let generation = credentials.generation;
        let mut state = State {
            poller: Arc::clone(&poller),
            handshakes: Handshakes::new(credentials.clone(), listener),
            generation,
            first: credentials.group,
            links: (0..size).map(|_| ProcessLink::default()).collect(),
            processes: (0..size).map(|_| None).collect(),
            groups: HashMap::new(),
            agent,
            exits: Vec::new(),
            sleepers,
            peer_timeout,
        };
        state.register_agent();
        Ok(Arc::new(Self { poller, generation, state: Mutex::new(state) }))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    pub(super) fn push(&mut self, group: u64, event: Event) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.push(event);
        }
    }

    /// Tells a group that there are bytes of data links from `rank`.
    pub(super) fn announce_data(&mut self, group: u64, rank: usize) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.announce_data(rank);
        }
    }

    /// Returns the groups with a process, and the process's rank in each.
    pub(super) fn ranks_of(&mut self, process: usize) -> impl Iterator<Item = (&mut GroupState, usize)> {
        self.groups.values_mut().filter_map(move |group| group.of(process))
    }
}

impl GroupState {
    /// Returns this group and the rank of a process in it, if the process is a rank of the group.
    pub(super) fn of(&mut self, process: usize) -> Option<(&mut Self, usize)> {
        let rank = self.processes.iter().position(|&of| of == process)?;
        Some((self, rank))
    }

    pub(super) fn push(&mut self, event: Event) {
        if !self.left {
            self.events.push(event);
            self.slot.ring();
        }
    }

    pub(super) fn announce_data(&mut self, rank: usize) {
        if !std::mem::replace(&mut self.inboxes[rank].announced_data, true) {
            self.push(Event::Data(rank));
        }
    }

    pub(super) fn announce(&mut self, rank: usize) {
        if !std::mem::replace(&mut self.inboxes[rank].announced, true) {
            self.push(Event::Control(rank));
        }
    }
}
