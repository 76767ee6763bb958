//! Listening sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::ServeError;

/// The kernel cuts this down to `net.core.somaxconn`.
const BACKLOG: i32 = i32::MAX;
/// How often a free port is looked for that is free at all addresses.
const PORT_ATTEMPTS: usize = 16;
/// A connection whose host has vanished without a word is found out after this and
/// `KEEPALIVE_PROBES * KEEPALIVE_INTERVAL` more.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// Listens at all of `addresses`; see [`StoreServer::bind`](super::StoreServer::bind).
///
/// # Errors
/// [`ServeError`], which names the address.
pub fn listen(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, ServeError> {
    let mut attempt = 1;
    loop {
        match listen_once(addresses) {
            // The port that the first address picked may be taken at another.
            Err(ServeError::InUse { address }) if address.port() == 0 && attempt < PORT_ATTEMPTS => {
                attempt += 1
            }
            result => return result,
        }
    }
}

fn listen_once(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, ServeError> {
    let also_any_v4 = addresses.iter().any(|address| address.ip() == IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut listeners = Vec::with_capacity(addresses.len());
    let mut picked = 0;
    for &asked in addresses {
        let port = if asked.port() == 0 { picked } else { asked.port() };
        let address = SocketAddr::new(asked.ip(), port);
        let listener = listen_with_fallback(address, also_any_v4).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::InUse { address: asked },
            _ => ServeError::Listen { address: asked, source },
        })?;
        if asked.port() == 0 && picked == 0 {
            let what = "ask for the address of a socket";
            picked = listener.local_addr().map_err(|source| ServeError::System { what, source })?.port();
        }
        listeners.push(listener);
    }
    Ok(listeners)
}

/// `[::]` stands for every address; without IPv6 that is `0.0.0.0`.
fn listen_with_fallback(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let everywhere = address.is_ipv6() && address.ip().is_unspecified();
    match listen_one(address, only_v6) {
        Err(_) if everywhere && !only_v6 && listen_would_work_without_v6(address) => {
            listen_one(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()), false)
        }
        result => result,
    }
}

/// Whether IPv6 itself is what is missing, and not the port.
fn listen_would_work_without_v6(address: SocketAddr) -> bool {
    listen_one(SocketAddr::new(address.ip(), 0), false).is_err()
}

fn listen_one(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    // A port whose old connections still linger may be used again.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Prepares a listener for the event loop. Linux hands these options on to accepted connections,
/// which saves a system call for each.
pub(super) fn set_options(listener: &TcpListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let socket = SockRef::from(listener);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    socket.set_tcp_keepalive(&keepalive)
}
