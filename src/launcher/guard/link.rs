//! The launcher's end of the socket to the guard process.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdUnixStream;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::net::UnixStream;

use super::protocol::{Decoder, FromGuard, ToGuard, encode};

/// The socket to the guard, used from a tokio runtime.
#[derive(Debug)]
pub(crate) struct GuardLink {
    socket: UnixStream,
    decoder: Decoder,
}

impl GuardLink {
    /// # Errors
    /// The socket cannot be registered with the runtime.
    pub(crate) fn new(socket: StdUnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket: UnixStream::from_std(socket)?, decoder: Decoder::default() })
    }

    /// Sends `message` and the file descriptors that belong to it.
    ///
    /// Blocks while the socket's buffer is full. The guard never blocks on the launcher, so the wait is
    /// short.
    ///
    /// # Errors
    /// The guard is gone.
    pub(crate) fn send(&self, message: &ToGuard, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        debug_assert_eq!(message.descriptors(), descriptors.len());
        let frame = encode(message)?;
        let socket = &self.socket;
        let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let mut sent = 0;
        while sent < frame.len() {
            let rights = [ControlMessage::ScmRights(&raw)];
            // The descriptors are sent with the first bytes of the message.
            let control: &[ControlMessage<'_>] = if sent == 0 && !raw.is_empty() { &rights } else { &[] };
            let parts = [IoSlice::new(&frame[sent..])];
            match sendmsg::<()>(socket.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
                    match poll(&mut fds, PollTimeout::NONE) {
                        Ok(_) | Err(Errno::EINTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Returns the guard's next message, or `None` if the guard is gone. Cancel safe.
    ///
    /// # Errors
    /// The guard sent an invalid message.
    pub(crate) async fn receive(&mut self) -> io::Result<Option<FromGuard>> {
        loop {
            if let Some(message) = self.decoder.next().map_err(io::Error::other)? {
                return Ok(Some(message));
            }
            self.socket.readable().await?;
            let mut bytes = [0; 16 << 10];
            match self.socket.try_read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(count) => self.decoder.push(&bytes[..count]),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset => return Ok(None),
                    _ => return Err(error),
                },
            }
        }
    }
}
