//! Fast path for messages: they are sent and received by the calling thread, without a queue, if no earlier
//! message is queued.
//!
//! The frames are the same as those of queued messages. All but the most common cases use the queues.

use std::io::IoSlice;
use std::sync::Arc;

use super::{
    AnySourceQueue, EAGER_BYTES, Match, MessageError, OutgoingFrame, PeerMessages, PendingSend, ReadState,
    Stage, check_type, plain_frame,
};
use crate::buffer::BorrowedBuffer;
use crate::collectives::call::Call;
use crate::collectives::kernels::SourceBytes;
use crate::engine::completion::Completion;
use crate::fault::fault_point;
use crate::transport::frame::{Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::Credentials;

/// The result of a direct send.
#[derive(Debug)]
pub(crate) enum SendProgress {
    Complete,
    Partial(PartialSend),
    /// Nothing was sent; the message goes through the queues.
    Nothing,
}

/// A message whose first `sent` bytes, header included, are sent.
#[derive(Debug)]
pub(crate) struct PartialSend {
    seq: u64,
    header: [u8; HEADER_BYTES],
    sent: usize,
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
    /// Sends as much of a message as the connection takes now.
    pub(crate) fn send_direct(
        &mut self,
        ours: &Credentials,
        call: Call,
        buffer: &BorrowedBuffer<'_>,
    ) -> Result<SendProgress, MessageError> {
        let (len, cost) = (buffer.len(), buffer.len() + HEADER_BYTES);
        let first = self.outgoing.is_empty() && self.held == 0;
        let Some(conn) = self.conn.as_mut().filter(|_| first && cost <= self.credit.left) else {
            return Ok(SendProgress::Nothing);
        };
        let bytes = buffer.bytes(0..len);
        if len > EAGER_BYTES || bytes.len() < len {
            return Ok(SendProgress::Nothing);
        }
        let seq = self.next_seq;
        let frame = Frame { len: len as u64, call: call.encode(), ..plain_frame(ours, Kind::Eager, seq) };
        let header = frame.encode();
        let parts = [IoSlice::new(&header), IoSlice::new(bytes)];
        let sent = conn.send(&parts).map_err(MessageError::Broken)?;
        if sent == 0 {
            return Ok(SendProgress::Nothing);
        }
        self.next_seq += 1;
        self.credit.left -= cost;
        fault_point("message sent", seq, sent.saturating_sub(HEADER_BYTES));
        Ok(if sent == cost {
            SendProgress::Complete
        } else {
            SendProgress::Partial(PartialSend { seq, header, sent })
        })
    }

    /// Queues the rest of a message whose first part [`Self::send_direct`] has sent.
    pub(crate) fn post_partial_send(
        &mut self,
        partial: PartialSend,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
    ) {
        let PartialSend { seq, header, sent } = partial;
        self.outgoing.push_back(OutgoingFrame { header, body: Some(seq), sent });
        self.update_bounds(&completion);
        self.sends.push_back(PendingSend { seq, call, completion, buffer, stage: Stage::Sent });
    }

    /// Receives what has arrived of the message that `call` asks for, if that is the next message on the
    /// connection.
    pub(crate) fn recv_direct(
        &mut self,
        ours: &Credentials,
        any_source: &AnySourceQueue,
        call: Call,
        buffer: &mut BorrowedBuffer<'_>,
    ) -> Result<RecvProgress, MessageError> {
        let queued = !self.recvs.is_empty() || !self.unexpected.is_empty() || !any_source.recvs.is_empty();
        if queued || !matches!(self.reading, ReadState::Header) {
            return Ok(RecvProgress::UseQueues);
        }
        let Some(conn) = &mut self.conn else { return Ok(RecvProgress::UseQueues) };
        let missing = HEADER_BYTES.saturating_sub(conn.unread().len());
        if missing > 0 && conn.fill(HEADER_BYTES).map_err(MessageError::Broken)? < missing {
            return Ok(RecvProgress::Nothing);
        }
        let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else {
            return Ok(RecvProgress::Nothing);
        };
        let frame = Frame::decode(bytes)?;
        let theirs = Call::decode(frame.call).ok().filter(|theirs| theirs.root == call.root);
        let is_ours =
            frame.kind == Kind::Eager && (frame.generation, frame.group) == (ours.generation, ours.group);
        let Some(theirs) = theirs.filter(|_| is_ours) else { return Ok(RecvProgress::UseQueues) };
        check_type(theirs, call, frame.seq)?;
        // The queues handle a message whose length differs from that of the buffer.
        if frame.len != buffer.len() as u64 || frame.len > EAGER_BYTES as u64 {
            return Ok(RecvProgress::UseQueues);
        }
        conn.consume(HEADER_BYTES);
        self.recv_rest(ours, 0, buffer)
    }

    /// Receives more of a message whose first `done` bytes are in `buffer` already.
    pub(crate) fn recv_rest(
        &mut self,
        ours: &Credentials,
        mut done: usize,
        buffer: &mut BorrowedBuffer<'_>,
    ) -> Result<RecvProgress, MessageError> {
        let len = buffer.len();
        let Some(conn) = &mut self.conn else { return Ok(RecvProgress::Partial(done)) };
        while done < len {
            let got = read_into(conn, &mut buffer.bytes_mut(done..len))?;
            if got == 0 {
                return Ok(RecvProgress::Partial(done));
            }
            done += got;
            fault_point("message received", self.next_id, done);
        }
        self.return_credit(ours, len);
        Ok(RecvProgress::Complete)
    }

    /// Queues a receive whose first `done` bytes are in `buffer` already.
    pub(crate) fn post_partial_recv(
        &mut self,
        order: u64,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
        done: usize,
    ) {
        let mut recv = self.pending_recv(order, call, buffer, completion);
        (recv.matched, recv.done) = (Some(Match::Eager), done);
        self.reading = ReadState::Posted { id: recv.id, eager: true };
        self.recvs.push_back(recv);
    }
}

/// Moves bytes that were read ahead to `into`; if there are none, reads from the connection.
fn read_into(conn: &mut Conn, into: &mut [u8]) -> Result<usize, MessageError> {
    let ahead = conn.unread().len().min(into.len());
    if ahead == 0 {
        return conn.recv(into).map_err(MessageError::Broken);
    }
    SourceBytes::from(&conn.unread()[..ahead]).copy_to(&mut into[..ahead]);
    conn.consume(ahead);
    Ok(ahead)
}
