//! A connection: a link, and a buffer of bytes that were read from it before they are needed (read-ahead).

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::{Deref, DerefMut};

use super::read_ahead::{MAX_READ_AHEAD_BYTES, MIN_READ_AHEAD_BYTES, ReadAhead};
use super::{CellHeader, CellMessage, Link};
use crate::collectives::kernels::SourceBytes;

/// Most bytes that one write passes to a connection, so that other peers get their turn. A socket takes at most the bytes
/// that fit into its send buffer, 4 MiB in Linux. Few long writes are faster: 4 MiB in writes of 256 KiB take up to 1.2
/// times as long.
pub(crate) const MAX_WRITE_BYTES: usize = 4 << 20;

/// Most bytes that are read before the read-ahead buffer exists.
const FIRST_READ_BYTES: usize = 512;

/// The connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnError {
    /// The peer closed the connection.
    #[error("connection closed")]
    Closed,
    /// The kernel reported an error on the connection.
    #[error("{0}")]
    Failed(io::Error),
}

/// A link and the bytes that were read from it but not used yet.
#[derive(Debug)]
pub(crate) struct Conn {
    link: Box<dyn Link>,
    ahead: ReadAhead,
    /// Bytes that were read ahead, and that follow the message which the link [reads elsewhere](Link::reads_elsewhere).
    later: Vec<u8>,
}

impl Conn {
    pub(crate) fn new(link: Box<dyn Link>) -> Self {
        Self { link, ahead: ReadAhead::default(), later: Vec::new() }
    }

    /// Returns the bytes that were read and not consumed.
    pub(crate) fn unread(&self) -> &[u8] {
        self.ahead.unread()
    }

    pub(crate) fn consume(&mut self, bytes: usize) {
        self.ahead.consume(bytes);
    }

    /// Reads from the link into the read-ahead buffer, up to `limit` unread bytes in it. Returns the number
    /// of bytes read, 0 if none are available now.
    pub(crate) fn fill(&mut self, limit: usize) -> Result<usize, ConnError> {
        let unread = self.ahead.unread().len();
        let limit = limit.min(MAX_READ_AHEAD_BYTES);
        if limit <= unread {
            return Ok(0);
        }
        if self.ahead.is_new() {
            let mut first = [0; FIRST_READ_BYTES];
            let bytes = recv(&mut *self.link, &mut self.later, &mut first[..limit.min(FIRST_READ_BYTES)])?;
            self.ahead.begin(&first[..bytes]);
            return Ok(bytes);
        }
        let bytes = recv(&mut *self.link, &mut self.later, self.ahead.space(limit - unread))?;
        self.ahead.add(bytes);
        Ok(bytes)
    }

    /// Reads a header of `header` bytes into the read-ahead buffer, which has less, and the bytes behind it into `into`, by
    /// one system call. Returns the number of bytes in `into`. The caller must know that they belong there, or end the group.
    pub(crate) fn fill_header(&mut self, header: usize, into: &mut [u8]) -> Result<usize, ConnError> {
        if self.ahead.is_new() || !self.later.is_empty() {
            return self.fill(header).map(|_| 0);
        }
        let most = into.len().min(MAX_READ_AHEAD_BYTES - header);
        let rest = header - self.ahead.unread().len();
        let parts = &mut [IoSliceMut::new(self.ahead.space(rest)), IoSliceMut::new(&mut into[..most])];
        let bytes = received(|| self.link.try_recv_vectored(parts))?;
        self.ahead.add(bytes.min(rest));
        Ok(bytes.saturating_sub(rest))
    }

    /// Reads from the link into `parts`; the read-ahead buffer must be empty. Returns how many bytes, maybe 0.
    pub(crate) fn recv_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<usize, ConnError> {
        debug_assert!(self.unread().is_empty());
        received(|| self.link.try_recv_vectored(parts))
    }

    /// Reads from the link into `into`; the read-ahead buffer must be empty. Returns how many bytes, maybe 0.
    pub(crate) fn recv(&mut self, into: &mut [u8]) -> Result<usize, ConnError> {
        debug_assert!(self.unread().is_empty());
        recv(&mut *self.link, &mut self.later, into)
    }

    /// Moves bytes that were read ahead to `into`; if there are none, reads from the link. Returns how many.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> Result<usize, ConnError> {
        let ahead = self.unread().len().min(into.len());
        if ahead == 0 {
            return self.recv(into);
        }
        SourceBytes::from(&self.unread()[..ahead]).copy_to(&mut into[..ahead]);
        self.consume(ahead);
        Ok(ahead)
    }

    /// Sends bytes from the front of `parts`. Returns their number, 0 if the link can take none now.
    pub(crate) fn send(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, ConnError> {
        loop {
            match self.link.try_send(parts) {
                Ok(bytes) => return Ok(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) => check_interrupted(error)?,
            }
        }
    }

    /// Sends message number `seq` in a cell of the link. Returns false if its header must go through the stream.
    #[inline]
    pub(crate) fn send_cell(&mut self, seq: u64, header: CellHeader, data: &[u8]) -> Result<bool, ConnError> {
        self.link.try_send_cell(seq + 1, header, data).map_err(ConnError::Failed)
    }

    /// Returns message number `seq`, if it is in the next cell of the link. A caller that waits for it gives the number of
    /// bytes of data that it expects, as `awaited`. Then the link looks several times. A message whose data is in the
    /// stream is returned only when the data is next there.
    #[inline]
    pub(crate) fn cell(&mut self, seq: u64, awaited: Option<usize>) -> Option<CellMessage> {
        // A cell that was never used has stamp 0, so no message has it.
        let message = self.link.cell(seq + 1, awaited)?;
        message.data_at.is_none_or(|at| at <= self.consumed()).then_some(message)
    }

    /// Copies the data of the message that [`Self::cell`] returned, and empties its cell. The length of `into` is that of
    /// the data in the cell, at most [`CELL_BYTES`](super::CELL_BYTES).
    #[inline]
    pub(crate) fn take_cell(&mut self, into: &mut [u8]) -> Result<(), ConnError> {
        self.link.take_cell(into).map_err(ConnError::Failed)
    }

    /// Empties the cell of a message whose data is in the stream from `at` on, so that the data is read next.
    #[inline]
    pub(crate) fn take_header(&mut self, at: u64) -> Result<(), ConnError> {
        if at != self.consumed() {
            let what = "shared memory is corrupt: a message has its data where other data was";
            return Err(ConnError::Failed(io::Error::new(io::ErrorKind::InvalidData, what)));
        }
        self.take_cell(&mut [])?;
        if self.link.reads_elsewhere() && !self.unread().is_empty() {
            self.later.splice(..0, self.ahead.unread().iter().copied());
            self.ahead.consume(self.ahead.unread().len());
        }
        Ok(())
    }

    /// Returns the number of bytes of the stream that were consumed.
    fn consumed(&self) -> u64 {
        self.link.received() - (self.unread().len() + self.later.len()) as u64
    }

    /// Reads and discards available bytes. Returns true if the peer has closed its end or the link failed.
    pub(crate) fn discard(&mut self) -> bool {
        for _ in 0..64 {
            self.consume(self.unread().len());
            match self.fill(MIN_READ_AHEAD_BYTES) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(_) => return true,
            }
        }
        self.consume(self.unread().len());
        false
    }
}

/// A connection has the methods of its link. Only the methods of [`Conn`] itself may move bytes.
impl Deref for Conn {
    type Target = dyn Link;

    fn deref(&self) -> &Self::Target {
        &*self.link
    }
}

impl DerefMut for Conn {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.link
    }
}

/// Receives bytes from the link, or from `later` those that it has returned too early.
#[inline]
fn recv(link: &mut dyn Link, later: &mut Vec<u8>, into: &mut [u8]) -> Result<usize, ConnError> {
    if !later.is_empty() && !link.reads_elsewhere() {
        let bytes = later.len().min(into.len());
        into[..bytes].copy_from_slice(&later[..bytes]);
        later.drain(..bytes);
        return Ok(bytes);
    }
    received(|| link.try_recv(into))
}

/// Calls `receive` until it is not interrupted. Returns the number of received bytes, maybe 0.
#[inline]
fn received(mut receive: impl FnMut() -> io::Result<usize>) -> Result<usize, ConnError> {
    loop {
        match receive() {
            Ok(0) => return Err(ConnError::Closed),
            Ok(bytes) => return Ok(bytes),
            // Checked first: a rank that waits asks again and again.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) => check_interrupted(error)?,
        }
    }
}

/// Returns an error unless an attempt was only interrupted.
#[cold]
fn check_interrupted(error: io::Error) -> Result<(), ConnError> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Err(ConnError::Closed),
        _ => Err(ConnError::Failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::frame::HEADER_BYTES;
    use crate::transport::links::fake;

    #[test]
    fn bytes_behind_a_header_are_read_with_it() {
        let mut random = convoke_testkit::Random::new("bytes_behind_a_header_are_read_with_it");
        let script = fake::FaultScript { step: 400, seed: random.next(), ..fake::FaultScript::default() };
        let (mut a, b) = fake::pair(script);
        let mut conn = Conn::new(Box::new(b));
        let sent: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let (mut at, mut got, mut behind) = (0, Vec::new(), 0);
        while got.len() < sent.len() {
            if at < sent.len() {
                at += a.try_send(&[IoSlice::new(&sent[at..])]).unwrap_or(0);
            }
            let mut into = vec![0; random.below(300)];
            let used = if conn.unread().len() < HEADER_BYTES {
                conn.fill_header(HEADER_BYTES, &mut into).unwrap()
            } else {
                0
            };
            if used > 0 {
                assert_eq!(
                    conn.unread().len(),
                    HEADER_BYTES,
                    "the header is whole if bytes behind it were read"
                );
                behind += used;
            }
            let take = if used > 0 { HEADER_BYTES } else { conn.unread().len().min(random.below(200)) };
            let take = if at == sent.len() { conn.unread().len() } else { take };
            got.extend_from_slice(&conn.unread()[..take]);
            got.extend_from_slice(&into[..used]);
            conn.consume(take);
        }
        assert_eq!(got, sent);
        assert!(behind > 0, "no byte was read behind a header");
    }

    #[test]
    fn read_ahead_keeps_order_when_the_buffer_moves() {
        let (mut a, b) = fake::pair(fake::FaultScript::default());
        let mut conn = Conn::new(Box::new(b));
        let sent: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let (mut at, mut got) = (0, Vec::new());
        while got.len() < sent.len() {
            if at < sent.len() {
                at += a.try_send(&[IoSlice::new(&sent[at..])]).unwrap_or(0);
            }
            conn.fill(MIN_READ_AHEAD_BYTES + 7).unwrap();
            let take = conn.unread().len().saturating_sub(3).max(usize::from(at == sent.len()));
            let take = take.min(conn.unread().len());
            got.extend_from_slice(&conn.unread()[..take]);
            conn.consume(take);
        }
        assert_eq!(got, sent);
    }
}
