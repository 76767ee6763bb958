//! Sleeps until one of many descriptors is ready.
//!
//! Descriptors with rare events stay registered in an epoll set: that of the process (control connections,
//! the listener, the launcher, and the doorbell, an eventfd that wakes this rank), or that of a group (its
//! connections for messages). The few connections that a collective waits for change with every call. They
//! are polled together with the epoll sets, so that a collective need not register and remove them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

#[cfg(test)]
use crate::transport::links::fault_injection;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// Most events that one call of epoll_wait returns.
const EVENTS: usize = 64;

/// The owner of a descriptor that is registered in the epoll set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Doorbell,
    /// The listener, or a connection whose peer has not authenticated yet.
    Handshake,
    Agent,
    /// The control connection to a process; in a group's epoll set, the message connection to a rank.
    Peer(usize),
    /// A process; the event says that it has ended.
    Process(usize),
}

impl Source {
    fn to_data(self) -> u64 {
        let (kind, rank) = match self {
            Self::Doorbell => (0, 0),
            Self::Handshake => (1, 0),
            Self::Agent => (2, 0),
            Self::Peer(rank) => (3, rank),
            Self::Process(rank) => (4, rank),
        };
        kind << 56 | rank as u64
    }

    fn from_data(data: u64) -> Self {
        let rank = (data & ((1 << 56) - 1)) as usize;
        match data >> 56 {
            0 => Self::Doorbell,
            1 => Self::Handshake,
            2 => Self::Agent,
            3 => Self::Peer(rank),
            _ => Self::Process(rank),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Poller {
    epoll: Epoll,
    #[cfg(test)]
    chance: fault_injection::FaultSource,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            #[cfg(test)]
            chance: fault_injection::FaultSource::from_thread(),
        })
    }

    /// Watches `fd` for incoming data, and for room to write if `write` is set.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, source: Source, write: bool) -> io::Result<()> {
        Ok(self.epoll.add(fd, event(source, write))?)
    }

    pub(crate) fn change(&self, fd: BorrowedFd<'_>, source: Source, write: bool) -> io::Result<()> {
        Ok(self.epoll.modify(fd, &mut event(source, write))?)
    }

    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = self.epoll.delete(fd);
    }

    /// Returns the registered sources that are ready, at most 64.
    pub(crate) fn ready(&self) -> impl Iterator<Item = Source> + use<> {
        let mut events = [EpollEvent::empty(); EVENTS];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        let ready = events.into_iter().take(count).map(|event| Source::from_data(event.data()));
        #[cfg(test)]
        let ready = fault_injection::shuffle_ready(ready.collect(), self.chance.next()).into_iter();
        ready
    }

    /// Sleeps until a descriptor is ready, at most `timeout`. Returns whether one of `watched` is ready.
    pub(crate) fn sleep(
        &self,
        watched: [Option<BorrowedFd<'_>>; 2],
        others: &[(BorrowedFd<'_>, PollFlags)],
        timeout: Duration,
    ) -> bool {
        #[cfg(test)]
        if self.chance.next().is_some_and(|mut random| random.below(8) == 0) {
            // This simulates a signal that interrupts the sleep.
            return false;
        }
        let mut fds = Vec::with_capacity(others.len() + 2);
        fds.extend(watched.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let watched = fds.len();
        fds.extend(others.iter().map(|&(fd, flags)| PollFd::new(fd, flags)));
        // The time is rounded up: a thread that woke too early would spin.
        let millis = timeout.as_micros().div_ceil(1000).min(60_000) as u16;
        match nix::poll::poll(&mut fds, PollTimeout::from(millis)) {
            Ok(0) | Err(Errno::EINTR) => false,
            Ok(_) => fds[..watched].iter().any(|fd| fd.any().unwrap_or(true)),
            Err(_) => true,
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

fn event(source: Source, write: bool) -> EpollEvent {
    let flags = if write { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
    EpollEvent::new(flags, source.to_data())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_round_trip() {
        for source in [Source::Doorbell, Source::Agent, Source::Peer(1 << 40), Source::Process(9)] {
            assert_eq!(Source::from_data(source.to_data()), source);
        }
    }
}
