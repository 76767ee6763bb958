//! Finds node 0 of a job whose scheduler gives its name, but neither its address nor its port. A candidate is
//! node 0 only if its store has this job's registration of node 0.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use convoke_store::{ServeError, Store, StoreServer, TcpStore};

use super::{RendezvousError, interfaces, serve};
use crate::formatting;
use crate::messages::{Progress, print_message};
use crate::scheduler::{NodeSearch, scontrol, scontrol_field};

/// Longest time for one candidate, and for one lookup of a name.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Delay after the first round over all candidates. It grows up to [`LONGEST_DELAY`].
const FIRST_DELAY: Duration = Duration::from_millis(5);
const LONGEST_DELAY: Duration = Duration::from_millis(250);
/// Time after which the other addresses are tried too, although the name has an address.
const NAME_TIMEOUT: Duration = Duration::from_secs(5);
const SCONTROL_TIMEOUT: Duration = Duration::from_secs(5);

/// The store of node 0, and its address for the workers of this node.
pub(super) struct FoundNode0 {
    pub(super) store: TcpStore,
    pub(super) host: String,
    pub(super) port: u16,
}

/// On node 0: serves the store at the first port that is free.
pub(super) fn serve_at_free_port(search: &NodeSearch) -> Result<StoreServer, RendezvousError> {
    let mut last = None;
    for &port in &search.ports {
        match serve(&search.name, port) {
            Err(error @ RendezvousError::InUse { .. }) => last = Some(error),
            other => return other,
        }
    }
    Err(last.unwrap_or(RendezvousError::Serve { source: ServeError::NoAddress }))
}

/// On node 0: returns the address by which its own workers reach the store. It is the name, unless the name
/// leads to another host or nowhere.
pub(super) fn own_address(search: &NodeSearch) -> String {
    let own: Vec<IpAddr> = interfaces::own_addresses();
    match resolve(&search.name) {
        Ok(found) if found.iter().any(|ip| ip.is_loopback() || own.contains(ip)) => search.name.clone(),
        found => {
            let address = own.iter().find(|ip| !ip.is_loopback()).or(own.first());
            let address = address.map_or_else(|| "127.0.0.1".to_owned(), ToString::to_string);
            let why = found.map_or_else(|error| error, |_| "it is the address of another host".to_owned());
            print_message(&format!(
                "warning: {} is the scheduler's name of this host, but does not lead to it ({why}); its workers use {address}",
                search.name
            ));
            address
        }
    }
}

/// Connects to node 0, and prints why it has to wait. `key` exists in its store and in no other.
///
/// # Errors
/// [`RendezvousError::Unreachable`] after `deadline`, with what to try.
pub(super) fn find_node_0(
    search: &NodeSearch,
    key: &[u8],
    deadline: Instant,
) -> Result<FoundNode0, RendezvousError> {
    let start = Instant::now();
    let shown = formatting::address(&search.name, search.ports[0]);
    let mut progress = Progress::new(deadline);
    let mut show_at = start + Progress::INTERVAL;
    let mut delay = FIRST_DELAY;
    let mut others: Option<Vec<(String, Vec<IpAddr>)>> = None;
    loop {
        let resolved = resolve(&search.name);
        let is_unknown = resolved.is_err();
        if others.is_none() && (is_unknown || start.elapsed() > NAME_TIMEOUT) {
            others = Some(other_addresses(search));
        }
        let mut last = resolved.as_ref().err().cloned();
        let named = resolved.map(|ips| (search.name.clone(), ips));
        for (host, ips) in named.iter().chain(others.iter().flatten()) {
            for address in candidates(ips, &search.ports) {
                match try_candidate(address, key, deadline) {
                    Ok(store) => {
                        return Ok(FoundNode0 { store, host: host.clone(), port: address.port() });
                    }
                    Err(error) if last.is_none() => last = Some(error),
                    Err(_) => {}
                }
            }
        }
        let last = last.unwrap_or_else(|| format!("{} has no address", search.name));
        let now = Instant::now();
        if now + delay >= deadline {
            let after_s = (start.elapsed() + Duration::from_millis(500)).as_secs();
            let advice = advice(search, is_unknown);
            return Err(RendezvousError::Unreachable { address: shown, after_s, last, advice });
        }
        if now >= show_at {
            progress.show(&format!("waiting for node 0 at {shown}: {last}"));
            show_at = now + Progress::INTERVAL;
        }
        thread::sleep(delay);
        delay = delay.mul_f64(1.5).min(LONGEST_DELAY);
    }
}

fn advice(search: &NodeSearch, is_unknown: bool) -> String {
    let name = &search.name;
    if is_unknown {
        format!(
            "this host finds no address of {name}: add it to DNS or /etc/hosts, or export MASTER_ADDR with it"
        )
    } else {
        let ports: Vec<_> = search.ports.iter().map(ToString::to_string).collect();
        format!(
            "does the launcher run on {name}, and may this host reach one of its ports {}? a firewall can be the cause",
            ports.join(", ")
        )
    }
}

/// Returns all addresses with all ports; all addresses at the likeliest port first.
fn candidates(ips: &[IpAddr], ports: &[u16]) -> Vec<SocketAddr> {
    ports.iter().flat_map(|port| ips.iter().map(|ip| SocketAddr::new(*ip, *port))).collect()
}

/// Makes one attempt to connect to node 0 at this address.
fn try_candidate(address: SocketAddr, key: &[u8], deadline: Instant) -> Result<TcpStore, String> {
    let deadline = deadline.min(Instant::now() + ATTEMPT);
    let store = TcpStore::connect_once(&address.to_string(), deadline).map_err(|error| error.to_string())?;
    match store.check(&[key], deadline) {
        Ok(true) => Ok(store),
        Ok(false) => Err(format!("{address} is the store of another job, or node 0 is just starting")),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns addresses of node 0 that do not depend on its name: that of Slurm's configuration, and those of the
/// scheduler's variables.
fn other_addresses(search: &NodeSearch) -> Vec<(String, Vec<IpAddr>)> {
    let asked = search.asks_scontrol.then(|| {
        let text = scontrol(&["show", "node", &search.name], SCONTROL_TIMEOUT).ok()?;
        scontrol_field(&text, "NodeAddr").map(str::to_owned)
    });
    let all = asked.flatten().into_iter().chain(search.addresses.iter().cloned());
    let all = all.filter(|host| *host != search.name);
    all.filter_map(|host| resolve(&host).ok().map(|ips| (host, ips))).collect()
}

/// Looks a host name up, in a thread of its own: a name server that does not answer must not block the caller
/// for longer than [`ATTEMPT`].
pub(super) fn resolve(host: &str) -> Result<Vec<IpAddr>, String> {
    if let Ok(ip) = host.parse() {
        return Ok(vec![ip]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    let look_up = move || {
        let found = (name.as_str(), 0).to_socket_addrs();
        let _ = sender.send(found.map(|found| found.map(|address| address.ip()).collect::<Vec<_>>()));
    };
    let started = thread::Builder::new().name("convoke-resolve".into()).spawn(look_up);
    started.map_err(|error| format!("cannot start a thread: {error}"))?;
    match receiver.recv_timeout(ATTEMPT) {
        Ok(Ok(mut ips)) => {
            ips.dedup();
            Ok(ips)
        }
        Ok(Err(error)) => Err(format!("cannot look up {host}: {error}")),
        Err(_) => Err(format!("no answer while looking up {host}")),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const KEY: &[u8] = b"job/convoke/node/0";

    fn search(ports: Vec<u16>) -> NodeSearch {
        let name = "127.0.0.1".to_owned();
        NodeSearch { job: "job".to_owned(), name, ports, addresses: Vec::new(), asks_scontrol: false }
    }

    fn server() -> StoreServer {
        StoreServer::bind(&[SocketAddr::from(([127, 0, 0, 1], 0))]).unwrap()
    }

    #[test]
    fn other_programs_at_the_ports_are_passed_over() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let other_job = server();
        other_job.store().set(b"other/convoke/node/0", b"x", Instant::now() + LONG).unwrap();
        let node_0 = server();
        node_0.store().set(KEY, b"x", Instant::now() + LONG).unwrap();
        let ports = vec![silent.local_addr().unwrap().port(), other_job.port(), node_0.port()];
        let found = find_node_0(&search(ports), KEY, Instant::now() + LONG).unwrap();
        assert_eq!((found.host.as_str(), found.port), ("127.0.0.1", node_0.port()));
    }

    #[test]
    fn port_in_use_is_left_to_its_owner() {
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let taken = listener.local_addr().unwrap().port();
        let free = convoke_testkit::free_port();
        assert_eq!(serve_at_free_port(&search(vec![taken, free])).unwrap().port(), free);
        let error = serve_at_free_port(&search(vec![taken])).unwrap_err();
        assert!(matches!(error, RendezvousError::InUse { .. }), "{error}");
    }

    #[test]
    fn node_0_that_does_not_come_is_named_with_its_ports() {
        let ports = vec![convoke_testkit::free_port()];
        let wanted = format!("reach one of its ports {}?", ports[0]);
        let result = find_node_0(&search(ports), KEY, Instant::now() + Duration::from_millis(50));
        let error = result.err().unwrap().to_string();
        assert!(error.contains(&wanted), "{error}");
    }
}
