//! The reading side of messages.

use super::{
    ANNOUNCEMENTS, CREDIT_BYTES, EAGER_BYTES, Early, Mailbox, Match, MessageError, Open, Reading, Receiving,
    Stage, bare, check, place,
};
use crate::call::Call;
use crate::fault::moment;
use crate::frame::{Frame, HEADER_BYTES, Kind};
use crate::kernels::Source;
use crate::links::conn::{Conn, QUANTUM_BYTES};
use crate::links::hello::Credentials;

impl Mailbox {
    /// Reads available data with at most one system call. Returns whether anything moved.
    pub(super) fn read(
        &mut self,
        ours: &Credentials,
        open: &mut Open,
        conn: &mut Conn,
    ) -> Result<bool, MessageError> {
        let mut any = false;
        let mut asked = false;
        loop {
            let stepped = self.read_step(ours, open, conn)?;
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
                    let got = conn.recv(&mut recv.lent.bytes_mut(range)).map_err(MessageError::Broken)?;
                    recv.done += got;
                    moment("message received", recv.id, recv.done);
                    got
                }
                None => conn.fill(EAGER_BYTES).map_err(MessageError::Broken)?,
            };
            any |= got > 0;
        }
    }

    /// Returns the receive into whose buffer a large piece can be read directly, and the bytes to read.
    fn direct_target(&self, conn: &Conn) -> Option<(usize, usize)> {
        let Reading::Posted { id, .. } = self.reading else { return None };
        let index = self.recvs.iter().position(|recv| recv.id == id)?;
        let left = self.recvs[index].lent.len() - self.recvs[index].done;
        (left >= 4096 && conn.unread().is_empty()).then_some((index, left.min(QUANTUM_BYTES)))
    }

    /// Processes bytes that were read ahead. Returns whether anything could be done.
    fn read_step(
        &mut self,
        ours: &Credentials,
        open: &mut Open,
        conn: &mut Conn,
    ) -> Result<bool, MessageError> {
        match self.reading {
            Reading::Header => {
                let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else { return Ok(false) };
                let frame =
                    Frame::decode(bytes).map_err(|error| MessageError::Protocol(error.to_string()))?;
                conn.consume(HEADER_BYTES);
                self.header(ours, open, &frame)?;
                Ok(true)
            }
            Reading::Early { total, id } => {
                let Some(early) = self.early.iter_mut().find(|early| early.id == id) else {
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
                if let Some(claimed) = early.claimed {
                    self.hand_over(ours, id, claimed);
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
                Source::from(&conn.unread()[..take]).copy_to(&mut recv.lent.bytes_mut(range));
                conn.consume(take);
                recv.done += take;
                moment("message received", recv.id, recv.done);
                if recv.done < recv.lent.len() {
                    return Ok(take > 0);
                }
                let Some(recv) = self.recvs.remove(index) else { return Ok(true) };
                self.reading = Reading::Header;
                if eager {
                    self.owe(ours, recv.lent.len());
                }
                recv.ticket.complete(Ok(Some(self.envelope_of(recv.call))));
                Ok(true)
            }
        }
    }

    /// Gives an unexpected message to the receive that claimed it while it was read.
    fn hand_over(&mut self, ours: &Credentials, early: u64, recv: u64) {
        let early = self.early.iter().position(|message| message.id == early);
        let bytes = early.and_then(|index| self.early.remove(index)).and_then(|early| early.bytes);
        let recv = self.recvs.iter().position(|waiting| waiting.id == recv);
        let recv = recv.and_then(|index| self.recvs.remove(index));
        if let (Some(bytes), Some(mut recv)) = (bytes, recv) {
            self.kept -= bytes.len() + HEADER_BYTES;
            Source::from(&*bytes).copy_to(&mut recv.lent.bytes_mut(0..bytes.len()));
            self.owe(ours, bytes.len());
            recv.ticket.complete(Ok(Some(self.envelope_of(recv.call))));
        }
    }

    fn header(&mut self, ours: &Credentials, open: &mut Open, frame: &Frame) -> Result<(), MessageError> {
        let protocol = |what: String| Err(MessageError::Protocol(what));
        if (frame.generation, frame.group) != (ours.generation, ours.group) {
            return protocol(format!("a message of generation {}, group {}", frame.generation, frame.group));
        }
        match frame.kind {
            Kind::Eager | Kind::Rts => self.arrival(ours, open, frame),
            Kind::Cts => {
                let waiting =
                    place(&self.sends, frame.seq).filter(|&index| self.sends[index].stage != Stage::Held);
                let Some(index) = waiting else {
                    return protocol(format!("it asks for message {}, which does not wait", frame.seq));
                };
                let send = &mut self.sends[index];
                if std::mem::replace(&mut send.stage, Stage::Sent) == Stage::Sent {
                    return protocol(format!("it asks twice for message {}", frame.seq));
                }
                let (len, call) = (send.lent.len() as u64, send.call.encode());
                let header = Frame { len, call, ..bare(ours, Kind::Message, frame.seq) };
                self.push(ours, header, Some(frame.seq));
                self.announced -= 1;
                self.send_held(ours);
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
                self.send_held(ours);
                Ok(())
            }
            kind @ (Kind::Hello | Kind::Welcome | Kind::Proof | Kind::Refuse | Kind::Data | Kind::Open)
            | kind @ (Kind::State | Kind::Ask | Kind::Abort | Kind::Goodbye | Kind::Share) => {
                protocol(format!("a {kind:?} frame among messages"))
            }
        }
    }

    /// Handles a message or its announcement.
    fn arrival(&mut self, ours: &Credentials, open: &mut Open, frame: &Frame) -> Result<(), MessageError> {
        let call = Call::decode(frame.call).map_err(MessageError::Protocol)?;
        let (seq, eager) = (frame.seq, frame.kind == Kind::Eager);
        let expected = if eager { call.bytes() } else { 0 };
        if frame.len != expected || eager && call.bytes() > EAGER_BYTES as u64 {
            return Err(MessageError::Protocol(format!("{} bytes for {call}", frame.len)));
        }
        if let Some(index) = self.taker(open, call.root) {
            let recv = &mut self.recvs[index];
            check(call, recv.call, seq)?;
            recv.matched = Some(if eager { Match::Eager } else { Match::Large(seq) });
            if eager {
                self.reading = Reading::Posted { id: recv.id, eager: true };
            } else {
                self.push(ours, bare(ours, Kind::Cts, seq), None);
            }
            return Ok(());
        }
        let total = frame.len as usize;
        if eager {
            self.kept += total + HEADER_BYTES;
        } else {
            self.offers += 1;
        }
        if self.kept > CREDIT_BYTES || self.offers > ANNOUNCEMENTS {
            return Err(MessageError::Protocol("it sends more than it has credit for".to_owned()));
        }
        let (id, came) = (self.next_id, open.came);
        (self.next_id, open.came) = (id + 1, came + 1);
        let bytes = eager.then(|| Vec::with_capacity(total));
        let complete = !eager || total == 0;
        self.early.push_back(Early { id, seq, came, call, bytes, complete, claimed: None });
        if eager && total > 0 {
            self.reading = Reading::Early { total, id };
        }
        Ok(())
    }

    /// Returns the first receive that a message with this tag can match. If that is a receive from any
    /// source, it is moved to this mailbox first.
    pub(super) fn taker(&mut self, open: &mut Open, tag: u32) -> Option<usize> {
        let ours = |recv: &Receiving| recv.matched.is_none() && recv.call.root == tag;
        let ours = self.recvs.iter().position(ours);
        let anybody = open.recvs.iter().position(|recv| recv.call.root == tag);
        match (ours, anybody) {
            (_, None) => ours,
            (Some(index), Some(any)) if self.recvs[index].order < open.recvs[any].order => Some(index),
            (_, Some(any)) => {
                let any = open.recvs.remove(any)?;
                let recv = self.receiving(any.order, any.call, any.lent, any.ticket);
                self.recvs.push_back(recv);
                Some(self.recvs.len() - 1)
            }
        }
    }
}
