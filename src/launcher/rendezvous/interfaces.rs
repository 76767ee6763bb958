//! Addresses of this host's network interfaces, and the state of its loopback interface.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use convoke_env::host::{Interface, interfaces};

/// The loopback addresses.
pub(super) const LOOPBACK: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
/// The addresses that stand for all addresses of a host. That of IPv6 includes IPv4.
pub(super) const ANY: [IpAddr; 2] = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];

/// Returns, with `port`, those of `ips` that belong to this host.
pub(super) fn local(ips: &[IpAddr], port: u16) -> impl Iterator<Item = SocketAddr> {
    let is_local = |ip: &&IpAddr| UdpSocket::bind((**ip, 0)).is_ok();
    ips.iter().filter(is_local).map(move |ip| SocketAddr::new(*ip, port))
}

/// Returns true if the loopback interface is down. Processes of this host then cannot reach each other by
/// TCP.
pub(super) fn loopback_is_down() -> bool {
    // The list of all interfaces takes longer to read than a worker takes to start, so the route is checked
    // first.
    if loopback_has_route() {
        return false;
    }
    let all = all();
    let mut loopbacks = all.iter().filter(|one| one.is_loopback).peekable();
    loopbacks.peek().is_some() && !loopbacks.any(|one| one.is_up)
}

/// Returns true if this host has a route to 127.0.0.1 over the loopback interface. This check sends no
/// packet.
fn loopback_has_route() -> bool {
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    route_address(loopback).is_ok_and(|own| own == loopback)
}

/// Returns the address of this host on its way to `to`. Connecting a UDP socket only looks up the route, and sends
/// nothing.
pub(super) fn route_address(to: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    // Any port is suitable.
    socket.connect((to, 9))?;
    Ok(socket.local_addr()?.ip())
}

/// Returns the addresses of this host's interfaces, those that other hosts most likely reach first, and
/// whether each interface is up. The result is empty if the system does not provide the addresses.
pub(super) fn addresses() -> impl Iterator<Item = (IpAddr, bool)> {
    let mut all = all();
    all.sort_by_key(Interface::reach);
    all.into_iter().flat_map(|one| one.addresses.into_iter().map(move |ip| (ip, one.is_up)))
}

/// Returns the addresses of this host's interfaces that are up, without link-local ones; loopback last.
pub(crate) fn own_addresses() -> Vec<IpAddr> {
    let useful = addresses().filter(|(ip, up)| *up && !is_link_local(ip));
    let mut addresses: Vec<IpAddr> = useful.map(|(ip, _)| ip).collect();
    addresses.sort_by_key(IpAddr::is_loopback);
    addresses.dedup();
    addresses
}

fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn all() -> Vec<Interface> {
    interfaces().unwrap_or_else(|_| Vec::new())
}
