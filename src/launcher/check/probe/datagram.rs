//! Finds out whether packets as large as an interface allows reach another node, without fragmentation.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};

use super::ID;

/// Bytes of the headers of IPv4 and UDP, which count as part of a packet.
const HEADERS: u32 = 28;
/// Largest packet that UDP over IPv4 can have.
const LARGEST: u32 = 65_507 + HEADERS;
const ATTEMPTS: u32 = 4;
const WAIT: Duration = Duration::from_millis(250);
const SMALL: usize = ID + 4;

/// Returns true if packets of `mtu` bytes do not reach the node, but small packets do. Returns false if no UDP
/// gets through, as in networks that carry TCP only, and for IPv6.
pub(in super::super) fn loses_large_packets(to: SocketAddr, id: &[u8; ID], mtu: u32) -> bool {
    let SocketAddr::V4(to) = to else { return false };
    let Ok(socket) = UdpSocket::bind("0.0.0.0:0") else { return false };
    // The kernel sends packets of any size that the interface takes, and does not split them.
    if set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::PROBE).is_err() || socket.connect(to).is_err() {
        return false;
    }
    let large = (mtu.min(LARGEST) - HEADERS.min(mtu)) as usize;
    if large <= SMALL {
        return false;
    }
    let mut packet = vec![0; large];
    packet[..ID].copy_from_slice(id);
    let (mut small_arrives, mut answer) = (false, [0; SMALL]);
    for _ in 0..ATTEMPTS {
        // The last four bytes of an answer tell which packet arrived.
        packet[ID..SMALL].copy_from_slice(&0u32.to_be_bytes());
        let small = socket.send(&packet[..SMALL]);
        packet[ID..SMALL].copy_from_slice(&1u32.to_be_bytes());
        if small.is_err() || socket.send(&packet).is_err() {
            return false;
        }
        let until = Instant::now() + WAIT;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if socket.set_read_timeout(Some(left)).is_err() {
                return false;
            }
            match socket.recv(&mut answer) {
                Ok(SMALL) if answer[..ID] == *id && answer[ID..] == 1u32.to_be_bytes() => return false,
                Ok(SMALL) if answer[..ID] == *id => small_arrives = true,
                Ok(_) | Err(_) => {}
            }
        }
    }
    small_arrives
}
