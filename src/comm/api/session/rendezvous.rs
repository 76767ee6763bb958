//! How the ranks of a job meet: the store of the job, for each way to create a session.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use convoke_env::{Generation, WorkerEnv, vars};
use convoke_store::{FileStore, ServeError, Store, StoreServer, TcpStore};

use crate::bootstrap::options::{GroupOptions, Listen};
use crate::bootstrap::{RANK_0, StoreLocation};
use crate::error::CommError;

/// Time limit for recording that this rank no longer uses a store file. If it expires, the file may stay.
const SIGN_OFF_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) enum Rendezvous {
    /// The world has one rank, which needs no store.
    SingleRank,
    Tcp(MasterStore),
    File(PathBuf),
    Store(Arc<dyn Store>),
}

/// Address of a store over TCP, and who serves it.
#[derive(Debug)]
pub(super) struct MasterStore {
    host: String,
    port: u16,
    /// The launcher serves the store; otherwise rank 0 does.
    served_by_launcher: bool,
    /// Id of the job, if it has one.
    run_id: Option<String>,
    /// MASTER_ADDR is unset, so the host was derived from the variables of mpirun or srun.
    derived: bool,
    /// The ranks are on several hosts.
    several_hosts: bool,
}

#[derive(Debug)]
pub(super) struct OpenStore {
    pub(super) store: Arc<dyn Store>,
    /// The server, if this process serves the store. It must live as long as the worlds.
    pub(super) server: Option<Arc<StoreServer>>,
    /// The object that signs off from the file when the last world is dropped.
    pub(super) sign_off: Option<Arc<SignOff>>,
}

impl Rendezvous {
    /// Returns the default listen address: one at which the other ranks can reach this host.
    pub(super) fn listen(&self) -> Listen {
        match self {
            Self::SingleRank => Listen::Loopback,
            Self::Tcp(master) if master.is_host_ambiguous(&master.resolve().unwrap_or_default()) => {
                Listen::Routable
            }
            Self::Tcp(master) => Listen::RouteTo(master.host.clone()),
            Self::File(_) | Self::Store(_) => Listen::Routable,
        }
    }

    /// Returns the prefix of all store keys of the world of rendezvous round `round`.
    pub(super) fn prefix(&self, round: u32) -> String {
        let mut prefix = "convoke".to_owned();
        if let Self::Tcp(MasterStore { run_id: Some(run_id), .. }) = self {
            prefix = format!("{prefix}/{run_id}");
        }
        if round == 0 { prefix } else { format!("{prefix}/round-{round}") }
    }

    /// Returns the rank whose process serves the store; `None` if no rank serves it.
    pub(super) fn store_rank(&self) -> Option<usize> {
        matches!(self, Self::Tcp(MasterStore { served_by_launcher: false, .. })).then_some(0)
    }

    /// Returns true if a process serves the store, so that the store ends with that process.
    pub(super) fn is_served(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// Returns where the store of a world of `size` ranks is, for error messages.
    pub(super) fn store_location(&self, size: usize) -> StoreLocation {
        match self {
            Self::SingleRank | Self::Store(_) => StoreLocation::default(),
            Self::File(path) => StoreLocation {
                address: path.display().to_string(),
                configured_by: format!("file://{} and {size} as the number of ranks", path.display()),
                ..StoreLocation::default()
            },
            Self::Tcp(master) if master.served_by_launcher => {
                let server = "the launcher of node 0";
                StoreLocation { address: master.to_string(), server, configured_by: String::new() }
            }
            Self::Tcp(master) => {
                let MasterStore { host, port, run_id, .. } = master;
                let configured_by = match run_id {
                    Some(_) => format!("MASTER_ADDR={host}, MASTER_PORT={port} and WORLD_SIZE={size}"),
                    None => format!("tcp://{master} and {size} as the number of ranks"),
                };
                StoreLocation { address: master.to_string(), server: RANK_0, configured_by }
            }
        }
    }

    /// Opens the store for `rank` of `size`. The wait for a server lasts at most `init_timeout`.
    pub(super) fn open(
        &self,
        rank: usize,
        size: usize,
        options: &GroupOptions,
    ) -> Result<OpenStore, CommError> {
        let deadline = Instant::now() + options.init_timeout;
        let open_store = |store| OpenStore { store, server: None, sign_off: None };
        match self {
            Self::SingleRank => Ok(open_store(Arc::new(convoke_store::MemoryStore::new()))),
            Self::Store(store) => Ok(open_store(Arc::clone(store))),
            Self::Tcp(master) if rank == 0 && !master.served_by_launcher => {
                let server = master.get_or_serve()?;
                Ok(OpenStore { store: server.store(), server: Some(server), sign_off: None })
            }
            Self::Tcp(master) => {
                let store = TcpStore::connect(&master.to_string(), deadline);
                let store =
                    store.map_err(|error| self.store_location(size).convert_error(&options.name, error))?;
                Ok(open_store(Arc::new(store)))
            }
            Self::File(path) => {
                let key = (std::process::id(), path.clone(), rank);
                let store = Arc::new(match departed_ranks().remove(&key) {
                    Some(generation) => FileStore::rejoin(path, &departed_key(generation), deadline)?,
                    None => FileStore::open(path, None, deadline)?,
                });
                let sign_off = SignOff { store: Arc::clone(&store), key, size, formed: OnceLock::new() };
                Ok(OpenStore { store, server: None, sign_off: Some(Arc::new(sign_off)) })
            }
        }
    }
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SingleRank => f.write_str("no rendezvous address"),
            Self::Tcp(master) => master.fmt(f),
            Self::File(path) => path.display().fmt(f),
            Self::Store(store) => write!(f, "the store {:p}", Arc::as_ptr(store).cast::<()>()),
        }
    }
}

impl OpenStore {
    /// Records that all ranks have formed the world of this generation; only then does a drop sign off.
    pub(super) fn record_formed(&self, generation: Generation) {
        if let Some(sign_off) = &self.sign_off {
            sign_off.formed.get_or_init(|| generation);
        }
    }
}

impl MasterStore {
    /// Returns the address that a URL names; rank 0 serves the store.
    pub(super) fn explicit(host: String, port: u16) -> Self {
        Self { host, port, served_by_launcher: false, run_id: None, derived: false, several_hosts: false }
    }

    /// Returns the address from the environment variables of a launcher.
    pub(super) fn from_env(env: &WorkerEnv) -> Self {
        Self {
            host: env.master_addr.clone(),
            port: env.master_port,
            served_by_launcher: env.use_agent_store,
            run_id: Some(env.run_id.clone()),
            derived: std::env::var_os(vars::MASTER_ADDR).is_none(),
            several_hosts: env.local_world_size < env.world_size,
        }
    }

    fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        Ok((self.host.as_str(), self.port).to_socket_addrs()?.collect())
    }

    /// Returns true if other hosts may resolve the store's host name to another address, such as a host's own
    /// name, which is loopback there (127.0.1.1 on Debian).
    fn is_host_ambiguous(&self, resolved: &[SocketAddr]) -> bool {
        is_ambiguous(&self.host, resolved, self.run_id.is_some().then_some(self.several_hosts))
    }

    /// Returns the server at this address that an earlier world of this process started, or a new one. While
    /// a live world uses the server, the error is that the address is in use.
    ///
    /// The server lives as long as the process, because ranks drop a world at different times. A rank that
    /// rejoins early, or forms a group without rank 0, needs the store of the previous world.
    fn get_or_serve(&self) -> Result<Arc<StoreServer>, CommError> {
        /// Servers by process id and address. The id is needed because a forked child has no server threads.
        static SERVERS: Mutex<BTreeMap<(u32, String), Arc<StoreServer>>> = Mutex::new(BTreeMap::new());
        let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (std::process::id(), self.to_string());
        if let Some(left) = servers.get(&key).filter(|server| Arc::strong_count(server) == 1) {
            return Ok(Arc::clone(left));
        }
        let server = Arc::new(self.serve()?);
        servers.insert(key, Arc::clone(&server));
        Ok(server)
    }

    /// Serves the store at the named address. Binds to all addresses if the name resolves to loopback here.
    /// It also does so if the address is not local, since NAT may translate it, unless the host was derived
    /// from the variables of mpirun or srun.
    fn serve(&self) -> Result<StoreServer, CommError> {
        let derived = ", which was derived from the variables of mpirun or srun (MASTER_ADDR and MASTER_PORT \
                       win over them)";
        let advice = if self.derived { derived } else { "" };
        let wrong = |source| CommError::system(&format!("cannot serve the store at {self}{advice}"), source);
        let named = self.resolve().map_err(wrong)?;
        let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, self.port))];
        let everywhere = self.is_host_ambiguous(&named);
        let first = match StoreServer::bind(if everywhere { &any } else { &named }) {
            Ok(server) => return Ok(server),
            Err(error) => error,
        };
        if everywhere || self.derived || matches!(first, ServeError::InUse { .. }) {
            return Err(wrong(std::io::Error::other(first)));
        }
        StoreServer::bind(&any).map_err(|_| wrong(std::io::Error::other(first)))
    }
}

impl fmt::Display for MasterStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, .. } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// `several_hosts` is `None` if the number of hosts is unknown.
fn is_ambiguous(host: &str, resolved: &[SocketAddr], several_hosts: Option<bool>) -> bool {
    let is_alias = host != "localhost" && host.parse::<IpAddr>().is_err();
    let is_loopback = !resolved.is_empty() && resolved.iter().all(|address| address.ip().is_loopback());
    is_loopback && several_hosts.unwrap_or(is_alias)
}

/// Records, when dropped, that this rank no longer uses a store file; the last rank to do so removes the
/// file.
///
/// The store key of the count contains the generation, since a killed job leaves its own count in the file.
/// The file of a killed job does no harm: no rank confirms its announcement, and rank 0 overwrites it.
#[derive(Debug)]
pub(super) struct SignOff {
    store: Arc<FileStore>,
    /// The process that joined, the file and the rank. A forked child does not sign off.
    key: (u32, PathBuf, usize),
    size: usize,
    /// Set when all ranks have met; before that, it is unknown which other ranks use the file.
    formed: OnceLock<Generation>,
}

impl Drop for SignOff {
    fn drop(&mut self) {
        let Some(generation) = self.formed.get().filter(|_| std::process::id() == self.key.0) else { return };
        departed_ranks().insert(self.key.clone(), *generation);
        // If signing off fails, the file stays, which does no harm.
        let _ = self.store.leave(&departed_key(*generation), self.size, Instant::now() + SIGN_OFF_TIMEOUT);
    }
}

/// Returns the key of the count of ranks of this generation that have signed off.
fn departed_key(generation: Generation) -> Vec<u8> {
    format!("convoke/{generation}/gone").into_bytes()
}

type DepartedRanks = BTreeMap<(u32, PathBuf, usize), Generation>;

/// Returns the ranks that have signed off in this process, by process id, file and rank. A rank that joins
/// again withdraws its sign-off, so that the last other rank to sign off does not remove the file.
fn departed_ranks() -> MutexGuard<'static, DepartedRanks> {
    static DEPARTED: Mutex<DepartedRanks> = Mutex::new(BTreeMap::new());
    DEPARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_of_a_loopback_only_hostname_listens_on_all_addresses() {
        let here = [SocketAddr::from(([127, 0, 1, 1], 5))];
        let elsewhere = [SocketAddr::from(([10, 0, 0, 1], 5))];
        // A URL does not say how many hosts there are.
        assert!(is_ambiguous("node1", &here, None));
        assert!(!is_ambiguous("node1", &elsewhere, None));
        assert!(!is_ambiguous("localhost", &here, None) && !is_ambiguous("127.0.0.1", &here, None));
        // A launcher says whether there are several hosts.
        assert!(is_ambiguous("node1", &here, Some(true)) && !is_ambiguous("node1", &here, Some(false)));
        assert!(is_ambiguous("localhost", &here, Some(true)), "mpirun and srun may say so");
        assert!(!is_ambiguous("node1", &[], Some(true)));
    }
}
