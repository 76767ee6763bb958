//! Fast path for messages: the calling thread sends and receives them if no earlier message is queued.
//!
//! A message of up to [`EAGER_BYTES`] inside a host is sent in a cell, or announced by one. The frames of all
//! others are those of queued messages. All but the most common cases use the queues.

use std::io::IoSlice;

use super::read::SHORT_BYTES;
use super::{
    AnySourceQueue, EAGER_BYTES, Match, MessageError, OutgoingFrame, PeerMessages, PendingSend, PostedCall,
    ReadState, Stage, check_type, credit_for,
};
use crate::collectives::call::Call;
use crate::fault::fault_point;
use crate::transport::frame::{Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::{ConnError, MAX_WRITE_BYTES};
use crate::transport::links::{CELL_BYTES, CellMessage};

/// The result of a direct send.
#[derive(Debug)]
pub(crate) enum SendProgress {
    Complete,
    /// The first bytes of the frame of message `seq` were sent.
    Partial {
        seq: u64,
        frame: OutgoingFrame,
    },
    /// Nothing was sent; the message goes through the queues.
    Nothing,
}

/// The result of a direct receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecvProgress {
    Complete,
    /// The header and this many bytes of the elements have arrived.
    Partial(usize),
    Nothing,
    /// Nothing was received; the message must be received through the queues.
    UseQueues,
}

impl PeerMessages {
    /// Sends as much of the message `bytes` as the connection takes now.
    pub(crate) fn send_direct(&mut self, call: Call, bytes: &[u8]) -> Result<SendProgress, MessageError> {
        let (len, seq) = (bytes.len(), self.next_seq);
        if len <= EAGER_BYTES && self.send_cell(call, bytes)? {
            return Ok(SendProgress::Complete);
        }
        let (kind, cost) = if len <= EAGER_BYTES {
            (Kind::Eager, credit_for(len))
        } else if self.is_peer_ready(seq, call) {
            (Kind::Message, 0)
        } else {
            return Ok(SendProgress::Nothing);
        };
        if !self.can_send_now(cost) {
            return Ok(SendProgress::Nothing);
        }
        let Some(conn) = &mut self.conn else { return Ok(SendProgress::Nothing) };
        let credit = self.credit.owed_units();
        let frame = Frame::empty(kind, self.group, seq);
        let header = Frame { credit, len: len as u64, call: call.encode(), ..frame }.encode();
        let parts = [IoSlice::new(&header), IoSlice::new(&bytes[..len.min(MAX_WRITE_BYTES)])];
        let sent = conn.send(&parts).map_err(MessageError::Broken)?;
        if sent == 0 {
            return Ok(SendProgress::Nothing);
        }
        self.next_seq += 1;
        if kind == Kind::Message {
            self.last_large = Some(seq);
        }
        self.credit.left -= cost;
        self.credit.returned(credit);
        fault_point("message sent", seq, sent.saturating_sub(HEADER_BYTES));
        Ok(if sent == len + HEADER_BYTES {
            SendProgress::Complete
        } else {
            SendProgress::Partial { seq, frame: OutgoingFrame { header, body: Some(seq), sent } }
        })
    }

    /// Returns whether a message that uses so much credit may be sent before any queued one.
    #[inline(always)]
    fn can_send_now(&self, cost: usize) -> bool {
        self.outgoing.is_empty() && self.held == 0 && cost <= self.credit.left
    }

    /// Sends a message of at most [`EAGER_BYTES`] by a cell. Returns whether it was sent. The link may announce
    /// less, have no free cell, or no space.
    #[inline(always)]
    pub(crate) fn send_cell(&mut self, call: Call, bytes: &[u8]) -> Result<bool, MessageError> {
        let (cost, seq) = (credit_for(bytes.len()), self.next_seq);
        if !self.can_send_now(cost) {
            return Ok(false);
        }
        let Some(conn) = &mut self.conn else { return Ok(false) };
        if !conn.send_cell(seq, call.encode(), bytes).map_err(MessageError::Broken)? {
            return Ok(false);
        }
        self.next_seq += 1;
        self.credit.left -= cost;
        fault_point("message sent", seq, bytes.len());
        Ok(true)
    }

    /// Queues the rest of a message whose first part [`Self::send_direct`] has sent.
    pub(crate) fn post_partial_send(&mut self, seq: u64, frame: OutgoingFrame, posted: PostedCall) {
        self.outgoing.push_back(frame);
        self.update_bounds(&posted.completion);
        self.sends.push_back(PendingSend { seq, posted, stage: Stage::Sent });
    }

    /// Receives what has arrived of the message that `call` asks for, if that is the next message. `into` has room for
    /// just this message.
    pub(crate) fn recv_direct(
        &mut self,
        any_source: &AnySourceQueue,
        call: Call,
        into: &mut [u8],
    ) -> Result<RecvProgress, MessageError> {
        match self.recv_cell(any_source, call, into)? {
            RecvProgress::Nothing => {}
            received => return Ok(received),
        }
        let Some(conn) = &mut self.conn else { return Ok(RecvProgress::UseQueues) };
        if conn.unread().len() < HEADER_BYTES {
            // The elements of a short message are read with its header. Not more: no event would tell that the next message
            // has been read.
            let is_short = conn.reads_by_system_calls() && into.len() <= SHORT_BYTES;
            match conn.fill(HEADER_BYTES + if is_short { into.len() } else { 0 }) {
                Ok(_) => {}
                // The peer may have filled a cell before it closed the stream.
                Err(ConnError::Closed) => return Ok(RecvProgress::UseQueues),
                Err(error) => return Err(MessageError::Broken(error)),
            }
        }
        let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else {
            return Ok(RecvProgress::Nothing);
        };
        let bytes = *bytes;
        if conn.cell(self.next_incoming, None).is_some() {
            // A cell has come after the last look. The bytes may be the data that it announces.
            return Ok(RecvProgress::Nothing);
        }
        let frame = Frame::decode(&bytes)?;
        if frame.group_id() != self.group || frame.credit > 0 && self.held > 0 {
            // The queues report the error, or send held messages with this credit.
            return Ok(RecvProgress::UseQueues);
        }
        if frame.kind == Kind::Credit {
            conn.consume(HEADER_BYTES);
            self.credit.restore(frame.credit)?;
            return Ok(RecvProgress::Nothing);
        }
        let theirs = Call::decode(frame.call).ok().filter(|theirs| theirs.root == call.root);
        let is_next = frame.kind == Kind::Eager && frame.seq == self.next_incoming;
        let Some(theirs) = theirs.filter(|_| is_next) else { return Ok(RecvProgress::UseQueues) };
        check_type(theirs, call, frame.seq)?;
        // The queues handle a message whose length differs from that of the buffer.
        if frame.len != into.len() as u64 || frame.len > EAGER_BYTES as u64 {
            return Ok(RecvProgress::UseQueues);
        }
        conn.consume(HEADER_BYTES);
        self.credit.restore(frame.credit)?;
        self.next_incoming += 1;
        self.recv_rest(0, into)
    }

    /// Receives what has arrived of the message that `call` asks for, if it is in the next cell. If no message is there,
    /// the next one may be in the stream. `into` has room for just this message.
    #[inline(always)]
    pub(crate) fn recv_cell(
        &mut self,
        any_source: &AnySourceQueue,
        call: Call,
        into: &mut [u8],
    ) -> Result<RecvProgress, MessageError> {
        let queued = !self.recvs.is_empty() || !self.unexpected.is_empty() || !any_source.recvs.is_empty();
        if queued || !matches!(self.reading, ReadState::Header) {
            return Ok(RecvProgress::UseQueues);
        }
        let Some(conn) = &mut self.conn else { return Ok(RecvProgress::UseQueues) };
        let len = into.len();
        let awaited = Some(len).filter(|&bytes| bytes <= EAGER_BYTES);
        let Some(CellMessage { header, data_at }) = conn.cell(self.next_incoming, awaited) else {
            return Ok(RecvProgress::Nothing);
        };
        // The queues handle a message of another tag, or whose length differs from that of the buffer.
        let is_ours = header == call.encode() && call.bytes() == len as u64;
        if !is_ours || len > if data_at.is_some() { EAGER_BYTES } else { CELL_BYTES } {
            if let Some(theirs) = Call::decode(header).ok().filter(|theirs| theirs.root == call.root) {
                check_type(theirs, call, self.next_incoming)?;
            }
            return Ok(RecvProgress::UseQueues);
        }
        if let Some(at) = data_at {
            return self.recv_announced(at, into);
        }
        conn.take_cell(into).map_err(MessageError::Broken)?;
        self.next_incoming += 1;
        fault_point("message received", self.next_id, len);
        self.return_credit(len);
        Ok(RecvProgress::Complete)
    }

    /// Receives what has arrived of the message in the next cell, whose data is in the stream from `at` on.
    #[inline(never)]
    fn recv_announced(&mut self, at: u64, into: &mut [u8]) -> Result<RecvProgress, MessageError> {
        let Some(conn) = &mut self.conn else { return Ok(RecvProgress::UseQueues) };
        conn.take_header(at).map_err(MessageError::Broken)?;
        self.next_incoming += 1;
        self.recv_rest(0, into)
    }

    /// Receives more of a message whose first `done` bytes are in `into` already.
    pub(crate) fn recv_rest(
        &mut self,
        mut done: usize,
        into: &mut [u8],
    ) -> Result<RecvProgress, MessageError> {
        let len = into.len();
        let Some(conn) = &mut self.conn else { return Ok(RecvProgress::Partial(done)) };
        while done < len {
            let got = conn.read(&mut into[done..]).map_err(MessageError::Broken)?;
            if got == 0 {
                return Ok(RecvProgress::Partial(done));
            }
            done += got;
            fault_point("message received", self.next_id, done);
        }
        self.return_credit(len);
        Ok(RecvProgress::Complete)
    }

    /// Queues a receive whose first `done` bytes are in `buffer` already.
    pub(crate) fn post_partial_recv(&mut self, order: u64, posted: PostedCall, done: usize) {
        let mut recv = self.pending_recv(order, posted);
        (recv.matched, recv.done) = (Some(Match::Eager), done);
        self.reading = ReadState::Posted { id: recv.id, eager: true };
        self.recvs.push_back(recv);
    }
}
