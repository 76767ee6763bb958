//! From a host name and a port to a connection that has shaken hands.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

use socket2::{SockRef, TcpKeepalive};

use super::connection::{Connection, Failure};
use crate::error::StoreError;

/// The longest that one address may take while others have not been tried.
const ATTEMPT_TIME: Duration = Duration::from_secs(5);
/// Pauses between attempts grow from here to there, each shortened at random by up to half, so that
/// ten thousand clients do not knock at the same moment.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A server's host that has vanished without a word is found out after this and three probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Where a store is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// Reads `host:port`; an IPv6 address stands in brackets.
    ///
    /// # Errors
    /// [`StoreError::Invalid`].
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

    /// Connects and shakes hands, again and again until `deadline`.
    pub(super) fn reach(&self, deadline: Instant) -> Result<Connection, StoreError> {
        let started = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let last = match self.attempt(deadline) {
                Ok(connection) => return Ok(connection),
                Err(last) => last,
            };
            let rest = pause.mul_f64(0.5 + f64::from(random() >> 16) / f64::from(1 << 17));
            if Instant::now() + rest >= deadline {
                return Err(StoreError::Unreachable {
                    store: self.to_string(),
                    after: started.elapsed(),
                    attempts,
                    last,
                });
            }
            thread::sleep(rest);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Tries all addresses of the host once; the error says what the last one met.
    fn attempt(&self, deadline: Instant) -> Result<Connection, String> {
        let addresses = self.resolve(deadline)?;
        let mut last = format!("{} has no address", self.host);
        for address in addresses {
            let deadline = deadline.min(Instant::now() + ATTEMPT_TIME);
            match open(address, deadline) {
                Ok(connection) => return Ok(connection),
                Err(failure) => last = format!("{address}: {failure}"),
            }
        }
        Err(last)
    }

    /// Looks the name up: a thread does, since a silent name server holds up the call for long.
    fn resolve(&self, deadline: Instant) -> Result<Vec<SocketAddr>, String> {
        let Address { host, port } = self.clone();
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let (result, looked_up) = mpsc::channel();
        let lookup = move || {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // Nobody listens any more if this took too long.
            let _ = result.send(found);
        };
        let thread = thread::Builder::new().name("convoke-resolve".into()).spawn(lookup);
        thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        match looked_up.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(error)) => Err(format!("cannot look up {}: {error}", self.host)),
            Err(_) => Err(format!("no answer while looking up {}", self.host)),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Late => f.write_str("connected, but it does not answer as a store"),
            Failure::Lost(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("it hung up, and is no store or not any longer")
            }
            Failure::Lost(error) => error.fmt(f),
            Failure::Protocol(what) => write!(f, "not a store: it {what}"),
        }
    }
}

fn open(address: SocketAddr, deadline: Instant) -> Result<Connection, Failure> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, left)?;
    // A free port in the range that the system picks local ports from can connect to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(Failure::Lost(io::ErrorKind::ConnectionRefused.into()));
    }
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Connection::open(stream, random(), deadline)
}

/// A number that differs from call to call and from process to process.
pub(super) fn random() -> u32 {
    // Each RandomState has a key of its own.
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
