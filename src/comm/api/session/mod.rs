//! Entry points: they create the world from the environment, a URL or a store.

mod agent;
#[cfg(all(test, not(loom)))]
mod drain_tests;
mod live_worlds;
mod rendezvous;
mod url;
mod world;

use std::str::FromStr;
use std::sync::{Arc, Mutex};

use convoke_env::{AgentChannel, Generation, Token, WorkerEnv, vars};
use convoke_store::{PrefixStore, Store};

use crate::api::group::Group;
use crate::api::logger;
use crate::bootstrap::options::{GroupOptions, Listen};
use crate::bootstrap::{BootstrapConfig, WorldEntryGuard};
use crate::collectives::plan::Algorithms;
use crate::error::{CommError, require};
use agent::AgentHello;
pub use live_worlds::is_initialized;
use live_worlds::{LiveWorld, Membership};
use rendezvous::{MasterStore, OpenStore, Rendezvous};
use url::{InitMethod, Url};
pub use world::{World, is_elastic};

/// Joins the job that environment variables describe, and connects to all its ranks.
///
/// Equivalent to [`Session::join`] followed by [`Session::world`]. Without the variables of a launcher, it
/// returns a world of one rank, so a program also runs without a launcher.
///
/// # Errors
/// The errors of [`Session::join`] and [`Session::world`].
pub fn init() -> Result<World, CommError> {
    Session::join()?.world()
}

/// The membership of a process, as one rank, in a job. A session makes one world for each rendezvous round.
///
/// A launcher that restarts workers starts new processes, whose first world belongs to the new round. If all
/// processes survive a failure, they continue with [`Self::next_round`].
///
/// Every constructor reads these environment variables:
/// - CONVOKE_TOKEN or CONVOKE_TOKEN_FILE: the secret of the job, if the launcher sends none on the agent
///   channel.
/// - CONVOKE_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME: the interface to listen on
///   (see [`Listen::Interface`]).
/// - CONVOKE_ALGO: see [`GroupOptions::algorithms`].
/// - CONVOKE_SHM: `off` disables [`GroupOptions::shared_memory`].
/// - CONVOKE_THREAD_MIGRATION: see [`GroupOptions::thread_migration`].
/// - CONVOKE_SINGLE_COPY: see [`GroupOptions::single_copy`].
/// - CONVOKE_LOG: see `docs/reference/worker-env.md`.
#[derive(Debug)]
pub struct Session {
    rank: usize,
    size: usize,
    /// Rank and number of ranks on this node, from a launcher.
    local: Option<(usize, usize)>,
    restart_count: u32,
    rendezvous: Rendezvous,
    /// The store through which the ranks meet; `None` until it is open.
    open_store: Option<OpenStore>,
    agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    options: GroupOptions,
    round: u32,
}

impl Session {
    /// Joins the job that environment variables describe: the variables of torchrun, with convoke's agent
    /// channel, else the variables of mpirun or srun. Without any of them, the world has one rank.
    ///
    /// # Errors
    /// [`CommError::Env`] if variables are missing or malformed; [`CommError::Channel`] if the agent
    /// channel is broken; [`CommError::Token`] if the token cannot be used. [`CommError::InvalidArgument`]
    /// if the named interface does not exist, or a variable of convoke has an invalid value.
    pub fn join() -> Result<Self, CommError> {
        logger::install()?;
        match WorkerEnv::from_process()? {
            Some(env) => Self::from_worker_env(env),
            None => {
                log::info!("no launcher started this process: it is a world of one rank");
                Self::new(0, 1, Rendezvous::SingleRank)
            }
        }
    }

    /// Joins the job at a URL that also contains this rank.
    /// - `tcp://host:port?rank=0&world_size=2`: rank 0 serves the store at this address.
    /// - `file:///path?rank=0&world_size=2`: a file that all ranks can reach.
    /// - `env://`: equivalent to [`Self::join`].
    ///
    /// # Errors
    /// [`CommError::Url`] if the URL is malformed or lacks the rank. Otherwise the errors of
    /// [`Self::join`].
    pub fn from_url(url: &str) -> Result<Self, CommError> {
        logger::install()?;
        let parsed = Url::parse(url)?;
        match (parsed.init_method, parsed.rank_and_size) {
            (InitMethod::Env, None) => Self::join(),
            (init_method, Some((rank, size))) => Self::join_at(init_method, rank, size),
            (InitMethod::Tcp { .. } | InitMethod::File(_), None) => {
                let what = "it does not give the rank: add ?rank=0&world_size=2, or pass them \
                            (Session::from_url_as)";
                Err(CommError::Url { url: url.to_owned(), what: what.to_owned() })
            }
        }
    }

    /// Joins the job at a URL that is equal on all ranks; see [`Self::from_url`] for the schemes. With
    /// `env://`, rank and world size come from the arguments, and MASTER_ADDR and MASTER_PORT from the
    /// environment.
    ///
    /// # Errors
    /// [`CommError::Url`] if the URL is malformed or contains a rank; [`CommError::InvalidArgument`] if
    /// `rank` is not below `world_size`. Otherwise the errors of [`Self::join`].
    pub fn from_url_as(url: &str, rank: usize, world_size: usize) -> Result<Self, CommError> {
        logger::install()?;
        let parsed = Url::parse(url)?;
        if parsed.rank_and_size.is_some() {
            let what = "it gives a rank, and another was passed: leave one of them out".to_owned();
            return Err(CommError::Url { url: url.to_owned(), what });
        }
        Self::join_at(parsed.init_method, rank, world_size)
    }

    /// Joins the job through a store that all ranks can reach. [`Group::new`] does so without environment
    /// variables.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `rank` is not below `world_size`. Otherwise the errors of
    /// [`Self::join`].
    pub fn from_store(store: Arc<dyn Store>, rank: usize, world_size: usize) -> Result<Self, CommError> {
        logger::install()?;
        Self::new(rank, world_size, Rendezvous::Store(store))
    }

    fn join_at(init_method: InitMethod, rank: usize, size: usize) -> Result<Self, CommError> {
        match init_method {
            InitMethod::Tcp { host, port } => {
                Self::new(rank, size, Rendezvous::Tcp(MasterStore::explicit(host, port)))
            }
            InitMethod::File(path) => Self::new(rank, size, Rendezvous::File(path)),
            InitMethod::Env => {
                let variable = |name: &str| match name {
                    vars::RANK => Some(rank.to_string()),
                    vars::WORLD_SIZE => Some(size.to_string()),
                    _ => std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()),
                };
                match WorkerEnv::from_vars(variable)? {
                    Some(env) => Self::from_worker_env(env),
                    None => Self::new(rank, size, Rendezvous::SingleRank),
                }
            }
        }
    }

    fn new(rank: usize, size: usize, rendezvous: Rendezvous) -> Result<Self, CommError> {
        require(rank < size, || format!("rank {rank} of {size}: ranks are 0 to {}", size.saturating_sub(1)))?;
        let algorithms = std::env::var("CONVOKE_ALGO").unwrap_or_default().parse::<Algorithms>();
        let wrong = |error| CommError::InvalidArgument(format!("CONVOKE_ALGO: {error}"));
        let mut options = GroupOptions::default()
            .name("world")
            .listen(interface()?.unwrap_or_else(|| rendezvous.listen()))
            .algorithms(algorithms.map_err(wrong)?)
            .shared_memory(shared_memory_enabled()?)
            .thread_migration(from_variable("CONVOKE_THREAD_MIGRATION")?)
            .single_copy(from_variable("CONVOKE_SINGLE_COPY")?);
        options.token = Token::from_process()?;
        let (local, restart_count, open_store, agent, round) = (None, 0, None, None, 0);
        Ok(Self { rank, size, local, restart_count, rendezvous, open_store, agent, options, round })
    }

    fn from_worker_env(env: WorkerEnv) -> Result<Self, CommError> {
        let hello = agent::inherited_hello()?;
        let mut session = Self::new(env.rank, env.world_size, Rendezvous::Tcp(MasterStore::from_env(&env)))?;
        session.local = Some((env.local_rank, env.local_world_size));
        session.restart_count = env.restart_count;
        session.options.generation = env.generation.or(hello.as_ref().map(|hello| hello.generation));
        if let Some(AgentHello { generation, token, channel }) = hello {
            session.options.token = token.or(session.options.token);
            session.agent = channel.map(|channel| (channel, generation));
        }
        Ok(session)
    }

    /// Changes the options of later worlds, such as timeouts. Name, generation, token and address come from
    /// the launcher unless `change` replaces them.
    #[must_use]
    pub fn with_options(mut self, change: impl FnOnce(GroupOptions) -> GroupOptions) -> Self {
        self.options = change(self.options);
        self
    }

    /// Connects to all ranks of the job.
    ///
    /// # Errors
    /// The errors of [`Group::new`]; [`CommError::Store`] if no store answers at the rendezvous.
    pub fn world(&mut self) -> Result<World, CommError> {
        let mut options = self.options.clone();
        let (rank, size, round) = (self.rank, self.size, self.round);
        if size == 1 {
            let group = Group::join(BootstrapConfig::single_rank(options), Some(Arc::new(LiveWorld::new())))?;
            return Ok(World::new(group, self.local, self.restart_count));
        }
        log::info!("{}: rank {rank} of {size} joins the other ranks at {}", options.name, self.rendezvous);
        let store_id = format!("{}, round {round}", self.rendezvous);
        let membership = Arc::new(Membership::new(rank, &store_id)?);
        let open_store = match &mut self.open_store {
            Some(open_store) => open_store,
            none => none.insert(self.rendezvous.open(rank, size, &options)?),
        };
        let store: Arc<dyn Store> =
            Arc::new(PrefixStore::new(self.rendezvous.prefix(round), Arc::clone(&open_store.store)));
        let entry_guard =
            self.rendezvous.is_served().then(|| Arc::new(WorldEntryGuard::new(Arc::clone(&store))));
        // The launcher's generation identifies the first round only; later rounds draw their own.
        options.generation = options.generation.filter(|_| round == 0);
        let config = BootstrapConfig {
            store_rank: self.rendezvous.store_rank(),
            store_location: self.rendezvous.store_location(size),
            entry_guard: entry_guard.clone(),
            agent: self.agent.clone(),
            ..BootstrapConfig::new(store, store_id, (rank, size), options)
        };
        let used = (open_store.server.clone(), open_store.sign_off.clone());
        let keep_alive = (used, entry_guard, Arc::clone(&membership), LiveWorld::new());
        let group = Group::join(config, Some(Arc::new(keep_alive)))?;
        open_store.record_formed(group.generation());
        membership.record_formed();
        Ok(World::new(group, self.local, self.restart_count))
    }

    /// Connects to all ranks again, in the same processes, after the previous world was dropped or has
    /// failed. All ranks must call it.
    ///
    /// # Errors
    /// The errors of [`Self::world`].
    pub fn next_round(&mut self) -> Result<World, CommError> {
        self.round += 1;
        self.world()
    }
}

/// Returns true if CONVOKE_SHM lets the ranks of a host share memory.
fn shared_memory_enabled() -> Result<bool, CommError> {
    match std::env::var("CONVOKE_SHM").unwrap_or_default().trim() {
        "" | "on" | "1" => Ok(true),
        "off" | "0" => Ok(false),
        other => Err(CommError::InvalidArgument(format!("CONVOKE_SHM={other:?} is neither on nor off"))),
    }
}

/// Returns the option that a variable selects, or the default if it is unset or empty.
fn from_variable<T: Default + FromStr<Err = String>>(name: &str) -> Result<T, CommError> {
    match std::env::var(name).unwrap_or_default().trim() {
        "" => Ok(T::default()),
        text => text.parse().map_err(|what| CommError::InvalidArgument(format!("{name}={what}"))),
    }
}

/// Returns the address to listen at if an environment variable names a network interface, else `None`.
fn interface() -> Result<Option<Listen>, CommError> {
    const NAMES: [&str; 3] = ["CONVOKE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];
    let given = NAMES.iter().find_map(|name| {
        let value = std::env::var(name).ok().filter(|value| !value.trim().is_empty())?;
        Some((*name, value))
    });
    let Some((name, value)) = given else { return Ok(None) };
    // gloo accepts whole names only.
    let names = if name.starts_with("GLOO") { format!("={value}") } else { value.clone() };
    let address = crate::bootstrap::address(&Listen::Interface(names)).map_err(|error| match error {
        CommError::InvalidArgument(what) => CommError::InvalidArgument(format!("{name}={value:?}: {what}")),
        error => error,
    })?;
    log::info!("{name}={value:?} is {address}");
    Ok(Some(Listen::Address(address)))
}
