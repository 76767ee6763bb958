//! One client's connection: its unread bytes and its unsent replies.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use crate::answer::answer;
use crate::close_watch::watch_closely;
use crate::hub::{Hub, Shared};
use crate::state::{Caller, Woken};
use crate::wire::{Decoder, Request};

/// No request is begun while more than this many bytes of replies wait to be sent. With the longest
/// reply on top this bounds what a client that does not read can make the server hold.
pub(super) const MAX_UNSENT_BYTES: usize = 256 << 10;

/// A connection as the event loop keeps it. Idle, it owns no buffer.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    decoder: Decoder,
    /// Bytes of requests not yet carried out.
    input: Vec<u8>,
    /// Replies; the first `sent_bytes` are out.
    output: Vec<u8>,
    sent_bytes: usize,
    /// The client has sent its last; replies are still due.
    ended: bool,
    pub(super) interest: Interest,
}

/// What epoll watches a connection for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interest {
    pub(super) read: bool,
    pub(super) write: bool,
}

/// The connection is over: the client hung up, broke the protocol or cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Over;

/// What all connections use in turn.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) hub: Arc<Hub>,
    /// Connections whose wait is over and that have not been told yet.
    pub(super) woken: Woken,
    /// Filled by one read.
    read: Box<[u8]>,
    /// Replies of one connection, before they are sent.
    replies: Vec<u8>,
}

/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;
/// An unfinished request up to this size is put before the next read instead of the other way round.
const SMALL_INPUT_BYTES: usize = 16 << 10;
/// Buffers larger than this are not kept.
const KEPT_BYTES: usize = 1 << 20;

impl Desk {
    pub(super) fn new(hub: Arc<Hub>) -> Desk {
        let read = vec![0; SMALL_INPUT_BYTES + READ_BYTES].into();
        Desk { hub, woken: Woken::new(), read, replies: Vec::new() }
    }
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Connection {
        Connection {
            stream,
            decoder: Decoder::default(),
            input: Vec::new(),
            output: Vec::new(),
            sent_bytes: 0,
            ended: false,
            interest: Interest { read: true, write: false },
        }
    }

    /// Reads once, carries out the requests that are whole and sends their replies.
    pub(super) fn readable(&mut self, caller: Caller, desk: &mut Desk) -> Result<(), Over> {
        let mut input = std::mem::take(&mut self.input);
        let mut read = std::mem::take(&mut desk.read);
        let result = self.read_into(&mut input, &mut read, caller, desk);
        desk.read = read;
        self.keep_input(input);
        result
    }

    fn read_into(
        &mut self,
        input: &mut Vec<u8>,
        read: &mut [u8],
        caller: Caller,
        desk: &mut Desk,
    ) -> Result<(), Over> {
        let small = input.len() <= SMALL_INPUT_BYTES;
        let start = if small { input.len() } else { 0 };
        let count = match self.stream.read(&mut read[start..start + READ_BYTES]) {
            Ok(0) => {
                self.ended = true;
                return if self.unsent_bytes() == 0 { Err(Over) } else { Ok(()) };
            }
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(_) => return Err(Over),
        };
        if small {
            read[..start].copy_from_slice(input);
            let bytes = &read[..start + count];
            let used = self.carry_out(bytes, caller, desk)?;
            input.clear();
            input.extend_from_slice(&bytes[used..]);
        } else {
            input.extend_from_slice(&read[..count]);
            let used = self.carry_out(input, caller, desk)?;
            input.drain(..used);
        }
        Ok(())
    }

    /// Sends what is due; once that is little enough, carries out requests that were read before.
    pub(super) fn writable(&mut self, caller: Caller, desk: &mut Desk) -> Result<(), Over> {
        self.flush()?;
        if self.unsent_bytes() <= MAX_UNSENT_BYTES && !self.input.is_empty() {
            let mut input = std::mem::take(&mut self.input);
            let used = self.carry_out(&input, caller, desk)?;
            input.drain(..used);
            self.keep_input(input);
        }
        if self.ended && self.unsent_bytes() == 0 { Err(Over) } else { Ok(()) }
    }

    /// Carries out the requests at the front of `bytes` and sends the replies, until no whole request
    /// is left or too many replies wait to be sent. Returns the bytes used.
    fn carry_out(&mut self, bytes: &[u8], caller: Caller, desk: &mut Desk) -> Result<usize, Over> {
        let mut used = 0;
        loop {
            // Locked for these requests, and not while sending.
            let mut shared = desk.hub.lock();
            let more = self.answer_some(&bytes[used..], caller, &mut shared, &mut desk.replies);
            shared.take_woken(&mut desk.woken);
            drop(shared);
            self.send(&desk.replies)?;
            desk.replies.clear();
            desk.replies.shrink_to(KEPT_BYTES);
            let (some, stalled) = more?;
            used += some;
            if !stalled || self.unsent_bytes() > MAX_UNSENT_BYTES {
                return Ok(used);
            }
        }
    }

    /// Answers requests into `replies`; the bytes used, and whether it stopped for want of room.
    fn answer_some(
        &mut self,
        bytes: &[u8],
        caller: Caller,
        shared: &mut Shared,
        replies: &mut Vec<u8>,
    ) -> Result<(usize, bool), Over> {
        let mut used = 0;
        while self.unsent_bytes() + replies.len() <= MAX_UNSENT_BYTES {
            let Some((request, length)) = self.decoder.next(&bytes[used..]).map_err(|_| Over)? else {
                return Ok((used, false));
            };
            if matches!(request, Request::SetLastWill { .. }) {
                watch_closely(&self.stream).map_err(|_| Over)?;
            }
            answer(&mut shared.state, caller, request, replies, &mut shared.woken).map_err(|_| Over)?;
            used += length;
        }
        Ok((used, true))
    }

    /// Keeps the bytes of an unfinished request, and no buffer without any.
    fn keep_input(&mut self, input: Vec<u8>) {
        if !input.is_empty() {
            self.input = input;
        }
    }

    /// Sends `bytes` behind what is due already, and keeps what the socket does not take.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> Result<(), Over> {
        if self.output.is_empty() {
            while !bytes.is_empty() {
                match self.stream.write(bytes) {
                    Ok(count) => bytes = &bytes[count..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => return Err(Over),
                }
            }
        }
        if !bytes.is_empty() {
            if self.sent_bytes > self.output.len() / 2 {
                self.output.drain(..self.sent_bytes);
                self.sent_bytes = 0;
            }
            self.output.extend_from_slice(bytes);
        }
        Ok(())
    }

    /// Sends as much of the output as the socket takes.
    pub(super) fn flush(&mut self) -> Result<(), Over> {
        while self.unsent_bytes() > 0 {
            match self.stream.write(&self.output[self.sent_bytes..]) {
                Ok(count) => self.sent_bytes += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Over),
            }
        }
        self.output = Vec::new();
        self.sent_bytes = 0;
        Ok(())
    }

    pub(super) fn unsent_bytes(&self) -> usize {
        self.output.len() - self.sent_bytes
    }

    /// What to watch for now: no reading while replies pile up.
    pub(super) fn wanted(&self) -> Interest {
        Interest {
            read: !self.ended && self.unsent_bytes() <= MAX_UNSENT_BYTES,
            write: self.unsent_bytes() > 0,
        }
    }

    /// Tells the client that nothing more will come, after all that was sent.
    pub(super) fn hang_up(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }
}
