//! Byte transports between two ranks. They know nothing of elements, reductions or collectives.

#[cfg(test)]
mod byte_counts;
pub(crate) mod conn;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
pub(crate) mod fault_injection;
pub(crate) mod fork;
pub(crate) mod hello;
pub(crate) mod read_ahead;
pub(crate) mod tcp;
#[cfg(test)]
mod wrapper;

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Most bytes of data of a message in a cell.
pub(crate) const CELL_BYTES: usize = 4 << 10;

/// Largest message that is sent before its receive is known to be posted (eager). Its data is in a cell, or in the byte
/// stream. A cell announces the data in the stream, unless the link's memory is too small.
pub(crate) const EAGER_BYTES: usize = 256 << 10;

/// The header of a message in a cell: the encoded descriptor of its call.
pub(crate) type CellHeader = [u8; 16];

/// A message in a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CellMessage {
    pub(crate) header: CellHeader,
    /// The position in the byte stream of the message's data, counted from the first byte of the link. `None` if the
    /// data is in the cell.
    pub(crate) data_at: Option<u64>,
}

/// One ordered, reliable, two-way byte stream to a peer.
///
/// The methods do not block and may transfer only a part of the bytes. A method transfers as many as it can
/// now, or fails with [`WouldBlock`](io::ErrorKind::WouldBlock). The methods allocate nothing.
pub(crate) trait Link: fmt::Debug + Send {
    /// Sends bytes from the front of `parts`, and returns the number of bytes sent.
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Receives bytes into `into` (not empty), and returns their number; 0 if the peer has closed its end. `into` may
    /// be the space for all missing bytes of a message. Each link bounds the bytes of one call itself.
    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Receives bytes into `parts`, one after the other, like [`Self::try_recv`]. A link may receive into the first part
    /// (not empty) only.
    fn try_recv_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.try_recv(&mut parts[0])
    }

    /// Sends a message with the number `stamp` in a cell. Data of more than [`CELL_BYTES`] goes through the byte stream,
    /// all of it at once. Returns false if the link has no cells, if none is free, or if the stream has too little
    /// space. Each message has a larger `stamp` than the message before.
    fn try_send_cell(&mut self, _stamp: u64, _header: CellHeader, _data: &[u8]) -> io::Result<bool> {
        Ok(false)
    }

    /// Returns the message with the number `stamp`, if it is in the next cell. A caller that waits for it gives the number
    /// of bytes of data that it expects, as `_awaited`. Then the link looks several times.
    fn cell(&mut self, _stamp: u64, _awaited: Option<usize>) -> Option<CellMessage> {
        None
    }

    /// Copies the data of the message that [`Self::cell`] returned, and empties its cell. The length of `into` is that of
    /// the data in the cell, at most [`CELL_BYTES`].
    fn take_cell(&mut self, _into: &mut [u8]) -> io::Result<()> {
        Ok(())
    }

    /// Returns the number of bytes that were received from the stream. Only links with cells count them.
    fn received(&self) -> u64 {
        0
    }

    /// Returns whether the next bytes to receive are those of a message that [`Self::take_cell`] took, and are not where
    /// the bytes before and behind them are. So the bytes behind them may have been received before.
    fn reads_elsewhere(&self) -> bool {
        false
    }

    /// Returns whether each read costs a system call. Then it is better to read more bytes than are needed now. If not,
    /// such bytes would only be copied twice.
    fn reads_by_system_calls(&self) -> bool {
        true
    }

    /// Returns whether the peer should read a message of `bytes` bytes in the memory of this process, by
    /// [`Self::read_exposed`], if it [can](Self::is_readable).
    fn exposes(&self, _bytes: usize) -> bool {
        false
    }

    /// Returns whether the peer can read `bytes` in the memory of this process.
    fn is_readable(&self, _bytes: &[u8]) -> bool {
        false
    }

    /// Copies bytes at `address` in the memory of the peer to `into`. Returns false if the peer has ended or the group has
    /// failed, so that the bytes are not valid.
    fn read_exposed(&self, _address: u64, _into: &mut [u8]) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Tells the peer that nothing more will be sent.
    fn close_write(&mut self);

    /// Returns whether the peer's kernel has acknowledged all bytes that were sent.
    fn is_flushed(&self) -> bool;

    /// Returns whether bytes that were sent are not handed to the kernel yet.
    fn has_unsent(&self) -> bool {
        false
    }

    /// Returns whether the link works without a connection of its own, and would take one.
    fn awaits_connection(&self) -> bool {
        false
    }

    /// Gives the link a connection of its own, which it [awaits](Self::awaits_connection).
    fn adopt(&mut self, _conn: conn::Conn) {}

    /// Asks the kernel to free the connection's port at once when the link is dropped. Otherwise the port
    /// stays in TIME_WAIT for a minute. The link must be [flushed](Self::is_flushed): unacknowledged bytes
    /// are lost.
    fn skip_time_wait(&self) {}

    /// Asks the kernel to notice a dead peer host or path within `bound`, even if nothing is sent.
    fn enable_keepalive(&self, _bound: Duration) -> io::Result<()> {
        Ok(())
    }

    /// Returns the time since the peer's kernel last acknowledged data; `None` if it is unknown.
    fn time_since_ack(&self) -> Option<Duration> {
        None
    }

    /// Returns the CPU core on which the peer sent the last received data, if it is on this host and known.
    fn sender_cpu(&self) -> Option<usize> {
        None
    }

    /// Returns the file descriptor to poll; `None` if the link has none.
    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Returns a link that wraps the given one, or the given one.
type Wrap = fn(Box<dyn Link>) -> Box<dyn Link>;

/// The transports that wrap the links of connections, innermost first. A new one is registered here.
const WRAPPERS: &[Wrap] = &[
    #[cfg(test)]
    byte_counts::wrap,
    #[cfg(test)]
    fault_injection::wrap,
];

/// Returns a new connection over `link`, through the registered transports. They carry all bytes of the
/// connection, those of the handshake included.
pub(crate) fn connection(link: impl Link + 'static) -> conn::Conn {
    let link: Box<dyn Link> = Box::new(link);
    conn::Conn::new(WRAPPERS.iter().fold(link, |link, wrap| wrap(link)))
}
