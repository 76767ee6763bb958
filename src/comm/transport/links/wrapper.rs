//! A link that wraps another one. A wrapping transport defines what it does with the bytes that are sent and
//! received; everything else goes to the wrapped link.
//!
//! Only tests have such transports so far.

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::Link;

/// The work of a wrapping transport on the bytes of a link. The methods have the contracts of [`Link`].
pub(super) trait Wrapper: fmt::Debug + Send {
    fn try_send(&mut self, link: &mut dyn Link, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    fn try_recv(&mut self, link: &mut dyn Link, into: &mut [u8]) -> io::Result<usize>;
}

/// A link with its wrapper.
#[derive(Debug)]
pub(super) struct Wrapped<W> {
    pub(super) link: Box<dyn Link>,
    pub(super) wrapper: W,
}

impl<W: Wrapper> Link for Wrapped<W> {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.wrapper.try_send(&mut *self.link, parts)
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.wrapper.try_recv(&mut *self.link, into)
    }

    fn reads_by_system_calls(&self) -> bool {
        self.link.reads_by_system_calls()
    }

    fn close_write(&mut self) {
        self.link.close_write();
    }

    fn is_flushed(&self) -> bool {
        self.link.is_flushed()
    }

    fn has_unsent(&self) -> bool {
        self.link.has_unsent()
    }

    fn awaits_connection(&self) -> bool {
        self.link.awaits_connection()
    }

    fn adopt(&mut self, conn: super::conn::Conn) {
        self.link.adopt(conn);
    }

    fn skip_time_wait(&self) {
        self.link.skip_time_wait();
    }

    fn enable_keepalive(&self, bound: Duration) -> io::Result<()> {
        self.link.enable_keepalive(bound)
    }

    fn time_since_ack(&self) -> Option<Duration> {
        self.link.time_since_ack()
    }

    fn sender_cpu(&self) -> Option<usize> {
        self.link.sender_cpu()
    }

    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        self.link.pollable()
    }
}
