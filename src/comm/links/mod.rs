//! Byte transports between two ranks. They know no elements, reductions or collectives.

pub(crate) mod conn;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
pub(crate) mod fault_injection;
pub(crate) mod fork;
pub(crate) mod hello;
pub(crate) mod tcp;

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// One ordered, reliable, two-way byte stream to a peer.
///
/// Calls are nonblocking and partial: a call moves as much as it can now, or fails with
/// [`WouldBlock`](io::ErrorKind::WouldBlock). Nothing is allocated.
pub(crate) trait Link: fmt::Debug + Send {
    /// Sends bytes from the front of `parts`. Returns how many.
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Reads bytes into `into` (not empty). Returns how many, 0 when the peer has closed its end.
    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Tells the peer that nothing more will be sent.
    fn close_write(&mut self);

    /// Returns whether the peer's kernel has acknowledged all bytes that were sent.
    fn is_flushed(&self) -> bool;

    /// Asks the kernel to keep nothing of the connection when it is dropped; else its port waits for a minute
    /// (TIME_WAIT). The link must be [flushed](Self::is_flushed): other bytes are lost.
    fn skip_time_wait(&self) {}

    /// Asks the kernel to notice a dead peer host or path within `bound`, even if nothing is sent.
    fn enable_keepalive(&self, _bound: Duration) -> io::Result<()> {
        Ok(())
    }

    /// Returns the time since the peer's host was last heard; `None` if it is unknown.
    fn time_since_ack(&self) -> Option<Duration> {
        None
    }

    /// Returns the core from which the last data was sent, if it came from this host; `None` if it is
    /// unknown.
    fn sender_cpu(&self) -> Option<usize> {
        None
    }

    /// Returns the descriptor to poll; `None` if the link has none.
    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A link that is closed from the start.
#[derive(Debug)]
pub(crate) struct Closed;

impl Link for Closed {
    fn try_send(&mut self, _: &[IoSlice<'_>]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn try_recv(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }

    fn close_write(&mut self) {}

    fn is_flushed(&self) -> bool {
        true
    }
}
