//! TCP connections.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use nix::libc;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use smallvec::SmallVec;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use super::Link;
use super::fork::CloseOnFork;
use super::read_ahead::MAX_READ_AHEAD_BYTES;

/// Maximum number of connections that the kernel queues for a listening socket until the rank accepts them.
const BACKLOG: i32 = 4096;

/// Most bytes that are copied into one buffer before they are sent. The kernel takes one buffer faster than several.
const MAX_JOINED_BYTES: usize = 2 << 10;

/// A connected, nonblocking TCP socket.
#[derive(Debug)]
pub(crate) struct Tcp {
    /// Declared before the socket, so that it is dropped first.
    _close_on_fork: CloseOnFork,
    socket: Socket,
    /// The system's congestion control, which Reno replaced on this socket. It is set again if the connection
    /// leads to another host.
    system_congestion: SystemCongestion,
}

/// Name of the system's congestion control, if the socket has Reno instead until it is known whether the
/// connection leaves the host. `None` if Reno could not be set.
///
/// Inside a host there is no network path to measure, and a paced algorithm (BBR) only adds timers. With BBR,
/// the ring algorithm with 2 ranks took either 18 or 35 ms for 64 MiB; with Reno it takes 17 ms each time. A
/// socket that once had a paced algorithm stays paced, whatever is set later: an all-reduce of 256 KiB by 4
/// ranks took 1.1 ms instead of 0.2 ms. So sockets start with Reno, if the kernel permits.
type SystemCongestion = Option<Vec<u8>>;

/// Sets Reno on a socket that is not connected yet. Returns the name of the algorithm that Reno replaces.
fn start_with_reno(socket: &Socket) -> SystemCongestion {
    let before = socket.tcp_congestion().ok()?;
    socket.set_tcp_congestion(b"reno").ok()?;
    let name = before.split(|&byte| byte == 0).next().unwrap_or_default();
    Some(name.to_vec())
}

impl Tcp {
    fn new(socket: Socket, system_congestion: SystemCongestion) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        Ok(Self { _close_on_fork: CloseOnFork::new(socket.as_fd()), socket, system_congestion })
    }

    /// Starts to connect to `to`, from the local address `from` if there is one. [`Self::is_connected`] tells
    /// when the connection is open.
    pub(crate) fn connect(to: SocketAddr, from: Option<SocketAddr>) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        let system_congestion = start_with_reno(&socket);
        let tcp = Self::new(socket, system_congestion)?;
        if let Some(from) = from {
            tcp.socket.bind(&from.into())?;
        }
        match tcp.socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(tcp),
        }
    }

    /// Returns whether a connection attempt has completed.
    pub(crate) fn is_connected(&self) -> io::Result<bool> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        match self.socket.peer_addr() {
            Ok(_) => {
                self.restore_system_congestion();
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns true if both ends have the same IP address, and so are on this host. Two different addresses
    /// of this host return false.
    fn is_intra_host(&self) -> bool {
        let ip = |address: socket2::SockAddr| address.as_socket().map(|address| address.ip());
        let (ours, theirs) = (self.socket.local_addr().map(ip), self.socket.peer_addr().map(ip));
        matches!((ours, theirs), (Ok(Some(ours)), Ok(Some(theirs))) if ours == theirs)
    }

    fn restore_system_congestion(&self) {
        if let Some(system_congestion) = self.system_congestion.as_ref().filter(|_| !self.is_intra_host()) {
            let _ = self.socket.set_tcp_congestion(system_congestion);
        }
    }
}

/// Sends and receives by system calls of their own. Those of the C library are points at which a thread may be cancelled,
/// which costs each of them about 20 ns.
impl Link for Tcp {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if parts.len() < 2 || bytes > MAX_JOINED_BYTES {
            let mut no_descriptors = SendAncillaryBuffer::default();
            return Ok(rustix::net::sendmsg(&self.socket, parts, &mut no_descriptors, SendFlags::NOSIGNAL)?);
        }
        let mut joined = SmallVec::<[u8; MAX_JOINED_BYTES]>::new();
        parts.iter().for_each(|part| joined.extend_from_slice(part));
        Ok(rustix::net::send(&self.socket, &joined, SendFlags::NOSIGNAL)?)
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // The caller may pass the space for all that is missing. One read takes a part, so that other peers get
        // their turn.
        let most = into.len().min(MAX_READ_AHEAD_BYTES);
        Ok(rustix::net::recv(&self.socket, &mut into[..most], RecvFlags::empty())?.0)
    }

    fn try_recv_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(rustix::io::readv(&self.socket, parts)?)
    }

    fn close_write(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn is_flushed(&self) -> bool {
        unacked_bytes(&self.socket) == 0
    }

    fn skip_time_wait(&self) {
        let _ = self.socket.set_linger(Some(Duration::ZERO));
    }

    /// Sets keep-alive and user timeout, for control connections only. On a data connection, these settings
    /// would end the connection to a peer that is alive but slow to read. They are not set inside a host: a
    /// process whose virtual CPU does not run for `bound` would look like a lost host.
    fn enable_keepalive(&self, bound: Duration) -> io::Result<()> {
        if self.is_intra_host() {
            return Ok(());
        }
        let probe = Duration::from_secs(1);
        let probes = bound.as_secs().clamp(2, 120) as u32 - 1;
        let keepalive = TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(probes);
        self.socket.set_tcp_keepalive(&keepalive)?;
        self.socket.set_tcp_user_timeout(Some(bound))
    }

    fn time_since_ack(&self) -> Option<Duration> {
        time_since_ack(&self.socket)
    }

    /// Inside a host, the kernel puts the data into the receiver's socket on the sender's core, which the
    /// socket then reports (SO_INCOMING_CPU).
    fn sender_cpu(&self) -> Option<usize> {
        self.socket.cpu_affinity().ok()
    }

    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}

/// Returns the bytes that the peer's kernel has not acknowledged; 0 if the socket cannot say.
#[allow(unsafe_code)]
fn unacked_bytes(socket: &Socket) -> libc::c_int {
    let mut bytes: libc::c_int = 0;
    // SAFETY:
    // - the descriptor is open: `socket` is borrowed.
    // - SIOCOUTQ (= TIOCOUTQ) writes one int through the pointer, which points to one.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}

/// Returns the time since the peer's kernel last acknowledged anything.
#[allow(unsafe_code)]
fn time_since_ack(socket: &Socket) -> Option<Duration> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut bytes = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY:
    // - the descriptor is open: `socket` is borrowed.
    // - at most `bytes` bytes are written to `info`, which has so many.
    let result = unsafe {
        let (level, what) = (libc::IPPROTO_TCP, libc::TCP_INFO);
        libc::getsockopt(socket.as_raw_fd(), level, what, info.as_mut_ptr().cast(), &raw mut bytes)
    };
    // SAFETY: `tcp_info` consists of numbers, for which any bytes are a value; bytes that the kernel did not
    // write are zero.
    let info = unsafe { info.assume_init() };
    (result == 0).then(|| Duration::from_millis(info.tcpi_last_ack_recv.into()))
}

/// A nonblocking listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Declared before the socket, so that it is dropped first.
    _close_on_fork: CloseOnFork,
    socket: Socket,
    /// The system's congestion control, which Reno replaced on this socket. An accepted connection starts
    /// with Reno and gets the system's algorithm back if it leads to another host.
    system_congestion: SystemCongestion,
}

impl Listener {
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        let address = self.socket.local_addr()?.as_socket();
        address.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self::from_socket(self.socket.try_clone()?, self.system_congestion.clone()))
    }

    /// Returns the next waiting connection, and the address of its peer.
    pub(crate) fn accept(&self) -> io::Result<(Tcp, String)> {
        let (socket, from) = self.socket.accept()?;
        let from = from.as_socket().map_or_else(|| "?".to_owned(), |from| from.to_string());
        let tcp = Tcp::new(socket, self.system_congestion.clone())?;
        tcp.restore_system_congestion();
        Ok((tcp, from))
    }

    pub(crate) fn pollable(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn from_socket(socket: Socket, system_congestion: SystemCongestion) -> Self {
        Self { _close_on_fork: CloseOnFork::new(socket.as_fd()), socket, system_congestion }
    }
}

/// Listens at `address`.
pub(crate) fn listen(address: SocketAddr) -> io::Result<Listener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    let system_congestion = start_with_reno(&socket);
    socket.listen(BACKLOG)?;
    Ok(Listener::from_socket(socket, system_congestion))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `attempt` until it succeeds, for at most 10 s.
    fn retry<T>(mut attempt: impl FnMut() -> io::Result<T>) -> T {
        let until = std::time::Instant::now() + Duration::from_secs(10);
        loop {
            match attempt() {
                Ok(done) => return done,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            assert!(std::time::Instant::now() < until, "nothing came");
            std::thread::yield_now();
        }
    }

    /// Returns a listener, and the two ends of a connection to it.
    fn connected() -> (Listener, Tcp, Tcp) {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let dialled = Tcp::connect(listener.address().unwrap(), None).unwrap();
        let (accepted, _) = retry(|| listener.accept());
        assert!(dialled.is_connected().unwrap());
        (listener, dialled, accepted)
    }

    #[test]
    fn parts_arrive_in_order_whether_they_are_joined_or_not() {
        let (_listener, mut sender, mut receiver) = connected();
        for bytes in [[0, 1, 0], [64, 4, 1], [64, MAX_JOINED_BYTES - 65, 1], [64, MAX_JOINED_BYTES, 7]] {
            let sent: Vec<u8> = (0..bytes.iter().sum()).map(|index: usize| index as u8).collect();
            let (first, rest) = sent.split_at(bytes[0]);
            let (second, third) = rest.split_at(bytes[1]);
            let parts = [first, second, third].map(IoSlice::new);
            assert_eq!(sender.try_send(&parts).unwrap(), sent.len());
            let (mut got, mut filled) = (vec![0; sent.len()], 0);
            while filled < got.len() {
                filled += retry(|| receiver.try_recv(&mut got[filled..]));
            }
            assert!(got == sent, "{bytes:?}");
        }
    }

    #[test]
    fn loopback_connections_are_not_paced() {
        let (listener, dialled, accepted) = connected();
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
                assert_eq!(start_with_reno(&socket).as_deref(), Some(systems.as_bytes()));
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
        let system_congestion = start_with_reno(&socket);
        assert_eq!(name(&socket), "reno");
        let tcp = Tcp::new(socket, system_congestion).unwrap();
        tcp.restore_system_congestion();
        assert_eq!(name(&tcp.socket), systems);
    }

    fn name(socket: &Socket) -> String {
        String::from_utf8(socket.tcp_congestion().unwrap()).unwrap().trim_end_matches('\0').to_owned()
    }
}
