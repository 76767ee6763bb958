//! One outgoing connection.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{DoorEvent, HANDSHAKE_BYTES, STRANGER_TIME, handshake_frame, nonce, send};
use crate::engine::poller::{Poller, Source};
use crate::fault::moment;
use crate::frame::{Frame, HEADER_BYTES, Kind};
use crate::links::Link;
use crate::links::conn::Conn;
use crate::links::hello::{CAPABILITIES, Credentials, Hello, Lane, Role, SUITE_PLAIN, Welcome};
use crate::links::tcp::Tcp;
use crate::room;

/// First and longest pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// Longest wait for an answer to a hello before the dial is repeated. It is long because the peer answers
/// only while it is in a call itself.
const ANSWER_TIME: Duration = Duration::from_secs(300);
#[derive(Debug)]
pub(super) struct Dial {
    pub(super) peer: usize,
    pub(super) lane: Lane,
    pub(super) address: SocketAddr,
    step: Step,
    pause: Duration,
    /// The error of the last attempt.
    pub(super) last: String,
    /// The time since which nobody listens at the address.
    pub(super) refused_since: Option<Instant>,
    /// This dial only checks whether the peer listens; the peer is the one that connects.
    pub(super) probes: bool,
}

#[derive(Debug)]
enum Step {
    Pausing { until: Instant },
    Connecting { tcp: Tcp, since: Instant },
    Greeting { conn: Conn, hello: Hello, since: Instant },
    Done,
}

impl Dial {
    pub(super) fn new(peer: usize, lane: Lane, address: SocketAddr, now: Instant) -> Self {
        let (step, last) = (Step::Pausing { until: now }, "not tried yet".to_owned());
        Self { peer, lane, address, step, pause: PAUSE, last, refused_since: None, probes: false }
    }

    /// Repeatedly checks whether `peer` listens, which is to connect with `lane`. The first check comes after
    /// a pause.
    pub(super) fn probe(peer: usize, lane: Lane, address: SocketAddr, now: Instant) -> Self {
        let step = Step::Pausing { until: now + LONGEST_PAUSE };
        Self { step, pause: LONGEST_PAUSE, probes: true, ..Self::new(peer, lane, address, now) }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.step, Step::Done)
    }

    /// Returns when the dial wants a turn though no data has come.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match self.step {
            Step::Pausing { until } => Some(until),
            Step::Connecting { since, .. } => Some(since + STRANGER_TIME),
            Step::Greeting { since, .. } => Some(since + ANSWER_TIME),
            Step::Done => None,
        }
    }

    /// Takes one step and returns its result.
    pub(super) fn turn(
        &mut self,
        me: usize,
        ours: &Credentials,
        poller: &Poller,
        now: Instant,
    ) -> Option<DoorEvent> {
        match std::mem::replace(&mut self.step, Step::Done) {
            Step::Pausing { until } if now < until => self.step = Step::Pausing { until },
            Step::Pausing { .. } => return self.connect(poller, now),
            Step::Connecting { tcp, since } => match tcp.connected() {
                Ok(true) if self.probes => {
                    self.refused_since = None;
                    self.again("it listens, but has not connected".to_owned(), now);
                }
                Ok(true) => self.greet(tcp, me, ours, poller, now),
                Ok(false) if now < since + STRANGER_TIME => self.step = Step::Connecting { tcp, since },
                Ok(false) => self.again("no answer".to_owned(), now),
                Err(error) => self.failed(&error, now),
            },
            Step::Greeting { mut conn, hello, since } => {
                if let Err(broken) = conn.fill(HANDSHAKE_BYTES) {
                    self.again(format!("{broken} before it answered"), now);
                    return None;
                }
                match handshake_frame(&conn) {
                    Ok(None) if now < since + ANSWER_TIME => {
                        self.step = Step::Greeting { conn, hello, since };
                    }
                    Ok(None) => self.again("does not answer".to_owned(), now),
                    Ok(Some((frame, payload))) => {
                        conn.consume(HEADER_BYTES + payload.len());
                        return self.prove(conn, &frame, &payload, &hello, ours, now);
                    }
                    Err(error) => self.again(error.to_string(), now),
                }
            }
            Step::Done => {}
        }
        None
    }

    fn connect(&mut self, poller: &Poller, now: Instant) -> Option<DoorEvent> {
        match Tcp::connect(self.address, None) {
            Ok(tcp) => {
                let added = tcp.pollable().map(|fd| poller.add(fd, Source::Door, true));
                match added {
                    Some(Ok(())) => self.step = Step::Connecting { tcp, since: now },
                    Some(Err(error)) => self.failed(&error, now),
                    None => self.again("no descriptor".to_owned(), now),
                }
            }
            Err(source) => {
                self.failed(&source, now);
                let exhausted = room::is_without_descriptors(&source);
                return exhausted.then_some(DoorEvent::Exhausted { dials: true, source });
            }
        }
        None
    }

    fn greet(&mut self, tcp: Tcp, me: usize, ours: &Credentials, poller: &Poller, now: Instant) {
        self.refused_since = None;
        let mut conn = Conn::new(Box::new(tcp));
        if let Some(fd) = conn.pollable() {
            let _ = poller.change(fd, Source::Door, false);
        }
        let word = |rank: usize| u32::try_from(rank).unwrap_or(u32::MAX);
        let sent = nonce().and_then(|nonce| {
            let (source, destination) = (word(me), word(self.peer));
            let lane = self.lane;
            let hello =
                Hello { suite: SUITE_PLAIN, lane, capabilities: CAPABILITIES, source, destination, nonce };
            send(&mut conn, Kind::Hello, ours.generation, ours.group, &hello.encode())?;
            moment("greeted", 0, 0);
            Ok(hello)
        });
        match sent {
            Ok(hello) => self.step = Step::Greeting { conn, hello, since: now },
            Err(error) => self.failed(&error, now),
        }
    }

    /// Checks the peer's proof and sends ours.
    fn prove(
        &mut self,
        mut conn: Conn,
        frame: &Frame,
        payload: &[u8],
        hello: &Hello,
        ours: &Credentials,
        now: Instant,
    ) -> Option<DoorEvent> {
        let unauthorized = |what: String| {
            let from = format!("rank {} at {}", self.peer, self.address);
            Some(DoorEvent::Unauthorized { from, what })
        };
        let welcome = match frame.kind {
            Kind::Welcome => Welcome::decode(payload),
            Kind::Refuse => {
                let text: String = String::from_utf8_lossy(payload).chars().take(200).collect();
                self.again(format!("it refused: {text}"), now);
                return None;
            }
            kind => Err(format!("a {kind:?} frame in answer to a hello")),
        };
        let welcome = match welcome {
            Ok(welcome) => welcome,
            Err(what) => return unauthorized(what),
        };
        let (caps, nonce) = (welcome.capabilities, &welcome.nonce);
        if !ours.verify(Role::Acceptor, hello, caps, nonce, &welcome.proof) {
            return unauthorized("its proof is wrong: has it another token?".to_owned());
        }
        moment("proving", 0, 0);
        let proof = ours.prove(Role::Connector, hello, caps, nonce);
        if let Err(error) = send(&mut conn, Kind::Proof, ours.generation, ours.group, &proof) {
            self.failed(&error, now);
            return None;
        }
        Some(DoorEvent::Opened { peer: self.peer, lane: self.lane, conn })
    }

    fn failed(&mut self, error: &io::Error, now: Instant) {
        if error.kind() == io::ErrorKind::ConnectionRefused {
            self.refused_since.get_or_insert(now);
        }
        self.again(error.to_string(), now);
    }

    fn again(&mut self, why: String, now: Instant) {
        self.last = why;
        self.step = Step::Pausing { until: now + self.pause };
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}
