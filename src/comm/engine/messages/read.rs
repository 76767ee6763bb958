//! Reads message frames from the connection of a peer, and matches them with receives.

use super::{
    AnySourceQueue, EAGER_BYTES, Match, MessageError, PeerMessages, PendingRecv, ReadState, Stage,
    UnexpectedContent, UnexpectedMessage, check_type, plain_frame, send_index,
};
use crate::collectives::call::Call;
use crate::error::PeerMisbehaved;
use crate::fault::fault_point;
use crate::transport::frame::{Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::{Conn, MAX_READ_AHEAD_BYTES};
use crate::transport::links::hello::Credentials;

impl PeerMessages {
    /// Reads available data with at most one system call. Returns whether anything moved.
    pub(super) fn read(
        &mut self,
        ours: &Credentials,
        any_source: &mut AnySourceQueue,
        conn: &mut Conn,
    ) -> Result<bool, MessageError> {
        let mut any = false;
        let mut asked = false;
        loop {
            let stepped = self.read_step(ours, any_source, conn)?;
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
                    let got = conn.recv(&mut recv.buffer.bytes_mut(range)).map_err(MessageError::Broken)?;
                    recv.done += got;
                    fault_point("message received", recv.id, recv.done);
                    got
                }
                None => conn.fill(EAGER_BYTES).map_err(MessageError::Broken)?,
            };
            any |= got > 0;
        }
    }

    /// Returns the index of the receive into whose buffer the next bytes can be read directly, and how many.
    /// `None` if little is missing or if bytes were read ahead.
    fn direct_target(&self, conn: &Conn) -> Option<(usize, usize)> {
        let ReadState::Posted { id, .. } = self.reading else { return None };
        let index = self.recvs.iter().position(|recv| recv.id == id)?;
        let recv = &self.recvs[index];
        let left = recv.buffer.len().min(recv.message_bytes()).saturating_sub(recv.done);
        (left >= 4096 && conn.unread().is_empty()).then_some((index, left.min(MAX_READ_AHEAD_BYTES)))
    }

    /// Processes a header or elements among the bytes that were read ahead. Returns whether there were any.
    fn read_step(
        &mut self,
        ours: &Credentials,
        any_source: &mut AnySourceQueue,
        conn: &mut Conn,
    ) -> Result<bool, MessageError> {
        match self.reading {
            ReadState::Header => {
                let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else { return Ok(false) };
                let frame = Frame::decode(bytes)?;
                conn.consume(HEADER_BYTES);
                self.handle_header(ours, any_source, &frame)?;
                Ok(true)
            }
            ReadState::Unexpected { total, id } => {
                let unexpected = self.unexpected.get_mut(self.unexpected.index_of(id));
                let UnexpectedContent::Partial(bytes) = &mut unexpected.content else {
                    unreachable!("only small messages are read into the queue, until they are complete");
                };
                let take = conn.unread().len().min(total - bytes.len());
                bytes.extend_from_slice(&conn.unread()[..take]);
                conn.consume(take);
                if bytes.len() < total {
                    return Ok(take > 0);
                }
                let bytes = std::mem::take(bytes);
                self.reading = ReadState::Header;
                match unexpected.claimed_by {
                    Some(claimed) => self.deliver_claimed(ours, id, &bytes, claimed),
                    None => unexpected.content = UnexpectedContent::Complete(bytes),
                }
                Ok(true)
            }
            ReadState::Posted { id, eager } => {
                let index = self.recvs.iter().position(|recv| recv.id == id);
                let index = index.expect("a receive stays posted while its message is read");
                let recv = &mut self.recvs[index];
                let take = conn.unread().len().min(recv.message_bytes() - recv.done);
                recv.store(&conn.unread()[..take]);
                conn.consume(take);
                fault_point("message received", recv.id, recv.done);
                if recv.done < recv.message_bytes() {
                    return Ok(take > 0);
                }
                let recv = self.recvs.remove(index).expect("it was found there");
                self.reading = ReadState::Header;
                if eager {
                    self.return_credit(ours, recv.message_bytes());
                }
                recv.complete(self.peer);
                Ok(true)
            }
        }
    }

    /// Copies the unexpected message `unexpected`, now complete (`bytes`), to the receive that claimed it
    /// while it was being read. Completes that receive.
    fn deliver_claimed(&mut self, ours: &Credentials, unexpected: u64, bytes: &[u8], recv: u64) {
        self.unexpected.remove(self.unexpected.index_of(unexpected));
        let recv = self.recvs.iter().position(|waiting| waiting.id == recv);
        let recv = recv.and_then(|index| self.recvs.remove(index));
        let mut recv = recv.expect("a receive that has claimed a message is not cancelled");
        recv.store(bytes);
        self.return_credit(ours, bytes.len());
        recv.complete(self.peer);
    }

    fn handle_header(
        &mut self,
        ours: &Credentials,
        any_source: &mut AnySourceQueue,
        frame: &Frame,
    ) -> Result<(), MessageError> {
        let (generation, group) = (frame.generation, frame.group);
        if (generation, group) != (ours.generation, ours.group) {
            return Err(PeerMisbehaved::ForeignMessage { generation, group }.into());
        }
        match frame.kind {
            Kind::Eager | Kind::Rts => self.handle_message(ours, any_source, frame),
            Kind::Cts => {
                let waiting = send_index(&self.sends, frame.seq)
                    .filter(|&index| self.sends[index].stage != Stage::Held);
                let Some(index) = waiting else {
                    return Err(PeerMisbehaved::NotAnnounced { seq: frame.seq }.into());
                };
                let send = &mut self.sends[index];
                if std::mem::replace(&mut send.stage, Stage::Sent) == Stage::Sent {
                    return Err(PeerMisbehaved::AskedTwice { seq: frame.seq }.into());
                }
                let (len, call) = (send.buffer.len() as u64, send.call.encode());
                let header = Frame { len, call, ..plain_frame(ours, Kind::Message, frame.seq) };
                self.push(header, Some(frame.seq));
                self.announced -= 1;
                self.send_held(ours);
                Ok(())
            }
            Kind::Message => {
                let asked = |recv: &&PendingRecv| recv.matched == Some(Match::Large(frame.seq));
                let Some(recv) = self.recvs.iter().find(asked) else {
                    return Err(PeerMisbehaved::NotAskedFor { seq: frame.seq }.into());
                };
                if frame.len != recv.theirs.bytes() {
                    return Err(PeerMisbehaved::MessageLength { seq: frame.seq, len: frame.len }.into());
                }
                self.reading = ReadState::Posted { id: recv.id, eager: false };
                Ok(())
            }
            Kind::Credit => {
                self.credit.restore(frame.seq)?;
                self.send_held(ours);
                Ok(())
            }
            kind @ (Kind::Hello | Kind::Welcome | Kind::Proof | Kind::Refuse | Kind::Data | Kind::Open)
            | kind @ (Kind::State
            | Kind::StateQuery
            | Kind::Abort
            | Kind::Goodbye
            | Kind::Share
            | Kind::Close
            | Kind::Stream) => Err(PeerMisbehaved::NoMessageFrame { kind }.into()),
        }
    }

    /// Handles the header of a small message or the announcement of a large one: matches it with a receive,
    /// or keeps it as unexpected.
    fn handle_message(
        &mut self,
        ours: &Credentials,
        any_source: &mut AnySourceQueue,
        frame: &Frame,
    ) -> Result<(), MessageError> {
        let call = Call::decode(frame.call)?;
        let (seq, eager) = (frame.seq, frame.kind == Kind::Eager);
        let expected = if eager { call.bytes() } else { 0 };
        if frame.len != expected || eager && call.bytes() > EAGER_BYTES as u64 {
            return Err(PeerMisbehaved::EagerLength { len: frame.len, call }.into());
        }
        if let Some(index) = self.match_recv(any_source, call.root) {
            let recv = &mut self.recvs[index];
            check_type(call, recv.call, seq)?;
            recv.theirs = call;
            recv.matched = Some(if eager { Match::Eager } else { Match::Large(seq) });
            if eager {
                self.reading = ReadState::Posted { id: recv.id, eager: true };
            } else {
                self.push(plain_frame(ours, Kind::Cts, seq), None);
            }
            return Ok(());
        }
        let total = frame.len as usize;
        let (id, arrival_index) = (self.next_id, any_source.unexpected_count);
        (self.next_id, any_source.unexpected_count) = (id + 1, arrival_index + 1);
        let content = match (eager, total) {
            (false, _) => UnexpectedContent::Announcement,
            (true, 0) => UnexpectedContent::Complete(Vec::new()),
            (true, _) => UnexpectedContent::Partial(Vec::with_capacity(total)),
        };
        let message = UnexpectedMessage { id, seq, arrival_index, call, content, claimed_by: None };
        self.unexpected.push(message);
        if self.unexpected.is_over_limit() {
            return Err(PeerMisbehaved::CreditExceeded.into());
        }
        if eager && total > 0 {
            self.reading = ReadState::Unexpected { total, id };
        }
        Ok(())
    }

    /// Returns the index of the first receive that a message with this tag can match. A receive from any
    /// source becomes a receive from this peer if it is the first.
    pub(super) fn match_recv(&mut self, any_source: &mut AnySourceQueue, tag: u32) -> Option<usize> {
        let ours = |recv: &PendingRecv| recv.matched.is_none() && recv.call.root == tag;
        let ours = self.recvs.iter().position(ours);
        let anybody = any_source.recvs.iter().position(|recv| recv.call.root == tag);
        match (ours, anybody) {
            (_, None) => ours,
            (Some(index), Some(any)) if self.recvs[index].order < any_source.recvs[any].order => Some(index),
            (_, Some(any)) => {
                let any = any_source.recvs.remove(any)?;
                let recv = self.pending_recv(any.order, any.call, any.buffer, any.completion);
                self.recvs.push_back(recv);
                Some(self.recvs.len() - 1)
            }
        }
    }
}
