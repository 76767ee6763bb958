//! Reads message frames from the connection of a peer, and matches them with receives.

use smallvec::{SmallVec, smallvec};

use super::{
    AnySourceQueue, Match, MessageError, PeerMessages, PendingRecv, ReadState, Stage, UnexpectedContent,
    UnexpectedMessage, check_type, is_large, send_index,
};
use crate::collectives::call::Call;
use crate::error::PeerMisbehaved;
use crate::fault::fault_point;
use crate::transport::frame::{Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::{Conn, ConnError};
use crate::transport::links::{CELL_BYTES, CellMessage};

/// Most bytes of a message that are read ahead together with the header, if a read costs a system call.
pub(super) const SHORT_BYTES: usize = 32 << 10;
/// Most bytes that are read ahead if the next message may be of any length.
const READ_AHEAD_BYTES: usize = 64 << 10;

impl PeerMessages {
    /// Reads available data with at most one system call, or the next message of a link that needs none. Returns
    /// whether anything moved.
    pub(super) fn read(
        &mut self,
        any_source: &mut AnySourceQueue,
        conn: &mut Conn,
    ) -> Result<bool, MessageError> {
        let (mut any, mut asked) = (false, false);
        loop {
            if self.read_step(any_source, conn)? {
                any = true;
                continue;
            }
            if asked {
                return Ok(any);
            }
            // Behind a header, the elements are read directly into the buffer of the receive.
            let reads_header = !conn.reads_by_system_calls() && matches!(self.reading, ReadState::Header);
            asked = !reads_header;
            let got = match self.direct_target(conn) {
                Some((index, bytes)) => {
                    let recv = &mut self.recvs[index];
                    let range = recv.done..recv.done + bytes;
                    let into = &mut recv.posted.buffer.bytes_mut(range);
                    let got = conn.recv(into).map_err(MessageError::Broken)?;
                    recv.done += got;
                    fault_point("message received", recv.id, recv.done);
                    got
                }
                None => match conn.fill(if reads_header { HEADER_BYTES } else { READ_AHEAD_BYTES }) {
                    Ok(got) => got,
                    // The peer may have filled a cell after the last look and before it closed the stream.
                    Err(ConnError::Closed) if self.read_cell(any_source, conn)? => {
                        (any, asked) = (true, false);
                        continue;
                    }
                    Err(error) => return Err(MessageError::Broken(error)),
                },
            };
            any |= got > 0;
            asked |= got == 0;
        }
    }

    /// Returns the index of the receive into whose buffer the next bytes can be read directly, and how many.
    /// `None` if little is missing and a read takes a system call, or if bytes were read ahead.
    fn direct_target(&self, conn: &Conn) -> Option<(usize, usize)> {
        let ReadState::Posted { id, .. } = self.reading else { return None };
        let index = self.recvs.iter().position(|recv| recv.id == id)?;
        let recv = &self.recvs[index];
        let left = recv.posted.buffer.len().min(recv.message_bytes()).saturating_sub(recv.done);
        let is_worth_a_read = left >= 4096 || left > 0 && !conn.reads_by_system_calls();
        (is_worth_a_read && conn.unread().is_empty()).then_some((index, left))
    }

    /// Processes the message in the next cell, or a header or elements among the bytes that were read ahead.
    /// Returns whether there were any.
    fn read_step(&mut self, any_source: &mut AnySourceQueue, conn: &mut Conn) -> Result<bool, MessageError> {
        if !matches!(self.reading, ReadState::Header) {
            let (took, is_complete) = self.deliver(conn.unread());
            conn.consume(took);
            return Ok(took > 0 || is_complete);
        }
        if self.read_cell(any_source, conn)? {
            return Ok(true);
        }
        let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let frame = Frame::decode(bytes)?;
        // The peer may have filled a cell after the last look, and then sent this frame.
        let is_later = matches!(frame.kind, Kind::Eager | Kind::Rts) && frame.seq != self.next_incoming;
        if is_later && self.read_cell(any_source, conn)? {
            return Ok(true);
        }
        conn.consume(HEADER_BYTES);
        self.handle_header(any_source, &frame)?;
        Ok(true)
    }

    /// Processes the message in the next cell, unless a message of the stream is being read. Returns whether
    /// there was one.
    fn read_cell(&mut self, any_source: &mut AnySourceQueue, conn: &mut Conn) -> Result<bool, MessageError> {
        let seq = self.next_incoming;
        let message = conn.cell(seq, None).filter(|_| matches!(self.reading, ReadState::Header));
        let Some(CellMessage { header: call, data_at }) = message else { return Ok(false) };
        let decoded = Call::decode(call)?;
        if let Some(at) = data_at {
            conn.take_header(at).map_err(MessageError::Broken)?;
            let frame = Frame { len: decoded.bytes(), call, ..self.frame(Kind::Eager, seq) };
            self.handle_message(any_source, &frame)?;
            return Ok(true);
        }
        if decoded.bytes() > CELL_BYTES as u64 {
            return Err(PeerMisbehaved::EagerLength { len: CELL_BYTES as u64, call: decoded }.into());
        }
        let mut data: SmallVec<[u8; 256]> = smallvec![0; decoded.bytes() as usize];
        let frame = Frame { len: data.len() as u64, call, ..self.frame(Kind::Eager, seq) };
        self.handle_message(any_source, &frame)?;
        conn.take_cell(&mut data).map_err(MessageError::Broken)?;
        if !matches!(self.reading, ReadState::Header) {
            self.deliver(&data);
        }
        Ok(true)
    }

    /// Adds `bytes` to the message that is being read. Returns how many bytes belong to it, and whether it is
    /// complete.
    fn deliver(&mut self, bytes: &[u8]) -> (usize, bool) {
        match self.reading {
            ReadState::Header => unreachable!("the caller checks that a message is being read"),
            ReadState::Unexpected => {
                let unexpected = self.unexpected.get_mut(self.unexpected.last_index());
                let UnexpectedContent::Partial(kept) = &mut unexpected.content else {
                    unreachable!("only small messages are read into the queue, until they are complete");
                };
                let total = unexpected.call.bytes() as usize;
                let take = bytes.len().min(total - kept.len());
                kept.extend_from_slice(&bytes[..take]);
                if kept.len() < total {
                    return (take, false);
                }
                let kept = std::mem::take(kept);
                self.reading = ReadState::Header;
                match unexpected.claimed_by {
                    Some(recv) => self.deliver_claimed(&kept, recv),
                    None => unexpected.content = UnexpectedContent::Complete(kept),
                }
                (take, true)
            }
            ReadState::Posted { id, eager } => {
                let index = self.recvs.iter().position(|recv| recv.id == id);
                let index = index.expect("a receive stays posted while its message is read");
                let recv = &mut self.recvs[index];
                let take = bytes.len().min(recv.message_bytes() - recv.done);
                recv.store(&bytes[..take]);
                fault_point("message received", recv.id, recv.done);
                if recv.done < recv.message_bytes() {
                    return (take, false);
                }
                let recv = self.recvs.remove(index).expect("it was found there");
                self.reading = ReadState::Header;
                if eager {
                    self.return_credit(recv.message_bytes());
                }
                recv.complete(self.peer);
                (take, true)
            }
        }
    }

    /// Copies the last unexpected message, now complete (`bytes`), to the receive `recv`, which claimed it
    /// while it was being read. Completes that receive.
    fn deliver_claimed(&mut self, bytes: &[u8], recv: u64) {
        self.unexpected.remove(self.unexpected.last_index());
        let recv = self.recvs.iter().position(|waiting| waiting.id == recv);
        let recv = recv.and_then(|index| self.recvs.remove(index));
        let mut recv = recv.expect("a receive that has claimed a message is not cancelled");
        recv.store(bytes);
        self.return_credit(bytes.len());
        recv.complete(self.peer);
    }

    fn handle_header(&mut self, any_source: &mut AnySourceQueue, frame: &Frame) -> Result<(), MessageError> {
        let (seq, (generation, group)) = (frame.seq, frame.group_id());
        if (generation, group) != self.group {
            return Err(PeerMisbehaved::ForeignMessage { generation, group }.into());
        }
        if frame.credit > 0 {
            self.credit.restore(frame.credit)?;
            self.send_held();
        }
        match frame.kind {
            Kind::Eager | Kind::Rts => return self.handle_message(any_source, frame),
            Kind::Cts => {
                let index = send_index(&self.sends, seq);
                let index = index.filter(|&index| self.sends[index].stage != Stage::Held);
                let index = index.ok_or(PeerMisbehaved::NotAnnounced { seq })?;
                let send = &mut self.sends[index];
                if std::mem::replace(&mut send.stage, Stage::Sent) == Stage::Sent {
                    return Err(PeerMisbehaved::AskedTwice { seq }.into());
                }
                let (len, call) = (send.posted.buffer.len() as u64, send.posted.call.encode());
                self.push(Frame { len, call, ..self.frame(Kind::Message, seq) }, Some(seq));
                self.announced -= 1;
                self.send_held();
            }
            Kind::ReadDone => {
                let index = send_index(&self.sends, seq);
                let index = index.filter(|&index| self.sends[index].stage == Stage::Announced);
                let send = index.and_then(|index| self.sends.remove(index));
                let send = send.ok_or(PeerMisbehaved::NotAnnounced { seq })?;
                fault_point("message sent", seq, send.posted.buffer.len());
                send.posted.completion.complete(Ok(None));
                self.announced -= 1;
                self.send_held();
            }
            Kind::Ready => self.peer_ready = Some((seq, Call::decode(frame.call)?)),
            Kind::Message if self.ready == Some(seq) && seq == self.next_incoming => {
                self.ready = None;
                self.handle_unannounced(any_source, frame)?;
            }
            Kind::Message => {
                let asked = |recv: &&PendingRecv| recv.matched == Some(Match::Large(seq));
                let recv = self.recvs.iter().find(asked).ok_or(PeerMisbehaved::NotAskedFor { seq })?;
                if frame.len != recv.theirs.bytes() {
                    return Err(PeerMisbehaved::MessageLength { seq, len: frame.len }.into());
                }
                self.reading = ReadState::Posted { id: recv.id, eager: false };
            }
            Kind::Credit => {}
            kind @ (Kind::Hello | Kind::Welcome | Kind::Proof | Kind::Refuse | Kind::Data | Kind::Open)
            | kind @ (Kind::State | Kind::StateQuery | Kind::Abort | Kind::Goodbye)
            | kind @ (Kind::Share | Kind::Close | Kind::Stream) => {
                return Err(PeerMisbehaved::NoMessageFrame { kind }.into());
            }
        }
        Ok(())
    }

    /// Handles the header of a large message that this rank has not requested, because it is ready for it.
    fn handle_unannounced(
        &mut self,
        any_source: &mut AnySourceQueue,
        frame: &Frame,
    ) -> Result<(), MessageError> {
        let (seq, call) = (frame.seq, Call::decode(frame.call)?);
        if frame.len != call.bytes() {
            return Err(PeerMisbehaved::MessageLength { seq, len: frame.len }.into());
        }
        let index = self.match_recv(any_source, call.root).ok_or(PeerMisbehaved::NotAskedFor { seq })?;
        self.next_incoming += 1;
        let recv = &mut self.recvs[index];
        check_type(call, recv.posted.call, seq)?;
        (recv.theirs, recv.matched) = (call, Some(Match::Large(seq)));
        self.reading = ReadState::Posted { id: recv.id, eager: false };
        Ok(())
    }

    /// Handles the header of a message that is sent at once, or a larger one's announcement: matches it, or keeps it.
    fn handle_message(&mut self, any_source: &mut AnySourceQueue, frame: &Frame) -> Result<(), MessageError> {
        let call = Call::decode(frame.call)?;
        let (seq, eager) = (frame.seq, frame.kind == Kind::Eager);
        if seq != self.next_incoming {
            return Err(PeerMisbehaved::MessageOrder { seq, next: self.next_incoming }.into());
        }
        self.next_incoming += 1;
        let expected = if eager { call.bytes() } else { 0 };
        if frame.len != expected || eager && is_large(call) {
            return Err(PeerMisbehaved::EagerLength { len: frame.len, call }.into());
        }
        if let Some(index) = self.match_recv(any_source, call.root) {
            let recv = &mut self.recvs[index];
            check_type(call, recv.posted.call, seq)?;
            recv.theirs = call;
            if eager {
                recv.matched = Some(Match::Eager);
                self.reading = ReadState::Posted { id: recv.id, eager: true };
            } else {
                self.recvs[index].matched = Some(self.request(seq, frame.address));
            }
            return Ok(());
        }
        let total = frame.len as usize;
        let content = match (eager, total) {
            (false, _) => UnexpectedContent::Announcement { address: frame.address },
            (true, 0) => UnexpectedContent::Complete(Vec::new()),
            (true, _) => UnexpectedContent::Partial(Vec::with_capacity(total)),
        };
        let arrival_index = any_source.arrival_index();
        self.unexpected.push(UnexpectedMessage { seq, arrival_index, call, content, claimed_by: None });
        if self.unexpected.is_over_limit() {
            return Err(PeerMisbehaved::CreditExceeded.into());
        }
        if eager && total > 0 {
            self.reading = ReadState::Unexpected;
        }
        Ok(())
    }

    /// Returns the index of the first receive that a message with this tag can match. A receive from any
    /// source becomes a receive from this peer if it is the first.
    pub(super) fn match_recv(&mut self, any_source: &mut AnySourceQueue, tag: u32) -> Option<usize> {
        let ours = |recv: &PendingRecv| recv.matched.is_none() && recv.posted.call.root == tag;
        let ours = self.recvs.iter().position(ours);
        let anybody = any_source.recvs.iter().position(|recv| recv.posted.call.root == tag);
        match (ours, anybody) {
            (_, None) => ours,
            (Some(index), Some(any)) if self.recvs[index].order < any_source.recvs[any].order => Some(index),
            (_, Some(any)) => {
                let any = any_source.recvs.remove(any)?;
                let recv = self.pending_recv(any.order, any.posted);
                self.recvs.push_back(recv);
                Some(self.recvs.len() - 1)
            }
        }
    }
}
