//! Byte transports between two ranks. They know no elements, reductions or collectives.

pub(crate) mod conn;
#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod fork;
pub(crate) mod hello;
#[cfg(test)]
pub(crate) mod rough;
pub(crate) mod tcp;

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// One ordered, reliable, two-way flow of bytes to a peer.
///
/// Nonblocking and partial: a call moves what it can now, or nothing with
/// [`WouldBlock`](io::ErrorKind::WouldBlock). Nothing is allocated.
pub(crate) trait Link: fmt::Debug + Send {
    /// Takes bytes from the front of `parts`; how many.
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Puts bytes into `into` (not empty); how many, 0 when the peer has closed its end.
    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Tells the peer that nothing more comes.
    fn close_write(&mut self);

    /// Returns whether the peer's kernel has acknowledged all bytes that were sent.
    fn is_flushed(&self) -> bool;

    /// Asks the kernel to keep nothing of the connection when it is dropped; else its port waits for a minute
    /// (TIME_WAIT). The link must be [flushed](Self::is_flushed): other bytes are lost.
    fn give_up_port(&self) {}

    /// Asks the system to notice a dead peer host or path within `bound` though nothing is sent.
    fn watch_path(&self, _bound: Duration) -> io::Result<()> {
        Ok(())
    }

    /// Returns the time since the peer's host was last heard; `None` if it is unknown.
    fn unheard(&self) -> Option<Duration> {
        None
    }

    /// The core on which what came last was sent, if it was sent on this host; `None` if nobody knows.
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
