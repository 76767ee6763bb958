//! The frames and bytes that came for a channel and that its group has not read yet.

use std::io;

use crate::collectives::call::{Call, CallKind};
use crate::transport::frame::{Frame, Kind};
use crate::transport::links::conn::ConnError;
use crate::transport::links::hello::ConnectionKind;

/// Most bytes of frames that a channel keeps until its group reads them; beyond this, reports of waits are
/// dropped.
const REPORT_BYTES: usize = 64 << 10;
/// Most bytes of frames that a channel keeps. A peer that sends more ends its channel.
const MAX_BYTES: usize = 1 << 20;
/// Most bytes of an invalid frame that a channel keeps, for the error message.
const MAX_INVALID_BYTES: usize = 8 << 10;

/// Most bytes that a data link sends before it has a connection of its own.
pub(super) const MAX_STREAM_BYTES: usize = 64 << 10;

/// The receiving end of a channel.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    /// Why no more frames come; `None` while the channel is open.
    pub(super) ended: Option<ConnError>,
    /// This rank has closed its end.
    pub(super) closed: bool,
    /// The group has been told that there is something to read.
    pub(super) announced: bool,
    /// The group waits until the connection has sent its bytes.
    pub(super) awaits_room: bool,
    /// The bytes of the data links for collectives and for messages.
    pub(super) streams: [StreamBytes; 2],
    /// The group has been told that there are bytes of data links.
    pub(super) announced_data: bool,
}

impl Inbox {
    pub(super) fn push(&mut self, frame: &Frame, bytes: &[u8]) {
        if self.ended.is_some() || self.closed {
            return;
        }
        if self.bytes.len() + bytes.len() > MAX_BYTES {
            let why = io::Error::new(io::ErrorKind::InvalidData, "it sends control frames without end");
            self.ended = Some(ConnError::Failed(why));
        } else if !is_report(frame) || self.bytes.len() < REPORT_BYTES {
            self.bytes.extend_from_slice(bytes);
        }
    }

    /// Keeps the bytes of a Stream frame.
    pub(super) fn push_stream(&mut self, frame: &Frame, bytes: &[u8]) {
        if self.ended.is_some() || self.closed {
            return;
        }
        if !stream_index(frame.seq).is_some_and(|index| self.streams[index].push(bytes)) {
            let why = io::Error::new(io::ErrorKind::InvalidData, "it sends more data than it may");
            self.ended = Some(ConnError::Failed(why));
        }
    }

    pub(super) fn push_invalid(&mut self, bytes: &[u8]) {
        if self.ended.is_none() && !self.closed && self.bytes.len() < REPORT_BYTES + MAX_INVALID_BYTES {
            self.bytes.extend_from_slice(&bytes[..bytes.len().min(MAX_INVALID_BYTES)]);
        }
    }

    pub(super) fn take(&mut self, into: &mut [u8]) -> Option<io::Result<usize>> {
        if self.bytes.is_empty() {
            return ended(self);
        }
        let bytes = self.bytes.len().min(into.len());
        into[..bytes].copy_from_slice(&self.bytes[..bytes]);
        self.bytes.drain(..bytes);
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
        }
        Some(Ok(bytes))
    }
}

/// Returns whether a frame only reports or asks in which call a rank waits. The report of a monitored barrier
/// is more: it says that the rank has arrived.
fn is_report(frame: &Frame) -> bool {
    match frame.kind {
        Kind::State => Call::decode(frame.call).is_ok_and(|call| call.kind != CallKind::MonitoredBarrier),
        kind => kind == Kind::StateQuery,
    }
}

/// Returns what a read returns when the channel has ended.
pub(super) fn ended(inbox: &Inbox) -> Option<io::Result<usize>> {
    match inbox.ended.as_ref()? {
        ConnError::Closed => Some(Ok(0)),
        ConnError::Failed(error) => Some(Err(copy(error))),
    }
}

/// Returns an error equal to `error`: the end of one connection is the end of several channels.
pub(super) fn copy(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

pub(super) fn copy_end(how: &ConnError) -> ConnError {
    match how {
        ConnError::Closed => ConnError::Closed,
        ConnError::Failed(error) => ConnError::Failed(copy(error)),
    }
}

/// The bytes of one link that came in Stream frames and were not read yet.
#[derive(Debug, Default)]
pub(super) struct StreamBytes {
    bytes: Vec<u8>,
    received: usize,
    pub(super) ended: bool,
}

impl StreamBytes {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Keeps the bytes of a Stream frame. Returns false if they are more than a link may send.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        self.received += bytes.len();
        self.ended |= bytes.is_empty();
        self.bytes.extend_from_slice(bytes);
        self.received <= MAX_STREAM_BYTES
    }

    pub(super) fn take(&mut self, into: &mut [u8]) -> usize {
        let bytes = self.bytes.len().min(into.len());
        into[..bytes].copy_from_slice(&self.bytes[..bytes]);
        self.bytes.drain(..bytes);
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
        }
        bytes
    }
}

/// Returns the place of a kind of data link among the streams of a channel; `None` for a number of no such
/// kind.
pub(super) fn stream_index(number: u64) -> Option<usize> {
    match u8::try_from(number).ok().and_then(ConnectionKind::from_wire)? {
        ConnectionKind::Control => None,
        ConnectionKind::Collective => Some(0),
        ConnectionKind::Message => Some(1),
    }
}
