//! Connects the ranks of a group, which find each other's addresses in a key-value store.
//!
//! Each rank writes a record (address, host, settings) to the store, under a key that contains the
//! generation. Rank 0 gathers the records into one table, which all ranks read. For n ranks this costs n
//! writes, n reads by rank 0, and one read by each other rank. Then the ranks connect. When rank 0 is
//! connected to all ranks, it removes the keys, so that a later process cannot read stale records.
//!
//! If no launcher gave a generation (a random number that identifies this start of the job), rank 0 draws one
//! and announces it in the store, see `generation`.
//!
//! When the ranks of an existing group form another group, they exchange their records through the existing
//! group, not through the store. The store may have ended by then, since rank 0 may serve it and exit.

mod address;
mod connections;
mod cores;
mod gather;
mod generation;
pub(crate) mod options;
mod rank_lock;
mod record;
mod world_entry;

pub(crate) use address::address;

use std::fmt;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use convoke_env::host::{allowed_cpus, autogroup_enabled};
use convoke_env::{AgentChannel, Generation};
use convoke_store::{Store, StoreError};
use nix::unistd::{Pid, getsid};

use crate::bootstrap::options::{GroupOptions, ThreadMigration};
use crate::collectives::plan::{Topology, Tuning};
use crate::engine::{CoreSharing, Engine, Oversubscription, Settings};
use crate::error::cause::{self, Cause, Report};
use crate::error::{CommError, LossReason, Ranks};
use crate::fault::fault_point;
use crate::flight::{FlightRecorder, GroupRecorder};
use crate::json;
use crate::limits;
use crate::transport::frame::VERSION;
use crate::transport::links::hello::{ConnectionKind, Credentials};
use crate::transport::links::tcp::{self, Listener};
use connections::{control_connections, initial_connections};
use cores::CoreShare;
use rank_lock::RankLock;
use record::Record;
pub(crate) use world_entry::WorldEntryGuard;

/// Name of the store's server in error messages, if no launcher serves the store but rank 0 does.
pub(crate) const RANK_0: &str = "rank 0";
/// Interval at which a rank checks whether rank 0 has announced another generation.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time for which connections to a published address may be refused before the rank that published the
/// address counts as lost.
const REFUSED_TIMEOUT: Duration = Duration::from_millis(100);
/// Time limit for removing keys from the store and for publishing a failure there. Correctness depends on
/// neither.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which rank 0 logs the ranks that have not joined yet. The first time it is at most a third of
/// `init_timeout`.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// Most records that a rank looks up one by one in the store, to name the missing ranks in an error.
const MAX_LOOKUPS: usize = 1024;

/// Everything that a rank needs to form a group with the other ranks.
#[derive(Debug)]
pub(crate) struct BootstrapConfig {
    pub(crate) store: Arc<dyn Store>,
    /// Identifier of the store as text. Threads of one process that would use the same keys have equal
    /// identifiers.
    pub(crate) store_id: String,
    /// The rank whose process serves the store, if a rank does.
    pub(crate) store_rank: Option<usize>,
    pub(crate) store_location: StoreLocation,
    /// Removes the store entry of a formed world (the group of all ranks) when the world is dropped.
    pub(crate) entry_guard: Option<Arc<WorldEntryGuard>>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// For each rank of this group, its rank in the first ancestor of the group, such as the world.
    pub(crate) origin: Vec<usize>,
    /// True if the ranks are already connected in an ancestor group and exchange their records through it.
    pub(crate) is_successor: bool,
    pub(crate) options: GroupOptions,
    pub(crate) tuning: Tuning,
    pub(crate) agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    /// How ranks share CPU cores, inherited from an ancestor group. It is set if ranks outside this group
    /// also run on the cores of this group's ranks.
    pub(crate) sharing: Option<CoreSharing>,
}

/// Location of the store, for error messages.
#[derive(Debug, Clone, Default)]
pub(crate) struct StoreLocation {
    /// Address of the store; empty if the store has none.
    pub(crate) address: String,
    /// Name of the store's server, such as "rank 0"; empty if it is unknown.
    pub(crate) server: &'static str,
    /// The environment variables or arguments that tell a rank the address of this store; empty if a launcher
    /// sets them.
    pub(crate) configured_by: String,
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, server, configured_by } = self;
        if !address.is_empty() {
            write!(f, " at {address}")?;
        }
        if !server.is_empty() {
            write!(f, ", where {server} serves the store")?;
        }
        if !configured_by.is_empty() {
            write!(f, "; start every rank with {configured_by}")?;
        }
        Ok(())
    }
}

impl StoreLocation {
    /// Converts a store error to a [`CommError`]. If the store is lost or unreachable, the text names its
    /// server.
    pub(crate) fn convert_error(&self, group: &str, error: StoreError) -> CommError {
        match &error {
            StoreError::Lost { .. } | StoreError::Unreachable { .. } if !self.server.is_empty() => {
                let ranks = if self.server == RANK_0 { vec![0] } else { Vec::new() };
                let advice = match &error {
                    StoreError::Unreachable { .. } if !self.configured_by.is_empty() => {
                        format!("; is it running, and started with {}?", self.configured_by)
                    }
                    _ => String::new(),
                };
                let what = format!("{error}; {} serves it{advice}", self.server);
                CommError::Bootstrap { group: group.to_owned(), what, ranks }
            }
            _ => error.into(),
        }
    }
}

/// A connected group.
#[derive(Debug)]
pub(crate) struct ConnectedGroup {
    pub(crate) engine: Box<Engine>,
    /// The generation that the ranks agreed on.
    pub(crate) generation: Generation,
    pub(crate) topology: Topology,
    /// True if all ranks exchange data through shared memory.
    pub(crate) in_memory: bool,
}

/// Connects this rank to the other ranks, whose addresses it finds in the store.
pub(crate) fn connect(config: &BootstrapConfig) -> Result<ConnectedGroup, CommError> {
    log_outcome(config, || connect_through_store(config))
}

/// Connects this rank, which already listens, to all ranks; `records` holds their encoded records in rank
/// order.
pub(crate) fn connect_with_records(
    waiting: ListeningRank<'_>,
    records: &[&[u8]],
) -> Result<ConnectedGroup, CommError> {
    log_outcome(waiting.bootstrap.config, || waiting.bootstrap.connect_to_records(records))
}

fn log_outcome(
    config: &BootstrapConfig,
    connect: impl FnOnce() -> Result<ConnectedGroup, CommError>,
) -> Result<ConnectedGroup, CommError> {
    let BootstrapConfig { rank, size, ref options, .. } = *config;
    let started = Instant::now();
    let name = &options.name;
    let outcome = connect().map_err(|error| match error {
        CommError::Store(error) => config.store_location.convert_error(name, error),
        error => error,
    });
    match &outcome {
        Ok(ConnectedGroup { generation, .. }) => {
            cause::clear_consequence();
            let took = started.elapsed().as_millis();
            log::info!("{name}: rank {rank} of {size} connected after {took} ms, generation {generation}");
        }
        // The engine has already logged the error that ended the group.
        Err(error) if error.context().is_some() => {}
        Err(error) => log::error!("{name}: rank {rank} of {size}: {error}"),
    }
    outcome
}

fn connect_through_store(config: &BootstrapConfig) -> Result<ConnectedGroup, CommError> {
    let waiting = ListeningRank::new(config).map_err(|error| publish_failure(config, error))?;
    let bootstrap = &waiting.bootstrap;
    let rank = config.rank;
    let mut generation = bootstrap.initial_generation()?;
    loop {
        match bootstrap.run_round(generation)? {
            RoundOutcome::Connected(formed) => return Ok(*formed),
            RoundOutcome::Stale(announced) => {
                log::info!(
                    "{}: rank {rank} abandons generation {generation}, because rank 0 announced {announced}",
                    bootstrap.name()
                );
                generation = announced;
            }
        }
    }
}

/// Publishes at once, in the store, that this rank has no file descriptor left for listening. This needs a
/// generation from the launcher, since the key contains it. Returns the error for this rank.
fn publish_failure(config: &BootstrapConfig, error: CommError) -> CommError {
    let Some(what) = descriptor_error(config, &error) else { return error };
    let BootstrapConfig { rank, ref store, ref options, .. } = *config;
    if let Some(generation) = options.generation {
        let (name, record) = (&options.name, record::encode_failure(&what));
        let soon = Instant::now() + CLEANUP_TIMEOUT;
        let _ = store.set(format!("{name}/{generation}/rank/{rank}").as_bytes(), &record, soon);
        if rank == 0 {
            let table = json::encode(&[String::from_utf8_lossy(&record)]);
            let _ = store.set(format!("{name}/{generation}/table").as_bytes(), &table, soon);
        }
    }
    let (group, what) = (options.name.clone(), format!("rank {rank} {what}"));
    CommError::Bootstrap { group, what, ranks: vec![rank] }
}

/// Returns the message for an error that means a lack of file descriptors; `None` for any other error.
fn descriptor_error(config: &BootstrapConfig, error: &CommError) -> Option<String> {
    let CommError::System { source, .. } = error else { return None };
    let message = || limits::descriptor_limit_message(source, config.size, config.size);
    limits::is_out_of_descriptors(source).then(|| format!("has no file descriptor left: {}", message()))
}

fn listen(config: &BootstrapConfig) -> Result<Listener, CommError> {
    let address = address(&config.options.listen)?;
    tcp::listen(SocketAddr::new(address, 0)).map_err(|error| {
        let why = match error.kind() {
            ErrorKind::AddrInUse => {
                "; no local port is free (`ss -s` counts sockets in use and in TIME-WAIT)"
            }
            _ => "",
        };
        CommError::system(&format!("cannot listen at {address}{why}"), error)
    })
}

/// Returns the engine of a group of one rank. It delivers the messages that the rank sends to itself.
pub(crate) fn single_rank_engine(
    config: &BootstrapConfig,
    generation: Generation,
) -> Result<Engine, CommError> {
    let options = &config.options;
    let flight = Arc::new(config.group_recorder());
    flight.formed(generation);
    let settings = Settings {
        name: options.name.clone(),
        me: 0,
        size: 1,
        credentials: Credentials::new(options.token.as_ref(), generation, options.id),
        addresses: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
        store: Arc::clone(&config.store),
        abort_key: format!("{}/{generation}/abort", options.name).into_bytes(),
        store_rank: config.store_rank,
        agent: None,
        peer_timeout: options.peer_timeout,
        sharing: CoreSharing::SINGLE_RANK,
        flight,
    };
    Engine::new(settings, None)
}

impl BootstrapConfig {
    /// Returns a bootstrap configuration for a group of one rank, which needs no shared store.
    pub(crate) fn single_rank(options: GroupOptions, tuning: Tuning) -> Self {
        let store = Arc::new(convoke_store::MemoryStore::new());
        Self::new(store, "no rendezvous address".to_owned(), (0, 1), options, tuning)
    }

    /// Returns the configuration of one rank for a group without a parent group. Of the store, only the
    /// identifier is known, not the address or server.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        store_id: String,
        (rank, size): (usize, usize),
        options: GroupOptions,
        tuning: Tuning,
    ) -> Self {
        Self {
            store,
            store_id,
            store_rank: None,
            store_location: StoreLocation::default(),
            entry_guard: None,
            rank,
            size,
            origin: (0..size).collect(),
            is_successor: false,
            options,
            tuning,
            agent: None,
            sharing: None,
        }
    }

    fn group_recorder(&self) -> GroupRecorder {
        let Self { rank, size, origin, options, .. } = self;
        FlightRecorder::for_process().group(
            &options.name,
            options.id,
            options.generation,
            (*rank, *size),
            origin,
        )
    }

    fn record(&self, listener: &Listener) -> Result<Record, CommError> {
        let address = listener
            .address()
            .map_err(|error| CommError::system("cannot get the address of the listening socket", error))?;
        Ok(Record {
            version: VERSION,
            rank: self.rank,
            size: self.size,
            address,
            host: record::host_key(&self.options.locality_domain),
            cores: allowed_cpus().into_iter().collect(),
            pid: std::process::id(),
            tuning: self.tuning.to_string(),
            token: self.options.token.is_some(),
            memory: self.options.shared_memory,
        })
    }
}

/// A rank that listens for connections from its peers and has not connected to them yet.
pub(crate) struct ListeningRank<'a> {
    bootstrap: Bootstrap<'a>,
    _lock: RankLock,
}

impl<'a> ListeningRank<'a> {
    pub(crate) fn new(config: &'a BootstrapConfig) -> Result<Self, CommError> {
        let lock = RankLock::new(config)?;
        let deadline = Instant::now() + config.options.init_timeout;
        let listener = listen(config)?;
        let flight = Arc::new(config.group_recorder());
        let bootstrap = Bootstrap { config, record: config.record(&listener)?, listener, deadline, flight };
        let Record { rank, address, .. } = bootstrap.record;
        log::info!("{}: rank {rank} listens at {address}", bootstrap.name());
        Ok(Self { bootstrap, _lock: lock })
    }

    /// Returns the encoded record of this rank, which the other ranks need to connect to it.
    pub(crate) fn record(&self) -> Vec<u8> {
        self.bootstrap.encoded_record()
    }
}

/// Returns the encoded failure that a rank which cannot listen publishes instead of its record.
pub(crate) fn failure_record(config: &BootstrapConfig, error: &CommError) -> Vec<u8> {
    record::encode_failure(&descriptor_error(config, error).unwrap_or_else(|| error.to_string()))
}

/// The state of this rank while its group forms.
struct Bootstrap<'a> {
    config: &'a BootstrapConfig,
    record: Record,
    listener: Listener,
    deadline: Instant,
    flight: Arc<GroupRecorder>,
}

enum RoundOutcome {
    Connected(Box<ConnectedGroup>),
    /// Rank 0 has announced another generation, under which this rank must try again.
    Stale(Generation),
}

impl Bootstrap<'_> {
    fn store(&self) -> &dyn Store {
        &*self.config.store
    }

    /// Returns the encoded record of this rank.
    fn encoded_record(&self) -> Vec<u8> {
        json::encode(&self.record)
    }

    fn name(&self) -> &str {
        &self.config.options.name
    }

    fn key(&self, generation: Generation, what: &str) -> Vec<u8> {
        format!("{}/{generation}/{what}", self.name()).into_bytes()
    }

    fn record_key(&self, generation: Generation, rank: usize) -> Vec<u8> {
        self.key(generation, &format!("rank/{rank}"))
    }

    fn bootstrap_error(&self, what: String, mut ranks: Vec<usize>) -> CommError {
        ranks.truncate(cause::MAX_REPORTED_RANKS);
        CommError::Bootstrap { group: self.name().to_owned(), what, ranks }
    }

    /// Connects to all ranks; `records` holds their encoded records in rank order.
    fn connect_to_records(&self, records: &[&[u8]]) -> Result<ConnectedGroup, CommError> {
        let table = self.check_records(record::decode_all(records))?;
        let Some(generation) = self.config.options.generation else {
            unreachable!("a group that comes from another one has its generation")
        };
        match self.connect_ranks(generation, &table)? {
            RoundOutcome::Connected(formed) => Ok(*formed),
            RoundOutcome::Stale(_) => unreachable!(
                "no rank announces another generation when all have this one from their parent group"
            ),
        }
    }

    /// Connects to the ranks whose records are in `table`, in rank order.
    fn connect_ranks(&self, generation: Generation, table: &[Record]) -> Result<RoundOutcome, CommError> {
        let BootstrapConfig { rank, size, ref options, .. } = *self.config;
        let topology = Topology::new(table.iter().map(|record| &record.host));
        let sharing = self.config.sharing.unwrap_or_else(|| {
            let all: Vec<_> = topology.local_ranks(rank).iter().map(|&rank| &table[rank].cores).collect();
            let share = cores::core_share(&all, topology.host_and_index(rank).1);
            core_sharing(&share, table[rank].cores.count(), options.thread_migration)
        });
        let settings = Settings {
            name: options.name.clone(),
            me: rank,
            size,
            credentials: Credentials::new(options.token.as_ref(), generation, options.id),
            addresses: table.iter().map(|record| record.address).collect(),
            store: Arc::clone(&self.config.store),
            abort_key: self.key(generation, "abort"),
            store_rank: self.config.store_rank,
            agent: self.config.agent.clone(),
            peer_timeout: options.peer_timeout,
            sharing,
            flight: Arc::clone(&self.flight),
        };
        let mut engine = Box::new(self.engine(settings)?);
        fault_point("meeting", 0, 0);
        match self.connect_and_share_memory(&mut engine, generation, &topology) {
            Ok(Ok(in_memory)) => {
                self.flight.formed(generation);
                fault_point("connected", 0, 0);
                Ok(RoundOutcome::Connected(Box::new(ConnectedGroup {
                    engine,
                    generation,
                    topology,
                    in_memory,
                })))
            }
            Ok(Err(announced)) => Ok(RoundOutcome::Stale(announced)),
            Err(error) => {
                // Sends a goodbye to connected peers; without it they would report this rank as the cause of
                // the failure.
                engine.leave();
                Err(match error {
                    // The timeout of another rank expired before that of this rank.
                    CommError::Timeout { missing, after, .. } => self.unconnected_error(missing, after, ""),
                    error => error,
                })
            }
        }
    }

    /// Creates the engine. If file descriptors are lacking, publishes an abort in the store, so that the
    /// other ranks stop waiting.
    fn engine(&self, settings: Settings) -> Result<Engine, CommError> {
        let (store, key) = (Arc::clone(&settings.store), settings.abort_key.clone());
        let listener =
            self.listener.try_clone().map_err(|error| CommError::system("cannot duplicate a socket", error));
        let engine = listener.and_then(|listener| Engine::new(settings, Some(listener)));
        engine.map_err(|error| {
            let rank = self.config.rank;
            let Some(what) = descriptor_error(self.config, &error) else { return error };
            let report = Report::new(rank, Cause::Aborted { reason: format!("it {what}") });
            let _ = store.compare_set(&key, b"", &report.encode(), Instant::now() + CLEANUP_TIMEOUT);
            self.bootstrap_error(format!("rank {rank} {what}"), vec![rank])
        })
    }

    fn unconnected_error(&self, ranks: Vec<usize>, after: Duration, notes: &str) -> CommError {
        let what =
            format!("no connection with rank(s) {} after {} ms{notes}", Ranks(&ranks), after.as_millis());
        self.bootstrap_error(what, ranks)
    }

    /// Connects to all ranks, and sets up shared memory with the ranks of this host. Returns `Ok(true)` if
    /// all ranks share memory, and `Err` with the new generation if rank 0 has announced another one.
    fn connect_and_share_memory(
        &self,
        engine: &mut Engine,
        generation: Generation,
        topology: &Topology,
    ) -> Result<Result<bool, Generation>, CommError> {
        let BootstrapConfig { rank, size, ref options, .. } = *self.config;
        let (local_ranks, one_host) = (topology.local_ranks(rank), topology.hosts().len() == 1);
        let mut in_memory = false;
        if options.shared_memory && local_ranks.len() > 1 {
            // Data that goes through shared memory needs no connection, so only control connections are
            // opened first.
            if let Some(announced) =
                self.open_connections(engine, generation, &control_connections(rank, size))?
            {
                return Ok(Err(announced));
            }
            match engine.share_memory(local_ranks, self.deadline)? {
                Ok(()) => in_memory = one_host,
                // The first rank of the host logs the warning for all ranks of the host.
                Err(reason) if rank == local_ranks[0] => log::warn!(
                    "{}: ranks {} cannot use shared memory, and use connections inside their host: {reason}",
                    self.name(),
                    Ranks(&local_ranks[..local_ranks.len().min(cause::MAX_REPORTED_RANKS)])
                ),
                Err(reason) => log::info!("{}: rank {rank} cannot use shared memory: {reason}", self.name()),
            }
        }
        let announced = self.open_connections(engine, generation, &initial_connections(rank, size))?;
        Ok(announced.map_or(Ok(in_memory), Err))
    }

    /// Opens `connections`. Returns `None` when all are open, or another generation that rank 0 has
    /// announced.
    fn open_connections(
        &self,
        engine: &mut Engine,
        generation: Generation,
        connections: &[(usize, ConnectionKind)],
    ) -> Result<Option<Generation>, CommError> {
        let BootstrapConfig { rank, ref options, .. } = *self.config;
        loop {
            match engine.connect(connections, (Instant::now() + POLL_INTERVAL).min(self.deadline)) {
                Ok(true) => return Ok(None),
                Ok(false) => {}
                Err(error) => return Err(error),
            }
            let now = Instant::now();
            let confirmed = rank == 0 || self.config.is_successor || engine.is_connected(0);
            if !confirmed && let Some(announced) = self.superseding_generation(generation)? {
                return Ok(Some(announced));
            }
            if let Ok(Some(report)) =
                self.store().try_get(&self.key(generation, "abort"), now + POLL_INTERVAL)
            {
                return Err(engine.abort_with_report(&report));
            }
            // The refusing rank's record is not left over from a crashed job, since the table that contains
            // it also contains this rank's record.
            let given_up = engine.handshakes().refusing_peers(REFUSED_TIMEOUT, now).next();
            if let Some(gone) = given_up {
                let how =
                    LossReason::Unreachable { what: "no process listens at its address any more".to_owned() };
                return Err(engine.abort_bootstrap(Report::new(rank, Cause::PeerLost { rank: gone, how })));
            }
            if now >= self.deadline {
                let mut ranks: Vec<_> = engine.unconnected(connections).collect();
                ranks.sort_unstable();
                ranks.dedup();
                let notes = format!(" ({})", engine.handshakes().notes().join("; "));
                let after_ms = options.init_timeout.as_millis() as u64;
                engine
                    .abort_bootstrap(Report::new(rank, Cause::Timeout { missing: ranks.clone(), after_ms }));
                return Err(self.unconnected_error(ranks, options.init_timeout, &notes));
            }
        }
    }
}

/// Returns how this rank shares its cores with other ranks; `own` is the number of cores that this rank may
/// use.
fn core_sharing(share: &CoreShare, own: usize, migration: ThreadMigration) -> CoreSharing {
    // A number below `own` means a CPU-time quota of the cgroup, which applies on any core. A quota reduces
    // spinning, but is no reason to assign cores to ranks.
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if quota < own || own == 0 { share.cores.min(quota) } else { share.cores };
    let own_autogroup = || getsid(None) == Ok(Pid::this()) && autogroup_enabled(Path::new("/"));
    let oversubscription = match share.ranks > cores {
        false => Oversubscription::No,
        true if own_autogroup() => Oversubscription::Sessions,
        true => Oversubscription::Cores,
    };
    CoreSharing {
        oversubscription,
        core_index: share.index.filter(|_| migration != ThreadMigration::Never),
        leaves_shared_core: migration == ThreadMigration::Always && oversubscription == Oversubscription::No,
    }
}
