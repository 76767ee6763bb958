//! Opens connections: the connector, the acceptor, and the refusal of unauthenticated peers.
//!
//! Of each pair, the rank with the higher number connects, so the two ranks never connect to each other at
//! once. The higher rank opens the control connection at the start. A lower rank that needs a data connection
//! sends an Open frame on the control connection.
//!
//! A peer is unauthenticated until it has proven that it knows the secret. Such peers get few resources:
//! [`MAX_UNAUTHENTICATED`] at a time, [`CONNECT_TIMEOUT`] each, memory for one small frame. The connection of
//! a peer that does not speak the protocol is closed without an answer. A convoke process of another group is
//! told the reason.

mod connector;
mod exchange;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::poller::{Poller, Source};
use crate::fault::fault_point;
use crate::limits;
use crate::transport::frame::{FrameError, HEADER_BYTES, Kind};
use crate::transport::links;
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::{
    CAPABILITIES, ConnectionKind, Credentials, HandshakeError, Hello, Role, SUITE_PLAIN, Welcome,
};
use crate::transport::links::tcp::Listener;
use connector::Connector;
use exchange::{CONNECT_TIMEOUT, HANDSHAKE_BYTES, handshake_frame, nonce, refuse, send};
pub(crate) use exchange::{ConnectionId, HandshakeEvent};

/// Most incoming connections without a valid hello. Of connections with a valid hello but without a proof,
/// this many are kept beyond the number that the ranks of the group can open.
const MAX_UNAUTHENTICATED: usize = 64;
/// Longest time from a peer's valid hello to its proof that it knows the secret. It is long because the
/// peer's process may be stopped.
const PROOF_TIMEOUT: Duration = Duration::from_secs(300);
/// Most connections accepted in one poll, so that many attempts to connect do not hold up everything else.
const MAX_ACCEPTS: usize = 128;
/// Time for which no connection is accepted after the process ran out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most refused connections whose reasons are kept for error messages.
const MAX_NOTES: usize = 4;

/// The handshakes of all groups of a process, which share one listener.
#[derive(Debug)]
pub(crate) struct Handshakes {
    /// The credentials of the first group. Those of the other groups differ in the number of the group.
    credentials: Credentials,
    /// For each group, the rank of this process in it and its size.
    pub(crate) groups: HashMap<u64, (usize, usize)>,
    /// `None` after [`Self::close`], and if no other rank is to connect.
    listener: Option<Listener>,
    inbound: Vec<Inbound>,
    connectors: Vec<Connector>,
    /// The connections that were opened. A group may ask for one before it has learned that it is open. Of
    /// two connections each rank could keep another one, and close the one that the other keeps.
    opened: HashSet<ConnectionId>,
    notes: Vec<String>,
    /// Until then the process, out of descriptors, neither accepts connections nor polls the listener.
    accept_paused_until: Option<Instant>,
    /// The epoll set has reported a [`Source::Handshake`] since the last `accept`, so a connection may wait. An
    /// `accept` without a waiting connection costs the kernel a socket.
    is_ready: bool,
}

#[derive(Debug)]
struct Inbound {
    conn: Conn,
    from: String,
    since: Instant,
    /// The hello of the peer and this rank's nonce, once the peer has sent a valid hello.
    hello: Option<(Hello, [u8; 32])>,
    /// The group that the peer named; it counts only with a hello.
    group: u64,
}

impl Handshakes {
    pub(crate) fn new(credentials: Credentials, listener: Option<Listener>) -> Self {
        let (inbound, connectors, notes, accept_paused_until) = (Vec::new(), Vec::new(), Vec::new(), None);
        let (groups, opened) = (HashMap::new(), HashSet::new());
        let is_ready = false;
        Self {
            credentials,
            groups,
            listener,
            inbound,
            connectors,
            opened,
            notes,
            accept_paused_until,
            is_ready,
        }
    }

    /// Notes that a descriptor of a handshake is ready.
    pub(crate) fn note_ready(&mut self) {
        self.is_ready = true;
    }

    /// Stops all handshakes of `group`.
    pub(crate) fn remove_group(&mut self, group: u64) {
        self.groups.remove(&group);
        self.inbound.retain(|inbound| inbound.hello.is_none() || inbound.group != group);
        self.connectors.retain(|connector| connector.id.group != group);
        self.opened.retain(|id| id.group != group);
    }

    /// Stops all handshakes: closes the listener and all connections that are not open yet.
    pub(crate) fn close(&mut self) {
        self.listener = None;
        self.inbound.clear();
        self.connectors.clear();
    }

    /// Begins to open the connection `id`, unless it is open or an attempt is under way. With `probe_only`,
    /// begins to check repeatedly whether a process listens at `address`, until the peer has opened the
    /// connection.
    pub(crate) fn connect(&mut self, id: ConnectionId, address: SocketAddr, probe_only: bool, now: Instant) {
        if !self.opened.contains(&id) && self.connectors.iter().all(|connector| connector.id != id) {
            self.connectors.push(Connector::new(id, address, probe_only, now));
        }
    }

    /// Returns when the handshakes must advance even if no descriptor is ready; `None` if none has a timeout.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        let connectors = self.connectors.iter().filter_map(Connector::wake_at);
        let inbound = self.inbound.iter().map(Inbound::expires);
        connectors.chain(inbound).chain(self.accept_paused_until).min()
    }

    /// Returns the connection problems so far, for an error message.
    pub(crate) fn notes(&self) -> Vec<String> {
        let connectors = self.connectors.iter().map(|connector| {
            format!("rank {} at {}: {}", connector.id.peer, connector.address, connector.last_error)
        });
        connectors.take(MAX_NOTES).chain(self.notes.iter().cloned()).collect()
    }

    /// Returns the peers at whose address nobody has been listening for at least `time`.
    pub(crate) fn refusing_peers(&self, time: Duration, now: Instant) -> impl Iterator<Item = usize> + '_ {
        let long = move |connector: &&Connector| {
            connector.refused_since.is_some_and(|since| now.duration_since(since) >= time)
        };
        self.connectors.iter().filter(long).map(|connector| connector.id.peer)
    }

    /// Accepts connections and advances every handshake. Returns the results, each with its group. Opened
    /// connections are still registered as [`Source::Handshake`].
    pub(crate) fn progress(&mut self, poller: &Poller, now: Instant) -> Vec<(u64, HandshakeEvent)> {
        let mut out = Vec::new();
        if let Err(source) = self.accept(poller, now).map_err(Arc::new) {
            let event = || HandshakeEvent::Exhausted { outgoing: false, source: Arc::clone(&source) };
            out.extend(self.groups.keys().map(|&group| (group, event())));
        }
        let mut index = 0;
        while index < self.inbound.len() {
            match self.handshake_step(index, now) {
                Ok(None) => index += 1,
                Ok(Some(hello)) => {
                    let Inbound { conn, group, .. } = self.inbound.swap_remove(index);
                    let (peer, conn_kind) = (hello.source as usize, hello.conn_kind);
                    let opened = ConnectionId { group, peer, conn_kind };
                    self.connectors.retain(|connector| connector.id != opened);
                    out.push((group, HandshakeEvent::Opened { peer, conn_kind, conn }));
                }
                Err(why) => {
                    let closed = self.inbound.swap_remove(index);
                    if let Some(why) = why {
                        self.notes.truncate(MAX_NOTES - 1);
                        self.notes
                            .insert(0, format!("this rank refused a connection from {}: {why}", closed.from));
                    }
                }
            }
        }
        self.connectors.retain_mut(|connector| {
            let group = connector.id.group;
            let (me, _) = self.groups[&group];
            let event = connector.progress(me, &self.credentials.of_group(group), poller, now);
            let event = event.unwrap_or_else(|error| connector.retry(error, now));
            out.extend(event.map(|event| (group, event)));
            !connector.is_done()
        });
        for (group, event) in &out {
            if let HandshakeEvent::Opened { peer, conn_kind, .. } = event {
                self.opened.insert(ConnectionId { group: *group, peer: *peer, conn_kind: *conn_kind });
            }
        }
        out
    }

    /// Accepts the connections that wait. Fails if no descriptor is left for them.
    fn accept(&mut self, poller: &Poller, now: Instant) -> io::Result<()> {
        let is_ready = std::mem::take(&mut self.is_ready);
        let is_due = self.accept_paused_until.map_or(is_ready, |until| now >= until);
        let Some(listener) = self.listener.as_ref().filter(|_| is_due) else { return Ok(()) };
        if self.accept_paused_until.take().is_some() {
            let _ = poller.add(listener.pollable(), Source::Handshake, false);
        }
        for _ in 0..MAX_ACCEPTS {
            let (tcp, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if limits::is_out_of_descriptors(&error) => {
                    // The listener stays readable, so a thread that polls it would spin.
                    poller.remove(listener.pollable());
                    self.accept_paused_until = Some(now + ACCEPT_PAUSE);
                    return Err(error);
                }
                Err(_) => break,
            };
            let conn = links::connection(tcp);
            if conn.pollable().is_none_or(|fd| poller.add(fd, Source::Handshake, false).is_err()) {
                continue;
            }
            self.inbound.push(Inbound { conn, from, since: now, hello: None, group: 0 });
            limit(&mut self.inbound, false, MAX_UNAUTHENTICATED);
            let ranks: usize = self.groups.values().map(|&(_, size)| size).sum();
            limit(&mut self.inbound, true, MAX_UNAUTHENTICATED + ConnectionKind::ALL.len() * ranks);
        }
        Ok(())
    }

    /// Takes one step of the handshake with an incoming connection. Returns the peer's hello when the peer
    /// has authenticated. An error closes the connection; its text is kept for error messages.
    fn handshake_step(
        &mut self,
        index: usize,
        now: Instant,
    ) -> Result<Option<Hello>, Option<HandshakeError>> {
        let inbound = &mut self.inbound[index];
        if inbound.conn.fill(HANDSHAKE_BYTES).is_err() {
            let hello = inbound.hello.map(|(hello, _)| hello);
            return Err(hello.map(|hello| HandshakeError::ClosedAfterWelcome { source_rank: hello.source }));
        }
        if now >= inbound.expires() {
            return Err(None);
        }
        let (frame, payload) = match handshake_frame(&inbound.conn) {
            Ok(None) => return Ok(None),
            Ok(Some(frame)) => frame,
            Err(FrameError::Magic(_)) => return Err(None),
            Err(error) => return Err(Some(refuse(&mut inbound.conn, &self.credentials, error.into()))),
        };
        let no = |conn: &mut Conn, why| Err(Some(refuse(conn, &self.credentials, why)));
        let is_same = inbound.hello.is_none() || inbound.group == frame.group;
        let is_ours = is_same && frame.generation == self.credentials.generation;
        let Some(&(me, size)) = self.groups.get(&frame.group).filter(|_| is_ours) else {
            let (theirs, ours) = (frame.group_id(), self.credentials.group_id());
            return no(&mut inbound.conn, HandshakeError::ForeignGroup { theirs, ours });
        };
        let credentials = self.credentials.of_group(frame.group);
        inbound.conn.consume(HEADER_BYTES + payload.len());
        match (frame.kind, inbound.hello) {
            (Kind::Hello, None) => {
                let hello = match Hello::decode(&payload).and_then(|hello| check(hello, me, size)) {
                    Ok(hello) => hello,
                    Err(why) => return no(&mut inbound.conn, why),
                };
                let nonce = nonce().map_err(|error| HandshakeError::NoRandomNumbers(error.to_string()))?;
                let proof = credentials.prove(Role::Acceptor, &hello, CAPABILITIES, &nonce);
                let welcome = Welcome { suite: SUITE_PLAIN, capabilities: CAPABILITIES, nonce, proof };
                send(&mut inbound.conn, Kind::Welcome, &credentials, &welcome.encode()).map_err(|_| None)?;
                fault_point("welcomed", 0, 0);
                (inbound.hello, inbound.group) = (Some((hello, nonce)), frame.group);
                Ok(None)
            }
            (Kind::Proof, Some((hello, nonce))) => {
                if !credentials.verify(Role::Connector, &hello, CAPABILITIES, &nonce, &payload) {
                    return no(&mut inbound.conn, HandshakeError::WrongToken { source_rank: hello.source });
                }
                Ok(Some(hello))
            }
            (kind, _) => no(&mut inbound.conn, HandshakeError::BeforeProof(kind)),
        }
    }
}

impl Inbound {
    fn expires(&self) -> Instant {
        self.since + if self.hello.is_some() { PROOF_TIMEOUT } else { CONNECT_TIMEOUT }
    }
}

/// Closes the oldest incoming connection with a hello (without one if `with_hello` is false), if there are
/// more than `most` such connections. A real peer finishes its handshake at once, so the oldest is the least
/// likely to be a real peer.
fn limit(inbound: &mut Vec<Inbound>, with_hello: bool, most: usize) {
    let alike = inbound.iter().enumerate().filter(|(_, one)| one.hello.is_some() == with_hello);
    if alike.clone().count() > most
        && let Some((oldest, _)) = alike.min_by_key(|(_, one)| one.since)
    {
        inbound.remove(oldest);
    }
}

/// Returns `hello` if it may open a connection to rank `me` in a group of `size` ranks.
fn check(hello: Hello, me: usize, size: usize) -> Result<Hello, HandshakeError> {
    let (source_rank, destination) = (hello.source as usize, hello.destination as usize);
    match (source_rank, destination) {
        _ if destination != me => Err(HandshakeError::WrongDestination { me, destination }),
        _ if source_rank >= size => Err(HandshakeError::UnknownSource { source_rank, size }),
        _ if source_rank <= me => Err(HandshakeError::WrongDirection { source_rank, me }),
        _ => Ok(hello),
    }
}

#[cfg(test)]
mod tests {
    use convoke_env::Generation;

    use super::*;
    use crate::transport::links::tcp;

    #[test]
    fn request_for_an_open_connection_opens_no_second_one() {
        let credentials = Credentials::new(None, Generation::from_bytes([7; 16]), 0);
        let poller = Poller::new().unwrap();
        let listener = tcp::listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.address().unwrap();
        let (mut lower, mut higher) =
            (Handshakes::new(credentials.clone(), Some(listener)), Handshakes::new(credentials, None));
        lower.groups.insert(0, (0, 2));
        higher.groups.insert(0, (1, 2));
        let id = ConnectionId { group: 0, peer: 0, conn_kind: ConnectionKind::Collective };
        higher.connect(id, address, false, Instant::now());
        let mut opened = Vec::new();
        convoke_testkit::wait_until("both ranks have the connection", || {
            lower.note_ready();
            opened.extend(lower.progress(&poller, Instant::now()));
            opened.extend(higher.progress(&poller, Instant::now()));
            (opened.len() == 2).then_some(())
        });
        // The other rank asked for the connection at that moment.
        higher.connect(id, address, false, Instant::now());
        assert!(higher.connectors.is_empty(), "it opens another connection");
        higher.remove_group(0);
        higher.groups.insert(0, (1, 2));
        higher.connect(id, address, false, Instant::now());
        assert_eq!(higher.connectors.len(), 1, "a new group has no connections");
    }
}
