//! One client's connection, with its unprocessed requests and unsent replies.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use nix::sys::epoll::EpollFlags;

use crate::answer::answer;
use crate::keepalive::set_fast_keepalive;
use crate::shared_store::{LockedStore, SharedStore};
use crate::state::{ClientId, Woken};
use crate::wire::{Decoder, Request};

/// While more bytes of replies to a client than this are unsent, the server starts no further request
/// of that client. Together with the longest reply, this bounds the memory used by a client that does
/// not read.
pub(super) const MAX_UNSENT_BYTES: usize = 256 << 10;

/// A connection of the event loop. An idle connection owns no buffer.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    decoder: Decoder,
    /// Received bytes of requests that have not been carried out.
    input: Vec<u8>,
    /// Replies; the first `sent_bytes` of them have been sent.
    output: Vec<u8>,
    sent_bytes: usize,
    /// The client has closed its side; unsent replies remain.
    is_half_closed: bool,
    /// The events for which epoll watches the connection.
    pub(super) interest: EpollFlags,
}

/// Error: the connection must be closed, because the client closed it, broke the protocol or is
/// unreachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionClosed;

/// The store and the buffers that requests of all connections use in turn.
#[derive(Debug)]
pub(super) struct RequestContext {
    pub(super) shared: Arc<SharedStore>,
    /// Connections whose wait has ended and whose reply has not been sent.
    pub(super) woken: Woken,
    /// Buffer for the replies of one connection, before they are sent.
    replies: Vec<u8>,
}

/// Maximum number of bytes that one read takes from a socket.
const READ_BYTES: usize = 64 << 10;
/// An unfinished request of at most this size is copied to the front of the read buffer. For a longer
/// request, the newly read bytes are appended to the request instead.
const SMALL_INPUT_BYTES: usize = 16 << 10;
/// Size of the buffer for [`Connection::on_readable`].
pub(super) const READ_BUFFER_BYTES: usize = SMALL_INPUT_BYTES + READ_BYTES;
/// Largest reply buffer that is kept for later requests.
const KEPT_BYTES: usize = 1 << 20;

impl RequestContext {
    pub(super) fn new(shared: Arc<SharedStore>) -> RequestContext {
        RequestContext { shared, woken: Woken::new(), replies: Vec::new() }
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
            is_half_closed: false,
            interest: EpollFlags::EPOLLIN,
        }
    }

    /// Reads once from the socket to the buffer `read`, carries out all complete requests and sends their
    /// replies.
    pub(super) fn on_readable(
        &mut self,
        client: ClientId,
        read: &mut [u8],
        context: &mut RequestContext,
    ) -> Result<(), ConnectionClosed> {
        let small = self.input.len() <= SMALL_INPUT_BYTES;
        let start = if small { self.input.len() } else { 0 };
        let count = match self.stream.read(&mut read[start..start + READ_BYTES]) {
            Ok(0) => {
                self.is_half_closed = true;
                return if self.unsent_bytes() == 0 { Err(ConnectionClosed) } else { Ok(()) };
            }
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(_) => return Err(ConnectionClosed),
        };
        let mut input = std::mem::take(&mut self.input);
        if small {
            read[..start].copy_from_slice(&input);
            let bytes = &read[..start + count];
            let used = self.process_requests(bytes, client, context)?;
            input.clear();
            input.extend_from_slice(&bytes[used..]);
        } else {
            input.extend_from_slice(&read[..count]);
            let used = self.process_requests(&input, client, context)?;
            input.drain(..used);
        }
        self.keep_input(input);
        Ok(())
    }

    /// Sends unsent replies. If at most [`MAX_UNSENT_BYTES`] are left, carries out requests that were
    /// read before.
    pub(super) fn on_writable(
        &mut self,
        client: ClientId,
        context: &mut RequestContext,
    ) -> Result<(), ConnectionClosed> {
        self.flush()?;
        if self.unsent_bytes() <= MAX_UNSENT_BYTES && !self.input.is_empty() {
            let mut input = std::mem::take(&mut self.input);
            let used = self.process_requests(&input, client, context)?;
            input.drain(..used);
            self.keep_input(input);
        }
        if self.is_half_closed && self.unsent_bytes() == 0 { Err(ConnectionClosed) } else { Ok(()) }
    }

    /// Carries out the requests at the front of `bytes` and sends the replies. Stops when no complete
    /// request is left or too many replies are unsent. Returns the number of bytes processed.
    fn process_requests(
        &mut self,
        bytes: &[u8],
        client: ClientId,
        context: &mut RequestContext,
    ) -> Result<usize, ConnectionClosed> {
        let mut used = 0;
        loop {
            // The store's lock is held while requests are carried out, but not while replies are sent.
            let mut locked = context.shared.lock();
            let more = self.answer_requests(&bytes[used..], client, &mut locked, &mut context.replies);
            locked.drain_woken(&mut context.woken);
            drop(locked);
            let sent = self.send(&context.replies);
            // The buffer serves all connections, so it is emptied also if this client is gone.
            context.replies.clear();
            context.replies.shrink_to(KEPT_BYTES);
            sent?;
            let (processed, output_is_full) = more?;
            used += processed;
            if !output_is_full || self.unsent_bytes() > MAX_UNSENT_BYTES {
                return Ok(used);
            }
        }
    }

    /// Carries out requests and appends their replies to `replies`. Returns the number of bytes
    /// processed, and true if requests were left because too many reply bytes are unsent.
    fn answer_requests(
        &mut self,
        bytes: &[u8],
        client: ClientId,
        locked: &mut LockedStore,
        replies: &mut Vec<u8>,
    ) -> Result<(usize, bool), ConnectionClosed> {
        let mut used = 0;
        while self.unsent_bytes() + replies.len() <= MAX_UNSENT_BYTES {
            let Some((request, length)) = self.decoder.next(&bytes[used..]).map_err(|_| ConnectionClosed)?
            else {
                return Ok((used, false));
            };
            if matches!(request, Request::SetLastWill { .. }) {
                set_fast_keepalive(&self.stream).map_err(|_| ConnectionClosed)?;
            }
            answer(&mut locked.state, client, request, replies, &mut locked.woken)
                .map_err(|_| ConnectionClosed)?;
            used += length;
        }
        Ok((used, true))
    }

    /// Keeps the bytes of an unfinished request. Keeps no empty buffer.
    fn keep_input(&mut self, input: Vec<u8>) {
        if !input.is_empty() {
            self.input = input;
        }
    }

    /// Sends `bytes` after the unsent replies, and keeps the part that the socket does not accept.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> Result<(), ConnectionClosed> {
        if self.output.is_empty() {
            while !bytes.is_empty() {
                match self.stream.write(bytes) {
                    Ok(count) => bytes = &bytes[count..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => return Err(ConnectionClosed),
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

    /// Sends as much of the output as the socket accepts.
    pub(super) fn flush(&mut self) -> Result<(), ConnectionClosed> {
        while self.unsent_bytes() > 0 {
            match self.stream.write(&self.output[self.sent_bytes..]) {
                Ok(count) => self.sent_bytes += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(ConnectionClosed),
            }
        }
        self.output = Vec::new();
        self.sent_bytes = 0;
        Ok(())
    }

    pub(super) fn unsent_bytes(&self) -> usize {
        self.output.len() - self.sent_bytes
    }

    /// Returns the events to watch for now. Reading stops while too many replies are unsent.
    pub(super) fn wanted_interest(&self) -> EpollFlags {
        let mut interest = EpollFlags::empty();
        interest.set(EpollFlags::EPOLLIN, !self.is_half_closed && self.unsent_bytes() <= MAX_UNSENT_BYTES);
        interest.set(EpollFlags::EPOLLOUT, self.unsent_bytes() > 0);
        interest
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};

    use super::*;
    use crate::wire::encode::handshake;

    #[test]
    fn replies_to_a_client_that_is_gone_reach_no_other_client() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut context = RequestContext::new(Arc::new(SharedStore::in_process()));
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut connection = Connection::new(listener.accept().unwrap().0);
        // From now on the system refuses replies, as it does when the client is gone.
        connection.stream.shutdown(Shutdown::Write).unwrap();
        let mut request = Vec::new();
        handshake(&mut request, 1);
        let processed = connection.process_requests(&request, ClientId(1), &mut context);
        assert_eq!((processed, context.replies.len()), (Err(ConnectionClosed), 0));
    }
}
