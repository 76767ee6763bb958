//! Connections between the nodes of a check: each node answers at some ports and tries those of the others.
//!
//! A request over TCP has the id of the node that is meant and a number of bytes, which follow. The answer has
//! the id of the node, its time, and as many bytes.

mod client;
mod datagram;
mod server;

use std::time::{SystemTime, UNIX_EPOCH};

pub(super) use client::{ProbeError, probe};
pub(super) use datagram::loses_large_packets;
pub(super) use server::{ProbePorts, answer_probes};

/// Length of the id, and of request and answer before the bytes that follow.
const ID: usize = 16;
const REQUEST: usize = ID + 4;
const ANSWER: usize = ID + 8;
/// Most bytes that may follow a request.
const MAX_BYTES: u32 = 64 << 20;
const CHUNK: usize = 64 << 10;

/// Returns the milliseconds since 1970 by this host's clock.
fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_else(|error| error.duration());
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
    use std::time::{Duration, Instant};

    use super::*;

    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn node_is_reached_with_its_time_and_bytes_and_another_is_refused() {
        let ports = answer_probes([7; ID]).unwrap();
        for &port in &ports.tcp {
            let address = SocketAddr::new(LOCAL, port);
            let answer = probe(address, &[7; ID], 300_000, soon()).unwrap();
            assert!(answer.ahead_ms.abs() < 10_000, "{answer:?}");
            assert!(matches!(probe(address, &[8; ID], 0, soon()), Err(ProbeError::OtherAnswered)));
        }
        assert!(!loses_large_packets(SocketAddr::new(LOCAL, ports.udp), &[7; ID], 1500));
    }

    #[test]
    fn silent_or_closed_port_is_no_node() {
        let silent = TcpListener::bind((LOCAL, 0)).unwrap();
        let deadline = Instant::now() + Duration::from_millis(100);
        let answer = probe(silent.local_addr().unwrap(), &[7; ID], 0, deadline);
        assert!(matches!(answer, Err(ProbeError::OtherAnswered)), "{answer:?}");
        let closed = SocketAddr::new(LOCAL, convoke_testkit::free_port());
        let answer = probe(closed, &[7; ID], 0, soon());
        assert!(
            matches!(&answer, Err(ProbeError::NotReached(why)) if why == "connection refused"),
            "{answer:?}"
        );
    }
}
