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
use std::net::SocketAddr;
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
pub(crate) use exchange::HandshakeEvent;
use exchange::{CONNECT_TIMEOUT, HANDSHAKE_BYTES, handshake_frame, nonce, refuse, send};

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
    groups: HashMap<u64, (usize, usize)>,
    /// `None` after [`Self::close`], and if no other rank is to connect.
    listener: Option<Listener>,
    inbound: Vec<Inbound>,
    connectors: Vec<Connector>,
    /// The connections that were opened, with their group and rank. A group may ask for one before it has learned that
    /// it is open. Of two connections each rank could keep another one, and close the one that the other keeps.
    opened: HashSet<(u64, usize, ConnectionKind)>,
    notes: Vec<String>,
    /// The time until which no connection is accepted, because the process ran out of descriptors. Until then
    /// the listener is not polled.
    accept_paused_until: Option<Instant>,
    /// Number of connections turned away, for tests and diagnosis.
    pub(crate) refused: u64,
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
        Self {
            credentials,
            groups,
            listener,
            inbound,
            connectors,
            opened,
            notes,
            accept_paused_until,
            refused: 0,
        }
    }

    /// Accepts connections of `group`, in which this process is rank `me` of `size`.
    pub(crate) fn add_group(&mut self, group: u64, me: usize, size: usize) {
        self.groups.insert(group, (me, size));
    }

    /// Stops all handshakes of `group`.
    pub(crate) fn remove_group(&mut self, group: u64) {
        self.groups.remove(&group);
        self.inbound.retain(|inbound| inbound.hello.is_none() || inbound.group != group);
        self.connectors.retain(|connector| connector.group != group);
        self.opened.retain(|(of, ..)| *of != group);
    }

    /// Stops all handshakes: closes the listener and all connections that are not open yet.
    pub(crate) fn close(&mut self) {
        self.listener = None;
        self.inbound.clear();
        self.connectors.clear();
    }

    /// Begins to open a connection of `conn_kind` to `peer`, unless it is open or an attempt is under way.
    pub(crate) fn connect(
        &mut self,
        group: u64,
        peer: usize,
        conn_kind: ConnectionKind,
        address: SocketAddr,
        now: Instant,
    ) {
        if !self.is_open_or_opening(group, peer, conn_kind) {
            self.connectors.push(Connector::new(group, peer, conn_kind, address, now));
        }
    }

    /// Begins to check repeatedly whether a process listens at the `address` of `peer`, until `peer` has
    /// opened its connection of `conn_kind`.
    pub(crate) fn probe(
        &mut self,
        group: u64,
        peer: usize,
        conn_kind: ConnectionKind,
        address: SocketAddr,
        now: Instant,
    ) {
        if !self.is_open_or_opening(group, peer, conn_kind) {
            self.connectors.push(Connector::probe(group, peer, conn_kind, address, now));
        }
    }

    fn is_open_or_opening(&self, group: u64, peer: usize, conn_kind: ConnectionKind) -> bool {
        self.opened.contains(&(group, peer, conn_kind))
            || self.connectors.iter().any(|connector| connector.opens(group, peer, conn_kind))
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
            format!("rank {} at {}: {}", connector.peer, connector.address, connector.last_error)
        });
        connectors.take(MAX_NOTES).chain(self.notes.iter().cloned()).collect()
    }

    /// Returns the peers at whose address nobody has been listening for at least `time`.
    pub(crate) fn refusing_peers(&self, time: Duration, now: Instant) -> impl Iterator<Item = usize> + '_ {
        let long = move |connector: &&Connector| {
            connector.refused_since.is_some_and(|since| now.duration_since(since) >= time)
        };
        self.connectors.iter().filter(long).map(|connector| connector.peer)
    }

    /// Accepts connections and advances every handshake. Appends the results to `out`.
    pub(crate) fn progress(&mut self, poller: &Poller, now: Instant, out: &mut Vec<HandshakeEvent>) {
        let before = out.len();
        self.accept(poller, now, out);
        let mut index = 0;
        while index < self.inbound.len() {
            match self.handshake_step(index, now) {
                Ok(None) => index += 1,
                Ok(Some(event)) => {
                    self.inbound.swap_remove(index);
                    if let HandshakeEvent::Opened { group, peer, conn_kind, .. } = event {
                        self.connectors.retain(|connector| !connector.opens(group, peer, conn_kind));
                    }
                    out.push(event);
                }
                Err(why) => {
                    let closed = self.inbound.swap_remove(index);
                    self.refused += 1;
                    if let Some(why) = why {
                        self.notes.truncate(MAX_NOTES - 1);
                        self.notes
                            .insert(0, format!("this rank refused a connection from {}: {why}", closed.from));
                    }
                }
            }
        }
        for connector in &mut self.connectors {
            let (me, _) = self.groups[&connector.group];
            let ours = self.credentials.of_group(connector.group);
            if let Some(event) = connector.progress(me, &ours, poller, now) {
                out.push(event);
            }
        }
        self.connectors.retain(|connector| !connector.is_done());
        self.opened.extend(out[before..].iter().filter_map(|event| match event {
            HandshakeEvent::Opened { group, peer, conn_kind, .. } => Some((*group, *peer, *conn_kind)),
            HandshakeEvent::Unauthorized { .. } | HandshakeEvent::Exhausted { .. } => None,
        }));
    }

    fn accept(&mut self, poller: &Poller, now: Instant, out: &mut Vec<HandshakeEvent>) {
        let Some(listener) =
            self.listener.as_ref().filter(|_| self.accept_paused_until.is_none_or(|until| now >= until))
        else {
            return;
        };
        if self.accept_paused_until.take().is_some() {
            let _ = poller.add(listener.pollable(), Source::Listener, false);
        }
        for _ in 0..MAX_ACCEPTS {
            let (tcp, from) = match self.listener.as_ref().map(Listener::accept) {
                Some(Ok(accepted)) => accepted,
                Some(Err(source)) if limits::is_out_of_descriptors(&source) => {
                    out.push(HandshakeEvent::Exhausted { group: None, source });
                    // The listener stays readable, so a thread that polls it would spin.
                    if let Some(listener) = &self.listener {
                        poller.remove(listener.pollable());
                    }
                    self.accept_paused_until = Some(now + ACCEPT_PAUSE);
                    return;
                }
                Some(Err(_)) | None => return,
            };
            let conn = links::connection(tcp);
            if conn.pollable().is_none_or(|fd| poller.add(fd, Source::Handshake, false).is_err()) {
                continue;
            }
            self.inbound.push(Inbound { conn, from, since: now, hello: None, group: 0 });
            self.limit_inbound(false, MAX_UNAUTHENTICATED);
            let ranks: usize = self.groups.values().map(|&(_, size)| size).sum();
            self.limit_inbound(true, MAX_UNAUTHENTICATED + ConnectionKind::ALL.len() * ranks);
        }
    }

    /// Closes the oldest incoming connection with a hello (without one if `with_hello` is false), if there
    /// are more than `most` such connections. A real peer finishes its handshake at once, so the oldest is
    /// the least likely to be a real peer.
    fn limit_inbound(&mut self, with_hello: bool, most: usize) {
        let alike = self.inbound.iter().enumerate().filter(|(_, one)| one.hello.is_some() == with_hello);
        if alike.clone().count() > most
            && let Some((oldest, _)) = alike.min_by_key(|(_, one)| one.since)
        {
            self.inbound.remove(oldest);
            self.refused += 1;
        }
    }

    /// Takes one step of the handshake with an incoming connection. An error closes the connection; its text
    /// is kept for error messages.
    fn handshake_step(
        &mut self,
        index: usize,
        now: Instant,
    ) -> Result<Option<HandshakeEvent>, Option<HandshakeError>> {
        let inbound = &mut self.inbound[index];
        if inbound.conn.fill(HANDSHAKE_BYTES).is_err() {
            let hello = inbound.hello.map(|(hello, _)| hello);
            return Err(hello.map(|hello| HandshakeError::ClosedAfterWelcome { source_rank: hello.source }));
        }
        if now >= inbound.expires() {
            return Err(None);
        }
        let (generation, first) = (self.credentials.generation, self.credentials.group);
        let (frame, payload) = match handshake_frame(&inbound.conn) {
            Ok(None) => return Ok(None),
            Ok(Some(frame)) => frame,
            Err(FrameError::Magic(_)) => return Err(None),
            Err(error) => return Err(Some(refuse(&mut inbound.conn, generation, first, error.into()))),
        };
        let no = |conn: &mut Conn, why| Err(Some(refuse(conn, generation, first, why)));
        let known = self.groups.get(&frame.group).filter(|_| frame.generation == generation);
        let Some(&(me, size)) = known.filter(|_| inbound.hello.is_none() || inbound.group == frame.group)
        else {
            let theirs = (frame.generation, frame.group);
            return no(&mut inbound.conn, HandshakeError::ForeignGroup { theirs, ours: (generation, first) });
        };
        let (group, credentials) = (frame.group, self.credentials.of_group(frame.group));
        inbound.conn.consume(HEADER_BYTES + payload.len());
        match (frame.kind, inbound.hello) {
            (Kind::Hello, None) => {
                let hello = match Hello::decode(&payload) {
                    Ok(hello) => hello,
                    Err(why) => return no(&mut inbound.conn, why),
                };
                if let Err(why) = check(&hello, me, size) {
                    return no(&mut inbound.conn, why);
                }
                let nonce = nonce().map_err(|error| HandshakeError::NoRandomNumbers(error.to_string()))?;
                let proof = credentials.prove(Role::Acceptor, &hello, CAPABILITIES, &nonce);
                let welcome = Welcome { suite: SUITE_PLAIN, capabilities: CAPABILITIES, nonce, proof };
                send(&mut inbound.conn, Kind::Welcome, generation, group, &welcome.encode())
                    .map_err(|_| None)?;
                fault_point("welcomed", 0, 0);
                (inbound.hello, inbound.group) = (Some((hello, nonce)), group);
                Ok(None)
            }
            (Kind::Proof, Some((hello, nonce))) => {
                if !credentials.verify(Role::Connector, &hello, CAPABILITIES, &nonce, &payload) {
                    return no(&mut inbound.conn, HandshakeError::WrongToken { source_rank: hello.source });
                }
                let conn = std::mem::replace(&mut inbound.conn, Conn::closed());
                Ok(Some(HandshakeEvent::Opened {
                    group,
                    peer: hello.source as usize,
                    conn_kind: hello.conn_kind,
                    conn,
                }))
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

fn check(hello: &Hello, me: usize, size: usize) -> Result<(), HandshakeError> {
    let (source_rank, destination) = (hello.source as usize, hello.destination as usize);
    match (source_rank, destination) {
        _ if destination != me => Err(HandshakeError::WrongDestination { me, destination }),
        _ if source_rank >= size => Err(HandshakeError::UnknownSource { source_rank, size }),
        _ if source_rank <= me => Err(HandshakeError::WrongDirection { source_rank, me }),
        _ => Ok(()),
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
        lower.add_group(0, 0, 2);
        higher.add_group(0, 1, 2);
        higher.connect(0, 0, ConnectionKind::Collective, address, Instant::now());
        let (mut at_lower, mut at_higher) = (Vec::new(), Vec::new());
        convoke_testkit::wait_until("both ranks have the connection", || {
            lower.progress(&poller, Instant::now(), &mut at_lower);
            higher.progress(&poller, Instant::now(), &mut at_higher);
            (at_lower.len() + at_higher.len() == 2).then_some(())
        });
        // The other rank asked for the connection at that moment.
        higher.connect(0, 0, ConnectionKind::Collective, address, Instant::now());
        assert!(higher.connectors.is_empty(), "it opens another connection");
        higher.remove_group(0);
        higher.add_group(0, 1, 2);
        higher.connect(0, 0, ConnectionKind::Collective, address, Instant::now());
        assert_eq!(higher.connectors.len(), 1, "a new group has no connections");
    }
}
