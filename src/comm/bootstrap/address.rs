//! Chooses the address at which a rank listens.

use std::io;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};
use std::path::Path;

use nix::net::if_::InterfaceFlags;

use super::interfaces::{self, Interface};
use crate::bootstrap::options::Listen;
use crate::error::CommError;

/// Returns the address of this host that `listen` selects.
pub(crate) fn address(listen: &Listen) -> Result<IpAddr, CommError> {
    match listen {
        Listen::Loopback => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        Listen::Address(address) => Ok(*address),
        Listen::Interface(names) => {
            let all = list()?;
            interfaces::select_address(&all, names).ok_or_else(|| {
                let there: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
                CommError::InvalidArgument(format!(
                    "no network interface {names:?} is up and has an address; this host has {}",
                    there.join(", ")
                ))
            })
        }
        Listen::Routable => interfaces::most_reachable_address(list()?.iter()).ok_or_else(|| {
            CommError::InvalidArgument("no network interface is up and has an address".to_owned())
        }),
        Listen::RouteTo(host) => {
            let address =
                route_to(host).map_err(|error| CommError::system(&format!("no route to {host}"), error))?;
            if matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
                return Err(CommError::InvalidArgument(format!(
                    "the route to {host} starts at the link-local address {address}, which other hosts \
                     cannot reach: give a global address or a name, or set CONVOKE_SOCKET_IFNAME"
                )));
            }
            Ok(address)
        }
    }
}

/// Returns the source address of packets to `host`, found by a UDP connect that sends nothing.
fn route_to(host: &str) -> io::Result<IpAddr> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for target in (host, 9).to_socket_addrs()? {
        let any = if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let found = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(target)?;
            socket.local_addr()
        });
        match found {
            Ok(address) => return Ok(address.ip()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The network interfaces of this host, in the order of `getifaddrs`.
fn list() -> Result<Vec<Interface>, CommError> {
    let entries = nix::ifaddrs::getifaddrs()
        .map_err(|error| CommError::system("cannot list the network interfaces", error))?;
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (v4, v6) = (read("/proc/net/route"), read("/proc/net/ipv6_route"));
    let with_default_route = interfaces::default_routes(&v4, &v6);
    let mut all: Vec<Interface> = Vec::new();
    // `getifaddrs` returns one entry for each address of an interface, and one entry without an address.
    for entry in entries {
        let known = all.iter().position(|one| one.name == entry.interface_name);
        let index = known.unwrap_or(all.len());
        if known.is_none() {
            all.push(Interface {
                is_bridge: Path::new("/sys/class/net").join(&entry.interface_name).join("bridge").exists(),
                has_default_route: with_default_route.contains(entry.interface_name.as_str()),
                name: entry.interface_name,
                is_up: entry.flags.contains(InterfaceFlags::IFF_UP),
                is_loopback: entry.flags.contains(InterfaceFlags::IFF_LOOPBACK),
                addresses: Vec::new(),
            });
        }
        let v4 = entry.address.and_then(|address| Some(IpAddr::V4(address.as_sockaddr_in()?.ip())));
        let v6 = entry.address.and_then(|address| Some(IpAddr::V6(address.as_sockaddr_in6()?.ip())));
        all[index].addresses.extend(v4.or(v6));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_towards_a_loopback_peer_is_loopback() {
        for listen in [Listen::Loopback, Listen::RouteTo("127.0.0.1".to_owned())] {
            assert_eq!(address(&listen).unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        for listen in [Listen::RouteTo("localhost".to_owned()), Listen::Interface("none0,lo".to_owned())] {
            assert!(address(&listen).unwrap().is_loopback());
        }
        assert_eq!(address(&Listen::RouteTo("::1".to_owned())).unwrap(), "::1".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn any_host_has_an_address() {
        address(&Listen::Routable).unwrap();
    }

    #[test]
    fn an_unknown_interface_is_named() {
        let error = address(&Listen::Interface("none0".to_owned())).unwrap_err().to_string();
        assert!(error.contains("none0") && error.contains("lo"), "{error}");
    }
}
