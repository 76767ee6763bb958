//! TCP connections.

use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use nix::libc;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use super::Link;
use super::fork::NotForForks;

/// Connections that the kernel queues for a listener that is not in a call.
const BACKLOG: i32 = 4096;

/// A connected, nonblocking TCP socket.
#[derive(Debug)]
pub(crate) struct Tcp {
    /// Before the socket, so that it is dropped first.
    _not_for_forks: NotForForks,
    socket: Socket,
    /// The congestion control for a connection to another host.
    outside: Outside,
}

/// The system's congestion control, if Reno replaces it until it is known whether a connection leaves the
/// host.
///
/// Inside a host there is no path to probe, and a paced algorithm (BBR) only adds timers. With it, the ring
/// at 2 ranks took 18 or 35 ms for 64 MiB by chance; Reno needs 17 ms each time. A socket that was once paced
/// stays paced, whatever is set later: an all-reduce of 256 KiB by 4 ranks took 1.1 ms instead of 0.2. So
/// sockets begin with Reno. This has no effect if the system refuses it.
type Outside = Option<Vec<u8>>;

/// Makes a socket without a connection begin with Reno.
fn begin_unpaced(socket: &Socket) -> Outside {
    let before = socket.tcp_congestion().ok()?;
    socket.set_tcp_congestion(b"reno").ok()?;
    let name = before.split(|&byte| byte == 0).next().unwrap_or_default();
    Some(name.to_vec())
}

impl Tcp {
    fn new(socket: Socket, outside: Outside) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        Ok(Self { _not_for_forks: NotForForks::new(socket.as_fd()), socket, outside })
    }

    /// Begins a connection; [`Self::connected`] says when it is open.
    pub(crate) fn connect(to: SocketAddr, from: Option<SocketAddr>) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        let outside = begin_unpaced(&socket);
        let tcp = Self::new(socket, outside)?;
        if let Some(from) = from {
            tcp.socket.bind(&from.into())?;
        }
        match tcp.socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(tcp),
        }
    }

    /// Returns whether a connection attempt has completed.
    pub(crate) fn connected(&self) -> io::Result<bool> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        match self.socket.peer_addr() {
            Ok(_) => {
                self.paced_outside_the_host();
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns whether both ends have one address, and so are on this host. Two addresses may belong to one
    /// host too.
    fn is_inside_the_host(&self) -> bool {
        let ip = |address: socket2::SockAddr| address.as_socket().map(|address| address.ip());
        let (ours, theirs) = (self.socket.local_addr().map(ip), self.socket.peer_addr().map(ip));
        matches!((ours, theirs), (Ok(Some(ours)), Ok(Some(theirs))) if ours == theirs)
    }

    fn paced_outside_the_host(&self) {
        if let Some(outside) = self.outside.as_ref().filter(|_| !self.is_inside_the_host()) {
            let _ = self.socket.set_tcp_congestion(outside);
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

    fn give_up_port(&self) {
        let _ = self.socket.set_linger(Some(Duration::ZERO));
    }

    /// Sets keep-alive and user timeout, for control connections only. On a data lane, these settings would
    /// end a peer that is alive but slow to read. They are not set inside a host: a virtual core that is not
    /// scheduled for `bound`, while it holds one end, would look like a lost host.
    fn watch_path(&self, bound: Duration) -> io::Result<()> {
        if self.is_inside_the_host() {
            return Ok(());
        }
        let probe = Duration::from_secs(1);
        let probes = bound.as_secs().clamp(2, 120) as u32 - 1;
        let keepalive = TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(probes);
        self.socket.set_tcp_keepalive(&keepalive)?;
        self.socket.set_tcp_user_timeout(Some(bound))
    }

    fn unheard(&self) -> Option<Duration> {
        last_heard(&self.socket)
    }

    /// Inside a host, the sender's core also carries the data into the receiver's socket.
    fn sender_cpu(&self) -> Option<usize> {
        self.socket.cpu_affinity().ok()
    }

    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}

/// Returns the bytes that the peer's kernel has not acknowledged; 0 if the socket cannot say.
#[allow(unsafe_code)]
fn unsent(socket: &Socket) -> libc::c_int {
    let mut bytes: libc::c_int = 0;
    // SAFETY:
    // - the descriptor is open: `socket` is borrowed.
    // - SIOCOUTQ (= TIOCOUTQ) writes one int through the pointer, which points to one.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}

/// Returns the time since the peer's kernel last acknowledged anything.
#[allow(unsafe_code)]
fn last_heard(socket: &Socket) -> Option<Duration> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut bytes = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY:
    // - the descriptor is open: `socket` is borrowed.
    // - at most `bytes` bytes are written to `info`, which has so many.
    let result = unsafe {
        let (level, what) = (libc::IPPROTO_TCP, libc::TCP_INFO);
        libc::getsockopt(socket.as_raw_fd(), level, what, info.as_mut_ptr().cast(), &raw mut bytes)
    };
    // SAFETY: numbers, for which any bytes are a value; those that the kernel did not write are zero.
    let info = unsafe { info.assume_init() };
    (result == 0).then(|| Duration::from_millis(info.tcpi_last_ack_recv.into()))
}

/// A nonblocking listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Before the socket, so that it is dropped first.
    _not_for_forks: NotForForks,
    socket: Socket,
    /// The system's congestion control, for connections that are accepted.
    outside: Outside,
}

impl Listener {
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        let address = self.socket.local_addr()?.as_socket();
        address.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self::of(self.socket.try_clone()?, self.outside.clone()))
    }

    /// Returns the next waiting connection, and the address of its peer.
    pub(crate) fn accept(&self) -> io::Result<(Tcp, String)> {
        let (socket, from) = self.socket.accept()?;
        let from = from.as_socket().map_or_else(|| "?".to_owned(), |from| from.to_string());
        let tcp = Tcp::new(socket, self.outside.clone())?;
        tcp.paced_outside_the_host();
        Ok((tcp, from))
    }

    pub(crate) fn pollable(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn of(socket: Socket, outside: Outside) -> Self {
        Self { _not_for_forks: NotForForks::new(socket.as_fd()), socket, outside }
    }
}

/// Listens at `address`.
pub(crate) fn listen(address: SocketAddr) -> io::Result<Listener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    let outside = begin_unpaced(&socket);
    socket.listen(BACKLOG)?;
    Ok(Listener::of(socket, outside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_connections_are_not_paced() {
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
        // All sockets must begin with Reno, because a socket that was once paced stays paced.
        for socket in [&listener.socket, &dialled.socket, &accepted.socket] {
            assert_eq!(name(socket), "reno");
        }
    }

    #[test]
    fn socket_starts_with_reno_whatever_the_system_default() {
        let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap();
        let mut others = 0;
        for systems in known.split_whitespace() {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
            // Some algorithms are for root only.
            if socket.set_tcp_congestion(systems.as_bytes()).is_ok() {
                assert_eq!(begin_unpaced(&socket).as_deref(), Some(systems.as_bytes()));
                assert_eq!(name(&socket), "reno");
                others += usize::from(systems != "reno");
            }
        }
        if others == 0 {
            convoke_testkit::skip(format_args!("no other congestion control than reno, of {known:?}"));
        }
    }

    #[test]
    fn connections_to_other_hosts_use_the_system_congestion_control() {
        // The socket is not connected yet, so it is not known to lead to this host.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
        let systems = name(&socket);
        let outside = begin_unpaced(&socket);
        assert_eq!(name(&socket), "reno");
        let tcp = Tcp::new(socket, outside).unwrap();
        tcp.paced_outside_the_host();
        assert_eq!(name(&tcp.socket), systems);
    }

    fn name(socket: &Socket) -> String {
        String::from_utf8(socket.tcp_congestion().unwrap()).unwrap().trim_end_matches('\0').to_owned()
    }
}
