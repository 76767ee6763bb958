//! The key-value store through which the nodes of `convoke check` exchange what they find. Node 0 serves it
//! where the job's rendezvous would be.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use convoke_store::{PrefixStore, Store, StoreError, StoreServer, TcpStore};

use super::connect::{address_problem, strip_address};
use super::node_0_search::{find_node_0, own_address, resolve, serve_at_free_port};
use super::{RendezvousError, elastic, interfaces, serve};
use crate::config::{Config, Endpoint, Rendezvous};
use crate::formatting;
use crate::host_name::full_host_name;
use crate::messages::Progress;

/// Key that exists in the store of a check, and in no other store.
const MARK: &str = "node 0";
/// Key of the number of nodes that have joined, if the nodes have no ranks.
const COUNT: &[u8] = b"count";
/// Longest time for one attempt to connect, and for one operation.
const ATTEMPT: Duration = Duration::from_millis(1500);
const OPERATION: Duration = Duration::from_secs(5);
const DELAY: Duration = Duration::from_millis(50);
/// Time without an answer after which a node gives up. Node 0's host is up, so a firewall is the likely cause.
const NO_ANSWER: Duration = Duration::from_secs(3);
/// Time for which another program may answer at the address of node 0.
const OTHER_PROGRAM: Duration = Duration::from_secs(2);

/// The store of a check, and the place of this node in it.
pub(crate) struct CheckStore {
    /// The server, on node 0 only.
    server: Option<StoreServer>,
    store: Arc<dyn Store>,
    pub(crate) node: usize,
    /// Address of this host on its way to node 0. On node 0, the address at which others reach it.
    pub(crate) address: Option<IpAddr>,
    /// Name and port of node 0, for messages.
    pub(crate) place: String,
}

impl CheckStore {
    pub(crate) fn is_server(&self) -> bool {
        self.server.is_some()
    }

    pub(crate) fn store(&self) -> &dyn Store {
        self.store.as_ref()
    }
}

/// Joins the other nodes. `wait` is the longest wait for node 0, and `waits_for_names` is true if names may
/// become known later.
///
/// # Errors
/// This node cannot serve the store, or does not reach node 0. The error says why and what to try.
pub(crate) fn open_check_store(
    config: &Config,
    wait: Duration,
    waits_for_names: bool,
) -> Result<CheckStore, RendezvousError> {
    let deadline = Instant::now() + wait;
    let prefix = format!("convoke/check/{}", config.scheduled.as_ref().map_or("", |job| &job.id));
    match &config.rendezvous {
        Rendezvous::Standalone => {
            let server = serve("localhost", 0)?;
            served(server, &prefix, "localhost")
        }
        Rendezvous::Static { node_rank, .. } if *node_rank >= config.nodes.max => {
            Err(RendezvousError::NodeRankOutOfRange { node_rank: *node_rank, expected: config.nodes.max })
        }
        Rendezvous::Static { node_rank: 0, search: Some(search), .. } => {
            let server = serve_at_free_port(search)?;
            let address = own_address(search);
            served(server, &prefix, &address)
        }
        Rendezvous::Static { node_rank, search: Some(search), .. } => {
            let key = format!("{prefix}/{MARK}");
            let found = find_node_0(search, key.as_bytes(), deadline)?;
            joined(found.store, &prefix, Some(*node_rank), &found.host, found.port)
        }
        Rendezvous::Static { node_rank: 0, host, port, .. } => {
            let problem =
                (config.nodes.max > 1 && resolve(host).is_ok()).then(|| address_problem(host)).flatten();
            let server = serve(host, *port)?;
            match problem {
                Some(problem) => Err(RendezvousError::Refused(problem)),
                None => served(server, &prefix, host),
            }
        }
        Rendezvous::Static { node_rank, host, port, .. } => {
            let store = connect(host, *port, &prefix, deadline, waits_for_names)?;
            joined(store, &prefix, Some(*node_rank), host, *port)
        }
        Rendezvous::Elastic { endpoint: endpoint @ Endpoint::Host { host, port, .. }, .. } => {
            let listeners = elastic::listen(endpoint)?;
            if listeners.is_empty() {
                let store = connect(host, *port, &prefix, deadline, waits_for_names)?;
                return joined(store, &prefix, None, host, *port);
            }
            let server = StoreServer::serve(listeners)?;
            served(server, &prefix, host)
        }
        Rendezvous::Elastic { endpoint, settings } => {
            let id = format!("check of {}", config.run_id);
            match elastic::share_store(endpoint, &id, settings.heartbeat_timeout, deadline)? {
                elastic::SharedStore::Served(server) => served(server, &prefix, &full_host_name()),
                elastic::SharedStore::At(addresses) => {
                    let (store, address) = connect_to_any(&addresses, &prefix, deadline)?;
                    joined(store, &prefix, None, &address.ip().to_string(), address.port())
                }
            }
        }
    }
}

/// Returns the store of node 0, which this node serves.
fn served(server: StoreServer, prefix: &str, host: &str) -> Result<CheckStore, RendezvousError> {
    let store: Arc<dyn Store> = Arc::new(PrefixStore::new(prefix, server.store()));
    store.add(COUNT, 1, Instant::now() + OPERATION)?;
    store.set(MARK.as_bytes(), b"1", Instant::now() + OPERATION)?;
    let own = interfaces::own_addresses();
    let address = addresses_of(host).into_iter().find(|ip| !ip.is_loopback() && own.contains(ip));
    let address =
        address.or_else(|| own.iter().copied().find(|ip| !ip.is_loopback())).or_else(|| own.first().copied());
    let place = formatting::address(host, server.port());
    Ok(CheckStore { server: Some(server), store, node: 0, address, place })
}

/// Returns the store of node 0 as another node uses it.
fn joined(
    store: TcpStore,
    prefix: &str,
    rank: Option<usize>,
    host: &str,
    port: u16,
) -> Result<CheckStore, RendezvousError> {
    let store: Arc<dyn Store> = Arc::new(PrefixStore::new(prefix, Arc::new(store)));
    let node = match rank {
        Some(rank) => rank,
        // The server has counted itself before it set the mark.
        None => usize::try_from(store.add(COUNT, 1, Instant::now() + OPERATION)? - 1).unwrap_or(usize::MAX),
    };
    let address = addresses_of(host).into_iter().find_map(|ip| interfaces::route_address(ip).ok());
    Ok(CheckStore { server: None, store, node, address, place: formatting::address(host, port) })
}

/// Connects to the store of node 0.
fn connect(
    host: &str,
    port: u16,
    prefix: &str,
    deadline: Instant,
    waits_for_names: bool,
) -> Result<TcpStore, RendezvousError> {
    let address = formatting::address(host, port);
    let start = Instant::now();
    let mut progress = Progress::new(deadline);
    let mut show_at = start + Progress::INTERVAL;
    // The last time at which waiting was worthwhile: node 0 refused, because it has not started yet.
    let (mut refused_at, mut other_since): (Instant, Option<Instant>) = (start, None);
    loop {
        let last = match attempt(&address, prefix) {
            Ok(store) => return Ok(store),
            Err(last) => last,
        };
        let now = Instant::now();
        let is_unknown = last.contains("look up");
        let is_other = last == OTHER_ANSWERS;
        if last.contains("refused") || waits_for_names {
            refused_at = now;
        }
        other_since = is_other.then(|| other_since.unwrap_or(now));
        let is_hopeless = (is_unknown && !waits_for_names)
            || now - refused_at > NO_ANSWER
            || other_since.is_some_and(|since| now - since > OTHER_PROGRAM);
        if is_hopeless || now + DELAY >= deadline {
            let after_s = (now - start + Duration::from_millis(500)).as_secs();
            let advice = if is_other {
                format!("is {address} the right address? another --master-port, or end what listens there")
            } else {
                super::connect::advice(&last, host, port)
            };
            return Err(RendezvousError::Unreachable { address, after_s, last, advice });
        }
        if now >= show_at {
            progress.show(&format!("waiting for node 0 at {address}: {last}"));
            show_at = now + Progress::INTERVAL;
        }
        thread::sleep(DELAY);
    }
}

/// Part of the error of the client if a program that is no store accepts its connection.
const NO_STORE: &str = "does not answer as a store";
const OTHER_ANSWERS: &str = "another program answers there";

/// Makes one attempt to connect to a store, and checks that it is one of a check.
fn attempt(address: &str, prefix: &str) -> Result<TcpStore, String> {
    let deadline = Instant::now() + ATTEMPT;
    let store = match TcpStore::connect_once(address, deadline) {
        Ok(store) => store,
        Err(StoreError::Unreachable { last, .. }) if last.contains(NO_STORE) => {
            return Err(OTHER_ANSWERS.to_owned());
        }
        Err(StoreError::Unreachable { last, .. }) => return Err(strip_address(address, &last).to_owned()),
        Err(_) => return Err(OTHER_ANSWERS.to_owned()),
    };
    match store.check(&[format!("{prefix}/{MARK}").as_bytes()], deadline) {
        Ok(true) => Ok(store),
        Ok(false) | Err(_) => Err(OTHER_ANSWERS.to_owned()),
    }
}

/// Connects to the first of several addresses of node 0 that answers, and returns it too.
fn connect_to_any(
    addresses: &[SocketAddr],
    prefix: &str,
    deadline: Instant,
) -> Result<(TcpStore, SocketAddr), RendezvousError> {
    let start = Instant::now();
    loop {
        let mut last = "it has no address".to_owned();
        for address in addresses {
            match attempt(&address.to_string(), prefix) {
                Ok(store) => return Ok((store, *address)),
                Err(why) => last = format!("{address}: {why}"),
            }
        }
        if Instant::now() + DELAY >= deadline || start.elapsed() > NO_ANSWER {
            let address = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let (after_s, advice) = (
                start.elapsed().as_secs(),
                "may this host reach these addresses? a firewall can be the cause",
            );
            return Err(RendezvousError::Unreachable { address, after_s, last, advice: advice.to_owned() });
        }
        thread::sleep(DELAY);
    }
}

fn addresses_of(host: &str) -> Vec<IpAddr> {
    resolve(host.trim_matches(['[', ']'])).unwrap_or_else(|_| Vec::new())
}
