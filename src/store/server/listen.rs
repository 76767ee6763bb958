//! Listening sockets.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::ServeError;
use crate::keepalive::set_keepalive;

/// Requested length of the accept queue. The kernel limits it to `net.core.somaxconn`.
const BACKLOG: i32 = i32::MAX;
/// Most attempts to find a port that is free at all addresses.
const PORT_ATTEMPTS: usize = 16;
/// Most attempts to listen at a port to which another process is bound that does not listen yet.
const LISTEN_ATTEMPTS: u64 = 10;
/// Idle time and interval of probes after which the loss of a client's host is detected.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Listens at all of `addresses`; see [`StoreServer::bind`](super::StoreServer::bind).
///
/// # Errors
/// [`ServeError`], which names the address.
pub fn listen(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, ServeError> {
    for _ in 1..PORT_ATTEMPTS {
        match listen_once(addresses) {
            // The port chosen at the first address may be in use at another one.
            Err(ServeError::InUse { address }) if address.port() == 0 => {}
            result => return result,
        }
    }
    listen_once(addresses)
}

fn listen_once(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, ServeError> {
    let lists_any_v4 = addresses.iter().any(|address| address.ip() == IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut listeners = Vec::with_capacity(addresses.len());
    let mut chosen_port = 0;
    for &requested in addresses {
        let port = if requested.port() == 0 { chosen_port } else { requested.port() };
        let address = SocketAddr::new(requested.ip(), port);
        let listener = listen_with_fallback(address, lists_any_v4).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::InUse { address: requested },
            _ => ServeError::Listen { address: requested, source },
        })?;
        if requested.port() == 0 && chosen_port == 0 {
            let what = "ask for the address of a socket";
            chosen_port = listener.local_addr().map_err(|source| ServeError::System { what, source })?.port();
        }
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Listens at one address. On a system without IPv6, `[::]` is replaced by `0.0.0.0`.
fn listen_with_fallback(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let is_any_v6 = address.is_ipv6() && address.ip().is_unspecified();
    match listen_one(address, only_v6) {
        // If the system has no IPv6, listening at a free port fails as well.
        Err(_) if is_any_v6 && !only_v6 && listen_one(SocketAddr::new(address.ip(), 0), false).is_err() => {
            listen_one(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()), false)
        }
        result => result,
    }
}

/// Listens at one address. Linux lets several processes bind a port before one of them listens. If two listen
/// at that moment, the port is in use for both. So a process that could bind the port tries again after a
/// random time.
fn listen_one(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let mut attempt = 1;
    loop {
        let socket = bind(address, only_v6)?;
        match socket.listen(BACKLOG) {
            Ok(()) => return Ok(socket.into()),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempt < LISTEN_ATTEMPTS => {
                let random = RandomState::new().build_hasher().finish();
                thread::sleep(Duration::from_micros(random % (500 << attempt)));
                attempt += 1;
            }
            Err(error) => return Err(error),
        }
    }
}

fn bind(address: SocketAddr, only_v6: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    // Allows a port whose earlier connections are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Sets a listener's options for the event loop. On Linux, accepted connections inherit the TCP
/// options, which saves system calls for each connection.
pub(super) fn configure(listener: &TcpListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    SockRef::from(listener).set_tcp_nodelay(true)?;
    set_keepalive(listener, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_of_two_servers_that_start_together_gets_the_port() {
        const ROUNDS: usize = 20_000;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, convoke_testkit::free_port()));
        // Both threads spin, so that they begin within a fraction of a microsecond.
        let arrived = AtomicUsize::new(0);
        let meet = |count: usize| {
            arrived.fetch_add(1, Ordering::SeqCst);
            while arrived.load(Ordering::SeqCst) < count {
                std::hint::spin_loop();
            }
        };
        let successes = AtomicUsize::new(0);
        let run = || {
            for round in 0..ROUNDS {
                meet(4 * round + 2);
                let listening = listen(&[address]);
                successes.fetch_add(usize::from(listening.is_ok()), Ordering::SeqCst);
                meet(4 * round + 4);
                drop(listening);
                assert_eq!(successes.load(Ordering::SeqCst), round + 1, "in round {round}");
            }
        };
        thread::scope(|scope| {
            scope.spawn(run);
            run();
        });
    }
}
