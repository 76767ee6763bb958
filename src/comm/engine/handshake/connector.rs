//! Opens one outgoing connection: connects to a rank, repeatedly if needed, and authenticates.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::exchange::{CONNECT_TIMEOUT, HANDSHAKE_BYTES, HandshakeEvent, handshake_frame, nonce, send};
use crate::engine::poller::{Poller, Source};
use crate::fault::fault_point;
use crate::limits;
use crate::transport::frame::{Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::{
    CAPABILITIES, ConnectionKind, Credentials, HandshakeError, Hello, Role, SUITE_PLAIN, Welcome,
};
use crate::transport::links::tcp::Tcp;
use crate::transport::links::{self, Link};

/// Pause after the first failed attempt to connect. It doubles with each attempt, up to [`MAX_RETRY_PAUSE`].
const RETRY_PAUSE: Duration = Duration::from_millis(5);
/// Longest pause between two attempts to connect.
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Longest wait for an answer to a hello before the attempt to connect is repeated. It is long because the
/// peer answers only while it is in a call itself.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(300);
#[derive(Debug)]
pub(super) struct Connector {
    /// The group whose rank `peer` this connector connects to.
    pub(super) group: u64,
    pub(super) peer: usize,
    pub(super) conn_kind: ConnectionKind,
    pub(super) address: SocketAddr,
    state: State,
    pause: Duration,
    /// The error of the last attempt to connect.
    pub(super) last_error: String,
    /// The time since which the address refuses connections, because no process listens there.
    pub(super) refused_since: Option<Instant>,
    /// This connector only checks whether the peer listens; the peer is the one that connects.
    pub(super) probe_only: bool,
}

#[derive(Debug)]
enum State {
    Pausing { until: Instant },
    Connecting { tcp: Tcp, since: Instant },
    AwaitingWelcome { conn: Conn, hello: Hello, since: Instant },
    Done,
}

impl Connector {
    pub(super) fn new(
        group: u64,
        peer: usize,
        conn_kind: ConnectionKind,
        address: SocketAddr,
        now: Instant,
    ) -> Self {
        let (state, last_error) = (State::Pausing { until: now }, "not tried yet".to_owned());
        Self {
            group,
            peer,
            conn_kind,
            address,
            state,
            pause: RETRY_PAUSE,
            last_error,
            refused_since: None,
            probe_only: false,
        }
    }

    /// Makes a connector that repeatedly checks whether `peer` listens, because `peer` is the rank that must
    /// open the connection of `conn_kind`. The first check comes after a pause.
    pub(super) fn probe(
        group: u64,
        peer: usize,
        conn_kind: ConnectionKind,
        address: SocketAddr,
        now: Instant,
    ) -> Self {
        let state = State::Pausing { until: now + MAX_RETRY_PAUSE };
        let connector = Self::new(group, peer, conn_kind, address, now);
        Self { state, pause: MAX_RETRY_PAUSE, probe_only: true, ..connector }
    }

    /// Returns whether this connector opens, or awaits, this connection.
    pub(super) fn opens(&self, group: u64, peer: usize, conn_kind: ConnectionKind) -> bool {
        (self.group, self.peer, self.conn_kind) == (group, peer, conn_kind)
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Returns when the connector must run even if no data has arrived; `None` if it is done.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match self.state {
            State::Pausing { until } => Some(until),
            State::Connecting { since, .. } => Some(since + CONNECT_TIMEOUT),
            State::AwaitingWelcome { since, .. } => Some(since + WELCOME_TIMEOUT),
            State::Done => None,
        }
    }

    /// Takes one step of the attempt to connect. Returns the event that it caused, if any.
    pub(super) fn progress(
        &mut self,
        me: usize,
        ours: &Credentials,
        poller: &Poller,
        now: Instant,
    ) -> Option<HandshakeEvent> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Pausing { until } if now < until => self.state = State::Pausing { until },
            State::Pausing { .. } => return self.connect(poller, now),
            State::Connecting { tcp, since } => match tcp.is_connected() {
                Ok(true) if self.probe_only => {
                    self.refused_since = None;
                    self.retry("it listens, but has not connected".to_owned(), now);
                }
                Ok(true) => self.send_hello(tcp, me, ours, poller, now),
                Ok(false) if now < since + CONNECT_TIMEOUT => self.state = State::Connecting { tcp, since },
                Ok(false) => self.retry("no answer".to_owned(), now),
                Err(error) => self.failed(&error, now),
            },
            State::AwaitingWelcome { mut conn, hello, since } => {
                if let Err(broken) = conn.fill(HANDSHAKE_BYTES) {
                    self.retry(format!("{broken} before it answered"), now);
                    return None;
                }
                match handshake_frame(&conn) {
                    Ok(None) if now < since + WELCOME_TIMEOUT => {
                        self.state = State::AwaitingWelcome { conn, hello, since };
                    }
                    Ok(None) => self.retry("does not answer".to_owned(), now),
                    Ok(Some((frame, payload))) => {
                        conn.consume(HEADER_BYTES + payload.len());
                        return self.prove(conn, &frame, &payload, &hello, ours, now);
                    }
                    Err(error) => self.retry(error.to_string(), now),
                }
            }
            State::Done => {}
        }
        None
    }

    fn connect(&mut self, poller: &Poller, now: Instant) -> Option<HandshakeEvent> {
        match Tcp::connect(self.address, None) {
            Ok(tcp) => {
                let added = tcp.pollable().map(|fd| poller.add(fd, Source::Handshake, true));
                match added {
                    Some(Ok(())) => self.state = State::Connecting { tcp, since: now },
                    Some(Err(error)) => self.failed(&error, now),
                    None => self.retry("this process has no file descriptor left".to_owned(), now),
                }
            }
            Err(source) => {
                self.failed(&source, now);
                let exhausted = limits::is_out_of_descriptors(&source);
                let group = Some(self.group);
                return exhausted.then_some(HandshakeEvent::Exhausted { group, source });
            }
        }
        None
    }

    fn send_hello(&mut self, tcp: Tcp, me: usize, ours: &Credentials, poller: &Poller, now: Instant) {
        self.refused_since = None;
        let mut conn = links::connection(tcp);
        if let Some(fd) = conn.pollable() {
            let _ = poller.change(fd, Source::Handshake, false);
        }
        let word = |rank: usize| u32::try_from(rank).expect("a group has fewer than 2^32 ranks");
        let sent = nonce().and_then(|nonce| {
            let (source, destination) = (word(me), word(self.peer));
            let conn_kind = self.conn_kind;
            let hello = Hello {
                suite: SUITE_PLAIN,
                conn_kind,
                capabilities: CAPABILITIES,
                source,
                destination,
                nonce,
            };
            send(&mut conn, Kind::Hello, ours.generation, ours.group, &hello.encode())?;
            fault_point("greeted", 0, 0);
            Ok(hello)
        });
        match sent {
            Ok(hello) => self.state = State::AwaitingWelcome { conn, hello, since: now },
            Err(error) => self.failed(&error, now),
        }
    }

    /// Checks the peer's proof that it knows the secret, and sends this rank's proof.
    fn prove(
        &mut self,
        mut conn: Conn,
        frame: &Frame,
        payload: &[u8],
        hello: &Hello,
        ours: &Credentials,
        now: Instant,
    ) -> Option<HandshakeEvent> {
        let unauthorized = |error: HandshakeError| {
            let from = format!("rank {} at {}", self.peer, self.address);
            Some(HandshakeEvent::Unauthorized { group: self.group, from, error })
        };
        let welcome = match frame.kind {
            Kind::Welcome => Welcome::decode(payload),
            Kind::Refuse => {
                let text: String = String::from_utf8_lossy(payload).chars().take(200).collect();
                self.retry(format!("it refused: {text}"), now);
                return None;
            }
            kind => Err(HandshakeError::NoWelcome(kind)),
        };
        let welcome = match welcome {
            Ok(welcome) => welcome,
            Err(error) => return unauthorized(error),
        };
        let (caps, nonce) = (welcome.capabilities, &welcome.nonce);
        if !ours.verify(Role::Acceptor, hello, caps, nonce, &welcome.proof) {
            return unauthorized(HandshakeError::WrongProof);
        }
        fault_point("proving", 0, 0);
        let proof = ours.prove(Role::Connector, hello, caps, nonce);
        if let Err(error) = send(&mut conn, Kind::Proof, ours.generation, ours.group, &proof) {
            self.failed(&error, now);
            return None;
        }
        Some(HandshakeEvent::Opened { group: self.group, peer: self.peer, conn_kind: self.conn_kind, conn })
    }

    fn failed(&mut self, error: &io::Error, now: Instant) {
        if error.kind() == io::ErrorKind::ConnectionRefused {
            self.refused_since.get_or_insert(now);
        }
        self.retry(error.to_string(), now);
    }

    fn retry(&mut self, why: String, now: Instant) {
        self.last_error = why;
        self.state = State::Pausing { until: now + self.pause };
        self.pause = (self.pause * 2).min(MAX_RETRY_PAUSE);
    }
}
