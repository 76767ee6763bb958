//! TCP connections.

use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use nix::libc;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use super::Link;
use super::fork::NotForForks;

/// Connections that the kernel holds for a listener that is not in a call.
const BACKLOG: i32 = 4096;

/// A connected, nonblocking TCP socket.
#[derive(Debug)]
pub(crate) struct Tcp {
    /// Before the socket, so that it is dropped first.
    _not_for_forks: NotForForks,
    socket: Socket,
}

impl Tcp {
    pub(crate) fn new(socket: Socket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        Ok(Self { _not_for_forks: NotForForks::new(socket.as_fd()), socket })
    }

    /// Begins a connection; [`connected`] says when it is there.
    pub(crate) fn connect(to: SocketAddr, from: Option<SocketAddr>) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        let tcp = Self::new(socket)?;
        if let Some(from) = from {
            tcp.socket.bind(&from.into())?;
        }
        match tcp.socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(tcp),
        }
    }

    /// Whether a connection that was begun is there.
    pub(crate) fn connected(&self) -> io::Result<bool> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        match self.socket.peer_addr() {
            Ok(_) => {
                self.unpaced_inside_a_host();
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Inside a host there is no path to probe: a congestion control that paces (BBR) only adds timers there,
    /// and made the ring at 2 ranks 18 or 35 ms for 64 MiB by chance, where Reno needs 17 ms each time.
    /// Without effect where the system refuses.
    fn unpaced_inside_a_host(&self) {
        let ip = |address: socket2::SockAddr| address.as_socket().map(|address| address.ip());
        let (ours, theirs) = (self.socket.local_addr().map(ip), self.socket.peer_addr().map(ip));
        if matches!((ours, theirs), (Ok(Some(ours)), Ok(Some(theirs))) if ours == theirs) {
            let _ = self.socket.set_tcp_congestion(b"reno");
        }
    }
}

impl Link for Tcp {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.socket.send_vectored_with_flags(parts, libc::MSG_NOSIGNAL)
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&self.socket).read(into)
    }

    fn close_write(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn is_flushed(&self) -> bool {
        unsent(&self.socket) == 0
    }

    /// For control connections only: on a data lane the same settings would end a peer that is alive
    /// but slow to read.
    fn watch_path(&self, bound: Duration) -> io::Result<()> {
        let probe = Duration::from_secs(1);
        let probes = bound.as_secs().clamp(2, 120) as u32 - 1;
        let keepalive = TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(probes);
        self.socket.set_tcp_keepalive(&keepalive)?;
        self.socket.set_tcp_user_timeout(Some(bound))
    }

    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}

/// Bytes that the peer's kernel has not acknowledged; 0 if the socket cannot say.
#[allow(unsafe_code)]
fn unsent(socket: &Socket) -> libc::c_int {
    let mut bytes: libc::c_int = 0;
    // SAFETY:
    // - the descriptor is open: `socket` is borrowed.
    // - SIOCOUTQ (= TIOCOUTQ) writes one int through the pointer, which points to one.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}

/// A nonblocking listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Before the socket, so that it is dropped first.
    _not_for_forks: NotForForks,
    socket: Socket,
}

impl Listener {
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        let address = self.socket.local_addr()?.as_socket();
        address.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self::of(self.socket.try_clone()?))
    }

    /// The next connection that waits, and who makes it.
    pub(crate) fn accept(&self) -> io::Result<(Tcp, String)> {
        let (socket, from) = self.socket.accept()?;
        let from = from.as_socket().map_or_else(|| "?".to_owned(), |from| from.to_string());
        let tcp = Tcp::new(socket)?;
        tcp.unpaced_inside_a_host();
        Ok((tcp, from))
    }

    pub(crate) fn pollable(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn of(socket: Socket) -> Self {
        Self { _not_for_forks: NotForForks::new(socket.as_fd()), socket }
    }
}

/// Listens at `address`.
pub(crate) fn listen(address: SocketAddr) -> io::Result<Listener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(Listener::of(socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_inside_a_host_are_not_paced() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let dialled = Tcp::connect(listener.address().unwrap(), None).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        let accepted = loop {
            match listener.accept() {
                Ok((tcp, _)) => break tcp,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            assert!(std::time::Instant::now() < until, "nobody came");
            std::thread::yield_now();
        };
        assert!(dialled.connected().unwrap());
        for tcp in [dialled, accepted] {
            let name = tcp.socket.tcp_congestion().unwrap();
            assert!(name.starts_with(b"reno"), "{}", String::from_utf8_lossy(&name));
        }
    }
}
