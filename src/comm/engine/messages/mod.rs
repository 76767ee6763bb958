//! Point-to-point messages: matching by (peer, tag) in order, credits, and a rendezvous protocol for large
//! messages.
//!
//! A message of up to [`EAGER_BYTES`] is sent at once. If no receive matches it yet, the receiver keeps it.
//! The sender knows how much the receiver keeps ([`CREDIT_BYTES`] for each peer) and gets credit back when
//! receives take the messages. A message that is larger, or for which no credit is left, is only announced
//! (Rts frame) in its place in the order. When a receive matches it, the receiver requests it (Cts frame),
//! and it is sent (Message frame) straight into the buffer of that receive. So messages that no receive
//! matches never block a message of another tag.
//!
//! A message may be shorter than the buffer of its receive. If it is longer, the receive fails, and the rest of
//! the message is read and discarded, so that the next message is in its place.
//!
//! A message of a rank to itself needs no connection (`to_self`).

pub(crate) mod direct;
mod read;
mod to_self;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::BorrowedBuffer;
use crate::collectives::call::{Call, CallError, Status};
use crate::collectives::kernels::SourceBytes;
use crate::engine::completion::Completion;
use crate::engine::control::query_at;
use crate::error::{CommError, PeerMisbehaved};
use crate::fault::fault_point;
use crate::transport::frame::{Frame, FrameError, HEADER_BYTES, Kind};
use crate::transport::links::conn::{Conn, ConnError, MAX_READ_AHEAD_BYTES};
use crate::transport::links::hello::Credentials;

/// Largest message that is sent eagerly, before a receive matches it.
pub(crate) const EAGER_BYTES: usize = 64 << 10;
/// Bytes of unexpected messages that a receiver keeps for each peer, headers included.
pub(crate) const CREDIT_BYTES: usize = 1 << 20;
/// Most announced messages from one peer that no receive has matched. The sender holds further messages back,
/// in order, until a receive matches one of those. The limit is low in tests of this module.
pub(crate) const MAX_ANNOUNCEMENTS: usize = if cfg!(test) { 50 } else { 1 << 20 };

/// A message that this rank sends.
#[derive(Debug)]
pub(crate) struct PendingSend {
    pub(crate) seq: u64,
    pub(crate) call: Call,
    pub(crate) completion: Arc<Completion>,
    buffer: BorrowedBuffer<'static>,
    stage: Stage,
}

/// How much of a message this rank has sent to the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing was sent, because too many messages are announced already.
    Held,
    /// Only the announcement was sent or queued (Rts frame).
    Announced,
    /// The elements of the message were sent or queued.
    Sent,
}

/// A receive that waits for its message.
#[derive(Debug)]
pub(crate) struct PendingRecv {
    id: u64,
    /// The index of this receive among all receives of the group.
    order: u64,
    pub(crate) call: Call,
    pub(crate) completion: Arc<Completion>,
    buffer: BorrowedBuffer<'static>,
    /// The message that this receive was matched with; `None` until there is one.
    matched: Option<Match>,
    /// The call of the matched message.
    theirs: Call,
    /// Bytes of the message that were received.
    pub(crate) done: usize,
}

impl PendingRecv {
    /// Returns the bytes of the matched message.
    fn message_bytes(&self) -> usize {
        self.theirs.bytes() as usize
    }

    /// Stores the next bytes of the message, and discards those for which the buffer has no room.
    fn store(&mut self, bytes: &[u8]) {
        let room = self.buffer.len().saturating_sub(self.done).min(bytes.len());
        SourceBytes::from(&bytes[..room]).copy_to(&mut self.buffer.bytes_mut(self.done..self.done + room));
        self.done += bytes.len();
    }

    /// Completes the receive: all bytes of the message were stored or discarded.
    fn complete(self, from: usize) {
        let (count, room) = (self.theirs.count(), self.call.count());
        self.completion.complete(if count > room {
            Err(CommError::Truncated { from, tag: self.call.root, count, room })
        } else {
            Ok(Some(Status { source: from, call: self.theirs }))
        });
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    /// A small message that is being read.
    Eager,
    /// A large message with this sequence number, which this rank has requested.
    Large(u64),
}

/// An unexpected message: it came before a receive matched it.
#[derive(Debug)]
struct UnexpectedMessage {
    /// A number that this rank gives the message. `seq` cannot identify it, because a peer may send any
    /// `seq`.
    id: u64,
    seq: u64,
    /// The index of this message among all unexpected messages of the group.
    arrival_index: u64,
    call: Call,
    content: UnexpectedContent,
    /// The `id` of the receive that takes the message when all of its bytes have arrived.
    claimed_by: Option<u64>,
}

/// The part of an unexpected message that has arrived so far.
#[derive(Debug)]
enum UnexpectedContent {
    /// The announcement of a large message, whose elements the sender keeps until this rank requests them.
    Announcement,
    /// The first bytes of a small message that is being read.
    Partial(Vec<u8>),
    /// All bytes of a small message.
    Complete(Vec<u8>),
}

/// A frame that is being sent.
#[derive(Debug)]
struct OutgoingFrame {
    header: [u8; HEADER_BYTES],
    /// The sequence number of the message whose elements follow the header; `None` for a frame without
    /// elements.
    body: Option<u64>,
    sent: usize,
}

/// What the next bytes from the peer belong to.
#[derive(Debug, Clone, Copy)]
enum ReadState {
    Header,
    /// The rest of the small unexpected message `id`, which is the last of `unexpected` and has `total`
    /// bytes.
    Unexpected {
        total: usize,
        id: u64,
    },
    /// The rest of a message for the receive `id`; `eager` says that the message used credit.
    Posted {
        id: u64,
        eager: bool,
    },
}

/// The reasons why the messages with a peer stop.
#[derive(Debug)]
pub(crate) enum MessageError {
    Broken(ConnError),
    Mismatch { theirs: Call, ours: Call, seq: u64 },
    Protocol(PeerMisbehaved),
}

/// State shared by all peers: receives from any source, and the counters that order them.
#[derive(Debug, Default)]
pub(crate) struct AnySourceQueue {
    pub(crate) recvs: VecDeque<AnySourceRecv>,
    /// Number of receives of the group so far.
    posted: u64,
    /// Number of unexpected messages of the group so far.
    unexpected_count: u64,
}

/// A receive from any source.
#[derive(Debug)]
pub(crate) struct AnySourceRecv {
    order: u64,
    pub(crate) call: Call,
    pub(crate) completion: Arc<Completion>,
    buffer: BorrowedBuffer<'static>,
}

impl From<PeerMisbehaved> for MessageError {
    fn from(error: PeerMisbehaved) -> Self {
        Self::Protocol(error)
    }
}

impl From<FrameError> for MessageError {
    fn from(error: FrameError) -> Self {
        Self::Protocol(error.into())
    }
}

impl From<CallError> for MessageError {
    fn from(error: CallError) -> Self {
        Self::Protocol(error.into())
    }
}

impl AnySourceQueue {
    /// Counts one more receive of the group and returns its index.
    pub(crate) fn order(&mut self) -> u64 {
        self.posted += 1;
        self.posted
    }

    pub(crate) fn post(&mut self, call: Call, buffer: BorrowedBuffer<'static>, completion: Arc<Completion>) {
        let order = self.order();
        self.recvs.push_back(AnySourceRecv { order, call, completion, buffer });
    }
}

/// The shortest timeout, and the earliest time to ask other ranks what they wait in, of all sends and
/// receives since last no message was pending. With these bounds, a check of the clock costs little even with
/// many messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeadlineBounds {
    pub(crate) shortest: Duration,
    pub(crate) query_at: Instant,
}

/// All messages with one peer.
#[derive(Debug)]
pub(crate) struct PeerMessages {
    peer: usize,
    pub(crate) conn: Option<Conn>,
    /// The sends in the order of their sequence numbers; the last `held` of them are neither sent nor
    /// announced.
    pub(crate) sends: VecDeque<PendingSend>,
    held: usize,
    /// Number of messages that are announced and that the peer has not requested yet.
    announced: usize,
    pub(crate) recvs: VecDeque<PendingRecv>,
    deadline_bounds: Option<DeadlineBounds>,
    unexpected: VecDeque<UnexpectedMessage>,
    /// Totals of `unexpected`: bytes kept, headers included, and announcements.
    unexpected_bytes: usize,
    unexpected_announcements: usize,
    outgoing: VecDeque<OutgoingFrame>,
    reading: ReadState,
    /// Bytes of eager messages, headers included, that this rank may send before the peer returns credit.
    credit: usize,
    /// Bytes of eager messages, headers included, that receives have taken and for which no credit was
    /// returned to the peer.
    credit_owed: usize,
    next_seq: u64,
    next_id: u64,
    /// The connection took no bytes at the last write, so this rank must wait until it is writable.
    pub(crate) write_blocked: bool,
}

/// Returns the index in `sends` of the message with sequence number `seq`.
fn send_index(sends: &VecDeque<PendingSend>, seq: u64) -> Option<usize> {
    sends.binary_search_by_key(&seq, |send| send.seq).ok()
}

impl PeerMessages {
    pub(crate) fn new(peer: usize) -> Self {
        Self {
            peer,
            conn: None,
            sends: VecDeque::new(),
            held: 0,
            announced: 0,
            recvs: VecDeque::new(),
            deadline_bounds: None,
            unexpected: VecDeque::new(),
            unexpected_bytes: 0,
            unexpected_announcements: 0,
            outgoing: VecDeque::new(),
            reading: ReadState::Header,
            credit: CREDIT_BYTES,
            credit_owed: 0,
            next_seq: 0,
            next_id: 0,
            write_blocked: false,
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.sends.is_empty() || !self.recvs.is_empty() || !self.outgoing.is_empty()
    }

    fn update_bounds(&mut self, completion: &Completion) {
        let (shortest, query_at) = (completion.timeout, query_at(completion));
        let before = self.deadline_bounds.filter(|_| !self.sends.is_empty() || !self.recvs.is_empty());
        self.deadline_bounds =
            Some(before.map_or(DeadlineBounds { shortest, query_at }, |before| DeadlineBounds {
                shortest: before.shortest.min(shortest),
                query_at: before.query_at.min(query_at),
            }));
    }

    /// Returns the bounds of all messages; `None` if no send or receive is pending.
    pub(crate) fn deadline_bounds(&self) -> Option<DeadlineBounds> {
        self.deadline_bounds.filter(|_| !self.sends.is_empty() || !self.recvs.is_empty())
    }

    /// Closes the connection and drops all queued data. The caller has taken out all sends and receives
    /// before.
    pub(crate) fn stop(&mut self) {
        self.conn = None;
        self.unexpected.clear();
        self.outgoing.clear();
        (self.held, self.announced, self.unexpected_bytes, self.unexpected_announcements) = (0, 0, 0, 0);
        self.write_blocked = false;
    }

    pub(crate) fn post_send(
        &mut self,
        ours: &Credentials,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
    ) {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.update_bounds(&completion);
        self.sends.push_back(PendingSend { seq, call, completion, buffer, stage: Stage::Held });
        self.held += 1;
        self.send_held(ours);
    }

    /// Sends or announces held messages, in order, as far as credit and limits allow.
    fn send_held(&mut self, ours: &Credentials) {
        while self.held > 0 {
            let index = self.sends.len() - self.held;
            let PendingSend { seq, call, ref buffer, .. } = self.sends[index];
            let (bytes, cost) = (buffer.len(), buffer.len() + HEADER_BYTES);
            let eager = bytes <= EAGER_BYTES && cost <= self.credit;
            let (kind, len) = if eager { (Kind::Eager, bytes as u64) } else { (Kind::Rts, 0) };
            if eager {
                self.credit -= cost;
                self.sends[index].stage = Stage::Sent;
            } else if self.announced < MAX_ANNOUNCEMENTS {
                self.announced += 1;
                self.sends[index].stage = Stage::Announced;
            } else {
                return;
            }
            self.held -= 1;
            self.push(
                ours,
                Frame { len, call: call.encode(), ..plain_frame(ours, kind, seq) },
                eager.then_some(seq),
            );
        }
    }

    /// Returns the first unexpected message with this tag that no receive has claimed: its index among all
    /// unexpected messages of the group, and its status.
    pub(crate) fn unexpected(&self, tag: u32) -> Option<(u64, Status)> {
        let unexpected = &self.unexpected[self.unexpected_index(tag)?];
        Some((unexpected.arrival_index, Status { source: self.peer, call: unexpected.call }))
    }

    fn unexpected_index(&self, tag: u32) -> Option<usize> {
        self.unexpected
            .iter()
            .position(|unexpected| unexpected.call.root == tag && unexpected.claimed_by.is_none())
    }

    /// Posts a receive with the index `order`, and gives it the first unexpected message with its tag, if
    /// there is one.
    pub(crate) fn post_recv(
        &mut self,
        ours: &Credentials,
        order: u64,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
    ) -> Result<(), MessageError> {
        let mut recv = self.pending_recv(order, call, buffer, completion);
        let id = recv.id;
        if let Some(index) = self.unexpected_index(call.root) {
            let unexpected = &mut self.unexpected[index];
            if let Err(error) = check_type(unexpected.call, call, unexpected.seq) {
                self.recvs.push_back(recv);
                return Err(error);
            }
            recv.theirs = unexpected.call;
            match &mut unexpected.content {
                UnexpectedContent::Announcement => {
                    let seq = unexpected.seq;
                    recv.matched = Some(Match::Large(seq));
                    self.unexpected.remove(index);
                    self.unexpected_announcements -= 1;
                    self.push(ours, plain_frame(ours, Kind::Cts, seq), None);
                }
                UnexpectedContent::Complete(bytes) => {
                    let bytes = std::mem::take(bytes);
                    self.unexpected.remove(index);
                    self.unexpected_bytes -= bytes.len() + HEADER_BYTES;
                    recv.store(&bytes);
                    // A message of this rank to itself used no credit, and a peer that is gone needs none.
                    if self.conn.is_some() {
                        self.return_credit(ours, bytes.len());
                    }
                    recv.complete(self.peer);
                    return Ok(());
                }
                UnexpectedContent::Partial(_) => {
                    unexpected.claimed_by = Some(id);
                    recv.matched = Some(Match::Eager);
                }
            }
        }
        self.recvs.push_back(recv);
        Ok(())
    }

    fn pending_recv(
        &mut self,
        order: u64,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
    ) -> PendingRecv {
        let id = self.next_id;
        self.next_id += 1;
        self.update_bounds(&completion);
        PendingRecv { id, order, call, completion, buffer, matched: None, theirs: call, done: 0 }
    }

    /// Removes the receives that no message has matched, and returns their completions.
    pub(crate) fn cancel_receives(&mut self) -> Vec<Arc<Completion>> {
        let (matched, others): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.recvs).into_iter().partition(|recv| recv.matched.is_some());
        self.recvs = matched;
        others.into_iter().map(|recv| recv.completion).collect()
    }

    /// Returns whether some bytes that were sent to the peer may not have arrived: they are not written, or
    /// not acknowledged.
    pub(crate) fn has_bytes_in_flight(&self) -> bool {
        !self.outgoing.is_empty() || self.conn.as_ref().is_some_and(|conn| !conn.is_flushed())
    }

    /// Returns whether a message that is queued or on its way ends the wait of the peer, which has reported
    /// that it waits in `call`.
    pub(crate) fn has_message_for(&self, call: &Call) -> bool {
        let receives = call.as_send() != *call;
        let comes = |send: &PendingSend| send.stage == Stage::Sent || receives && send.call.root == call.root;
        self.sends.iter().any(comes)
    }

    /// Writes queued frames and reads frames that have arrived. Returns whether anything moved.
    pub(crate) fn progress(
        &mut self,
        ours: &Credentials,
        any_source: &mut AnySourceQueue,
    ) -> Result<bool, MessageError> {
        let Some(mut conn) = self.conn.take() else { return Ok(false) };
        let result =
            self.write(&mut conn).and_then(|wrote| Ok(self.read(ours, any_source, &mut conn)? | wrote));
        // The frames that were read may have queued an answer, such as a Cts frame.
        let result = result.and_then(|moved| Ok(self.write(&mut conn)? | moved));
        self.conn = Some(conn);
        result
    }

    fn write(&mut self, conn: &mut Conn) -> Result<bool, MessageError> {
        let mut any = false;
        self.write_blocked = false;
        while let Some(out) = self.outgoing.front_mut() {
            let body = out.body.map(|seq| {
                send_index(&self.sends, seq).expect("a send stays until its frame has been written")
            });
            let buffer = body.map(|index| &self.sends[index].buffer);
            let total = HEADER_BYTES + buffer.map_or(0, BorrowedBuffer::len);
            let from = out.sent.saturating_sub(HEADER_BYTES);
            let bytes = buffer.map_or(&[][..], |buffer| buffer.bytes(from..from + MAX_READ_AHEAD_BYTES));
            let parts = [IoSlice::new(&out.header[out.sent.min(HEADER_BYTES)..]), IoSlice::new(bytes)];
            let sent = conn.send(&parts).map_err(MessageError::Broken)?;
            out.sent += sent;
            any |= sent > 0;
            if let Some(seq) = out.body {
                fault_point("message sent", seq, out.sent.saturating_sub(HEADER_BYTES));
            }
            if out.sent < total {
                self.write_blocked = sent == 0;
                return Ok(any);
            }
            self.outgoing.pop_front();
            if let Some(send) = body.and_then(|index| self.sends.remove(index)) {
                send.completion.complete(Ok(None));
            }
        }
        Ok(any)
    }

    fn return_credit(&mut self, ours: &Credentials, bytes: usize) {
        self.credit_owed += bytes + HEADER_BYTES;
        if self.credit_owed >= CREDIT_BYTES / 2 {
            self.push(ours, plain_frame(ours, Kind::Credit, self.credit_owed as u64), None);
            self.credit_owed = 0;
        }
    }

    fn push(&mut self, _: &Credentials, frame: Frame, body: Option<u64>) {
        self.outgoing.push_back(OutgoingFrame { header: frame.encode(), body, sent: 0 });
    }
}

/// Returns a frame header without a call and with payload length 0.
fn plain_frame(ours: &Credentials, kind: Kind, seq: u64) -> Frame {
    Frame { kind, generation: ours.generation, group: ours.group, seq, call: [0; 16], len: 0 }
}

/// Checks that a message has the type that its receive asks for; its length may differ.
fn check_type(theirs: Call, ours: Call, seq: u64) -> Result<(), MessageError> {
    if (theirs.kind, theirs.dtype, theirs.root) == (ours.kind, ours.dtype, ours.root) {
        return Ok(());
    }
    Err(MessageError::Mismatch { theirs, ours, seq })
}

#[cfg(test)]
mod tests;
