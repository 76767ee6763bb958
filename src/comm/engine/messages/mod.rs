//! Point-to-point messages: matching by (peer, tag) in order, credits, and rendezvous for large messages.
//!
//! A message of up to [`EAGER_BYTES`] is sent at once. If no receive matches it yet, the receiver keeps it.
//! The sender knows how much the receiver keeps ([`CREDIT_BYTES`] for each peer) and gets credit back when
//! receives take the messages. Each frame of the opposite direction returns it. If there is none for long, a frame is
//! sent for this purpose alone: behind long data, even a short frame costs 2 to 10 µs over TCP. A message that is larger, or for which no credit is left, is only announced
//! (Rts frame) in its place in the order. When a receive matches it, the receiver requests it (Cts frame),
//! and it is sent (Message frame) straight into the buffer of that receive. So messages that no receive
//! matches never block a message of another tag.
//!
//! A receiver that posts a receive for a large message, and has no other, tells the sender so (Ready frame). If the
//! sender's next message is for that receive, the sender sends it without an announcement. If it is not, or the sender
//! has announced it already, the frame has no effect.
//!
//! Inside a host, a message of up to [`EAGER_BYTES`] goes through a cell of shared memory, or is announced by
//! one, if the caller sends it directly ([`direct`]). The sequence numbers tell the order of messages in cells and in
//! the stream.
//!
//! A message may be shorter than the buffer of its receive. If it is longer, the receive fails, and the rest
//! of the message is read and discarded, so that the next message is in its place.
//!
//! A message of a rank to itself needs no connection (`to_self`).

pub(crate) mod direct;
mod exposed;
mod queues;
mod read;
mod to_self;
mod unexpected;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use crate::buffer::BorrowedBuffer;
use crate::collectives::call::{Call, Status};
use crate::engine::completion::Completion;
use crate::fault::fault_point;
use crate::transport::frame::{Frame, GroupId, HEADER_BYTES, Kind};
pub(crate) use crate::transport::links::EAGER_BYTES;
use crate::transport::links::conn::{Conn, MAX_WRITE_BYTES};
pub(crate) use queues::{AnySourceQueue, DeadlineBounds, MessageError, PostedCall, Probe};
use queues::{Match, OutgoingFrame, PendingRecv, PendingSend, ReadState, Stage, check_type, send_index};
use unexpected::{
    CREDIT_BYTES, Credit, MAX_ANNOUNCEMENTS, UnexpectedContent, UnexpectedMessage, UnexpectedQueue,
    credit_for,
};

/// Returns whether a message waits for its receive before its elements are sent.
#[inline]
pub(crate) fn is_large(call: Call) -> bool {
    call.bytes() > EAGER_BYTES as u64
}

/// All messages with one peer.
#[derive(Debug)]
pub(crate) struct PeerMessages {
    peer: usize,
    group: GroupId,
    pub(crate) conn: Option<Conn>,
    /// The sends by sequence number; the last `held` of them are neither sent nor announced.
    pub(crate) sends: VecDeque<PendingSend>,
    held: usize,
    /// Number of messages that are announced and that the peer has not requested yet.
    announced: usize,
    pub(crate) recvs: VecDeque<PendingRecv>,
    /// Number of receives whose message the peer exposes and this rank has not read yet.
    exposed: usize,
    deadline_bounds: Option<DeadlineBounds>,
    unexpected: UnexpectedQueue,
    outgoing: VecDeque<OutgoingFrame>,
    reading: ReadState,
    credit: Credit,
    next_seq: u64,
    /// The sequence number of the peer's next message.
    next_incoming: u64,
    /// The message that the peer may send without an announcement, because a receive for it is posted.
    ready: Option<u64>,
    /// The message that this rank may send without an announcement, and the receive for which the peer is ready.
    peer_ready: Option<(u64, Call)>,
    /// The last large message that was sent or announced.
    last_large: Option<u64>,
    next_id: u64,
    /// The connection took no bytes at the last write, so this rank must wait until it is writable.
    pub(crate) write_blocked: bool,
}

impl PeerMessages {
    pub(crate) fn new(peer: usize, group: GroupId) -> Self {
        Self {
            peer,
            group,
            conn: None,
            sends: VecDeque::new(),
            held: 0,
            announced: 0,
            recvs: VecDeque::new(),
            exposed: 0,
            deadline_bounds: None,
            unexpected: UnexpectedQueue::default(),
            outgoing: VecDeque::new(),
            reading: ReadState::Header,
            credit: Credit { left: CREDIT_BYTES, owed: 0 },
            next_seq: 0,
            next_incoming: 0,
            ready: None,
            peer_ready: None,
            last_large: None,
            next_id: 0,
            write_blocked: false,
        }
    }

    /// Returns whether a send or receive is pending.
    pub(crate) fn has_posted(&self) -> bool {
        !self.sends.is_empty() || !self.recvs.is_empty()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.has_posted() || !self.outgoing.is_empty()
    }

    fn update_bounds(&mut self, completion: &Completion) {
        let bounds = DeadlineBounds::of(completion);
        self.deadline_bounds = Some(self.deadline_bounds().map_or(bounds, |before| before.min(bounds)));
    }

    /// Returns the bounds of all messages; `None` if no send or receive is pending.
    pub(crate) fn deadline_bounds(&self) -> Option<DeadlineBounds> {
        self.deadline_bounds.filter(|_| self.has_posted())
    }

    /// Closes the connection and drops all queued data. The caller has taken out all sends and receives.
    pub(crate) fn stop(&mut self) {
        self.conn = None;
        self.unexpected = UnexpectedQueue::default();
        self.outgoing.clear();
        (self.held, self.announced, self.exposed) = (0, 0, 0);
        self.write_blocked = false;
    }

    pub(crate) fn post_send(&mut self, posted: PostedCall) {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.update_bounds(&posted.completion);
        self.sends.push_back(PendingSend { seq, posted, stage: Stage::Held });
        self.held += 1;
        self.send_held();
    }

    /// Sends or announces held messages, in order, as far as credit and limits allow.
    fn send_held(&mut self) {
        while self.held > 0 {
            let index = self.sends.len() - self.held;
            let PendingSend { seq, ref posted, .. } = self.sends[index];
            let (call, bytes) = (posted.call, posted.buffer.len());
            let cost = credit_for(bytes);
            let eager = bytes <= EAGER_BYTES && cost <= self.credit.left;
            let exposed = self.expose(call, &posted.buffer);
            let is_awaited = is_large(call) && exposed.is_none() && self.is_peer_ready(seq, call);
            let (kind, len) = match (eager, is_awaited) {
                (true, _) => (Kind::Eager, bytes as u64),
                (false, true) => (Kind::Message, bytes as u64),
                (false, false) => (Kind::Rts, 0),
            };
            if eager || is_awaited {
                self.credit.left -= if eager { cost } else { 0 };
                self.sends[index].stage = Stage::Sent;
            } else if self.announced < MAX_ANNOUNCEMENTS {
                self.announced += 1;
                self.sends[index].stage = Stage::Announced;
            } else {
                return;
            }
            if is_large(call) {
                self.last_large = Some(seq);
            }
            self.held -= 1;
            let address = exposed.unwrap_or(0);
            let header = Frame { len, call: call.encode(), address, ..self.frame(kind, seq) };
            self.push(header, (eager || is_awaited).then_some(seq));
        }
    }

    /// Returns whether the peer should read the elements of a message in the memory of this rank, if it can.
    pub(crate) fn exposes(&self, call: Call) -> bool {
        is_large(call) && self.conn.as_ref().is_some_and(|conn| conn.exposes(call.bytes() as usize))
    }

    /// Returns the address of the elements of a message, if the peer should read them there.
    fn expose(&self, call: Call, buffer: &BorrowedBuffer<'_>) -> Option<u64> {
        let bytes = buffer.bytes(0..buffer.len());
        // The peer copies from one piece of memory.
        let exposes = self.exposes(call) && bytes.len() == buffer.len();
        let is_readable = exposes && self.conn.as_ref().is_some_and(|conn| conn.is_readable(bytes));
        is_readable.then(|| bytes.as_ptr().addr() as u64)
    }

    /// Returns whether the peer will probably send a Ready frame for the next large message. It sent one for the last large
    /// message, maybe after that was announced, and none since.
    pub(crate) fn expects_ready(&self) -> bool {
        self.last_large.is_some_and(|last| self.peer_ready.is_some_and(|(seq, _)| seq == last))
    }

    /// Returns whether the peer has posted a receive for message number `seq` with this call, so that a large message
    /// needs no announcement.
    fn is_peer_ready(&self, seq: u64, call: Call) -> bool {
        self.peer_ready.is_some_and(|(next, theirs)| next == seq && check_type(theirs, call, seq).is_ok())
    }

    /// Returns the first unexpected message with this tag that no receive has claimed: its index among all
    /// unexpected messages of the group, and its status.
    pub(crate) fn unexpected(&self, tag: u32) -> Option<(u64, Status)> {
        let unexpected = self.unexpected.first(tag)?;
        Some((unexpected.arrival_index, Status { source: self.peer, call: unexpected.call }))
    }

    /// Posts a receive with the index `order`; it gets the first unexpected message with its tag, if any.
    pub(crate) fn post_recv(&mut self, order: u64, posted: PostedCall) -> Result<(), MessageError> {
        let call = posted.call;
        let mut recv = self.pending_recv(order, posted);
        let id = recv.id;
        if let Some(index) = self.unexpected.index(call.root) {
            let unexpected = self.unexpected.get_mut(index);
            if let Err(error) = check_type(unexpected.call, call, unexpected.seq) {
                self.recvs.push_back(recv);
                return Err(error);
            }
            recv.theirs = unexpected.call;
            if let UnexpectedContent::Partial(_) = unexpected.content {
                unexpected.claimed_by = Some(id);
                recv.matched = Some(Match::Eager);
                self.recvs.push_back(recv);
                return Ok(());
            }
            let unexpected = self.unexpected.remove(index);
            if let UnexpectedContent::Complete(bytes) = unexpected.content {
                recv.store(&bytes);
                // A message of this rank to itself used no credit, and a peer that is gone needs none.
                if self.conn.is_some() {
                    self.return_credit(bytes.len());
                }
                recv.complete(self.peer);
                return Ok(());
            }
            if let UnexpectedContent::Announcement { address } = unexpected.content {
                recv.matched = Some(self.request(unexpected.seq, address));
            }
        }
        self.recvs.push_back(recv);
        self.announce_receive(call);
        Ok(())
    }

    /// Requests a message that the peer has announced, unless it is at `address`, where this rank then reads it. Returns how it is
    /// matched.
    fn request(&mut self, seq: u64, address: u64) -> Match {
        if address != 0 {
            self.exposed += 1;
            return Match::Exposed { seq, address };
        }
        self.push(self.frame(Kind::Cts, seq), None);
        Match::Large(seq)
    }

    /// Tells the peer that a receive is posted, if it is for a large message and is the only one.
    fn announce_receive(&mut self, call: Call) {
        let is_only = self.recvs.len() == 1 && self.recvs[0].matched.is_none() && self.unexpected.is_empty();
        if is_only && is_large(call) && self.conn.is_some() && self.ready != Some(self.next_incoming) {
            self.ready = Some(self.next_incoming);
            self.push(Frame { call: call.encode(), ..self.frame(Kind::Ready, self.next_incoming) }, None);
        }
    }

    fn pending_recv(&mut self, order: u64, posted: PostedCall) -> PendingRecv {
        let (id, theirs) = (self.next_id, posted.call);
        self.next_id += 1;
        self.update_bounds(&posted.completion);
        PendingRecv { id, order, posted, matched: None, theirs, done: 0 }
    }

    /// Removes the receives that no message has matched, and returns their completions.
    pub(crate) fn cancel_receives(&mut self) -> Vec<Arc<Completion>> {
        let (matched, others): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.recvs).into_iter().partition(|recv| recv.matched.is_some());
        self.recvs = matched;
        others.into_iter().map(|recv| recv.posted.completion).collect()
    }

    /// Returns whether bytes to the peer may not have arrived: they are not written, or not acknowledged.
    pub(crate) fn has_bytes_in_flight(&self) -> bool {
        !self.outgoing.is_empty() || self.conn.as_ref().is_some_and(|conn| !conn.is_flushed())
    }

    /// Returns whether a queued or sent message ends the wait of the peer, which waits in `call`.
    pub(crate) fn has_message_for(&self, call: &Call) -> bool {
        let receives = call.as_send() != *call;
        let comes =
            |send: &PendingSend| send.stage == Stage::Sent || receives && send.posted.call.root == call.root;
        self.sends.iter().any(comes)
    }

    /// Writes queued frames and reads frames that have arrived. Returns whether anything moved.
    pub(crate) fn progress(&mut self, any_source: &mut AnySourceQueue) -> Result<bool, MessageError> {
        let Some(mut conn) = self.conn.take() else { return Ok(false) };
        let result = self.write(&mut conn).and_then(|wrote| Ok(self.read(any_source, &mut conn)? | wrote));
        let result = result.map(|moved| self.read_exposed(&conn) | moved);
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
            let buffer = body.map(|index| &self.sends[index].posted.buffer);
            let total = HEADER_BYTES + buffer.map_or(0, BorrowedBuffer::len);
            let from = out.sent.saturating_sub(HEADER_BYTES);
            let bytes = buffer.map_or(&[][..], |buffer| buffer.bytes(from..from + MAX_WRITE_BYTES));
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
                send.posted.completion.complete(Ok(None));
            }
        }
        Ok(any)
    }

    fn return_credit(&mut self, bytes: usize) {
        if self.credit.owe(bytes) {
            self.push(self.frame(Kind::Credit, 0), None);
        }
    }

    fn frame(&self, kind: Kind, seq: u64) -> Frame {
        Frame::empty(kind, self.group, seq)
    }

    /// Queues a frame, which also returns the credit that this rank owes.
    fn push(&mut self, frame: Frame, body: Option<u64>) {
        let credit = self.credit.owed_units();
        self.credit.returned(credit);
        let frame = Frame { credit, ..frame };
        self.outgoing.push_back(OutgoingFrame { header: frame.encode(), body, sent: 0 });
    }
}

#[cfg(test)]
mod tests;
