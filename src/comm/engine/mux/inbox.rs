//! The frames and bytes that came for a channel and that its group has not read yet.

use std::io;

use crate::collectives::call::{Call, CallKind};
use crate::transport::frame::{Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::ConnError;
use crate::transport::links::hello::ConnectionKind;

/// Most bytes of unread frames that a channel keeps; beyond this, reports of waits are dropped.
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
    /// Keeps a frame, whose encoded bytes are `bytes`.
    pub(super) fn push(&mut self, frame: &Frame, bytes: &[u8]) {
        if self.ended.is_some() || self.closed {
            return;
        }
        if frame.kind == Kind::Stream {
            let stream = stream_index(frame.seq).map(|index| &mut self.streams[index]);
            if !stream.is_some_and(|stream| stream.push(&bytes[HEADER_BYTES..])) {
                self.fail("it sends more data than it may");
            }
        } else if self.bytes.len() + bytes.len() > MAX_BYTES {
            self.fail("it sends control frames without end");
        } else if !is_report(frame) || self.bytes.len() < REPORT_BYTES {
            self.bytes.extend_from_slice(bytes);
        }
    }

    fn fail(&mut self, what: &'static str) {
        self.ended = Some(ConnError::Failed(io::Error::new(io::ErrorKind::InvalidData, what)));
    }

    pub(super) fn push_invalid(&mut self, bytes: &[u8]) {
        if self.ended.is_none() && !self.closed && self.bytes.len() < REPORT_BYTES + MAX_INVALID_BYTES {
            self.bytes.extend_from_slice(&bytes[..bytes.len().min(MAX_INVALID_BYTES)]);
        }
    }

    /// Reads control frames; `None` if no more have come yet.
    pub(super) fn take(&mut self, into: &mut [u8]) -> Option<io::Result<usize>> {
        if self.bytes.is_empty() { self.end() } else { Some(Ok(take_bytes(&mut self.bytes, into))) }
    }

    /// Returns what a read returns when the channel has ended.
    pub(super) fn end(&self) -> Option<io::Result<usize>> {
        match copy_end(self.ended.as_ref()?) {
            ConnError::Closed => Some(Ok(0)),
            ConnError::Failed(error) => Some(Err(error)),
        }
    }
}

/// Moves bytes from the front of `bytes` to `into`, and returns their number. Frees `bytes` if none are left.
pub(super) fn take_bytes(bytes: &mut Vec<u8>, into: &mut [u8]) -> usize {
    let count = bytes.len().min(into.len());
    into[..count].copy_from_slice(&bytes[..count]);
    bytes.drain(..count);
    if bytes.is_empty() {
        *bytes = Vec::new();
    }
    count
}

/// Returns whether a frame only reports or asks in which call a rank waits. The report of a monitored barrier
/// is more: it says that the rank has arrived.
fn is_report(frame: &Frame) -> bool {
    match frame.kind {
        Kind::State => Call::decode(frame.call).is_ok_and(|call| call.kind != CallKind::MonitoredBarrier),
        kind => kind == Kind::StateQuery,
    }
}

/// Returns an error equal to `how`: the end of one connection is the end of several channels.
pub(super) fn copy_end(how: &ConnError) -> ConnError {
    match how {
        ConnError::Closed => ConnError::Closed,
        ConnError::Failed(error) => ConnError::Failed(match error.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(error.kind(), error.to_string()),
        }),
    }
}

/// The bytes of one link that came in Stream frames and were not read yet.
#[derive(Debug, Default)]
pub(super) struct StreamBytes {
    pub(super) bytes: Vec<u8>,
    received: usize,
    pub(super) ended: bool,
}

impl StreamBytes {
    /// Keeps the bytes of a Stream frame. Returns false if they are more than a link may send.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        self.received += bytes.len();
        self.ended |= bytes.is_empty();
        self.bytes.extend_from_slice(bytes);
        self.received <= MAX_STREAM_BYTES
    }
}

/// Returns the index of a kind of data link among the streams of a channel; `None` for another number.
pub(super) fn stream_index(number: u64) -> Option<usize> {
    match ConnectionKind::from_wire(number)? {
        ConnectionKind::Control => None,
        ConnectionKind::Collective => Some(0),
        ConnectionKind::Message => Some(1),
    }
}
