//! Opens one outgoing connection: connects to a rank, repeatedly if needed, and authenticates.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::exchange::{
    CONNECT_TIMEOUT, ConnectionId, HANDSHAKE_BYTES, HandshakeEvent, handshake_frame, nonce, send,
};
use crate::engine::poller::{Poller, Source};
use crate::fault::fault_point;
use crate::limits;
use crate::transport::frame::{Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::{
    CAPABILITIES, Credentials, HandshakeError, Hello, Role, SUITE_PLAIN, Welcome,
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
    pub(super) id: ConnectionId,
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
    /// Makes a connector for the connection `id`. With `probe_only` it repeatedly checks whether the peer
    /// listens, because the peer is the rank that must open the connection; the first check comes after a
    /// pause.
    pub(super) fn new(id: ConnectionId, address: SocketAddr, probe_only: bool, now: Instant) -> Self {
        let (until, pause) =
            if probe_only { (now + MAX_RETRY_PAUSE, MAX_RETRY_PAUSE) } else { (now, RETRY_PAUSE) };
        let (state, last_error) = (State::Pausing { until }, "not tried yet".to_owned());
        Self { id, address, state, pause, last_error, refused_since: None, probe_only }
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

    /// Repeats the attempt after a pause, because of `error`. Returns the event that it caused, if any.
    pub(super) fn retry(&mut self, error: io::Error, now: Instant) -> Option<HandshakeEvent> {
        if error.kind() == io::ErrorKind::ConnectionRefused {
            self.refused_since.get_or_insert(now);
        }
        self.last_error = error.to_string();
        self.state = State::Pausing { until: now + self.pause };
        self.pause = (self.pause * 2).min(MAX_RETRY_PAUSE);
        let exhausted = limits::is_out_of_descriptors(&error);
        exhausted.then(|| HandshakeEvent::Exhausted { outgoing: true, source: Arc::new(error) })
    }

    /// Takes one step of the attempt to connect. Returns its event, if any. Errors go to [`Self::retry`].
    pub(super) fn progress(
        &mut self,
        me: usize,
        ours: &Credentials,
        poller: &Poller,
        now: Instant,
    ) -> io::Result<Option<HandshakeEvent>> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Pausing { until } if now < until => self.state = State::Pausing { until },
            State::Pausing { .. } => {
                let tcp = Tcp::connect(self.address, None)?;
                let fd = tcp.pollable().expect("a socket has a descriptor");
                poller.add(fd, Source::Handshake, true)?;
                self.state = State::Connecting { tcp, since: now };
            }
            State::Connecting { tcp, since } => match tcp.is_connected()? {
                true if self.probe_only => {
                    self.refused_since = None;
                    return Err(io::Error::other("it listens, but has not connected"));
                }
                true => self.state = self.send_hello(tcp, me, ours, poller, now)?,
                false if now < since + CONNECT_TIMEOUT => self.state = State::Connecting { tcp, since },
                false => return Err(io::Error::other("no answer")),
            },
            State::AwaitingWelcome { mut conn, hello, since } => {
                let ended = |broken| io::Error::other(format!("{broken} before it answered"));
                conn.fill(HANDSHAKE_BYTES).map_err(ended)?;
                match handshake_frame(&conn).map_err(io::Error::other)? {
                    None if now < since + WELCOME_TIMEOUT => {
                        self.state = State::AwaitingWelcome { conn, hello, since };
                    }
                    None => return Err(io::Error::other("does not answer")),
                    Some((frame, payload)) => {
                        conn.consume(HEADER_BYTES + payload.len());
                        return self.prove(conn, &frame, &payload, &hello, ours).map(Some);
                    }
                }
            }
            State::Done => {}
        }
        Ok(None)
    }

    fn send_hello(
        &mut self,
        tcp: Tcp,
        me: usize,
        ours: &Credentials,
        poller: &Poller,
        now: Instant,
    ) -> io::Result<State> {
        self.refused_since = None;
        let mut conn = links::connection(tcp);
        if let Some(fd) = conn.pollable() {
            let _ = poller.change(fd, Source::Handshake, false);
        }
        let word = |rank: usize| u32::try_from(rank).expect("a group has fewer than 2^32 ranks");
        let (suite, capabilities, conn_kind) = (SUITE_PLAIN, CAPABILITIES, self.id.conn_kind);
        let (source, destination, nonce) = (word(me), word(self.id.peer), nonce()?);
        let hello = Hello { suite, conn_kind, capabilities, source, destination, nonce };
        send(&mut conn, Kind::Hello, ours, &hello.encode())?;
        fault_point("greeted", 0, 0);
        Ok(State::AwaitingWelcome { conn, hello, since: now })
    }

    /// Checks the peer's proof that it knows the secret, and sends this rank's proof.
    fn prove(
        &self,
        mut conn: Conn,
        frame: &Frame,
        payload: &[u8],
        hello: &Hello,
        ours: &Credentials,
    ) -> io::Result<HandshakeEvent> {
        let welcome = match frame.kind {
            Kind::Welcome => Welcome::decode(payload),
            Kind::Refuse => {
                let text: String = String::from_utf8_lossy(payload).chars().take(200).collect();
                return Err(io::Error::other(format!("it refused: {text}")));
            }
            kind => Err(HandshakeError::NoWelcome(kind)),
        };
        let verified = welcome.and_then(|Welcome { capabilities, nonce, proof, .. }| {
            if !ours.verify(Role::Acceptor, hello, capabilities, &nonce, &proof) {
                return Err(HandshakeError::WrongProof);
            }
            Ok(ours.prove(Role::Connector, hello, capabilities, &nonce))
        });
        let ConnectionId { peer, conn_kind, .. } = self.id;
        match verified {
            Ok(proof) => {
                fault_point("proving", 0, 0);
                send(&mut conn, Kind::Proof, ours, &proof)?;
                Ok(HandshakeEvent::Opened { peer, conn_kind, conn })
            }
            Err(error) => {
                let from = format!("rank {peer} at {}", self.address);
                Ok(HandshakeEvent::Unauthorized { from, error })
            }
        }
    }
}
