//! Addresses of servers, and opening connections to them.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

use nix::errno::Errno;
use nix::poll::PollFlags;
use socket2::{Domain, Protocol, Socket, Type};

use super::connection::{Connection, ExchangeError, wait_ready};
use crate::call::Call;
use crate::error::StoreError;
use crate::interrupt::{self, Interrupted, is_interrupted};
use crate::keepalive::set_keepalive;

/// Longest time to connect to one address of a host, so that its other addresses are tried too.
const ATTEMPT_TIME: Duration = Duration::from_secs(5);
/// Delay after the first attempt. It doubles after each attempt, up to [`LONGEST_DELAY`]. Each delay
/// is shortened at random by up to half, so that ten thousand clients do not connect at the same time.
const FIRST_DELAY: Duration = Duration::from_millis(20);
const LONGEST_DELAY: Duration = Duration::from_secs(1);
/// Idle time and interval of probes after which the loss of the server's host is detected.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// The address at which a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// Parses `host:port`. An IPv6 address must be in brackets.
    pub(super) fn parse(text: &str) -> Result<Address, StoreError> {
        let invalid =
            || StoreError::Invalid { what: format!("{text:?} is not an address, such as host:29500") };
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let port = port.parse().map_err(|_| invalid())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let name = bare.unwrap_or(host);
        if name.is_empty() || name.contains(['[', ']']) || (bare.is_none() && name.contains(':')) {
            return Err(invalid());
        }
        Ok(Address { host: name.to_owned(), port })
    }

    /// Connects and performs the handshake. Repeats failed attempts until `deadline`.
    pub(super) fn connect(&self, deadline: Instant) -> Result<Connection, StoreError> {
        let started = Instant::now();
        let mut longest = FIRST_DELAY;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let last = match self.connect_once(deadline) {
                Ok(connection) => return Ok(connection),
                Err(AttemptError::Interrupted) => return Err(self.interrupted(started)),
                Err(AttemptError::Failed(last)) => last,
            };
            let delay = longest.mul_f64(0.5 + f64::from(random_u32() >> 16) / f64::from(1 << 17));
            if Instant::now() + delay >= deadline {
                let (store, after) = (self.to_string(), started.elapsed());
                return Err(StoreError::Unreachable { store, after, attempts, last });
            }
            interrupt::sleep(delay).map_err(|Interrupted| self.interrupted(started))?;
            longest = (longest * 2).min(LONGEST_DELAY);
        }
    }

    /// Returns the error of a program that was interrupted while it connected.
    pub(super) fn interrupted(&self, started: Instant) -> StoreError {
        Call::started_at("connect", started).interrupted(self.to_string(), Vec::new())
    }

    /// Tries all addresses of the host once. The error is that of the last address.
    pub(super) fn connect_once(&self, deadline: Instant) -> Result<Connection, AttemptError> {
        let addresses = self.resolve(deadline)?;
        let mut last = format!("{} has no address", self.host);
        for address in addresses {
            let deadline = deadline.min(Instant::now() + ATTEMPT_TIME);
            match open(address, deadline) {
                Ok(connection) => return Ok(connection),
                Err(ExchangeError::Interrupted) => return Err(AttemptError::Interrupted),
                Err(error) => last = format!("{address}: {error}"),
            }
        }
        Err(AttemptError::Failed(last))
    }

    /// Looks the host name up, in a thread of its own: a lookup cannot be cancelled, and an
    /// unresponsive name server would block it beyond the deadline.
    fn resolve(&self, deadline: Instant) -> Result<Vec<SocketAddr>, AttemptError> {
        let Address { host, port } = self.clone();
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let (result, looked_up) = mpsc::channel();
        let lookup = move || {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // Sending fails if the lookup took longer than the deadline: the receiver was then
            // dropped.
            let _ = result.send(found);
        };
        let thread = thread::Builder::new().name("convoke-resolve".into()).spawn(lookup);
        thread.map_err(|error| AttemptError::Failed(format!("cannot start a thread: {error}")))?;
        loop {
            let until = interrupt::next_check(deadline);
            let what = match looked_up.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Ok(addresses)) => return Ok(addresses),
                Ok(Err(error)) => format!("cannot look up {}: {error}", self.host),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => match is_interrupted() {
                    true => return Err(AttemptError::Interrupted),
                    false => continue,
                },
                Err(_) => format!("no answer while looking up {}", self.host),
            };
            return Err(AttemptError::Failed(what));
        }
    }
}

/// The reason why an attempt to connect failed.
#[derive(Debug)]
pub(super) enum AttemptError {
    /// The error of the last address.
    Failed(String),
    Interrupted,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

fn open(address: SocketAddr, deadline: Instant) -> Result<Connection, ExchangeError> {
    let stream = connect_by(address, deadline)?;
    // TCP self-connect: if the kernel picks the target port as the local port, the socket connects
    // to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(ExchangeError::Lost(io::ErrorKind::ConnectionRefused.into()));
    }
    set_keepalive(&stream, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL)?;
    Connection::open(stream, random_u32(), deadline)
}

/// Opens a TCP connection. `TcpStream::connect_timeout` would not notice that the program was interrupted.
fn connect_by(address: SocketAddr, deadline: Instant) -> Result<TcpStream, ExchangeError> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(Errno::EINPROGRESS as i32) => {}
        connected => return Ok(connected.map(|()| socket.into())?),
    }
    match wait_ready(socket.as_fd(), PollFlags::POLLOUT, deadline) {
        Err(ExchangeError::Timeout) => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        ready => ready?,
    }
    match socket.take_error()? {
        Some(error) => Err(error.into()),
        None => Ok(socket.into()),
    }
}

/// Returns a random number for nonces and delays. It is not suitable for secrets.
pub(super) fn random_u32() -> u32 {
    // Every RandomState has its own random key.
    RandomState::new().hash_one(std::process::id()) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_well_formed_address_is_accepted(
            name in "[a-z0-9]([a-z0-9.-]{0,30}[a-z0-9])?",
            ip in any::<IpAddr>(),
            port: u16,
        ) {
            let ip_text = SocketAddr::new(ip, port).to_string();
            for (text, host) in [(format!("{name}:{port}"), name), (ip_text, ip.to_string())] {
                let address = Address::parse(&text).unwrap();
                prop_assert_eq!((address.host.as_str(), address.port), (host.as_str(), port));
                prop_assert_eq!(address.to_string(), text);
            }
        }

        #[test]
        fn any_text_is_an_address_or_refused(text in "(\\[?[a-z0-9:.%]{0,8}\\]?:?[0-9]{0,6}|\\PC{0,20})") {
            if let Ok(address) = Address::parse(&text) {
                let again = Address::parse(&address.to_string()).unwrap();
                prop_assert_eq!((again.host, again.port), (address.host, address.port));
            }
        }
    }

    #[test]
    fn addresses_are_host_and_port() {
        for (text, host, port) in
            [("node-1:29500", "node-1", 29500), ("10.0.0.1:1", "10.0.0.1", 1), ("[::1]:80", "::1", 80)]
        {
            let address = Address::parse(text).unwrap();
            assert_eq!((address.host.as_str(), address.port), (host, port));
            assert_eq!(address.to_string(), text);
        }
        for text in ["", "node", "node:", ":1", "node:x", "node:65536", "::1:80", "[::1]"] {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(error.contains("is not an address"), "{text:?}: {error}");
        }
    }
}
