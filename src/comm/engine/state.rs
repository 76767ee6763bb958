//! What an engine knows: its settings, its peers, its calls in progress.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use convoke_env::{AgentChannel, Generation};
use convoke_store::Store;

use super::messages::Mailbox as Messages;
use super::run::{Lanes, Run};
use super::ticket::Ticket;
use crate::call::Call;
use crate::links::conn::{Broken, Conn};
use crate::links::hello::{Credentials, Lane};
use crate::links::tcp::Listener;

/// What an engine needs to know from the start.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Name of the group, for messages.
    pub(crate) name: String,
    pub(crate) me: usize,
    pub(crate) size: usize,
    pub(crate) credentials: Credentials,
    /// Where each rank listens.
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) listener: Listener,
    /// Where the ranks agree on the cause of a failure, and under which key.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) abort_key: Vec<u8>,
    /// The rank in whose process the store lives, if it lives in one.
    pub(crate) store_rank: Option<usize>,
    /// The launcher's news of deaths, and the generation it knows this round by.
    pub(crate) agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    /// Bound for noticing a dead host or path.
    pub(crate) peer_timeout: Duration,
    /// More ranks on this host than cores: do not spin.
    pub(crate) crowded: bool,
}

/// Everything about one other rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) control: Option<Conn>,
    /// Control bytes that the connection has not taken yet.
    pub(super) control_out: Vec<u8>,
    pub(super) collective: Option<Conn>,
    pub(super) messages: Messages,
    /// It said goodbye.
    pub(super) left: bool,
    /// Its control connection has ended: when, and how.
    pub(super) silent: Option<(Instant, Broken)>,
    /// A data connection ended: until when its control connection must say why.
    pub(super) suspect: Option<(Instant, String)>,
    /// What it last said it waits in, and for whom.
    pub(super) state: Option<PeerState>,
    /// Lanes that it was asked to open.
    pub(super) asked: [bool; 3],
}

#[derive(Debug)]
pub(super) struct PeerState {
    pub(super) seq: u64,
    pub(super) call: Call,
    pub(super) awaits: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Collective {
    pub(super) run: Run,
    pub(super) ticket: Arc<Ticket>,
    /// Ranks it waited for when it last told the others.
    pub(super) told: Option<Vec<usize>>,
}

impl Peer {
    pub(super) fn new(rank: usize) -> Self {
        Self {
            control: None,
            control_out: Vec::new(),
            collective: None,
            messages: Messages::new(rank),
            left: false,
            silent: None,
            suspect: None,
            state: None,
            asked: [false; 3],
        }
    }

    pub(super) fn is_open(&self, lane: Lane) -> bool {
        match lane {
            Lane::Control => self.control.is_some(),
            Lane::Collective => self.collective.is_some(),
            Lane::Message => self.messages.conn.is_some(),
        }
    }
}

/// The connections of all peers for collectives.
pub(super) struct Collectives<'a>(pub(super) &'a mut [Peer]);

impl Lanes for Collectives<'_> {
    fn lane(&mut self, peer: usize) -> Option<&mut Conn> {
        self.0.get_mut(peer)?.collective.as_mut()
    }
}
