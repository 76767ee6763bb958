//! At which address to listen.

use std::io;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};

use crate::error::CommError;
use crate::options::Listen;

/// The address of this host that `listen` means.
pub(super) fn address(listen: &Listen) -> Result<IpAddr, CommError> {
    match listen {
        Listen::Loopback => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        Listen::Address(address) => Ok(*address),
        Listen::Interface(names) => interface(names),
        Listen::RouteTo(host) => {
            route_to(host).map_err(|error| CommError::system(&format!("no route to {host}"), error))
        }
    }
}

/// The source address that packets to `host` get. Nothing is sent.
fn route_to(host: &str) -> io::Result<IpAddr> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
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

/// The first address of the first interface in `names` that has one, IPv4 before IPv6.
fn interface(names: &str) -> Result<IpAddr, CommError> {
    let all = nix::ifaddrs::getifaddrs()
        .map_err(|error| CommError::system("cannot list the network interfaces", error))?;
    let all: Vec<_> = all.collect();
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let addresses = || all.iter().filter(|one| one.interface_name == name).filter_map(|one| one.address);
        let v4 = addresses().find_map(|address| address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip())));
        let v6 = || {
            let mut all = addresses().filter_map(|address| address.as_sockaddr_in6().map(|v6| v6.ip()));
            // A link-local address needs a scope, which an address in a record cannot carry.
            all.find(|v6| !v6.is_unicast_link_local()).map(IpAddr::V6)
        };
        if let Some(address) = v4.or_else(v6) {
            return Ok(address);
        }
    }
    let mut known: Vec<_> = all.iter().map(|one| one.interface_name.as_str()).collect();
    known.sort_unstable();
    known.dedup();
    Err(CommError::InvalidArgument(format!(
        "no network interface {names:?} with an address (there are {})",
        known.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_reached_from_loopback() {
        for listen in [Listen::Loopback, Listen::RouteTo("127.0.0.1".to_owned())] {
            assert_eq!(address(&listen).unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        assert!(address(&Listen::RouteTo("localhost".to_owned())).unwrap().is_loopback());
        assert!(address(&Listen::Interface("none0,lo".to_owned())).unwrap().is_loopback());
    }

    #[test]
    fn an_unknown_interface_is_named() {
        let error = address(&Listen::Interface("none0".to_owned())).unwrap_err().to_string();
        assert!(error.contains("none0") && error.contains("lo"), "{error}");
    }
}
