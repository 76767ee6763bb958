//! A data link between two ranks of a group that was made from another group.
//!
//! It begins on the connection between the processes of the ranks, so that a group which moves few bytes
//! needs no connection of its own. In each direction it may carry [`MAX_STREAM_BYTES`] in this way, in Stream
//! frames, which the receiver always keeps; so the data of one group never holds up another. A rank that has
//! more to send asks for a connection of the link's own. When that is open, each rank ends its Stream frames
//! with an empty one, and sends the rest over the new connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::channel::Channel;
use super::inbox::{MAX_STREAM_BYTES, stream_index, take_bytes};
use super::state::Event;
use crate::transport::frame::{CONTROL_PAYLOAD_BYTES, Frame, Kind};
use crate::transport::links::Link;
use crate::transport::links::conn::{Conn, ConnError};
use crate::transport::links::hello::ConnectionKind;

/// A rank asks for a connection when it has this many bytes to send, together with those that it has sent.
const MANY_BYTES: usize = 32 << 10;

#[derive(Debug)]
pub(super) struct DataLink {
    channel: Channel,
    kind: ConnectionKind,
    /// The connection of its own.
    own: Option<Conn>,
    /// Bytes sent in Stream frames.
    sent: usize,
    has_asked: bool,
    /// This rank sends over its own connection.
    sends_on_own: bool,
    /// The peer sends over its own connection, and all bytes of Stream frames have been read.
    receives_on_own: bool,
}

impl DataLink {
    pub(super) fn new(channel: Channel, kind: ConnectionKind) -> Self {
        let (has_asked, sends_on_own, receives_on_own) = (false, false, false);
        Self { channel, kind, own: None, sent: 0, has_asked, sends_on_own, receives_on_own }
    }

    fn frame(&self, bytes: usize) -> Frame {
        let Channel { mux, group, .. } = &self.channel;
        let header = Frame::empty(Kind::Stream, (mux.generation, *group), self.kind.to_wire().into());
        Frame { len: bytes as u64, ..header }
    }

    /// Sends bytes in Stream frames.
    fn send_frames(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        if self.sent + total > MANY_BYTES && !std::mem::replace(&mut self.has_asked, true) {
            let Channel { mux, group, rank } = &self.channel;
            mux.lock().push(*group, Event::NeedsConnection(*rank, self.kind));
        }
        let bytes = total.min(MAX_STREAM_BYTES - self.sent);
        if bytes == 0 && total > 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut rest = parts.iter().flat_map(|part| part.iter().copied()).take(bytes);
        let mut frames = Vec::new();
        for start in (0..bytes).step_by(CONTROL_PAYLOAD_BYTES) {
            let len = (bytes - start).min(CONTROL_PAYLOAD_BYTES);
            frames.extend_from_slice(&self.frame(len).encode());
            frames.extend(rest.by_ref().take(len));
        }
        self.channel.try_send(&[IoSlice::new(&frames)])?;
        self.sent += bytes;
        Ok(bytes)
    }

    /// Receives bytes of Stream frames; `None` if all further bytes come over the link's own connection.
    fn recv_frames(&mut self, into: &mut [u8]) -> Option<io::Result<usize>> {
        let index = stream_index(self.kind.to_wire().into())?;
        let Channel { ref mux, group, rank } = self.channel;
        let mut state = mux.lock();
        for attempt in 0..2 {
            let Some((_, inbox)) = state.channel(group, rank) else { return Some(Ok(0)) };
            let stream = &mut inbox.streams[index];
            match take_bytes(&mut stream.bytes, into) {
                0 if stream.ended => {
                    self.receives_on_own = true;
                    return None;
                }
                0 if attempt == 0 => state.read_channel(group, rank),
                0 => return Some(inbox.end().unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))),
                bytes => {
                    if !stream.bytes.is_empty() {
                        state.announce_data(group, rank);
                    }
                    return Some(Ok(bytes));
                }
            }
        }
        unreachable!("the second attempt returns")
    }
}

fn moved(result: Result<usize, ConnError>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(io::ErrorKind::WouldBlock.into()),
        Ok(bytes) => Ok(bytes),
        Err(ConnError::Closed) => Err(io::ErrorKind::BrokenPipe.into()),
        Err(ConnError::Failed(error)) => Err(error),
    }
}

fn received_on_own(result: Result<usize, ConnError>) -> io::Result<usize> {
    match result {
        Err(ConnError::Closed) => Ok(0),
        received => moved(received),
    }
}

impl Link for DataLink {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.own.is_some() && !self.sends_on_own {
            let Channel { mux, group, rank } = &self.channel;
            mux.lock().push_frame(*group, *rank, &self.frame(0));
            self.sends_on_own = true;
        }
        match &mut self.own {
            Some(own) => moved(own.send(parts)),
            None => self.send_frames(parts),
        }
    }

    /// Receives what has arrived. If bytes remain that no descriptor reports, announces them again: a reader
    /// of messages reads once for each event.
    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !self.receives_on_own
            && let Some(received) = self.recv_frames(into)
        {
            return received;
        }
        // The peer may have sent the last frame before this rank knows the connection.
        let Some(own) = &mut self.own else { return Err(io::ErrorKind::WouldBlock.into()) };
        let received = own.read(into);
        if !own.unread().is_empty() {
            self.channel.mux.lock().announce_data(self.channel.group, self.channel.rank);
        }
        received_on_own(received)
    }

    fn try_recv_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.own {
            Some(own) if self.receives_on_own && own.unread().is_empty() => {
                received_on_own(own.recv_vectored(parts))
            }
            _ => self.try_recv(&mut parts[0]),
        }
    }

    fn close_write(&mut self) {
        if let Some(own) = &mut self.own {
            own.close_write();
        }
    }

    fn is_flushed(&self) -> bool {
        self.channel.is_flushed() && self.own.as_ref().is_none_or(|own| own.is_flushed())
    }

    fn skip_time_wait(&self) {
        if let Some(own) = &self.own {
            own.skip_time_wait();
        }
    }

    fn time_since_ack(&self) -> Option<Duration> {
        self.own.as_ref()?.time_since_ack()
    }

    fn sender_cpu(&self) -> Option<usize> {
        self.own.as_ref().map_or_else(|| self.channel.sender_cpu(), |own| own.sender_cpu())
    }

    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        self.own.as_ref()?.pollable()
    }

    fn awaits_connection(&self) -> bool {
        self.own.is_none()
    }

    fn adopt(&mut self, conn: Conn) {
        self.own.get_or_insert(conn);
    }
}
