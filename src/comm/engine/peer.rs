//! The state of another rank: its connections, its messages, and what is known of its waits.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::execution::PeerConnections;
use super::messages::PeerMessages;
use crate::collectives::call::Call;
use crate::transport::frame::GroupId;
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::ConnectionKind;

/// The state of one other rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) control: Option<Conn>,
    /// Bytes of control frames that are not written to the control connection yet.
    pub(super) control_out: Vec<u8>,
    pub(super) collective: Option<Conn>,
    pub(super) messages: PeerMessages,
    /// The number of short messages that callers have received by themselves over the connection, modulo
    /// [`INLINE_RECEIVES`](super::message_watch::INLINE_RECEIVES).
    pub(super) inline_receives: u32,
    /// The last monitored barrier at which the peer said that it has arrived.
    pub(super) last_barrier: Option<u64>,
    /// The peer's last report of the call that it waits in, and of the ranks that it waits for.
    pub(super) wait_report: Option<WaitReport>,
    /// The peer's offer to share memory, which says how this rank can reach the memory.
    pub(super) offer: Option<Vec<u8>>,
    /// For each [`ConnectionKind`], whether this rank has asked the peer to open that connection.
    pub(super) requested: [bool; 3],
}

#[derive(Debug)]
pub(super) struct WaitReport {
    pub(super) seq: u64,
    pub(super) call: Call,
    pub(super) awaits: Vec<usize>,
    pub(super) received_at: Instant,
}

/// The wait of a rank: the number of the call, the call, and the ranks that it waits for.
pub(super) type Wait = (u64, Call, Vec<usize>);

impl Peer {
    pub(super) fn new(rank: usize, group: GroupId) -> Self {
        Self {
            control: None,
            control_out: Vec::new(),
            collective: None,
            messages: PeerMessages::new(rank, group),
            inline_receives: 0,
            last_barrier: None,
            wait_report: None,
            offer: None,
            requested: [false; 3],
        }
    }

    /// Returns the link by which data can be sent to this rank.
    pub(super) fn link(&self, conn_kind: ConnectionKind) -> Option<&Conn> {
        match conn_kind {
            ConnectionKind::Control => self.control.as_ref(),
            ConnectionKind::Collective => self.collective.as_ref(),
            ConnectionKind::Message => self.messages.conn.as_ref(),
        }
    }

    /// Returns the descriptor of the connection for messages, if there is one.
    pub(super) fn message_fd(&self) -> Option<BorrowedFd<'_>> {
        self.messages.conn.as_ref()?.pollable()
    }

    /// Returns whether the connection is open, or a link that needs none.
    pub(super) fn is_open(&self, conn_kind: ConnectionKind) -> bool {
        self.link(conn_kind).is_some_and(|link| !link.awaits_connection())
    }
}

impl PeerConnections for Vec<Peer> {
    fn connection(&mut self, peer: usize) -> Option<&mut Conn> {
        self.get_mut(peer)?.collective.as_mut()
    }
}
