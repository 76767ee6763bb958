//! Which network interface a list of names means; the interfaces are given to it.

use std::net::IpAddr;

/// A network interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) is_up: bool,
    pub(super) is_loopback: bool,
    pub(super) addresses: Vec<IpAddr>,
}

impl Interface {
    /// Its first address that others could use, IPv4 before IPv6.
    fn address(&self) -> Option<IpAddr> {
        let usable =
            || self.addresses.iter().copied().filter(|_| self.is_up).filter(|&one| can_be_recorded(one));
        usable().find(IpAddr::is_ipv4).or_else(|| usable().next())
    }

    /// Loopback leads to nobody else, and a container bridge to this host's own containers only.
    fn leads_nowhere(&self) -> u8 {
        if self.is_loopback { 2 } else { u8::from(self.name.starts_with("docker")) }
    }
}

/// A link-local IPv6 address needs a scope, which differs from host to host.
fn can_be_recorded(address: IpAddr) -> bool {
    !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// The address that `names` means, in the syntax of NCCL_SOCKET_IFNAME: names or beginnings of names, the
/// first that exists counts; `=` before the list takes them as whole names only; `^` takes any other
/// interface than those, `^=` than those with these whole names.
pub(super) fn choose(all: &[Interface], names: &str) -> Option<IpAddr> {
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
        return outward(all.iter().filter(|one| !named(one)));
    }
    // Of `eth1` and `eth10` the first is meant by `eth1`, whatever their order.
    let exact = |name: &str| all.iter().filter(|one| one.name == name).find_map(Interface::address);
    let prefix =
        |name: &str| all.iter().filter(|one| one.name.starts_with(name)).find_map(Interface::address);
    names.iter().find_map(|name| exact(name).or_else(|| prefix(name).filter(|_| !whole)))
}

/// An address at which other hosts are most likely to reach this one.
pub(super) fn outward<'a>(all: impl Iterator<Item = &'a Interface>) -> Option<IpAddr> {
    let mut all: Vec<_> = all.filter_map(|one| Some((one.leads_nowhere(), one.address()?))).collect();
    all.sort_by_key(|&(nowhere, _)| nowhere);
    all.first().map(|&(_, address)| address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<Interface> {
        let interface = |name: &str, addresses: &[&str]| Interface {
            name: name.to_owned(),
            is_up: true,
            is_loopback: name == "lo",
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
    fn lists_are_read_as_nccl_and_gloo_mean_them() {
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
            assert_eq!(choose(&host(), names), address, "{names}");
        }
    }

    #[test]
    fn without_a_list_loopback_comes_last() {
        let mut all = host();
        assert_eq!(outward(all.iter()), Some("10.10.0.1".parse().unwrap()));
        all.retain(|one| one.is_loopback);
        assert_eq!(outward(all.iter()), Some("127.0.0.1".parse().unwrap()));
    }
}
