//! The addresses of this host.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Whether the loopback interface is down, without which no process of this host reaches another one by TCP.
pub(super) fn loopback_is_down() -> bool {
    let mut loopbacks = getifaddrs()
        .into_iter()
        .flatten()
        .filter(|one| one.flags.contains(InterfaceFlags::IFF_LOOPBACK))
        .peekable();
    loopbacks.peek().is_some() && !loopbacks.any(|one| one.flags.contains(InterfaceFlags::IFF_UP))
}

/// Addresses of its interfaces, and whether that interface is up; none if the system does not tell.
pub(super) fn addresses() -> impl Iterator<Item = (IpAddr, bool)> {
    getifaddrs().into_iter().flatten().filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let ip = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))?;
        Some((ip, interface.flags.contains(InterfaceFlags::IFF_UP)))
    })
}
