//! The control connection to one other process of the job, which all common groups use.

use std::collections::HashSet;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use convoke_env::Generation;

use super::closing::ClosingConn;
use crate::transport::frame::{CONTROL_PAYLOAD_BYTES, Frame, HEADER_BYTES};
use crate::transport::links::conn::{Conn, ConnError};

/// Most bytes that wait to be sent; while there are more, no group may add frames.
const MAX_UNSENT_BYTES: usize = 256 << 10;

#[derive(Debug, Default)]
pub(super) struct ProcessLink {
    /// `None` until the connection is open, and for this process itself.
    pub(super) conn: Option<Conn>,
    /// Why the connection has ended.
    pub(super) ended: Option<ConnError>,
    /// Bytes of whole frames, without those that were sent already.
    unsent: Vec<u8>,
    /// The connection is watched for room to write.
    pub(super) watches_room: bool,
    /// The process has sent bytes that are no frame of a common group. No later byte can be assigned.
    pub(super) invalid: bool,
    /// Groups that this process has closed, and the other process has not. Their frames are dropped.
    pub(super) half_closed: HashSet<u64>,
}

impl ProcessLink {
    pub(super) fn is_open(&self) -> bool {
        self.conn.is_some() && self.ended.is_none()
    }

    /// Returns the descriptor of the open connection.
    pub(super) fn pollable(&self) -> Option<BorrowedFd<'_>> {
        self.conn.as_ref().filter(|_| self.ended.is_none())?.pollable()
    }

    /// Returns the next bytes that were read ahead, with their frame if valid; `None` until it is complete.
    pub(super) fn next_input(&mut self, generation: Generation) -> Option<(Option<Frame>, Vec<u8>)> {
        let conn = self.conn.as_mut()?;
        let unread = conn.unread();
        if !self.invalid {
            match Frame::decode(unread.first_chunk::<HEADER_BYTES>()?) {
                Ok(frame) if frame.generation == generation && !frame.kind.carries_elements() => {
                    let bytes = unread.get(..HEADER_BYTES + frame.len as usize)?.to_vec();
                    conn.consume(bytes.len());
                    return Some((Some(frame), bytes));
                }
                Ok(_) | Err(_) => self.invalid = true,
            }
        }
        let bytes = unread.to_vec();
        conn.consume(bytes.len());
        (!bytes.is_empty()).then_some((None, bytes))
    }

    /// Reads from the connection. Returns whether anything came.
    pub(super) fn fill(&mut self) -> Result<bool, ConnError> {
        let Some(conn) = self.conn.as_mut().filter(|_| self.ended.is_none()) else { return Ok(false) };
        Ok(conn.fill(HEADER_BYTES + CONTROL_PAYLOAD_BYTES)? > 0)
    }

    /// Takes whole frames to send: all of them, or none if too many bytes wait already.
    pub(super) fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.ended.is_some() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if self.unsent.len() > MAX_UNSENT_BYTES {
            self.flush();
        }
        if self.unsent.len() > MAX_UNSENT_BYTES {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let before = self.unsent.len();
        parts.iter().for_each(|part| self.unsent.extend_from_slice(part));
        let bytes = self.unsent.len() - before;
        self.flush();
        Ok(bytes)
    }

    /// Adds a frame to the frames to send, however many there are.
    pub(super) fn push(&mut self, frame: &Frame) {
        if self.is_open() {
            self.unsent.extend_from_slice(&frame.encode());
            self.flush();
        }
    }

    /// Sends what the connection takes now.
    pub(super) fn flush(&mut self) {
        let has_unsent = self.has_unsent();
        if let Some(conn) = self.conn.as_mut().filter(|_| has_unsent) {
            match conn.send(&[IoSlice::new(&self.unsent)]) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                // Nobody will read these bytes. That the connection is broken is detected when it is read.
                Err(_) => self.unsent.clear(),
            }
        }
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.is_open() && !self.unsent.is_empty()
    }

    /// Returns whether the kernel of the process has acknowledged all bytes.
    pub(super) fn is_flushed(&self) -> bool {
        !self.has_unsent() && self.conn.as_ref().is_none_or(|conn| conn.is_flushed())
    }

    /// Ends the link. Returns the connection, if it was open, with the bytes that wait to be sent.
    pub(super) fn close(&mut self) -> Option<ClosingConn> {
        let (unsent, was_open) = (std::mem::take(&mut self.unsent), self.is_open());
        self.ended.get_or_insert(ConnError::Closed);
        let conn = self.conn.take().filter(|_| was_open)?;
        Some(ClosingConn::new(conn, unsent, false))
    }
}
