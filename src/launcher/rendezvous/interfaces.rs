//! Addresses of this host's network interfaces, and the state of its loopback interface.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Returns true if the loopback interface is down. Processes of this host then cannot reach each other by
/// TCP.
pub(super) fn loopback_is_down() -> bool {
    // The list of all interfaces takes longer to read than a worker takes to start, so the route is checked
    // first.
    if loopback_has_route() {
        return false;
    }
    let mut loopbacks = getifaddrs()
        .into_iter()
        .flatten()
        .filter(|one| one.flags.contains(InterfaceFlags::IFF_LOOPBACK))
        .peekable();
    loopbacks.peek().is_some() && !loopbacks.any(|one| one.flags.contains(InterfaceFlags::IFF_UP))
}

/// Returns true if this host has a route to 127.0.0.1 over the loopback interface. This check sends no
/// packet.
fn loopback_has_route() -> bool {
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    let routed = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((loopback, 9))?;
        socket.local_addr()
    });
    routed.is_ok_and(|own| own.ip() == loopback)
}

/// Returns the addresses of this host's interfaces, and whether each interface is up. The result is empty if
/// the system does not provide the addresses.
pub(super) fn addresses() -> impl Iterator<Item = (IpAddr, bool)> {
    getifaddrs().into_iter().flatten().filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let ip = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))?;
        Some((ip, interface.flags.contains(InterfaceFlags::IFF_UP)))
    })
}
