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
//! When the ranks of an existing group form another group, they need no store: they agree through the
//! existing group, and use its connections, see `join`.

mod address;
mod config;
mod connections;
mod cores;
mod formation;
mod gather;
mod generation;
mod join;
pub(crate) mod options;
mod rank_lock;
mod record;
mod world_entry;

pub(crate) use address::address;
pub(crate) use join::Joining;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_env::Generation;

use crate::collectives::plan::Topology;
use crate::engine::{CoreSharing, Engine};
use crate::error::{CommError, cause};
use crate::json;
use crate::limits;
use crate::transport::links::tcp::{self, Listener};
pub(crate) use config::{BootstrapConfig, StoreLocation};
use formation::{Bootstrap, RoundError};
use rank_lock::RankLock;
pub(crate) use world_entry::WorldEntryGuard;

/// Name of the store's server in error messages, if no launcher serves the store but rank 0 does.
pub(crate) const RANK_0: &str = "rank 0";
/// Interval at which a rank checks whether rank 0 has announced another generation.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time limit for removing keys from the store and for publishing a failure there. Correctness depends on
/// neither.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which rank 0 logs the ranks that have not joined yet. The first time it is at most a third of
/// `init_timeout`.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// Most records that a rank looks up one by one in the store, to name the missing ranks in an error.
const MAX_LOOKUPS: usize = 1024;

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
    let bootstrap = Bootstrap::new(config).map_err(|error| publish_failure(config, error))?;
    let (rank, name) = (config.rank, bootstrap.name());
    let mut generation = bootstrap.initial_generation()?;
    loop {
        match bootstrap.run_round(generation) {
            Ok(connected) => return Ok(connected),
            Err(RoundError::Failed(error)) => return Err(error),
            Err(RoundError::Stale(announced)) => {
                log::info!(
                    "{name}: rank {rank} abandons generation {generation}, because rank 0 announced {announced}"
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
        let no_port = "; no local port is free (`ss -s` counts sockets in use and in TIME-WAIT)";
        let why = if error.kind() == ErrorKind::AddrInUse { no_port } else { "" };
        CommError::system(&format!("cannot listen at {address}{why}"), error)
    })
}

/// Returns the engine of a group of one rank. It delivers the messages that the rank sends to itself.
pub(crate) fn single_rank_engine(
    config: &BootstrapConfig,
    generation: Generation,
) -> Result<Engine, CommError> {
    let flight = Arc::new(config.group_recorder());
    flight.formed(generation);
    let addresses = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
    Engine::new(config.settings(generation, addresses, CoreSharing::SINGLE_RANK, flight), None, None)
}

impl<'a> Bootstrap<'a> {
    /// Listens for connections from the other ranks.
    fn new(config: &'a BootstrapConfig) -> Result<Self, CommError> {
        let lock = RankLock::new(config)?;
        let deadline = Instant::now() + config.options.init_timeout;
        let listener = listen(config)?;
        let flight = Arc::new(config.group_recorder());
        let record = config.record(&listener)?;
        log::info!("{}: rank {} listens at {}", config.options.name, record.rank, record.address);
        Ok(Self { config, record, listener, deadline, flight, _lock: lock })
    }
}
