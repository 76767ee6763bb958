//! The guard process, as the launcher sees it, and the socket to it.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdUnixStream;

use convoke_env::ExitCause;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use tokio::net::UnixStream;

use super::protocol::{Decoder, FromGuard, ToGuard, encode};

/// The guard process. Its socket is used from a tokio runtime.
pub(crate) struct GuardProcess {
    pub(crate) pid: Pid,
    socket: UnixStream,
    decoder: Decoder,
    /// Set once the guard has ended. The inner value is how it ended, or `None` if only its socket has
    /// closed.
    end: Option<Option<ExitCause>>,
}

impl GuardProcess {
    pub(crate) fn new(pid: Pid, socket: StdUnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { pid, socket: UnixStream::from_std(socket)?, decoder: Decoder::default(), end: None })
    }

    /// Sends a message and its descriptors. If the guard is gone, the event loop handles that next.
    pub(crate) fn send(&mut self, message: &ToGuard, descriptors: &[BorrowedFd<'_>]) {
        if self.try_send(message, descriptors).is_err() {
            self.end = Some(None);
        }
    }

    /// Sends a message and its descriptors. Fails if the guard is gone. Blocks while the socket's buffer is
    /// full. The guard never blocks on the launcher, so the wait is short.
    pub(crate) fn try_send(&self, message: &ToGuard, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        debug_assert_eq!(message.descriptors(), descriptors.len());
        let frame = encode(message)?;
        let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let mut sent = 0;
        while sent < frame.len() {
            // The descriptors are sent with the first bytes of the message.
            let control: &[ControlMessage<'_>] = if sent == 0 && !raw.is_empty() { &rights } else { &[] };
            let parts = [IoSlice::new(&frame[sent..])];
            match sendmsg::<()>(self.socket.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLOUT)];
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

    /// Returns the guard's next message, or `None` if its socket has closed. An error if the guard sent an
    /// invalid message. Cancel safe.
    pub(crate) async fn receive(&mut self) -> io::Result<Option<FromGuard>> {
        loop {
            if let Some(message) = self.decoder.next().map_err(io::Error::other)? {
                return Ok(Some(message));
            }
            self.socket.readable().await?;
            let mut bytes = [0; 16 << 10];
            let count = match self.socket.try_read(&mut bytes) {
                Ok(count) => count,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::ConnectionReset => 0,
                    _ => return Err(error),
                },
            };
            if count == 0 {
                self.end.get_or_insert(None);
                return Ok(None);
            }
            self.decoder.push(&bytes[..count]);
        }
    }

    /// Records the end of a child of the launcher. Returns false if the child is not the guard.
    pub(crate) fn record_end(&mut self, pid: i32, cause: ExitCause) -> bool {
        let is_guard = pid == self.pid.as_raw();
        if is_guard {
            self.end = Some(Some(cause));
        }
        is_guard
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Returns how the guard ended, if that is known.
    pub(crate) fn exit_cause(&self) -> Option<ExitCause> {
        self.end.flatten()
    }
}
