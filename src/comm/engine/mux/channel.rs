//! A channel: the control link between two ranks of a group, over the connection between their processes.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use super::Mux;
use super::data::{StreamBytes, stream_index};
use crate::collectives::call::{Call, CallKind};
use crate::transport::frame::{Frame, Kind};
use crate::transport::links::Link;
use crate::transport::links::conn::ConnError;

/// Most bytes of frames that a channel keeps until its group reads them; beyond this, reports of waits are
/// dropped.
const REPORT_BYTES: usize = 64 << 10;
/// Most bytes of frames that a channel keeps. A peer that sends more ends its channel.
const MAX_BYTES: usize = 1 << 20;
/// Most bytes of an invalid frame that a channel keeps, for the error message.
const MAX_INVALID_BYTES: usize = 8 << 10;

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) mux: Arc<Mux>,
    pub(super) group: u64,
    pub(super) rank: usize,
}

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

    fn take(&mut self, into: &mut [u8]) -> Option<io::Result<usize>> {
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

impl Link for Channel {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.mux.lock().send(&self.mux.poller, self.group, self.rank, parts)
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut state = self.mux.lock();
        let Some((_, inbox)) = state.channel(self.group, self.rank) else { return Ok(0) };
        if let Some(taken) = inbox.take(into) {
            return taken;
        }
        state.read_channel(&self.mux.poller, self.group, self.rank);
        let inbox = state.channel(self.group, self.rank).map(|(_, inbox)| inbox);
        inbox.and_then(|inbox| inbox.take(into)).unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    /// Closes the channel; the connection stays open for other groups.
    fn close_write(&mut self) {
        self.mux.lock().close_channel(&self.mux.poller, self.group, self.rank);
    }

    fn is_flushed(&self) -> bool {
        let mut state = self.mux.lock();
        let Some((link, _)) = state.channel(self.group, self.rank) else { return true };
        link.is_flushed()
    }

    fn has_unsent(&self) -> bool {
        let mut state = self.mux.lock();
        let Some((link, inbox)) = state.channel(self.group, self.rank) else { return false };
        link.flush();
        inbox.awaits_room |= link.has_unsent();
        link.has_unsent()
    }

    fn time_since_ack(&self) -> Option<Duration> {
        let mut state = self.mux.lock();
        let (link, _) = state.channel(self.group, self.rank)?;
        link.conn.as_ref()?.time_since_ack()
    }
}
