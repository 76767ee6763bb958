//! Chooses the address at which a rank listens.

use std::io;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};

use convoke_env::host::{Interface, interfaces, most_reachable_address};

use crate::bootstrap::options::Listen;
use crate::error::CommError;

/// Returns the address of this host that `listen` selects.
pub(crate) fn address(listen: &Listen) -> Result<IpAddr, CommError> {
    match listen {
        Listen::Loopback => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        Listen::Address(address) => Ok(*address),
        Listen::Interface(names) => {
            let all = all_interfaces()?;
            select_address(&all, names).ok_or_else(|| {
                let there: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
                CommError::InvalidArgument(format!(
                    "no network interface {names:?} is up and has an address; this host has {}",
                    there.join(", ")
                ))
            })
        }
        Listen::Routable => most_reachable_address(all_interfaces()?.iter()).ok_or_else(|| {
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

fn all_interfaces() -> Result<Vec<Interface>, CommError> {
    interfaces().map_err(|error| CommError::system("cannot list the network interfaces", error))
}

/// Returns the address that `names` selects, in the syntax of NCCL_SOCKET_IFNAME. The names are interface
/// names or prefixes, and the first match counts. `=` before the list requires whole names. `^` before the
/// list selects any interface except the named ones; `^=` does the same and compares whole names.
fn select_address(all: &[Interface], names: &str) -> Option<IpAddr> {
    let names = names.trim();
    let (unwanted, names) = names.strip_prefix('^').map_or((false, names), |names| (true, names));
    let (whole, names) = names.strip_prefix('=').map_or((false, names), |names| (true, names));
    let names: Vec<&str> = names.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if unwanted {
        let named = |one: &Interface| {
            names.iter().any(|&name| one.name == name || (!whole && one.name.starts_with(name)))
        };
        return most_reachable_address(all.iter().filter(|one| !named(one)));
    }
    // `eth1` selects the interface `eth1` before `eth10`, in whatever order the kernel lists them.
    let exact = |name: &str| all.iter().filter(|one| one.name == name).find_map(Interface::usable_address);
    let prefix =
        |name: &str| all.iter().filter(|one| one.name.starts_with(name)).find_map(Interface::usable_address);
    names.iter().find_map(|name| exact(name).or_else(|| prefix(name).filter(|_| !whole)))
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

    fn host() -> Vec<Interface> {
        let interface = |name: &str, addresses: &[&str]| Interface {
            name: name.to_owned(),
            is_up: true,
            is_loopback: name == "lo",
            is_bridge: name == "docker0",
            has_default_route: false,
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        };
        vec![
            interface("lo", &["127.0.0.1", "::1"]),
            interface("docker0", &["172.17.0.1"]),
            interface("eth10", &["10.10.0.1"]),
            interface("eth1", &["fe80::1", "fd00::1", "10.1.0.1"]),
            interface("ib0", &["fe80::2", "fd00::2"]),
            interface("ib1", &["fe80::3"]),
            Interface { is_up: false, ..interface("eth2", &["10.2.0.1"]) },
        ]
    }

    #[test]
    fn interface_lists_have_the_meaning_of_nccl_and_gloo() {
        let cases = [
            ("eth1", Some("10.1.0.1")),
            ("eth", Some("10.10.0.1")),
            ("=eth1", Some("10.1.0.1")),
            ("=eth", None),
            ("none,ib0,eth1", Some("fd00::2")),
            (" none , eth10 ", Some("10.10.0.1")),
            ("=none,eth10", Some("10.10.0.1")),
            ("lo", Some("127.0.0.1")),
            ("ib1", None),
            ("ib", Some("fd00::2")),
            ("eth2", None),
            ("^eth1", Some("fd00::2")),
            ("^=eth1", Some("10.10.0.1")),
            ("^docker,eth", Some("fd00::2")),
            ("^eth,ib", Some("172.17.0.1")),
            ("^eth,ib,docker", Some("127.0.0.1")),
            ("^eth,ib,docker,lo", None),
            ("^", Some("10.10.0.1")),
            ("=", None),
            (",", None),
        ];
        for (names, address) in cases {
            let address = address.map(|text| text.parse::<IpAddr>().unwrap());
            assert_eq!(select_address(&host(), names), address, "{names}");
        }
    }

    #[test]
    fn bridges_are_avoided_unless_the_host_is_reached_through_one() {
        let interface = |name: &str, is_bridge, has_default_route, address: &str| Interface {
            name: name.to_owned(),
            is_up: true,
            is_loopback: name == "lo",
            is_bridge,
            has_default_route,
            addresses: vec![address.parse().unwrap()],
        };
        let lo = interface("lo", false, false, "127.0.0.1");
        let virbr0 = interface("virbr0", true, false, "192.168.122.1");
        let cni0 = interface("cni0", true, false, "10.244.0.1");
        let flannel = interface("flannel.1", false, false, "10.244.0.0");
        let eth0 = interface("eth0", false, true, "10.0.0.5");
        let br0 = interface("br0", true, true, "10.0.0.6");
        let ib0 = interface("ib0", false, false, "10.9.0.1");
        let taken = |all: &[&Interface]| {
            most_reachable_address(all.iter().copied()).map(|address| address.to_string())
        };
        assert_eq!(taken(&[&lo, &virbr0, &cni0, &flannel, &eth0]).unwrap(), "10.0.0.5");
        assert_eq!(
            taken(&[&lo, &virbr0, &br0, &ib0]).unwrap(),
            "10.0.0.6",
            "a bridge that the host is reached through"
        );
        assert_eq!(
            taken(&[&lo, &virbr0, &ib0]).unwrap(),
            "10.9.0.1",
            "a network of its own, without a default route"
        );
        assert_eq!(taken(&[&lo, &cni0]).unwrap(), "10.244.0.1", "better than loopback");
    }

    #[test]
    fn loopback_comes_last_without_an_interface_list() {
        let mut all = host();
        assert_eq!(most_reachable_address(all.iter()), Some("10.10.0.1".parse().unwrap()));
        all.retain(|one| one.is_loopback);
        assert_eq!(most_reachable_address(all.iter()), Some("127.0.0.1".parse().unwrap()));
    }
}
