//! Selects the network interface at which a rank listens, by a list of names. The caller passes the
//! interfaces of the host.

use std::collections::HashSet;
use std::net::IpAddr;

/// A network interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) is_up: bool,
    pub(super) is_loopback: bool,
    /// The kernel reports a bridge, which usually connects containers or virtual machines of this host.
    pub(super) is_bridge: bool,
    /// The interface has a default route.
    pub(super) has_default_route: bool,
    pub(super) addresses: Vec<IpAddr>,
}

impl Interface {
    /// Returns the first address that other hosts could use, IPv4 before IPv6.
    fn address(&self) -> Option<IpAddr> {
        let usable =
            || self.addresses.iter().copied().filter(|_| self.is_up).filter(|&one| is_publishable(one));
        usable().find(IpAddr::is_ipv4).or_else(|| usable().next())
    }

    /// Sort key: lower is more likely to be reachable from other hosts. Loopback reaches no other host. A
    /// bridge without a default route usually reaches only containers of this host.
    fn sort_key(&self) -> u8 {
        match self {
            Self { is_loopback: true, .. } => 3,
            Self { has_default_route: true, .. } => 0,
            Self { is_bridge: true, .. } => 2,
            Self { .. } => 1,
        }
    }
}

/// Returns false for a link-local IPv6 address: it needs a scope id (network interface), which differs
/// between hosts.
fn is_publishable(address: IpAddr) -> bool {
    !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Returns the address that `names` selects, in the syntax of NCCL_SOCKET_IFNAME. The names are interface
/// names or prefixes, and the first match counts. `=` before the list requires whole names. `^` before the
/// list selects any interface except the named ones; `^=` does the same and compares whole names.
pub(super) fn select_address(all: &[Interface], names: &str) -> Option<IpAddr> {
    let (unwanted, names) = match names.trim().strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, names.trim()),
    };
    let (whole, names) = match names.strip_prefix('=') {
        Some(rest) => (true, rest),
        None => (false, names),
    };
    let names: Vec<&str> = names.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if unwanted {
        let named = |one: &Interface| {
            names.iter().any(|&name| one.name == name || (!whole && one.name.starts_with(name)))
        };
        return most_reachable_address(all.iter().filter(|one| !named(one)));
    }
    // `eth1` selects the interface `eth1` before `eth10`, in whatever order the kernel lists them.
    let exact = |name: &str| all.iter().filter(|one| one.name == name).find_map(Interface::address);
    let prefix =
        |name: &str| all.iter().filter(|one| one.name.starts_with(name)).find_map(Interface::address);
    names.iter().find_map(|name| exact(name).or_else(|| prefix(name).filter(|_| !whole)))
}

/// Returns the address at which other hosts are most likely to reach this host.
pub(super) fn most_reachable_address<'a>(all: impl Iterator<Item = &'a Interface>) -> Option<IpAddr> {
    let mut all: Vec<_> = all.filter_map(|one| Some((one.sort_key(), one.address()?))).collect();
    all.sort_by_key(|&(key, _)| key);
    all.first().map(|&(_, address)| address)
}

/// Returns the interfaces with a default route, from /proc/net/route and /proc/net/ipv6_route.
pub(super) fn default_routes<'a>(v4: &'a str, v6: &'a str) -> HashSet<&'a str> {
    const UP: u32 = 1;
    const REJECT: u32 = 0x200;
    let is_up = |flags: &str| u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & (UP | REJECT) == UP);
    // Columns: interface, destination, gateway, flags, ..., mask (the eighth).
    let v4 = v4.lines().skip(1).filter_map(move |line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (name, flags) = (*fields.first()?, *fields.get(3)?);
        (fields.get(1)? == &"00000000" && fields.get(7)? == &"00000000" && is_up(flags)).then_some(name)
    });
    // Columns: destination, its prefix length, ..., flags (the ninth), interface.
    let v6 = v6.lines().filter_map(move |line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (flags, name) = (*fields.get(8)?, *fields.get(9)?);
        (fields[0].bytes().all(|digit| digit == b'0') && fields[1] == "00" && is_up(flags)).then_some(name)
    });
    v4.chain(v6).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn default_routes_are_read_as_the_kernel_writes_them() {
        let v4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                  eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
                  docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
                  tun0\t00000000\t0100000A\t0003\t0\t0\t0\t00000080\t0\t0\t0\nbroken\n";
        let zeros = "0".repeat(32);
        let v6 = format!(
            "{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth1\n\
             {zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n\
             fe800000000000000000000000000000 40 {zeros} 00 {zeros} 00000100 00000001 00000000 00000001     eth2\n\n"
        );
        assert_eq!(default_routes(v4, &v6), HashSet::from(["eth0", "eth1"]));
        assert_eq!(default_routes("", ""), HashSet::new());
    }

    #[test]
    fn loopback_comes_last_without_an_interface_list() {
        let mut all = host();
        assert_eq!(most_reachable_address(all.iter()), Some("10.10.0.1".parse().unwrap()));
        all.retain(|one| one.is_loopback);
        assert_eq!(most_reachable_address(all.iter()), Some("127.0.0.1".parse().unwrap()));
    }
}
