//! One connection of a client to a server. A connection on which an exchange (request and reply)
//! failed is never used again.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::StoreError;
use crate::wire::encode::byte;
use crate::wire::{Kind, MAX_KEY_COUNT, MAX_REPLY_BYTES, encode};

/// The reason why an exchange failed. After any of these errors the connection must be dropped,
/// because the next bytes may belong to an earlier reply.
#[derive(Debug)]
pub(super) enum ExchangeError {
    /// No reply came by the deadline.
    Timeout,
    Lost(io::Error),
    Protocol(ReplyError),
}

impl ExchangeError {
    /// Returns the error of `operation` on the store with this name; `timeout` is that for a timeout.
    pub(super) fn of_store(
        self,
        store: String,
        operation: &'static str,
        timeout: impl FnOnce() -> StoreError,
    ) -> StoreError {
        match self {
            Self::Timeout => timeout(),
            Self::Lost(source) => StoreError::Lost { store, operation, source },
            Self::Protocol(error) => StoreError::Protocol { store, what: format!("{operation}: it {error}") },
        }
    }
}

/// A reply that the protocol does not allow. The text continues a sentence about the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum ReplyError {
    #[error("answered a ping of {sent:#010x} with {received:#010x}")]
    Nonce { sent: u32, received: u32 },
    #[error("answered a check with {0}")]
    Check(u8),
    #[error("ended a wait with {0}")]
    Wait(u8),
    #[error("answered a cancellation with {0}")]
    Cancel(u8),
    #[error("sent {count} where at most {limit} is possible")]
    Count { count: i64, limit: usize },
    #[error("announced a value of {0} bytes")]
    ValueLength(u64),
    #[error("sent a reply of more than {MAX_REPLY_BYTES} bytes")]
    ReplyLength,
}

impl From<io::Error> for ExchangeError {
    fn from(error: io::Error) -> ExchangeError {
        ExchangeError::Lost(error)
    }
}

impl From<ReplyError> for ExchangeError {
    fn from(error: ReplyError) -> ExchangeError {
        ExchangeError::Protocol(error)
    }
}

/// The outcome of a wait on the server. The connection can be used again after either outcome.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WaitOutcome {
    Ready,
    /// The wait was cancelled at the deadline. `present` tells for each checked key whether it exists.
    TimedOut {
        present: Vec<bool>,
    },
}

/// Maximum number of bytes that one read takes from the socket.
const READ_BYTES: usize = 16 << 10;
/// Time in which a live server answers a cancellation. A wait that times out may return this much
/// later than its deadline.
const CANCEL_TIME: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Until when the exchange in progress sends and receives.
    deadline: Instant,
    /// Bytes received; the first `consumed_bytes` have been read.
    input: Vec<u8>,
    consumed_bytes: usize,
    /// Bytes of the requests to send next.
    output: Vec<u8>,
}

impl Connection {
    /// Performs the handshake on a new socket.
    pub(super) fn open(
        stream: TcpStream,
        nonce: u32,
        deadline: Instant,
    ) -> Result<Connection, ExchangeError> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let (input, output) = (Vec::new(), Vec::new());
        let mut connection = Connection { stream, deadline, input, consumed_bytes: 0, output };
        connection.ask(|out| encode::handshake(out, nonce))?;
        connection.expect_nonce(nonce)?;
        Ok(connection)
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sets the time until which later calls send and receive.
    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Sends the requests that `write` appends to an empty buffer.
    pub(super) fn ask(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), ExchangeError> {
        write(self.request());
        self.send()
    }

    /// Returns the buffer for the next requests, empty.
    pub(super) fn request(&mut self) -> &mut Vec<u8> {
        self.output.clear();
        &mut self.output
    }

    /// Sends the requests in the buffer.
    fn send(&mut self) -> Result<(), ExchangeError> {
        const KEPT_BYTES: usize = 1 << 20;
        let mut sent = 0;
        while sent < self.output.len() {
            match self.stream.write(&self.output[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait_ready(PollFlags::POLLOUT)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.output.clear();
        self.output.shrink_to(KEPT_BYTES);
        Ok(())
    }

    /// Sends a request that has no reply, followed by a PING. The answer to the PING proves that the
    /// server has carried out the request before it.
    pub(super) fn send_and_confirm(&mut self, nonce: u32) -> Result<(), ExchangeError> {
        encode::ping(&mut self.output, nonce);
        self.send()?;
        self.expect_nonce(nonce)
    }

    fn expect_nonce(&mut self, nonce: u32) -> Result<(), ExchangeError> {
        let got = u32::from_le_bytes(self.read_array()?);
        if got != nonce {
            return Err(ReplyError::Nonce { sent: nonce, received: got }.into());
        }
        Ok(())
    }

    pub(super) fn read_byte(&mut self) -> Result<u8, ExchangeError> {
        let [byte] = self.read_array()?;
        Ok(byte)
    }

    pub(super) fn read_number(&mut self) -> Result<i64, ExchangeError> {
        Ok(i64::from_le_bytes(self.read_array()?))
    }

    /// Reads a number that must lie between 0 and `limit`.
    pub(super) fn read_count(&mut self, limit: usize) -> Result<usize, ExchangeError> {
        let number = self.read_number()?;
        match usize::try_from(number) {
            Ok(count) if count <= limit => Ok(count),
            _ => Err(ReplyError::Count { count: number, limit }.into()),
        }
    }

    pub(super) fn read_blob(&mut self) -> Result<Vec<u8>, ExchangeError> {
        let length = u64::from_le_bytes(self.read_array()?);
        let length = match usize::try_from(length) {
            Ok(length) if length <= MAX_REPLY_BYTES => length,
            _ => return Err(ReplyError::ValueLength(length).into()),
        };
        self.fill(length)?;
        let blob = self.input[self.consumed_bytes..self.consumed_bytes + length].to_vec();
        self.consume(length);
        Ok(blob)
    }

    /// Reads `count` blobs, which together must not exceed the limit of a reply.
    pub(super) fn read_blobs(&mut self, count: usize) -> Result<Vec<Vec<u8>>, ExchangeError> {
        let mut blobs = Vec::with_capacity(count.min(MAX_KEY_COUNT));
        let mut total = 0;
        for _ in 0..count {
            let blob = self.read_blob()?;
            total += blob.len();
            if total > MAX_REPLY_BYTES {
                return Err(ReplyError::ReplyLength.into());
            }
            blobs.push(blob);
        }
        Ok(blobs)
    }

    /// Waits until the server ends a wait with READY. At the deadline it cancels the wait and asks the
    /// server which of the keys `checked` exist.
    pub(super) fn finish_wait(&mut self, checked: &[&[u8]]) -> Result<WaitOutcome, ExchangeError> {
        match self.read_ready() {
            Ok(()) => return Ok(WaitOutcome::Ready),
            Err(ExchangeError::Timeout) => {}
            Err(error) => return Err(error),
        }
        let out = self.request();
        encode::bare(out, Kind::CancelWait);
        for &key in checked {
            encode::counted(out, Kind::Check, 1, [key].into_iter());
        }
        self.deadline = Instant::now() + CANCEL_TIME;
        self.send()?;
        let ready = match self.read_byte()? {
            byte::CANCELLED => false,
            // The wait ended on the server before the request to cancel it arrived, so both have a
            // reply.
            byte::READY => match self.read_byte()? {
                byte::CANCELLED => true,
                other => return Err(ReplyError::Cancel(other).into()),
            },
            other => return Err(ReplyError::Cancel(other).into()),
        };
        let mut present = Vec::with_capacity(checked.len());
        for _ in checked {
            present.push(self.read_check()?);
        }
        Ok(if ready { WaitOutcome::Ready } else { WaitOutcome::TimedOut { present } })
    }

    /// Reads READY, with which the server ends a wait. Any other byte is a protocol error.
    pub(super) fn read_ready(&mut self) -> Result<(), ExchangeError> {
        match self.read_byte()? {
            byte::READY => Ok(()),
            other => Err(ReplyError::Wait(other).into()),
        }
    }

    /// Reads the reply to a CHECK: true if all keys in the CHECK exist.
    pub(super) fn read_check(&mut self) -> Result<bool, ExchangeError> {
        match self.read_byte()? {
            byte::READY => Ok(true),
            byte::MISSING => Ok(false),
            other => Err(ReplyError::Check(other).into()),
        }
    }

    /// Returns true if no unexpected bytes are waiting on the connection.
    pub(super) fn is_reusable(&self) -> bool {
        self.input.is_empty()
    }

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], ExchangeError> {
        self.fill(N)?;
        let mut array = [0; N];
        array.copy_from_slice(&self.input[self.consumed_bytes..self.consumed_bytes + N]);
        self.consume(N);
        Ok(array)
    }

    /// Receives until at least `count` bytes are unread. Allocates only for bytes that have arrived.
    fn fill(&mut self, count: usize) -> Result<(), ExchangeError> {
        let mut bytes = [0; READ_BYTES];
        while self.input.len() - self.consumed_bytes < count {
            self.wait_ready(PollFlags::POLLIN)?;
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(ExchangeError::Lost(ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.input.extend_from_slice(&bytes[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn consume(&mut self, count: usize) {
        const KEPT_BYTES: usize = 64 << 10;
        self.consumed_bytes += count;
        if self.consumed_bytes == self.input.len() {
            self.input.clear();
            self.input.shrink_to(KEPT_BYTES);
            self.consumed_bytes = 0;
        } else if self.consumed_bytes > KEPT_BYTES {
            self.input.drain(..self.consumed_bytes);
            self.consumed_bytes = 0;
        }
    }

    fn wait_ready(&self, what: PollFlags) -> Result<(), ExchangeError> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.stream.as_fd(), what)], timeout) {
                // The clock is checked after EINTR too: with a fast interval timer, a signal may end
                // every poll.
                Ok(0) | Err(Errno::EINTR) if Instant::now() >= self.deadline => {
                    return Err(ExchangeError::Timeout);
                }
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(ExchangeError::Lost(error.into())),
            }
        }
    }
}
