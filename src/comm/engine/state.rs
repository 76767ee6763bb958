//! The state of an engine: its settings, its peers, its calls in progress.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use convoke_env::{AgentChannel, Generation};
use convoke_store::Store;

use super::affinity::CoreSharing;
use super::completion::Completion;
use super::execution::Execution;
use super::messages::PeerMessages;
use super::streams::PeerConnections;
use crate::call::Call;
use crate::flight::GroupRecorder;
use crate::links::conn::{Conn, ConnError};
use crate::links::hello::{ConnectionKind, Credentials};

/// The settings of an engine, which do not change.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Name of the group, for messages.
    pub(crate) name: String,
    pub(crate) me: usize,
    pub(crate) size: usize,
    pub(crate) credentials: Credentials,
    /// The address at which each rank listens.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The store in which the ranks agree on the cause of a failure; `abort_key` is the key.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) abort_key: Vec<u8>,
    /// The rank in whose process the store lives, if it lives in one.
    pub(crate) store_rank: Option<usize>,
    /// The channel on which the launcher reports deaths, and the generation of this round.
    pub(crate) agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    /// Longest time until a dead host or path is noticed.
    pub(crate) peer_timeout: Duration,
    pub(crate) sharing: CoreSharing,
    /// The group's part of the flight recorder.
    pub(crate) flight: Arc<GroupRecorder>,
}

/// The state of one other rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) control: Option<Conn>,
    /// Control bytes that the connection has not taken yet.
    pub(super) control_out: Vec<u8>,
    pub(super) collective: Option<Conn>,
    pub(super) messages: PeerMessages,
    /// The peer said goodbye.
    pub(super) left: bool,
    /// The time and manner in which its control connection ended.
    pub(super) control_closed: Option<(Instant, ConnError)>,
    /// The time until which its control connection must explain why a data connection ended, and the error.
    pub(super) suspect: Option<(Instant, String)>,
    /// The last monitored barrier at which the peer said that it has arrived.
    pub(super) last_barrier: Option<u64>,
    /// The last report of what the peer waits in, and for whom.
    pub(super) wait_report: Option<WaitReport>,
    /// The peer's offer to share memory, which says how to reach it.
    pub(super) offer: Option<Vec<u8>>,
    /// Lanes that the peer was asked to open.
    pub(super) requested: [bool; 3],
}

#[derive(Debug)]
pub(super) struct WaitReport {
    pub(super) seq: u64,
    pub(super) call: Call,
    pub(super) awaits: Vec<usize>,
    pub(super) received_at: Instant,
}

#[derive(Debug)]
pub(super) struct Collective {
    pub(super) execution: Execution,
    pub(super) completion: Arc<Completion>,
    /// In a monitored barrier: the others were told that this rank has arrived.
    pub(super) arrival_announced: bool,
}

/// A wait of a rank: the number of the call, the call, and the awaited ranks.
pub(super) type Wait = (u64, Call, Vec<usize>);

impl Peer {
    pub(super) fn new(rank: usize) -> Self {
        Self {
            control: None,
            control_out: Vec::new(),
            collective: None,
            messages: PeerMessages::new(rank),
            left: false,
            control_closed: None,
            suspect: None,
            last_barrier: None,
            wait_report: None,
            offer: None,
            requested: [false; 3],
        }
    }

    pub(super) fn is_open(&self, conn_kind: ConnectionKind) -> bool {
        match conn_kind {
            ConnectionKind::Control => self.control.is_some(),
            ConnectionKind::Collective => self.collective.is_some(),
            ConnectionKind::Message => self.messages.conn.is_some(),
        }
    }
}

/// The connections of all peers for collectives.
pub(super) struct CollectiveConnections<'a>(pub(super) &'a mut [Peer]);

impl PeerConnections for CollectiveConnections<'_> {
    fn connection(&mut self, peer: usize) -> Option<&mut Conn> {
        self.0.get_mut(peer)?.collective.as_mut()
    }
}
