//! The configuration with which a rank forms a group.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use convoke_env::host::allowed_cpus;
use convoke_env::{AgentChannel, Generation};
use convoke_store::{Store, StoreError};

use super::options::GroupOptions;
use super::record::{self, Record};
use super::{RANK_0, WorldEntryGuard};
use crate::collectives::plan::Algorithms;
use crate::engine::{CoreSharing, Oversubscription, Settings};
use crate::error::CommError;
use crate::flight::{FlightRecorder, GroupRecorder};
use crate::shm::single_copy::SingleCopyPolicy;
use crate::transport::frame::VERSION;
use crate::transport::links::hello::Credentials;
use crate::transport::links::tcp::Listener;

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
    pub(crate) options: GroupOptions,
    pub(crate) tuning: Algorithms,
    pub(crate) agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    /// The sharing of CPU cores between ranks, inherited from an ancestor group. It is set if ranks outside
    /// this group also run on the cores of this group's ranks.
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
        let Self { server, configured_by, .. } = self;
        let advice = match &error {
            StoreError::Unreachable { .. } if !configured_by.is_empty() => {
                format!("; is it running, and started with {configured_by}?")
            }
            StoreError::Lost { .. } | StoreError::Unreachable { .. } => String::new(),
            _ => return error.into(),
        };
        if server.is_empty() {
            return error.into();
        }
        let ranks = if *server == RANK_0 { vec![0] } else { Vec::new() };
        let what = format!("{error}; {server} serves it{advice}");
        CommError::Bootstrap { group: group.to_owned(), what, ranks }
    }
}

impl BootstrapConfig {
    /// Returns a bootstrap configuration for a group of one rank, which needs no shared store.
    pub(crate) fn single_rank(options: GroupOptions) -> Self {
        let store = Arc::new(convoke_store::MemoryStore::new());
        Self::new(store, "no rendezvous address".to_owned(), (0, 1), options)
    }

    /// Returns the configuration of one rank for a group without a parent group. Of the store, only the
    /// identifier is known, not the address or server.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        store_id: String,
        (rank, size): (usize, usize),
        options: GroupOptions,
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
            tuning: options.algorithms,
            options,
            agent: None,
            sharing: None,
        }
    }

    /// Returns whether the ranks `local_ranks` of a host are to share memory.
    pub(super) fn wants_memory(&self, local_ranks: &[usize]) -> bool {
        self.options.shared_memory && local_ranks.len() > 1
    }

    pub(super) fn group_recorder(&self) -> GroupRecorder {
        let Self { rank, size, origin, options, .. } = self;
        let recorder = FlightRecorder::for_process();
        recorder.group(&options.name, options.id, options.generation, (*rank, *size), origin)
    }

    pub(super) fn settings(
        &self,
        generation: Generation,
        addresses: Vec<SocketAddr>,
        sharing: CoreSharing,
        flight: Arc<GroupRecorder>,
    ) -> Settings {
        let Self { store, store_rank, rank, size, options, .. } = self;
        Settings {
            name: options.name.clone(),
            me: *rank,
            size: *size,
            credentials: Credentials::new(options.token.as_ref(), generation, options.id),
            addresses,
            store: Arc::clone(store),
            abort_key: format!("{}/{generation}/abort", options.name).into_bytes(),
            store_rank: *store_rank,
            peer_timeout: options.peer_timeout,
            single_copy: self.single_copy(sharing),
            sharing,
            flight,
        }
    }

    pub(super) fn single_copy(&self, sharing: CoreSharing) -> SingleCopyPolicy {
        let is_oversubscribed = sharing.oversubscription != Oversubscription::No;
        SingleCopyPolicy { setting: self.options.single_copy, is_oversubscribed }
    }

    pub(super) fn record(&self, listener: &Listener) -> Result<Record, CommError> {
        let failed = |error| CommError::system("cannot get the address of the listening socket", error);
        Ok(Record {
            version: VERSION,
            rank: self.rank,
            size: self.size,
            address: listener.address().map_err(failed)?,
            host: record::host_key(&self.options.locality_domain),
            cores: allowed_cpus().into_iter().collect(),
            pid: std::process::id(),
            tuning: self.tuning.to_string(),
            token: self.options.token.is_some(),
            memory: self.options.shared_memory,
        })
    }
}
