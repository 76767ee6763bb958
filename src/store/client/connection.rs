//! One connection of a client to a server. A connection on which an exchange (request and reply)
//! failed is never used again.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::call::Call;
use crate::error::StoreError;
use crate::interrupt;
use crate::wire::encode::byte;
use crate::wire::{Kind, MAX_KEY_COUNT, MAX_REPLY_BYTES, encode};

/// The reason why an exchange failed. After any of these errors the connection must be dropped,
/// because the next bytes may belong to an earlier reply. The texts describe a handshake.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExchangeError {
    /// No reply came by the deadline.
    #[error("connected, but it does not answer as a store")]
    Timeout,
    /// The program was interrupted while it waited.
    #[error("{}", interrupt::INTERRUPTED)]
    Interrupted,
    #[error("{}", describe_loss(.0))]
    Lost(#[from] io::Error),
    #[error("not a store: it {0}")]
    Protocol(#[from] ReplyError),
}

fn describe_loss(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => {
            "it closed the connection: it is not a store, or is shutting down".to_owned()
        }
        _ => error.to_string(),
    }
}

impl ExchangeError {
    /// Returns the error of `call` on the store with this name, which waited for `awaited`.
    pub(super) fn of_call(self, call: Call<'_>, store: String, awaited: Vec<String>) -> StoreError {
        match self {
            Self::Timeout => call.timeout(store, awaited),
            Self::Interrupted => call.interrupted(store, awaited),
            Self::Lost(source) => call.lost(store, source),
            Self::Protocol(error) => {
                StoreError::Protocol { store, what: format!("{}: it {error}", call.operation) }
            }
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

/// Maximum number of bytes that one read takes from the socket.
const READ_BYTES: usize = 16 << 10;
/// Time in which a live server answers a cancellation. A wait that times out may return this much
/// later than its deadline.
const CANCEL_TIME: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    /// Until when the exchange in progress sends and receives.
    pub(super) deadline: Instant,
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
        match u32::from_le_bytes(self.read_array()?) {
            received if received == nonce => Ok(()),
            received => Err(ReplyError::Nonce { sent: nonce, received }.into()),
        }
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
        if length > MAX_REPLY_BYTES as u64 {
            return Err(ReplyError::ValueLength(length).into());
        }
        let length = length as usize;
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

    /// Waits until the server ends a wait with READY. At the deadline it cancels the wait, asks the server
    /// which of the keys `checked` exist, and returns that. The connection can be used again in both cases.
    pub(super) fn finish_wait(&mut self, checked: &[&[u8]]) -> Result<Option<Vec<bool>>, ExchangeError> {
        match self.read_ready() {
            Ok(()) => return Ok(None),
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
        let first = self.read_byte()?;
        // If the wait ended on the server before the request to cancel it arrived, both have a reply.
        let ready = first == byte::READY;
        let last = if ready { self.read_byte()? } else { first };
        if last != byte::CANCELLED {
            return Err(ReplyError::Cancel(last).into());
        }
        let present = checked.iter().map(|_| self.read_check()).collect::<Result<_, _>>()?;
        Ok((!ready).then_some(present))
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
        wait_ready(self.stream.as_fd(), what, self.deadline)
    }
}

/// Waits until `descriptor` is ready for `what`.
pub(super) fn wait_ready(
    descriptor: BorrowedFd<'_>,
    what: PollFlags,
    deadline: Instant,
) -> Result<(), ExchangeError> {
    loop {
        let until = interrupt::next_check(deadline);
        let left = until.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(descriptor, what)], timeout) {
            // The clock is checked after EINTR too: with a fast interval timer, a signal may end
            // every poll.
            Ok(0) | Err(Errno::EINTR) if Instant::now() >= deadline => return Err(ExchangeError::Timeout),
            Ok(0) | Err(Errno::EINTR) if interrupt::is_interrupted() => {
                return Err(ExchangeError::Interrupted);
            }
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(ExchangeError::Lost(error.into())),
        }
    }
}
