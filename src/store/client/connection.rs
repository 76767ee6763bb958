//! One connection of a client, in step with the server or dropped.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::wire::encode::byte;
use crate::wire::{Kind, MAX_KEY_COUNT, MAX_REPLY_BYTES, encode};

/// Why an exchange failed. After any of these the connection is out of step and must be dropped.
#[derive(Debug)]
pub(super) enum Failure {
    /// No reply by the deadline.
    Late,
    Lost(io::Error),
    Protocol(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Lost(error)
    }
}

/// How a wait on the server ended; the connection is in step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Waited {
    Ready,
    /// Given up at the deadline. Of the keys asked about, whether each is there, if that came in time.
    TimedOut {
        there: Vec<bool>,
    },
}

/// Bytes asked of the socket at once.
const READ_BYTES: usize = 16 << 10;
/// A server that is alive answers the end of a wait within this; it is what a timeout may come late.
const CANCEL_TIME: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Bytes received; the first `taken_bytes` are used.
    inbox: Vec<u8>,
    taken_bytes: usize,
    /// Requests being put together.
    outbox: Vec<u8>,
}

impl Connection {
    /// Shakes hands on a new socket.
    pub(super) fn open(stream: TcpStream, nonce: u32, deadline: Instant) -> Result<Connection, Failure> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut connection = Connection { stream, inbox: Vec::new(), taken_bytes: 0, outbox: Vec::new() };
        let out = connection.request();
        encode::hello(out, nonce);
        connection.send(deadline)?;
        connection.expect_nonce(nonce, deadline)?;
        Ok(connection)
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The buffer for the next requests, empty.
    pub(super) fn request(&mut self) -> &mut Vec<u8> {
        self.outbox.clear();
        &mut self.outbox
    }

    /// Sends the requests in the buffer.
    pub(super) fn send(&mut self, deadline: Instant) -> Result<(), Failure> {
        const KEPT_BYTES: usize = 1 << 20;
        let mut sent = 0;
        while sent < self.outbox.len() {
            match self.stream.write(&self.outbox[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.ready_for(PollFlags::POLLOUT, deadline)?
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.outbox.clear();
        self.outbox.shrink_to(KEPT_BYTES);
        Ok(())
    }

    /// Sends a request that has no reply, and a PING: when that is answered the server has carried
    /// both out.
    pub(super) fn send_and_confirm(&mut self, nonce: u32, deadline: Instant) -> Result<(), Failure> {
        encode::ping(&mut self.outbox, nonce);
        self.send(deadline)?;
        self.expect_nonce(nonce, deadline)
    }

    fn expect_nonce(&mut self, nonce: u32, deadline: Instant) -> Result<(), Failure> {
        let got = u32::from_le_bytes(self.read_array(deadline)?);
        if got != nonce {
            return Err(Failure::Protocol(format!("answered a ping of {nonce:#010x} with {got:#010x}")));
        }
        Ok(())
    }

    pub(super) fn read_byte(&mut self, deadline: Instant) -> Result<u8, Failure> {
        let [byte] = self.read_array(deadline)?;
        Ok(byte)
    }

    pub(super) fn read_number(&mut self, deadline: Instant) -> Result<i64, Failure> {
        Ok(i64::from_le_bytes(self.read_array(deadline)?))
    }

    /// A number that counts something, at most `limit` of it.
    pub(super) fn read_count(&mut self, limit: usize, deadline: Instant) -> Result<usize, Failure> {
        let number = self.read_number(deadline)?;
        match usize::try_from(number) {
            Ok(count) if count <= limit => Ok(count),
            _ => Err(Failure::Protocol(format!("sent {number} where at most {limit} is possible"))),
        }
    }

    pub(super) fn read_blob(&mut self, deadline: Instant) -> Result<Vec<u8>, Failure> {
        let length = u64::from_le_bytes(self.read_array(deadline)?);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_REPLY_BYTES {
            return Err(Failure::Protocol(format!("announced a value of {length} bytes")));
        }
        self.fill(length, deadline)?;
        let blob = self.inbox[self.taken_bytes..self.taken_bytes + length].to_vec();
        self.took(length);
        Ok(blob)
    }

    /// As many blobs as were asked for; together no more than a reply may have.
    pub(super) fn read_blobs(&mut self, count: usize, deadline: Instant) -> Result<Vec<Vec<u8>>, Failure> {
        let mut blobs = Vec::with_capacity(count.min(MAX_KEY_COUNT));
        let mut total = 0;
        for _ in 0..count {
            let blob = self.read_blob(deadline)?;
            total += blob.len();
            if total > MAX_REPLY_BYTES {
                return Err(Failure::Protocol(format!("sent a reply of more than {MAX_REPLY_BYTES} bytes")));
            }
            blobs.push(blob);
        }
        Ok(blobs)
    }

    /// Waits for the byte that ends a wait. At the deadline takes the wait back, and asks which of
    /// `asked` are there.
    pub(super) fn finish_wait(&mut self, asked: &[&[u8]], deadline: Instant) -> Result<Waited, Failure> {
        match self.read_byte(deadline) {
            Ok(byte::READY) => return Ok(Waited::Ready),
            Ok(other) => return Err(Failure::Protocol(format!("ended a wait with {other}"))),
            Err(Failure::Late) => {}
            Err(failure) => return Err(failure),
        }
        let out = self.request();
        encode::bare(out, Kind::CancelWait);
        for &key in asked {
            encode::counted(out, Kind::Check, 1, [key].into_iter());
        }
        let deadline = Instant::now() + CANCEL_TIME;
        self.send(deadline)?;
        let ready = match self.read_byte(deadline)? {
            byte::CANCELLED => false,
            // The end of the wait and the request to cancel it have crossed.
            byte::READY => match self.read_byte(deadline)? {
                byte::CANCELLED => true,
                other => return Err(Failure::Protocol(format!("answered a cancellation with {other}"))),
            },
            other => return Err(Failure::Protocol(format!("answered a cancellation with {other}"))),
        };
        let mut there = Vec::with_capacity(asked.len());
        for _ in asked {
            there.push(self.read_byte(deadline)? == byte::READY);
        }
        Ok(if ready { Waited::Ready } else { Waited::TimedOut { there } })
    }

    /// Whether the server has sent nothing that was not asked for.
    pub(super) fn is_in_step(&self) -> bool {
        self.inbox.is_empty()
    }

    fn read_array<const N: usize>(&mut self, deadline: Instant) -> Result<[u8; N], Failure> {
        self.fill(N, deadline)?;
        let mut array = [0; N];
        array.copy_from_slice(&self.inbox[self.taken_bytes..self.taken_bytes + N]);
        self.took(N);
        Ok(array)
    }

    /// Receives until `count` bytes lie there; takes memory only for bytes that have come.
    fn fill(&mut self, count: usize, deadline: Instant) -> Result<(), Failure> {
        let mut bytes = [0; READ_BYTES];
        while self.inbox.len() - self.taken_bytes < count {
            self.ready_for(PollFlags::POLLIN, deadline)?;
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(Failure::Lost(ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.inbox.extend_from_slice(&bytes[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn took(&mut self, count: usize) {
        const KEPT_BYTES: usize = 64 << 10;
        self.taken_bytes += count;
        if self.taken_bytes == self.inbox.len() {
            self.inbox.clear();
            self.inbox.shrink_to(KEPT_BYTES);
            self.taken_bytes = 0;
        } else if self.taken_bytes > KEPT_BYTES {
            self.inbox.drain(..self.taken_bytes);
            self.taken_bytes = 0;
        }
    }

    fn ready_for(&self, what: PollFlags, deadline: Instant) -> Result<(), Failure> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.stream.as_fd(), what)], timeout) {
                // After a signal too: with a fast interval timer each poll may end by one.
                Ok(0) | Err(Errno::EINTR) if Instant::now() >= deadline => return Err(Failure::Late),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(Failure::Lost(error.into())),
            }
        }
    }
}
