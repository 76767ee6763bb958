//! Shares the address of a store in the registry of an elastic job, for `convoke check`.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use convoke_store::StoreServer;
use tokio::task::LocalSet;

use super::registry::{Entry, FileRegistry, Registry, RegistryError};
use super::{connector, host_addresses, random};
use crate::config::Endpoint;
use crate::rendezvous::{RendezvousError, interfaces};

/// Delay between two attempts to read the registry.
const DELAY: Duration = Duration::from_millis(50);
/// Age of an entry after which its store counts as left behind by an earlier check.
const STALE: Duration = Duration::from_secs(2);
const CONNECT: Duration = Duration::from_millis(500);

/// The store that the nodes use.
pub(in super::super) enum SharedStore {
    /// This node serves it.
    Served(StoreServer),
    /// Another node serves it at one of these addresses.
    At(Vec<SocketAddr>),
}

/// Finds the store that another node has entered in the registry under `id`, or enters one of this node.
///
/// # Errors
/// The registry cannot be reached or written before `deadline`.
pub(in super::super) fn share_store(
    endpoint: &Endpoint,
    id: &str,
    heartbeat_timeout: Duration,
    deadline: Instant,
) -> Result<SharedStore, RendezvousError> {
    let registry = match endpoint {
        Endpoint::Host { .. } => unreachable!("an endpoint with a host needs no registry"),
        Endpoint::File(path) => Registry::File(FileRegistry::new(path, id, heartbeat_timeout)),
        #[cfg(feature = "etcd")]
        Endpoint::Etcd(cluster) => Registry::Etcd(
            super::registry::EtcdRegistry::new(cluster, id, heartbeat_timeout)
                .map_err(RendezvousError::Refused)?,
        ),
        #[cfg(not(feature = "etcd"))]
        Endpoint::Etcd(_) => {
            return Err(RendezvousError::Refused(crate::config::EtcdCluster::MISSING.to_owned()));
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(RendezvousError::system("cannot start the event loop"))?;
    LocalSet::new().block_on(&runtime, async {
        loop {
            match find_or_enter(&registry).await {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                Err(RegistryError::Permanent(why)) => return Err(RendezvousError::Refused(why)),
                Err(RegistryError::Transient(why)) if Instant::now() >= deadline => {
                    return Err(RendezvousError::Refused(format!("{endpoint}: {why}")));
                }
                Err(RegistryError::Transient(_)) => {}
            }
            tokio::time::sleep(DELAY).await;
        }
    })
}

/// Makes one attempt. Returns `None` if another node was faster.
async fn find_or_enter(registry: &Registry) -> Result<Option<SharedStore>, RegistryError> {
    let transient = |error: &dyn std::fmt::Display| RegistryError::Transient(error.to_string());
    let start = Instant::now();
    let seen = loop {
        let seen = registry.read().await?;
        let Some(entry) = &seen.entry else { break seen };
        let addresses = entry.addresses.clone();
        if is_open(&addresses).await {
            return Ok(Some(SharedStore::At(addresses)));
        }
        if start.elapsed() > STALE {
            break seen;
        }
        tokio::time::sleep(DELAY).await;
    };
    let listeners = host_addresses::listen_anywhere().map_err(|error| transient(&error))?;
    let server = StoreServer::serve(listeners).map_err(|error| transient(&error))?;
    let addresses: Vec<SocketAddr> =
        interfaces::own_addresses().into_iter().map(|ip| SocketAddr::new(ip, server.port())).collect();
    let agent = connector::fresh_id().map_err(|error| transient(&error))?;
    let key = random().map_err(|error| transient(&error))?;
    registry.lease().await?;
    let mine = Entry::new(seen.term() + 1, addresses, agent, key, None);
    let now = registry.replace(&seen, &mine, None).await?;
    let is_mine = now.entry.is_some_and(|entry| entry.agent == agent);
    Ok(is_mine.then_some(SharedStore::Served(server)))
}

/// Returns true if a process listens at one of the addresses.
async fn is_open(addresses: &[SocketAddr]) -> bool {
    for address in addresses {
        let connected = tokio::time::timeout(CONNECT, tokio::net::TcpStream::connect(address)).await;
        if matches!(connected, Ok(Ok(_))) {
            return true;
        }
    }
    false
}
