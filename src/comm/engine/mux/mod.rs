//! The connections of a process to the other processes of its job, which all groups of the process share.
//!
//! The first group, usually the world, makes the multiplexer: its ranks are the *processes*. Each pair of
//! processes has one control connection. The groups that are made from the first group *join* the
//! multiplexer. Each pair of ranks of a group has a [channel](channel) for control frames, which is part of
//! the connection between their processes: the header of each frame names the group. A Close frame ends a
//! channel, and the connection goes on.
//!
//! [Data links](data) between ranks that share no memory also begin as parts of this connection.
//!
//! The multiplexer also has what else belongs to a process: the listener and the handshakes, the launcher's
//! channel, the descriptors that report the end of other processes, and the threads that [sleep](sleepers).
//! A thread of any group that polls hands each event to its group, and wakes the thread that sleeps there.
//! The multiplexer calls no group, so each group keeps its own failures, deadlines and order of calls.

mod channel;
mod closing;
mod data;
mod link;
mod membership;
mod polling;
mod routing;
mod sleepers;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use convoke_env::{AgentChannel, Generation};

use super::handshake::Handshakes;
use super::poller::{Poller, Source};
use crate::error::{CommError, LossReason};
use crate::transport::links::conn::{Conn, ConnError};
use crate::transport::links::hello::{ConnectionKind, Credentials, HandshakeError};
use crate::transport::links::tcp::Listener;
use channel::{Inbox, copy};
pub(super) use closing::ClosingConn;
use link::ProcessLink;
pub(crate) use membership::Membership;
use sleepers::Sleepers;
pub(crate) use sleepers::{Doorbell, Sleep, Slot};

/// The launcher's channel, and the generation whose reports count.
pub(crate) type Agent = (Arc<Mutex<AgentChannel>>, Generation);

/// An event that concerns one group.
#[derive(Debug)]
pub(super) enum Event {
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
    Opened {
        peer: usize,
        conn_kind: ConnectionKind,
        conn: Conn,
    },
    Unauthorized {
        from: String,
        error: HandshakeError,
    },
    Exhausted {
        outgoing: bool,
        source: io::Error,
    },
}

#[derive(Debug)]
pub(crate) struct Mux {
    poller: Poller,
    generation: Generation,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    handshakes: Handshakes,
    generation: Generation,
    /// The number of the first group.
    first: u64,
    /// The control connection to each process.
    links: Vec<ProcessLink>,
    /// The pidfd of each process that is watched.
    processes: Vec<Option<OwnedFd>>,
    groups: HashMap<u64, GroupState>,
    agent: Option<Agent>,
    /// The processes whose end the launcher has reported.
    exits: Vec<(usize, LossReason)>,
    sleepers: Sleepers,
    /// Longest time until a dead host or network path is detected.
    peer_timeout: Duration,
}

/// The state of one group.
#[derive(Debug)]
struct GroupState {
    /// The process of each rank.
    processes: Vec<usize>,
    /// The receiving end of the channel to each rank.
    inboxes: Vec<Inbox>,
    events: Vec<Event>,
    slot: Arc<Slot>,
    /// This process has left the group.
    left: bool,
}

impl Mux {
    /// Makes the multiplexer of a process whose job has `size` processes.
    pub(super) fn new(
        credentials: &Credentials,
        size: usize,
        agent: Option<Agent>,
        peer_timeout: Duration,
        listener: Option<Listener>,
    ) -> Result<Arc<Self>, CommError> {
        let system = |what: &'static str| move |error| CommError::system(what, error);
        let poller = Poller::new().map_err(system("cannot make an epoll set"))?;
        let sleepers = Sleepers::new().map_err(system("cannot make an eventfd"))?;
        poller
            .add(sleepers.doorbell(), Source::Doorbell, false)
            .map_err(system("cannot watch an eventfd"))?;
        if let Some(listener) = &listener {
            poller
                .add(listener.pollable(), Source::Listener, false)
                .map_err(system("cannot watch the listener"))?;
        }
        let mut state = State {
            handshakes: Handshakes::new(credentials.clone(), listener),
            generation: credentials.generation,
            first: credentials.group,
            links: (0..size).map(|_| ProcessLink::default()).collect(),
            processes: (0..size).map(|_| None).collect(),
            groups: HashMap::new(),
            agent,
            exits: Vec::new(),
            sleepers,
            peer_timeout,
        };
        state.register_agent(&poller);
        Ok(Arc::new(Self { poller, generation: credentials.generation, state: Mutex::new(state) }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, group: u64, event: Event) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.push(event);
        }
    }
}

impl GroupState {
    /// Returns this group and the rank of a process in it, if the process is another rank of the group.
    fn of(&mut self, process: usize) -> Option<(&mut Self, usize)> {
        let rank = self.processes.iter().position(|&of| of == process)?;
        Some((self, rank))
    }

    fn push(&mut self, event: Event) {
        if !self.left {
            self.events.push(event);
            self.slot.ring();
        }
    }

    fn announce_data(&mut self, rank: usize) {
        if !std::mem::replace(&mut self.inboxes[rank].announced_data, true) {
            self.push(Event::Data(rank));
        }
    }

    fn announce(&mut self, rank: usize) {
        if !std::mem::replace(&mut self.inboxes[rank].announced, true) {
            self.push(Event::Control(rank));
        }
    }
}

fn copy_end(how: &ConnError) -> ConnError {
    match how {
        ConnError::Closed => ConnError::Closed,
        ConnError::Failed(error) => ConnError::Failed(copy(error)),
    }
}
