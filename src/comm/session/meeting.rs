//! Where ranks meet: the store of a job, by each way in.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use convoke_env::{Generation, WorkerEnv, vars};
use convoke_store::{FileStore, ServeError, Store, StoreServer, TcpStore};

use super::served;
use crate::error::CommError;
use crate::options::Listen;

/// How long signing off from a file may take; nothing but the file depends on it.
const SIGN_OFF: Duration = Duration::from_secs(2);

/// Where the ranks of a job meet.
#[derive(Debug)]
pub(super) enum Meeting {
    /// There is nobody to meet.
    Alone,
    Tcp(Master),
    File(PathBuf),
    Store(Arc<dyn Store>),
}

/// Where a store is served over TCP, and by whom.
#[derive(Debug)]
pub(super) struct Master {
    host: String,
    port: u16,
    /// The launcher serves it; otherwise rank 0 does.
    by_launcher: bool,
    /// Id of the job, if it has one.
    run: Option<String>,
    /// Nobody named the host: it was concluded from the variables of mpirun or srun.
    found: bool,
    /// The ranks are on several hosts.
    several_hosts: bool,
}

/// A store that is open.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) store: Arc<dyn Store>,
    /// What must live as long as worlds do: the server, or the claim on the file.
    pub(super) keep: Option<Arc<dyn Any + Send + Sync>>,
    sign_off: Option<Arc<SignOff>>,
}

impl Meeting {
    /// Where to listen if nothing else says: where those who come this way can reach this host.
    pub(super) fn listen(&self) -> Listen {
        match self {
            Self::Alone => Listen::Loopback,
            // To itself the master's own host may be a loopback address (127.0.1.1 on Debian).
            Self::Tcp(master) if master.several_hosts && master.is_loopback() => Listen::Outward,
            Self::Tcp(master) => Listen::RouteTo(master.host.clone()),
            Self::File(_) | Self::Store(_) => Listen::Outward,
        }
    }

    /// Before all keys of the world of this round.
    pub(super) fn prefix(&self, round: u32) -> String {
        let mut prefix = "convoke".to_owned();
        if let Self::Tcp(Master { run: Some(run), .. }) = self {
            prefix = format!("{prefix}/{run}");
        }
        if round == 0 { prefix } else { format!("{prefix}/round-{round}") }
    }

    /// The rank in whose process the store lives.
    pub(super) fn store_rank(&self) -> Option<usize> {
        matches!(self, Self::Tcp(Master { by_launcher: false, .. })).then_some(0)
    }

    /// Opens the store for `rank` of `size`; where rank 0 serves it, waits for that at most `timeout`.
    pub(super) fn open(&self, rank: usize, size: usize, timeout: Duration) -> Result<Opened, CommError> {
        let deadline = Instant::now() + timeout;
        let opened = |store| Opened { store, keep: None, sign_off: None };
        match self {
            Self::Alone => Ok(opened(Arc::new(convoke_store::MemoryStore::new()))),
            Self::Store(store) => Ok(opened(Arc::clone(store))),
            Self::Tcp(master) if rank == 0 && !master.by_launcher => {
                let server = served::at(master.to_string(), || master.serve())?;
                Ok(Opened { store: server.store(), keep: Some(server), sign_off: None })
            }
            Self::Tcp(master) => Ok(opened(Arc::new(TcpStore::connect(&master.to_string(), deadline)?))),
            Self::File(path) => {
                let store = Arc::new(match left().remove(&(std::process::id(), path.clone(), rank)) {
                    Some(generation) => FileStore::come_back(path, &gone_key(generation), deadline)?,
                    None => FileStore::open(path, None, deadline)?,
                });
                let sign_off = Arc::new(SignOff {
                    store: Arc::clone(&store),
                    rank,
                    path: path.clone(),
                    size,
                    formed: OnceLock::new(),
                    pid: std::process::id(),
                });
                let keep: Arc<dyn Any + Send + Sync> = Arc::<SignOff>::clone(&sign_off);
                Ok(Opened { store, keep: Some(keep), sign_off: Some(sign_off) })
            }
        }
    }
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone => f.write_str("no place"),
            Self::Tcp(master) => master.fmt(f),
            Self::File(path) => path.display().fmt(f),
            Self::Store(store) => write!(f, "the store {:p}", Arc::as_ptr(store)),
        }
    }
}

impl Opened {
    /// All ranks have met, under this generation.
    pub(super) fn has_formed(&self, generation: Generation) {
        if let Some(sign_off) = &self.sign_off {
            sign_off.formed.get_or_init(|| generation);
        }
    }
}

impl Master {
    /// As a URL says.
    pub(super) fn explicit(host: String, port: u16) -> Self {
        Self { host, port, by_launcher: false, run: None, found: false, several_hosts: false }
    }

    /// As a launcher says.
    pub(super) fn of(env: &WorkerEnv) -> Self {
        Self {
            host: env.master_addr.clone(),
            port: env.master_port,
            by_launcher: env.use_agent_store,
            run: Some(env.run_id.clone()),
            found: std::env::var_os(vars::MASTER_ADDR).is_none(),
            several_hosts: env.local_world_size < env.world_size,
        }
    }

    fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        Ok((self.host.as_str(), self.port).to_socket_addrs()?.collect())
    }

    fn is_loopback(&self) -> bool {
        self.resolve().is_ok_and(|all| !all.is_empty() && all.iter().all(|one| one.ip().is_loopback()))
    }

    /// Serves the store at the address that the others were told; at any if others cannot reach that one, or if
    /// it is not ours (it may be translated on the way) and somebody named it.
    fn serve(&self) -> Result<StoreServer, CommError> {
        let advice = match self.found {
            true => {
                ", as concluded from the variables of mpirun or srun (MASTER_ADDR and MASTER_PORT win over them)"
            }
            false => "",
        };
        let wrong = |source| CommError::system(&format!("cannot serve the store at {self}{advice}"), source);
        let named = self.resolve().map_err(wrong)?;
        let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, self.port))];
        let everywhere = self.several_hosts && named.iter().all(|address| address.ip().is_loopback());
        let first = match StoreServer::bind(if everywhere { &any } else { &named }) {
            Ok(server) => return Ok(server),
            Err(error) => error,
        };
        if everywhere || self.found || matches!(first, ServeError::InUse { .. }) {
            return Err(wrong(std::io::Error::other(first)));
        }
        StoreServer::bind(&any).map_err(|_| wrong(std::io::Error::other(first)))
    }
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, .. } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// The end of a file through which ranks met: the last that signs off removes it.
///
/// Counted under the generation, since a job that was killed has left its own counts. Such a file does no
/// harm: its announcement is not confirmed by anybody, and rank 0 overwrites it.
#[derive(Debug)]
struct SignOff {
    store: Arc<FileStore>,
    rank: usize,
    path: PathBuf,
    size: usize,
    /// Set when all ranks are there; before, nobody knows who else uses the file.
    formed: OnceLock<Generation>,
    /// A fork of this process has nothing to sign off from.
    pid: u32,
}

impl Drop for SignOff {
    fn drop(&mut self) {
        let Some(generation) = self.formed.get().filter(|_| std::process::id() == self.pid) else { return };
        left().insert((self.pid, self.path.clone(), self.rank), *generation);
        // At worst the file stays, and does no harm.
        let _ = self.store.leave(&gone_key(*generation), self.size, Instant::now() + SIGN_OFF);
    }
}

/// Counts the ranks of this generation that have signed off.
fn gone_key(generation: Generation) -> Vec<u8> {
    format!("convoke/{generation}/gone").into_bytes()
}

type Left = HashMap<(u32, PathBuf, usize), Generation>;

/// The ranks that have signed off in this process, by process, file and rank. Who joins again there takes it back,
/// so that the last of the others does not remove the file.
fn left() -> MutexGuard<'static, Left> {
    static LEFT: LazyLock<Mutex<Left>> = LazyLock::new(Mutex::default);
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}
