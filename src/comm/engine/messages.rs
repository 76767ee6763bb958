//! Point-to-point messages: matching by (peer, tag) in order, credits, and large messages on demand.
//!
//! Up to [`EAGER_BYTES`] a message is sent at once. If nobody has asked for it yet, the receiver keeps
//! it; the sender knows how much the receiver is willing to keep ([`CREDIT_BYTES`] for each peer) and
//! gets credit back as messages are taken. A message that is larger, or for which no credit is left,
//! only announces itself (Rts), keeps its place in the order, and is sent (Cts, Message) straight into
//! the buffer of the call that asks for it. So what nobody has asked for yet can never block the tag
//! that somebody waits for.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use crate::call::Call;
use crate::engine::buffer::Lent;
use crate::engine::ticket::Ticket;
use crate::frame::{Frame, HEADER_BYTES, Kind};
use crate::links::conn::{Broken, Conn, QUANTUM_BYTES};
use crate::links::hello::Credentials;

/// Largest message that is sent before it is asked for.
pub(crate) const EAGER_BYTES: usize = 64 << 10;
/// What a receiver keeps for each peer until it is asked for, headers included.
pub(crate) const CREDIT_BYTES: usize = 1 << 20;
/// Most announcements of large messages from one peer that wait to be asked for.
const ANNOUNCEMENTS: usize = 1 << 16;

/// A message that this rank sends.
#[derive(Debug)]
pub(crate) struct Sending {
    pub(crate) seq: u64,
    pub(crate) call: Call,
    pub(crate) ticket: Arc<Ticket>,
    lent: Lent,
}

/// A message that this rank waits for.
#[derive(Debug)]
pub(crate) struct Receiving {
    id: u64,
    pub(crate) call: Call,
    pub(crate) ticket: Arc<Ticket>,
    lent: Lent,
    /// What it was matched with; `None` until then.
    matched: Option<Match>,
    /// Bytes that are in the buffer.
    pub(crate) done: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    /// A small message that is being read.
    Eager,
    /// A large one with this number, which was asked for.
    Large(u64),
}

/// A message that came before it was asked for.
#[derive(Debug)]
struct Early {
    seq: u64,
    call: Call,
    /// `None` for the announcement of a large message.
    bytes: Option<Vec<u8>>,
    complete: bool,
    /// The receive that takes it when it is complete.
    claimed: Option<u64>,
}

/// Something on its way out.
#[derive(Debug)]
struct Out {
    header: [u8; HEADER_BYTES],
    /// The message whose elements follow the header.
    body: Option<u64>,
    sent: usize,
}

/// What the next bytes from the peer are.
#[derive(Debug, Clone, Copy)]
enum Reading {
    Header,
    /// The rest of a small message that nobody has asked for: the last of `early`.
    Early {
        total: usize,
        seq: u64,
    },
    /// The rest of a message for the receive `id`.
    Posted {
        id: u64,
        eager: bool,
    },
}

/// What stops the messages with a peer.
#[derive(Debug)]
pub(crate) enum MessageError {
    Broken(Broken),
    Mismatch { theirs: Call, ours: Call, seq: u64 },
    Protocol(String),
}

/// All messages with one peer.
#[derive(Debug)]
pub(crate) struct Mailbox {
    pub(crate) conn: Option<Conn>,
    pub(crate) sends: Vec<Sending>,
    pub(crate) recvs: Vec<Receiving>,
    early: VecDeque<Early>,
    out: VecDeque<Out>,
    reading: Reading,
    /// Bytes that the peer still takes unasked.
    credit: usize,
    /// Bytes that were taken and not yet credited to the peer.
    owed: usize,
    next_seq: u64,
    next_id: u64,
    /// The connection had no room.
    pub(crate) full: bool,
}

impl Mailbox {
    pub(crate) fn new() -> Self {
        Self {
            conn: None,
            sends: Vec::new(),
            recvs: Vec::new(),
            early: VecDeque::new(),
            out: VecDeque::new(),
            reading: Reading::Header,
            credit: CREDIT_BYTES,
            owed: 0,
            next_seq: 0,
            next_id: 0,
            full: false,
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.sends.is_empty() || !self.recvs.is_empty() || !self.out.is_empty()
    }

    /// Forgets everything that is under way, after all calls were taken out.
    pub(crate) fn stop(&mut self) {
        self.conn = None;
        self.early.clear();
        self.out.clear();
        self.full = false;
    }

    pub(crate) fn post_send(&mut self, ours: &Credentials, call: Call, lent: Lent, ticket: Arc<Ticket>) {
        let seq = self.next_seq;
        self.next_seq += 1;
        let cost = lent.len() + HEADER_BYTES;
        let eager = lent.len() <= EAGER_BYTES && cost <= self.credit;
        if eager {
            self.credit -= cost;
        }
        let kind = if eager { Kind::Eager } else { Kind::Rts };
        let len = if eager { lent.len() as u64 } else { 0 };
        self.push(ours, Frame { len, call: call.encode(), ..frame(ours, kind, seq) }, eager.then_some(seq));
        self.sends.push(Sending { seq, call, ticket, lent });
    }

    /// Posts a receive, and gives it what came early.
    pub(crate) fn post_recv(
        &mut self,
        ours: &Credentials,
        call: Call,
        lent: Lent,
        ticket: Arc<Ticket>,
    ) -> Result<(), MessageError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut recv = Receiving { id, call, ticket, lent, matched: None, done: 0 };
        let waiting = |early: &Early| early.call.root == call.root && early.claimed.is_none();
        if let Some(index) = self.early.iter().position(waiting) {
            let early = &mut self.early[index];
            if let Err(error) = check(early.call, call, early.seq) {
                self.recvs.push(recv);
                return Err(error);
            }
            if early.bytes.is_none() {
                recv.matched = Some(Match::Large(early.seq));
                let seq = early.seq;
                self.early.remove(index);
                self.push(ours, frame(ours, Kind::Cts, seq), None);
            } else if early.complete {
                let bytes = self.early.remove(index).and_then(|early| early.bytes).unwrap_or_default();
                recv.lent.bytes_mut(0..bytes.len()).copy_from_slice(&bytes);
                self.owe(ours, bytes.len());
                recv.ticket.complete(Ok(()));
                return Ok(());
            } else {
                early.claimed = Some(id);
                recv.matched = Some(Match::Eager);
            }
        }
        self.recvs.push(recv);
        Ok(())
    }

    /// Moves what can be moved now; whether that was anything.
    pub(crate) fn turn(&mut self, ours: &Credentials) -> Result<bool, MessageError> {
        let Some(mut conn) = self.conn.take() else { return Ok(false) };
        let result = self.write(&mut conn).and_then(|wrote| Ok(self.read(ours, &mut conn)? | wrote));
        // What was read may have to be answered.
        let result = result.and_then(|moved| Ok(self.write(&mut conn)? | moved));
        self.conn = Some(conn);
        result
    }

    fn write(&mut self, conn: &mut Conn) -> Result<bool, MessageError> {
        let mut any = false;
        self.full = false;
        while let Some(out) = self.out.front_mut() {
            let body = out.body.and_then(|seq| self.sends.iter().position(|send| send.seq == seq));
            let lent = body.map(|index| &self.sends[index].lent);
            let total = HEADER_BYTES + lent.map_or(0, Lent::len);
            let from = out.sent.saturating_sub(HEADER_BYTES);
            let bytes = lent.map_or(&[][..], |lent| lent.bytes(from..from + QUANTUM_BYTES));
            let parts = [IoSlice::new(&out.header[out.sent.min(HEADER_BYTES)..]), IoSlice::new(bytes)];
            let sent = conn.send(&parts).map_err(MessageError::Broken)?;
            out.sent += sent;
            any |= sent > 0;
            if out.sent < total {
                self.full = sent == 0;
                return Ok(any);
            }
            self.out.pop_front();
            if let Some(index) = body {
                self.sends.remove(index).ticket.complete(Ok(()));
            }
        }
        Ok(any)
    }

    fn read(&mut self, ours: &Credentials, conn: &mut Conn) -> Result<bool, MessageError> {
        let mut any = false;
        let mut asked = false;
        loop {
            let stepped = self.read_step(ours, conn)?;
            any |= stepped;
            if stepped {
                continue;
            }
            if asked {
                return Ok(any);
            }
            asked = true;
            let got = match self.direct_target(conn) {
                Some(target) => {
                    let index = target.0;
                    let recv = &mut self.recvs[index];
                    let range = recv.done..recv.done + target.1;
                    let got = conn.recv(recv.lent.bytes_mut(range)).map_err(MessageError::Broken)?;
                    recv.done += got;
                    got
                }
                None => conn.fill(EAGER_BYTES).map_err(MessageError::Broken)?,
            };
            any |= got > 0;
        }
    }

    /// Where a large piece can be received without reading ahead: index of the receive, bytes.
    fn direct_target(&self, conn: &Conn) -> Option<(usize, usize)> {
        let Reading::Posted { id, .. } = self.reading else { return None };
        let index = self.recvs.iter().position(|recv| recv.id == id)?;
        let left = self.recvs[index].lent.len() - self.recvs[index].done;
        (left >= 4096 && conn.unread().is_empty()).then_some((index, left.min(QUANTUM_BYTES)))
    }

    /// Uses what was read ahead; whether anything could be done.
    fn read_step(&mut self, ours: &Credentials, conn: &mut Conn) -> Result<bool, MessageError> {
        match self.reading {
            Reading::Header => {
                let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else { return Ok(false) };
                let frame =
                    Frame::decode(bytes).map_err(|error| MessageError::Protocol(error.to_string()))?;
                conn.consume(HEADER_BYTES);
                self.header(ours, &frame)?;
                Ok(true)
            }
            Reading::Early { total, seq } => {
                let Some(early) =
                    self.early.iter_mut().find(|early| early.seq == seq && early.bytes.is_some())
                else {
                    return Err(MessageError::Protocol("a message without a place".to_owned()));
                };
                let bytes = early.bytes.get_or_insert_default();
                let take = conn.unread().len().min(total - bytes.len());
                bytes.extend_from_slice(&conn.unread()[..take]);
                conn.consume(take);
                if bytes.len() < total {
                    return Ok(take > 0);
                }
                early.complete = true;
                self.reading = Reading::Header;
                if let Some(id) = early.claimed {
                    self.hand_over(ours, seq, id);
                }
                Ok(true)
            }
            Reading::Posted { id, eager } => {
                let Some(index) = self.recvs.iter().position(|recv| recv.id == id) else {
                    return Err(MessageError::Protocol("a message without a receiver".to_owned()));
                };
                let recv = &mut self.recvs[index];
                let take = conn.unread().len().min(recv.lent.len() - recv.done);
                let range = recv.done..recv.done + take;
                recv.lent.bytes_mut(range).copy_from_slice(&conn.unread()[..take]);
                conn.consume(take);
                recv.done += take;
                if recv.done < recv.lent.len() {
                    return Ok(take > 0);
                }
                let recv = self.recvs.remove(index);
                self.reading = Reading::Header;
                if eager {
                    self.owe(ours, recv.lent.len());
                }
                recv.ticket.complete(Ok(()));
                Ok(true)
            }
        }
    }

    /// Gives a message that was read early to the receive that claimed it meanwhile.
    fn hand_over(&mut self, ours: &Credentials, seq: u64, id: u64) {
        let early = self.early.iter().position(|early| early.seq == seq && early.bytes.is_some());
        let bytes = early.and_then(|index| self.early.remove(index)).and_then(|early| early.bytes);
        let recv = self.recvs.iter().position(|recv| recv.id == id);
        if let (Some(bytes), Some(index)) = (bytes, recv) {
            let mut recv = self.recvs.remove(index);
            recv.lent.bytes_mut(0..bytes.len()).copy_from_slice(&bytes);
            self.owe(ours, bytes.len());
            recv.ticket.complete(Ok(()));
        }
    }

    fn header(&mut self, ours: &Credentials, frame: &Frame) -> Result<(), MessageError> {
        let protocol = |what: String| Err(MessageError::Protocol(what));
        if (frame.generation, frame.group) != (ours.generation, ours.group) {
            return protocol(format!("a message of generation {}, group {}", frame.generation, frame.group));
        }
        match frame.kind {
            Kind::Eager | Kind::Rts => self.arrival(ours, frame),
            Kind::Cts => {
                let Some(send) = self.sends.iter().find(|send| send.seq == frame.seq) else {
                    return protocol(format!("it asks for message {}, which does not wait", frame.seq));
                };
                let (len, call) = (send.lent.len() as u64, send.call.encode());
                let queued = self.out.iter().any(|out| out.body == Some(frame.seq));
                if queued {
                    return protocol(format!("it asks twice for message {}", frame.seq));
                }
                let header = Frame { len, call, ..self::frame(ours, Kind::Message, frame.seq) };
                self.push(ours, header, Some(frame.seq));
                Ok(())
            }
            Kind::Message => {
                let asked = |recv: &&Receiving| recv.matched == Some(Match::Large(frame.seq));
                let Some(recv) = self.recvs.iter().find(asked) else {
                    return protocol(format!("message {} was not asked for", frame.seq));
                };
                if frame.len != recv.lent.len() as u64 {
                    return protocol(format!("message {} has {} bytes", frame.seq, frame.len));
                }
                self.reading = Reading::Posted { id: recv.id, eager: false };
                Ok(())
            }
            Kind::Credit => {
                let credit = usize::try_from(frame.seq).unwrap_or(usize::MAX).saturating_add(self.credit);
                if credit > CREDIT_BYTES {
                    return protocol(format!("it credits {} bytes that it never got", frame.seq));
                }
                self.credit = credit;
                Ok(())
            }
            kind @ (Kind::Hello | Kind::Welcome | Kind::Proof | Kind::Refuse | Kind::Data | Kind::Open)
            | kind @ (Kind::State | Kind::Abort | Kind::Goodbye) => {
                protocol(format!("a {kind:?} frame among messages"))
            }
        }
    }

    /// A message or its announcement.
    fn arrival(&mut self, ours: &Credentials, frame: &Frame) -> Result<(), MessageError> {
        let call = Call::decode(frame.call).map_err(MessageError::Protocol)?;
        let (seq, eager) = (frame.seq, frame.kind == Kind::Eager);
        let expected = if eager { call.bytes() } else { 0 };
        if frame.len != expected || eager && call.bytes() > EAGER_BYTES as u64 {
            return Err(MessageError::Protocol(format!("{} bytes for {call}", frame.len)));
        }
        let wanted = |recv: &&mut Receiving| recv.matched.is_none() && recv.call.root == call.root;
        if let Some(recv) = self.recvs.iter_mut().find(wanted) {
            check(call, recv.call, seq)?;
            recv.matched = Some(if eager { Match::Eager } else { Match::Large(seq) });
            if eager {
                self.reading = Reading::Posted { id: recv.id, eager: true };
            } else {
                self.push(ours, self::frame(ours, Kind::Cts, seq), None);
            }
            return Ok(());
        }
        let kept =
            |early: &Early| early.bytes.is_some().then_some(early.call.bytes() as usize + HEADER_BYTES);
        let kept: usize = self.early.iter().filter_map(kept).sum();
        let total = frame.len as usize;
        if eager && kept + total + HEADER_BYTES > CREDIT_BYTES || self.early.len() >= ANNOUNCEMENTS {
            return Err(MessageError::Protocol("it sends more than it has credit for".to_owned()));
        }
        let bytes = eager.then(|| Vec::with_capacity(total));
        self.early.push_back(Early { seq, call, bytes, complete: !eager || total == 0, claimed: None });
        if eager && total > 0 {
            self.reading = Reading::Early { total, seq };
        }
        Ok(())
    }

    fn owe(&mut self, ours: &Credentials, bytes: usize) {
        self.owed += bytes + HEADER_BYTES;
        if self.owed >= CREDIT_BYTES / 2 {
            self.push(ours, frame(ours, Kind::Credit, self.owed as u64), None);
            self.owed = 0;
        }
    }

    fn push(&mut self, _: &Credentials, frame: Frame, body: Option<u64>) {
        self.out.push_back(Out { header: frame.encode(), body, sent: 0 });
    }
}

fn frame(ours: &Credentials, kind: Kind, seq: u64) -> Frame {
    Frame { kind, generation: ours.generation, group: ours.group, seq, call: [0; 16], len: 0 }
}

fn check(theirs: Call, ours: Call, seq: u64) -> Result<(), MessageError> {
    if theirs == ours { Ok(()) } else { Err(MessageError::Mismatch { theirs, ours, seq }) }
}
