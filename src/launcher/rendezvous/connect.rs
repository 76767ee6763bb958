//! Connects a node to the key-value store of node 0, and diagnoses why a connection fails.

use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use convoke_store::{StoreError, TcpStore};

use super::{RendezvousError, interfaces};
use crate::formatting;
use crate::host_name::full_host_name;
use crate::messages::{Progress, print_message};

/// Connects to the key-value store of node 0, and prints why it has to wait. `is_node_0` is true if this node
/// serves the store.
///
/// # Errors
/// [`RendezvousError::Unreachable`] after `deadline`, with what to try.
pub(super) fn connect_to_node_0(
    host: &str,
    port: u16,
    is_node_0: bool,
    deadline: Instant,
) -> Result<TcpStore, RendezvousError> {
    let start = Instant::now();
    let address = formatting::address(host, port);
    let mut progress = Progress::new(deadline);
    let mut diagnosed = None;
    loop {
        let until = deadline.min(Instant::now() + Progress::INTERVAL);
        match TcpStore::connect(&address, until) {
            Ok(store) => return Ok(store),
            Err(StoreError::Unreachable { last, .. }) => {
                let last = strip_address(&address, &last).to_owned();
                if until >= deadline {
                    let waited = deadline.saturating_duration_since(start) + Duration::from_millis(500);
                    let advice = match diagnosed.flatten() {
                        Some(AddressDiagnosis { advice, .. }) => advice,
                        None => advice(&last, host, port),
                    };
                    let after_s = waited.as_secs();
                    return Err(RendezvousError::Unreachable { address, after_s, last, advice });
                }
                if is_node_0 && diagnosed.is_none() {
                    let found = diagnose_address(host);
                    match &found {
                        Some(AddressDiagnosis { what, advice }) => {
                            print_message(&format!("warning: {what}; {advice}"));
                        }
                        None if has_no_route(&last) => {
                            return Err(RendezvousError::OwnAddressUnreachable { address, last });
                        }
                        None => {}
                    }
                    diagnosed = Some(found);
                }
                progress.show(&format!("waiting for node 0 at {address}: {last}"));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Diagnosis of a `--master-addr` that is not an address of node 0.
struct AddressDiagnosis {
    what: String,
    advice: String,
}

/// Returns a diagnosis for node 0 if `host` is an address of another host, or of an interface that is down.
/// `None` if `host` is an address of this host or does not resolve.
fn diagnose_address(host: &str) -> Option<AddressDiagnosis> {
    let resolved: Vec<IpAddr> =
        (host.trim_matches(['[', ']']), 0).to_socket_addrs().ok()?.map(|a| a.ip()).collect();
    let (up, down): (Vec<_>, Vec<_>) = interfaces::addresses().partition(|(_, up)| *up);
    let own_addresses: Vec<IpAddr> = up.into_iter().map(|(ip, _)| ip).collect();
    if let Some((ip, _)) = down.iter().find(|(ip, _)| resolved.contains(ip) && !own_addresses.contains(ip)) {
        return Some(AddressDiagnosis {
            what: format!("{ip} is an address of this host, but its interface is down"),
            advice: "bring it up (ip link set DEVICE up), or give all nodes a --master-addr of another"
                .to_owned(),
        });
    }
    if resolved.iter().any(|ip| own_addresses.contains(ip) || ip.is_loopback()) {
        return None;
    }
    let useful = |ip: &&IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    let list: Vec<_> = own_addresses.iter().filter(useful).take(8).map(ToString::to_string).collect();
    let list = if list.is_empty() { "none but loopback".to_owned() } else { list.join(", ") };
    Some(AddressDiagnosis {
        what: format!(
            "{host} is no address of this host ({}), which is node 0 and serves the store",
            full_host_name()
        ),
        advice: format!(
            "give all nodes a --master-addr of this host ({list}), or --node-rank=0 to the host that has {host}"
        ),
    })
}

/// Returns what is wrong, and what to try, if node 0 is told to serve at `host`, which is no usable address of
/// this host.
pub(super) fn address_problem(host: &str) -> Option<String> {
    diagnose_address(host).map(|AddressDiagnosis { what, advice }| format!("{what}\n  try: {advice}"))
}

/// Checks that this host has a route to `host`, if `host` is one of this host's own addresses. This queries
/// the routing table and sends nothing.
pub(super) fn route_to_self(host: &str) -> io::Result<()> {
    let ip = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
    let Some(ip) = ip.filter(|ip| interfaces::addresses().any(|(own, _)| own == *ip)) else { return Ok(()) };
    interfaces::route_address(ip).map(drop)
}

/// Returns true if the connection error `last` says that the kernel had no route to the address.
fn has_no_route(last: &str) -> bool {
    ["Network is unreachable", "No route to host", "Network is down", "Cannot assign requested address"]
        .iter()
        .any(|text| last.contains(text))
}

/// Returns advice for the user on the connection error `last`.
pub(super) fn advice(last: &str, host: &str, port: u16) -> String {
    if last.contains("look up") {
        format!("is {host} spelt right? an address does as well")
    } else if last.contains("refused") {
        format!(
            "is convoke running there with --node-rank=0 and --master-port={port}? the host answers, but nobody listens"
        )
    } else {
        format!("is {host} right, and may this host reach its port {port}? a firewall can be the cause")
    }
}

/// Removes `address` from the start of the socket error `last`, because the printed message already contains
/// the address.
pub(super) fn strip_address<'a>(address: &str, last: &'a str) -> &'a str {
    last.strip_prefix(address).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn master_addr_of_another_host_is_reported_on_node_0() {
        // This address belongs to a network for documentation, so no host has it.
        let diagnosis = diagnose_address("192.0.2.1").unwrap();
        assert!(diagnosis.what.starts_with("192.0.2.1 is no address of this host"), "{}", diagnosis.what);
        assert!(
            diagnosis.advice.contains("--node-rank=0 to the host that has 192.0.2.1"),
            "{}",
            diagnosis.advice
        );
        for own in ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]"] {
            assert!(diagnose_address(own).is_none(), "{own}");
        }
    }
}
