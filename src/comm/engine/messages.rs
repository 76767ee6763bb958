//! Point-to-point messages: matching by (peer, tag) in order, credits, and a rendezvous protocol for large
//! messages.
//!
//! A message of up to [`EAGER_BYTES`] is sent at once. If no receive matches it yet, the receiver keeps it.
//! The sender knows how much the receiver keeps ([`CREDIT_BYTES`] for each peer) and gets credit back as
//! messages are taken. A message that is larger, or for which no credit is left, only announces itself (Rts)
//! and keeps its place in the order. When a receive matches it (Cts), it is sent (Message) straight into the
//! buffer of that receive. So unexpected messages can never block the tag that a receive waits for.
//!
//! A message of a rank to itself needs no connection (`own`).

pub(crate) mod direct;
mod own;
mod read;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::call::{Call, Envelope};
use crate::engine::buffer::Lent;
use crate::engine::control::ask_at;
use crate::engine::ticket::Ticket;
use crate::fault::moment;
use crate::frame::{Frame, HEADER_BYTES, Kind};
use crate::kernels::Source;
use crate::links::conn::{Broken, Conn, QUANTUM_BYTES};
use crate::links::hello::Credentials;

/// Largest message that is sent eagerly, before a receive matches it.
pub(crate) const EAGER_BYTES: usize = 64 << 10;
/// Bytes of unexpected messages that a receiver keeps for each peer, headers included.
pub(crate) const CREDIT_BYTES: usize = 1 << 20;
/// Most announcements from one peer that no receive has matched. The sender holds further messages back, in
/// order, until one is matched. The limit is low in tests of this module.
pub(crate) const ANNOUNCEMENTS: usize = if cfg!(test) { 50 } else { 1 << 20 };

/// A message that this rank sends.
#[derive(Debug)]
pub(crate) struct Sending {
    pub(crate) seq: u64,
    pub(crate) call: Call,
    pub(crate) ticket: Arc<Ticket>,
    lent: Lent<'static>,
    stage: Stage,
}

/// The part of a message that the receiver knows of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The receiver knows nothing: there are too many announcements.
    Held,
    Announced,
    /// Its elements are on their way.
    Sent,
}

/// A receive that waits for its message.
#[derive(Debug)]
pub(crate) struct Receiving {
    id: u64,
    /// Its index among all receives of the group.
    order: u64,
    pub(crate) call: Call,
    pub(crate) ticket: Arc<Ticket>,
    lent: Lent<'static>,
    /// The message that it was matched with; `None` until then.
    matched: Option<Match>,
    /// Bytes that are in the buffer already.
    pub(crate) done: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    /// A small message that is being read.
    Eager,
    /// A large one with this number, which the receiver has requested.
    Large(u64),
}

/// An unexpected message: it came before a receive matched it.
#[derive(Debug)]
struct Early {
    /// A local number, because a peer may choose any `seq`.
    id: u64,
    seq: u64,
    /// Its index among all unexpected messages of the group.
    came: u64,
    call: Call,
    /// `None` for the announcement of a large message.
    bytes: Option<Vec<u8>>,
    complete: bool,
    /// The receive that takes the message when it is complete.
    claimed: Option<u64>,
}

/// A frame that is being sent.
#[derive(Debug)]
struct Out {
    header: [u8; HEADER_BYTES],
    /// The message whose elements follow the header.
    body: Option<u64>,
    sent: usize,
}

/// The meaning of the next bytes from the peer.
#[derive(Debug, Clone, Copy)]
enum Reading {
    Header,
    /// The rest of a small unexpected message: the last of `early`.
    Early {
        total: usize,
        id: u64,
    },
    /// The rest of a message for the receive `id`.
    Posted {
        id: u64,
        eager: bool,
    },
}

/// The reasons why the messages with a peer stop.
#[derive(Debug)]
pub(crate) enum MessageError {
    Broken(Broken),
    Mismatch { theirs: Call, ours: Call, seq: u64 },
    Protocol(String),
}

/// State that the mailboxes of all peers share: receives from any source, and the counters that order them.
#[derive(Debug, Default)]
pub(crate) struct Open {
    pub(crate) recvs: VecDeque<Anybody>,
    /// Number of receives so far.
    posted: u64,
    /// Number of unexpected messages so far.
    came: u64,
}

/// A receive from any source.
#[derive(Debug)]
pub(crate) struct Anybody {
    order: u64,
    pub(crate) call: Call,
    pub(crate) ticket: Arc<Ticket>,
    lent: Lent<'static>,
}

impl Open {
    /// Returns the number of the next receive.
    pub(crate) fn order(&mut self) -> u64 {
        self.posted += 1;
        self.posted
    }

    pub(crate) fn post(&mut self, call: Call, lent: Lent<'static>, ticket: Arc<Ticket>) {
        let order = self.order();
        self.recvs.push_back(Anybody { order, call, ticket, lent });
    }
}

/// Bounds over all sends and receives since there were last none: the shortest timeout, and the earliest time
/// to ask the others. With these bounds a check of the clock costs little even with many messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Haste {
    pub(crate) shortest: Duration,
    pub(crate) ask_at: Instant,
}

/// All messages with one peer.
#[derive(Debug)]
pub(crate) struct Mailbox {
    peer: usize,
    pub(crate) conn: Option<Conn>,
    /// The sends in the order of their numbers; the last `held` are not announced.
    pub(crate) sends: VecDeque<Sending>,
    held: usize,
    /// Number of messages that are announced and not requested.
    announced: usize,
    pub(crate) recvs: VecDeque<Receiving>,
    haste: Option<Haste>,
    early: VecDeque<Early>,
    /// Totals of `early`: bytes kept, headers included, and announcements.
    kept: usize,
    offers: usize,
    out: VecDeque<Out>,
    reading: Reading,
    /// Bytes that the peer still accepts eagerly.
    credit: usize,
    /// Bytes that were taken and not yet credited to the peer.
    owed: usize,
    next_seq: u64,
    next_id: u64,
    /// The connection had no room.
    pub(crate) full: bool,
}

/// Returns the index of a message among those that are sent.
fn place(sends: &VecDeque<Sending>, seq: u64) -> Option<usize> {
    sends.binary_search_by_key(&seq, |send| send.seq).ok()
}

impl Mailbox {
    pub(crate) fn new(peer: usize) -> Self {
        Self {
            peer,
            conn: None,
            sends: VecDeque::new(),
            held: 0,
            announced: 0,
            recvs: VecDeque::new(),
            haste: None,
            early: VecDeque::new(),
            kept: 0,
            offers: 0,
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

    fn hurry(&mut self, ticket: &Ticket) {
        let (shortest, ask_at) = (ticket.timeout, ask_at(ticket));
        let before = self.haste.filter(|_| !self.sends.is_empty() || !self.recvs.is_empty());
        self.haste = Some(before.map_or(Haste { shortest, ask_at }, |before| Haste {
            shortest: before.shortest.min(shortest),
            ask_at: before.ask_at.min(ask_at),
        }));
    }

    /// Returns the bounds of all messages; `None` if nothing is sent or received.
    pub(crate) fn haste(&self) -> Option<Haste> {
        self.haste.filter(|_| !self.sends.is_empty() || !self.recvs.is_empty())
    }

    /// Drops all state in progress, after all calls were taken out.
    pub(crate) fn stop(&mut self) {
        self.conn = None;
        self.early.clear();
        self.out.clear();
        (self.held, self.announced, self.kept, self.offers) = (0, 0, 0, 0);
        self.full = false;
    }

    pub(crate) fn post_send(
        &mut self,
        ours: &Credentials,
        call: Call,
        lent: Lent<'static>,
        ticket: Arc<Ticket>,
    ) {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.hurry(&ticket);
        self.sends.push_back(Sending { seq, call, ticket, lent, stage: Stage::Held });
        self.held += 1;
        self.send_held(ours);
    }

    /// Sends or announces held messages, in order, as far as credit and limits allow.
    fn send_held(&mut self, ours: &Credentials) {
        while self.held > 0 {
            let index = self.sends.len() - self.held;
            let Sending { seq, call, ref lent, .. } = self.sends[index];
            let (bytes, cost) = (lent.len(), lent.len() + HEADER_BYTES);
            let eager = bytes <= EAGER_BYTES && cost <= self.credit;
            let (kind, len) = if eager { (Kind::Eager, bytes as u64) } else { (Kind::Rts, 0) };
            if eager {
                self.credit -= cost;
                self.sends[index].stage = Stage::Sent;
            } else if self.announced < ANNOUNCEMENTS {
                self.announced += 1;
                self.sends[index].stage = Stage::Announced;
            } else {
                return;
            }
            self.held -= 1;
            self.push(
                ours,
                Frame { len, call: call.encode(), ..bare(ours, kind, seq) },
                eager.then_some(seq),
            );
        }
    }

    /// Returns the first unexpected message with this tag that no receive has claimed: its index among all
    /// unexpected messages of the group, and its envelope.
    pub(crate) fn early(&self, tag: u32) -> Option<(u64, Envelope)> {
        let early = &self.early[self.early_index(tag)?];
        Some((early.came, Envelope { from: self.peer, call: early.call }))
    }

    fn early_index(&self, tag: u32) -> Option<usize> {
        self.early.iter().position(|early| early.call.root == tag && early.claimed.is_none())
    }

    /// Posts a receive with the index `order`, and gives it a message that came early.
    pub(crate) fn post_recv(
        &mut self,
        ours: &Credentials,
        order: u64,
        call: Call,
        lent: Lent<'static>,
        ticket: Arc<Ticket>,
    ) -> Result<(), MessageError> {
        let mut recv = self.receiving(order, call, lent, ticket);
        let id = recv.id;
        if let Some(index) = self.early_index(call.root) {
            let early = &mut self.early[index];
            if let Err(error) = check(early.call, call, early.seq) {
                self.recvs.push_back(recv);
                return Err(error);
            }
            if early.bytes.is_none() {
                recv.matched = Some(Match::Large(early.seq));
                let seq = early.seq;
                self.early.remove(index);
                self.offers -= 1;
                self.push(ours, bare(ours, Kind::Cts, seq), None);
            } else if early.complete {
                let bytes = self.early.remove(index).and_then(|early| early.bytes).unwrap_or_default();
                self.kept -= bytes.len() + HEADER_BYTES;
                Source::from(&*bytes).copy_to(&mut recv.lent.bytes_mut(0..bytes.len()));
                // This rank owes no credit to itself, nor to a peer that is gone.
                if self.conn.is_some() {
                    self.owe(ours, bytes.len());
                }
                recv.ticket.complete(Ok(Some(self.envelope_of(call))));
                return Ok(());
            } else {
                early.claimed = Some(id);
                recv.matched = Some(Match::Eager);
            }
        }
        self.recvs.push_back(recv);
        Ok(())
    }

    fn receiving(&mut self, order: u64, call: Call, lent: Lent<'static>, ticket: Arc<Ticket>) -> Receiving {
        let id = self.next_id;
        self.next_id += 1;
        self.hurry(&ticket);
        Receiving { id, order, call, ticket, lent, matched: None, done: 0 }
    }

    /// Removes and returns receives that no message has matched.
    pub(crate) fn give_up_receives(&mut self) -> Vec<Arc<Ticket>> {
        let (matched, others): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.recvs).into_iter().partition(|recv| recv.matched.is_some());
        self.recvs = matched;
        others.into_iter().map(|recv| recv.ticket).collect()
    }

    /// Returns whether some bytes that were sent to the peer may not have arrived: they are not written, or
    /// not acknowledged.
    pub(crate) fn has_bytes_on_the_way(&self) -> bool {
        !self.out.is_empty() || self.conn.as_ref().is_some_and(|conn| !conn.is_flushed())
    }

    /// Returns whether the peer, which says that it waits in `call`, waits for a message that is queued or on
    /// its way.
    pub(crate) fn is_owed(&self, call: &Call) -> bool {
        let receives = call.of_sender() != *call;
        let comes = |send: &Sending| send.stage == Stage::Sent || receives && send.call.root == call.root;
        self.sends.iter().any(comes)
    }

    fn envelope_of(&self, call: Call) -> Envelope {
        Envelope { from: self.peer, call }
    }

    /// Moves pending data. Returns whether anything moved.
    pub(crate) fn turn(&mut self, ours: &Credentials, open: &mut Open) -> Result<bool, MessageError> {
        let Some(mut conn) = self.conn.take() else { return Ok(false) };
        let result = self.write(&mut conn).and_then(|wrote| Ok(self.read(ours, open, &mut conn)? | wrote));
        // Data that was read may need an answer.
        let result = result.and_then(|moved| Ok(self.write(&mut conn)? | moved));
        self.conn = Some(conn);
        result
    }

    fn write(&mut self, conn: &mut Conn) -> Result<bool, MessageError> {
        let mut any = false;
        self.full = false;
        while let Some(out) = self.out.front_mut() {
            let body = out.body.and_then(|seq| place(&self.sends, seq));
            let lent = body.map(|index| &self.sends[index].lent);
            let total = HEADER_BYTES + lent.map_or(0, Lent::len);
            let from = out.sent.saturating_sub(HEADER_BYTES);
            let bytes = lent.map_or(&[][..], |lent| lent.bytes(from..from + QUANTUM_BYTES));
            let parts = [IoSlice::new(&out.header[out.sent.min(HEADER_BYTES)..]), IoSlice::new(bytes)];
            let sent = conn.send(&parts).map_err(MessageError::Broken)?;
            out.sent += sent;
            any |= sent > 0;
            if let Some(seq) = out.body {
                moment("message sent", seq, out.sent.saturating_sub(HEADER_BYTES));
            }
            if out.sent < total {
                self.full = sent == 0;
                return Ok(any);
            }
            self.out.pop_front();
            if let Some(send) = body.and_then(|index| self.sends.remove(index)) {
                send.ticket.complete(Ok(None));
            }
        }
        Ok(any)
    }

    fn owe(&mut self, ours: &Credentials, bytes: usize) {
        self.owed += bytes + HEADER_BYTES;
        if self.owed >= CREDIT_BYTES / 2 {
            self.push(ours, bare(ours, Kind::Credit, self.owed as u64), None);
            self.owed = 0;
        }
    }

    fn push(&mut self, _: &Credentials, frame: Frame, body: Option<u64>) {
        self.out.push_back(Out { header: frame.encode(), body, sent: 0 });
    }
}

/// Returns a header without call and payload.
fn bare(ours: &Credentials, kind: Kind, seq: u64) -> Frame {
    Frame { kind, generation: ours.generation, group: ours.group, seq, call: [0; 16], len: 0 }
}

fn check(theirs: Call, ours: Call, seq: u64) -> Result<(), MessageError> {
    if theirs == ours { Ok(()) } else { Err(MessageError::Mismatch { theirs, ours, seq }) }
}

#[cfg(test)]
mod tests;
