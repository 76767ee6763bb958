//! The network interfaces of this host, and how likely other hosts reach it through each of them.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use super::kernel_file;

/// A network interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name, such as `eth0`.
    pub name: String,
    /// The interface is up.
    pub is_up: bool,
    /// Loopback: it reaches only this host.
    pub is_loopback: bool,
    /// The kernel reports a bridge, which usually connects containers or virtual machines of this host.
    pub is_bridge: bool,
    /// A default route leads through the interface.
    pub has_default_route: bool,
    /// Its IPv4 and IPv6 addresses, in the order of the kernel.
    pub addresses: Vec<IpAddr>,
}

/// The hosts that an interface most likely reaches. A lesser value reaches more hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Other hosts: a default route leads through the interface.
    DefaultRoute,
    /// A network without a default route, such as one between the nodes of a cluster.
    Network,
    /// Containers or virtual machines of this host, through a bridge.
    Bridge,
    /// This host alone.
    Loopback,
}

impl Interface {
    /// Returns what the interface most likely reaches.
    #[must_use]
    pub fn reach(&self) -> Reach {
        match self {
            Self { is_loopback: true, .. } => Reach::Loopback,
            Self { has_default_route: true, .. } => Reach::DefaultRoute,
            Self { is_bridge: true, .. } => Reach::Bridge,
            Self { .. } => Reach::Network,
        }
    }

    /// Returns the first address that other hosts could use, IPv4 before IPv6. A link-local IPv6 address needs
    /// a scope id (network interface), which differs between hosts.
    #[must_use]
    pub fn usable_address(&self) -> Option<IpAddr> {
        let is_usable = |one: &IpAddr| !matches!(one, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let usable = self.addresses.iter().copied().filter(is_usable).filter(|_| self.is_up);
        usable.min_by_key(IpAddr::is_ipv6)
    }
}

/// Returns the address at which other hosts are most likely to reach this host.
#[must_use]
pub fn most_reachable_address<'a>(all: impl IntoIterator<Item = &'a Interface>) -> Option<IpAddr> {
    let usable = all.into_iter().filter_map(|one| Some((one.reach(), one.usable_address()?)));
    usable.min_by_key(|&(reach, _)| reach).map(|(_, address)| address)
}

/// Returns the network interfaces of this host, in the order in which the kernel lists them.
///
/// Reads the kernel's list of addresses, its routes, and one path of /sys for each interface.
///
/// # Errors
/// The kernel does not list the interfaces.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let entries = getifaddrs()?;
    let [v4, v6] = ["/proc/net/route", "/proc/net/ipv6_route"].map(|path| kernel_file::read(Path::new(path)));
    let with_default_route = default_routes(&v4, &v6);
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

/// Returns the interfaces with a default route, from /proc/net/route and /proc/net/ipv6_route.
fn default_routes<'a>(v4: &'a str, v6: &'a str) -> HashSet<&'a str> {
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

    #[test]
    fn loopback_is_listed_with_its_address() {
        let all = interfaces().unwrap();
        let loopback = all.iter().find(|one| one.is_loopback).unwrap();
        assert_eq!((loopback.name.as_str(), loopback.reach()), ("lo", Reach::Loopback));
        assert!(!loopback.is_up || loopback.addresses.iter().any(IpAddr::is_loopback), "{loopback:?}");
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
}
