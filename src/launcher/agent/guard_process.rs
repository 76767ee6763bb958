//! The guard process, as the agent sees it.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use convoke_env::ExitCause;
use nix::unistd::Pid;

use crate::guard::{FromGuard, GuardLink, ToGuard};

pub(super) struct GuardProcess {
    pub(super) pid: Pid,
    link: GuardLink,
    /// Set once the guard has ended. The inner value is how it ended, or `None` if only its socket has
    /// closed.
    end: Option<Option<ExitCause>>,
}

impl GuardProcess {
    /// # Errors
    /// The socket cannot be registered with the runtime.
    pub(super) fn new(pid: Pid, socket: UnixStream) -> io::Result<Self> {
        Ok(Self { pid, link: GuardLink::new(socket)?, end: None })
    }

    /// Returns the guard's next message, or `None` if its socket has closed. Cancel safe.
    ///
    /// # Errors
    /// The guard sent an invalid message.
    pub(super) async fn receive(&mut self) -> io::Result<Option<FromGuard>> {
        let message = self.link.receive().await?;
        if message.is_none() {
            self.end.get_or_insert(None);
        }
        Ok(message)
    }

    /// Sends a message and its descriptors. If the guard is gone, the event loop handles that next.
    pub(super) fn send(&mut self, message: &ToGuard, descriptors: &[BorrowedFd<'_>]) {
        if self.link.send(message, descriptors).is_err() {
            self.end = Some(None);
        }
    }

    /// Tells the guard to exit.
    ///
    /// # Errors
    /// The guard is gone.
    pub(super) fn send_exit(&self) -> io::Result<()> {
        self.link.send(&ToGuard::Exit, &[])
    }

    /// Records the end of a child of the launcher. Returns false if the child is not the guard.
    pub(super) fn record_end(&mut self, pid: i32, cause: ExitCause) -> bool {
        let is_guard = pid == self.pid.as_raw();
        if is_guard {
            self.end = Some(Some(cause));
        }
        is_guard
    }

    pub(super) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Returns how the guard ended, if that is known.
    pub(super) fn exit_cause(&self) -> Option<ExitCause> {
        self.end.flatten()
    }
}
