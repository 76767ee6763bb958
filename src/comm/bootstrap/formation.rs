//! The connections of a group that forms: this rank connects to the ranks whose records it has.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_env::host::autogroup_enabled;
use convoke_store::{Store, interrupt};
use nix::unistd::{Pid, getsid};

use super::config::BootstrapConfig;
use super::connections::{control_connections, initial_connections};
use super::cores::{self, CoreShare};
use super::options::ThreadMigration;
use super::rank_lock::RankLock;
use super::record::Record;
use super::{CLEANUP_TIMEOUT, ConnectedGroup, POLL_INTERVAL, descriptor_error};
use crate::collectives::plan::Topology;
use crate::engine::handshake::Handshakes;
use crate::engine::{CorePlace, CoreSharing, Engine, Oversubscription, Settings};
use crate::error::cause::{self, Cause, Report};
use crate::error::{CommError, LossReason, Ranks};
use crate::fault::fault_point;
use crate::flight::GroupRecorder;
use crate::transport::links::hello::ConnectionKind;
use crate::transport::links::tcp::Listener;

/// Time for which connections to a published address may be refused before the rank that published the
/// address counts as lost.
const REFUSED_TIMEOUT: Duration = Duration::from_millis(100);

/// The state of this rank while its group forms.
pub(super) struct Bootstrap<'a> {
    pub(super) config: &'a BootstrapConfig,
    pub(super) record: Record,
    pub(super) listener: Listener,
    pub(super) deadline: Instant,
    pub(super) flight: Arc<GroupRecorder>,
    pub(super) _lock: RankLock,
}

/// The reason why a group did not form under a generation.
pub(super) enum RoundError {
    /// Rank 0 has announced another generation, under which this rank must try again.
    Stale(Generation),
    Failed(CommError),
}

impl<E: Into<CommError>> From<E> for RoundError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Bootstrap<'_> {
    pub(super) fn store(&self) -> &dyn Store {
        &*self.config.store
    }

    pub(super) fn name(&self) -> &str {
        &self.config.options.name
    }

    pub(super) fn key(&self, generation: Generation, what: &str) -> Vec<u8> {
        format!("{}/{generation}/{what}", self.name()).into_bytes()
    }

    pub(super) fn record_key(&self, generation: Generation, rank: usize) -> Vec<u8> {
        self.key(generation, &format!("rank/{rank}"))
    }

    pub(super) fn bootstrap_error(&self, what: String, mut ranks: Vec<usize>) -> CommError {
        ranks.truncate(cause::MAX_REPORTED_RANKS);
        CommError::Bootstrap { group: self.name().to_owned(), what, ranks }
    }

    /// Connects to the ranks whose records are in `table`, in rank order.
    pub(super) fn connect_ranks(
        &self,
        generation: Generation,
        table: &[Record],
    ) -> Result<ConnectedGroup, RoundError> {
        let BootstrapConfig { rank, ref options, .. } = *self.config;
        let topology = Topology::new(table.iter().map(|record| &record.host));
        let sharing = self.config.sharing.unwrap_or_else(|| {
            let all: Vec<_> = topology.local_ranks(rank).iter().map(|&rank| &table[rank].cores).collect();
            let share = cores::core_share(&all, topology.host_and_index(rank).1);
            core_sharing(&share, table[rank].cores.count(), options.thread_migration)
        });
        let addresses = table.iter().map(|record| record.address).collect();
        let settings = self.config.settings(generation, addresses, sharing, Arc::clone(&self.flight));
        let mut engine = Box::new(self.engine(settings)?);
        fault_point("meeting", 0, 0);
        let connected = self.connect_and_share_memory(&mut engine, generation, &topology);
        let in_memory = connected.map_err(|error| {
            let RoundError::Failed(error) = error else { return error };
            // Sends a goodbye to connected peers; without it they would report this rank as the cause of the
            // failure.
            engine.leave();
            RoundError::Failed(match error {
                // The timeout of another rank expired before that of this rank.
                CommError::Timeout { missing, after, .. } => self.unconnected_error(missing, after, ""),
                error => error,
            })
        })?;
        self.flight.formed(generation);
        fault_point("connected", 0, 0);
        Ok(ConnectedGroup { engine, generation, topology, in_memory })
    }

    /// Creates the engine. If file descriptors are lacking, publishes an abort in the store, so that the
    /// other ranks stop waiting.
    fn engine(&self, settings: Settings) -> Result<Engine, CommError> {
        let (store, key) = (Arc::clone(&settings.store), settings.abort_key.clone());
        let listener =
            self.listener.try_clone().map_err(|error| CommError::system("cannot duplicate a socket", error));
        let engine =
            listener.and_then(|listener| Engine::new(settings, self.config.agent.clone(), Some(listener)));
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

    /// Connects to all ranks, and sets up shared memory with the ranks of this host. Returns whether all
    /// ranks share memory.
    fn connect_and_share_memory(
        &self,
        engine: &mut Engine,
        generation: Generation,
        topology: &Topology,
    ) -> Result<bool, RoundError> {
        let BootstrapConfig { rank, size, .. } = *self.config;
        let (local_ranks, one_host) = (topology.local_ranks(rank), topology.hosts().len() == 1);
        let mut in_memory = false;
        if self.config.wants_memory(local_ranks) {
            // Data that goes through shared memory needs no connection, so only control connections are
            // opened first.
            self.open_connections(engine, generation, &control_connections(rank, size))?;
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
        self.open_connections(engine, generation, &initial_connections(rank, size))?;
        Ok(in_memory)
    }

    /// Opens `connections`, and returns when all are open.
    fn open_connections(
        &self,
        engine: &mut Engine,
        generation: Generation,
        connections: &[(usize, ConnectionKind)],
    ) -> Result<(), RoundError> {
        let BootstrapConfig { rank, ref options, .. } = *self.config;
        while !engine.connect(connections, (Instant::now() + POLL_INTERVAL).min(self.deadline))? {
            let now = Instant::now();
            if rank != 0 && !engine.is_connected(0) {
                self.check_generation(generation)?;
            }
            let aborted = self.store().try_get(&self.key(generation, "abort"), now + POLL_INTERVAL);
            if let Ok(Some(report)) = aborted {
                return Err(engine.abort_with_report(&report).into());
            }
            // The refusing rank's record is not left over from a crashed job, since the table that contains
            // it also contains this rank's record.
            let refusing = |handshakes: &Handshakes| handshakes.refusing_peers(REFUSED_TIMEOUT, now).next();
            if let Some(gone) = engine.with_handshakes(refusing) {
                let how =
                    LossReason::Unreachable { what: "no process listens at its address any more".to_owned() };
                let report = Report::new(rank, Cause::PeerLost { rank: gone, how });
                return Err(engine.abort_bootstrap(report).into());
            }
            if interrupt::is_interrupted() {
                let awaited = engine.unconnected(connections).next();
                return Err(engine.interrupt_bootstrap(awaited).into());
            }
            if now >= self.deadline {
                let mut ranks: Vec<_> = engine.unconnected(connections).collect();
                ranks.sort_unstable();
                ranks.dedup();
                let notes = format!(" ({})", engine.with_handshakes(Handshakes::notes).join("; "));
                let after_ms = options.init_timeout.as_millis() as u64;
                engine
                    .abort_bootstrap(Report::new(rank, Cause::Timeout { missing: ranks.clone(), after_ms }));
                return Err(self.unconnected_error(ranks, options.init_timeout, &notes).into());
            }
        }
        Ok(())
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
        place: share
            .index
            .filter(|_| migration != ThreadMigration::Never)
            .map(|index| CorePlace { index, ranks: share.ranks }),
        leaves_shared_core: migration == ThreadMigration::Always && oversubscription == Oversubscription::No,
    }
}
