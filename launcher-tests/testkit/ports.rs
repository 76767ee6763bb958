//! Ports for the servers of a test.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// First port: below the kernel's ephemeral ports, above the ports of `scripts/quickstart`.
const FIRST_PORT: u32 = 12_000;
const PORT_COUNT: u32 = 8_000;

/// One Unix socket for each port that this process has reserved. It tells other tests on this machine that
/// the port is taken.
static RESERVED: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// Returns an unused port of 127.0.0.1; see [`free_ports`].
#[must_use]
pub fn free_port() -> u16 {
    free_ports(1)
}

/// Returns the first of `count` consecutive unused ports of 127.0.0.1.
///
/// No other test on this machine gets these ports while this process lives. An abstract Unix socket named
/// after the port reserves it until this process ends.
#[must_use]
pub fn free_ports(count: u16) -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..PORT_COUNT {
        let number = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let first = (FIRST_PORT + number % PORT_COUNT) as u16;
        let reserved: Option<Vec<_>> = (first..first + count).map(reserve).collect();
        if let Some(reserved) = reserved {
            RESERVED.lock().unwrap().extend(reserved);
            return first;
        }
    }
    panic!("no {count} free ports from {FIRST_PORT} to {}", FIRST_PORT + PORT_COUNT - 1)
}

fn reserve(port: u16) -> Option<UnixListener> {
    let name = SocketAddr::from_abstract_name(format!("convoke-test-port-{port}")).unwrap();
    let reserved = UnixListener::bind_addr(&name).ok()?;
    TcpListener::bind(("127.0.0.1", port)).is_ok().then_some(reserved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_assigned_twice() {
        let mut ports: Vec<u16> = (0..200).map(|_| free_port()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 200);
    }

    #[test]
    fn port_of_another_process_is_not_assigned() {
        let port = free_port();
        assert!(reserve(port).is_none());
    }
}
