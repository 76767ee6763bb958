//! Fast path for messages: they are sent and received by the calling thread, without a queue, if none
//! precedes them.
//!
//! The wire format does not differ. All but the most common cases use the queues.

use std::io::IoSlice;
use std::sync::Arc;

use super::{EAGER_BYTES, Mailbox, Match, MessageError, Open, Out, Reading, Sending, Stage, bare, check};
use crate::call::Call;
use crate::engine::buffer::Lent;
use crate::engine::ticket::Ticket;
use crate::fault::moment;
use crate::frame::{Frame, HEADER_BYTES, Kind};
use crate::kernels::Source;
use crate::links::conn::Conn;
use crate::links::hello::Credentials;

/// The result of a direct send.
#[derive(Debug)]
pub(crate) enum Sent {
    Whole,
    Part(Begun),
    /// The connection took nothing; the message goes through the queues.
    Nothing,
}

/// A message of which a first part is sent.
#[derive(Debug)]
pub(crate) struct Begun {
    seq: u64,
    header: [u8; HEADER_BYTES],
    sent: usize,
}

/// The result of a direct receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    Whole,
    /// The header and this many bytes have arrived.
    Part(usize),
    Nothing,
    /// The message must be received through the queues.
    Other,
}

impl Mailbox {
    /// Sends as much of a message as the connection takes now.
    pub(crate) fn send_direct(
        &mut self,
        ours: &Credentials,
        call: Call,
        lent: &Lent<'_>,
    ) -> Result<Sent, MessageError> {
        let (len, cost) = (lent.len(), lent.len() + HEADER_BYTES);
        let first = self.out.is_empty() && self.held == 0;
        let Some(conn) = self.conn.as_mut().filter(|_| first && cost <= self.credit) else {
            return Ok(Sent::Nothing);
        };
        let bytes = lent.bytes(0..len);
        if len > EAGER_BYTES || bytes.len() < len {
            return Ok(Sent::Nothing);
        }
        let seq = self.next_seq;
        let frame = Frame { len: len as u64, call: call.encode(), ..bare(ours, Kind::Eager, seq) };
        let header = frame.encode();
        let parts = [IoSlice::new(&header), IoSlice::new(bytes)];
        let sent = conn.send(&parts).map_err(MessageError::Broken)?;
        if sent == 0 {
            return Ok(Sent::Nothing);
        }
        self.next_seq += 1;
        self.credit -= cost;
        moment("message sent", seq, sent.saturating_sub(HEADER_BYTES));
        Ok(if sent == cost { Sent::Whole } else { Sent::Part(Begun { seq, header, sent }) })
    }

    /// Queues the rest of a message that was sent in part.
    pub(crate) fn post_rest(&mut self, begun: Begun, call: Call, lent: Lent<'static>, ticket: Arc<Ticket>) {
        let Begun { seq, header, sent } = begun;
        self.out.push_back(Out { header, body: Some(seq), sent });
        self.hurry(&ticket);
        self.sends.push_back(Sending { seq, call, ticket, lent, stage: Stage::Sent });
    }

    /// Receives the available part of the message that a call asks for, if that message is the next one.
    pub(crate) fn recv_direct(
        &mut self,
        ours: &Credentials,
        open: &Open,
        call: Call,
        lent: &mut Lent<'_>,
    ) -> Result<Received, MessageError> {
        let queued = !self.recvs.is_empty() || !self.early.is_empty() || !open.recvs.is_empty();
        if queued || !matches!(self.reading, Reading::Header) {
            return Ok(Received::Other);
        }
        let Some(conn) = &mut self.conn else { return Ok(Received::Other) };
        let missing = HEADER_BYTES.saturating_sub(conn.unread().len());
        if missing > 0 && conn.fill(HEADER_BYTES).map_err(MessageError::Broken)? < missing {
            return Ok(Received::Nothing);
        }
        let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else { return Ok(Received::Nothing) };
        let frame = Frame::decode(bytes).map_err(|error| MessageError::Protocol(error.to_string()))?;
        let theirs = Call::decode(frame.call).ok().filter(|theirs| theirs.root == call.root);
        let is_ours =
            frame.kind == Kind::Eager && (frame.generation, frame.group) == (ours.generation, ours.group);
        let Some(theirs) = theirs.filter(|_| is_ours) else { return Ok(Received::Other) };
        check(theirs, call, frame.seq)?;
        if frame.len != lent.len() as u64 || frame.len > EAGER_BYTES as u64 {
            return Ok(Received::Other);
        }
        conn.consume(HEADER_BYTES);
        self.recv_rest(ours, 0, lent)
    }

    /// Receives more of a message of which `done` bytes have come.
    pub(crate) fn recv_rest(
        &mut self,
        ours: &Credentials,
        mut done: usize,
        lent: &mut Lent<'_>,
    ) -> Result<Received, MessageError> {
        let len = lent.len();
        let Some(conn) = &mut self.conn else { return Ok(Received::Part(done)) };
        while done < len {
            let got = read_into(conn, &mut lent.bytes_mut(done..len))?;
            if got == 0 {
                return Ok(Received::Part(done));
            }
            done += got;
            moment("message received", self.next_id, done);
        }
        self.owe(ours, len);
        Ok(Received::Whole)
    }

    /// Posts a receive of which `done` bytes have come.
    pub(crate) fn post_begun(
        &mut self,
        order: u64,
        call: Call,
        lent: Lent<'static>,
        ticket: Arc<Ticket>,
        done: usize,
    ) {
        let mut recv = self.receiving(order, call, lent, ticket);
        (recv.matched, recv.done) = (Some(Match::Eager), done);
        self.reading = Reading::Posted { id: recv.id, eager: true };
        self.recvs.push_back(recv);
    }
}

/// Reads bytes that were read ahead, else bytes from the connection.
fn read_into(conn: &mut Conn, into: &mut [u8]) -> Result<usize, MessageError> {
    let ahead = conn.unread().len().min(into.len());
    if ahead == 0 {
        return conn.recv(into).map_err(MessageError::Broken);
    }
    Source::from(&conn.unread()[..ahead]).copy_to(&mut into[..ahead]);
    conn.consume(ahead);
    Ok(ahead)
}
