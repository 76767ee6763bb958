//! Making a group: its connections, and what it has of its own.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use convoke_env::Generation;
use convoke_store::{PrefixStore, Store};

use super::{CommError, Group, GroupOptions, Inner, KeepAlive};
use crate::bootstrap::{self, BootstrapConfig, ConnectedGroup};
use crate::collectives::plan::Topology;
use crate::engine::Shared;
use crate::error::require;
use crate::shm::allocations::Allocations;
use crate::transport::links::fork::fork_count;

impl Group {
    /// Connects to the other ranks of a group, which meet in `store`.
    ///
    /// Reads no environment variables. All ranks pass an equal `size`, and equal options except for the
    /// listen address; each passes its own `rank`.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`] names the ranks that are missing or differ. [`CommError::Concurrent`] if
    /// another thread of this process is joining as this rank through this store. Also
    /// [`CommError::InvalidArgument`], [`CommError::Unauthorized`], [`CommError::PeerLost`],
    /// [`CommError::Store`] and [`CommError::System`].
    pub fn new(
        store: Arc<dyn Store>,
        rank: usize,
        size: usize,
        options: GroupOptions,
    ) -> Result<Self, CommError> {
        // The pointer identifies the store, so two handles of one store give one store id.
        let store_id = format!("the store {:p}", Arc::as_ptr(&store).cast::<()>());
        let store = Arc::new(PrefixStore::new("convoke", store));
        let config = BootstrapConfig::new(store, store_id, (rank, size), options);
        Self::join(config, None)
    }

    pub(crate) fn join(config: BootstrapConfig, keep: Option<KeepAlive>) -> Result<Self, CommError> {
        let BootstrapConfig { rank, size, .. } = config;
        let wrong = || format!("rank {rank} of {size}: ranks are 0 to {}", size.saturating_sub(1));
        require(rank < size && size <= 1 << 24, wrong)?;
        if size == 1 {
            let failed = |error| CommError::system("cannot get random numbers", error);
            let random = || Generation::random().map_err(failed);
            let generation = config.options.generation.map_or_else(random, Ok)?;
            return Ok(Self::from_parts(config, generation, (Topology::one_host(1), None), None, keep));
        }
        let formed = bootstrap::connect(&config)?;
        Ok(Self::from_bootstrap(config, formed, keep))
    }

    pub(super) fn from_bootstrap(
        config: BootstrapConfig,
        formed: ConnectedGroup,
        keep: Option<KeepAlive>,
    ) -> Self {
        let ConnectedGroup { engine, generation, topology, in_memory } = formed;
        let memory = engine.allocations().filter(|_| in_memory);
        // The group keeps the launcher's channel and the world's entry no longer than `keep` does.
        let config = BootstrapConfig {
            sharing: Some(engine.settings.sharing),
            agent: None,
            entry_guard: None,
            ..config
        };
        Self::from_parts(config, generation, (topology, memory), Some(Shared::new(*engine)), keep)
    }

    fn from_parts(
        config: BootstrapConfig,
        generation: Generation,
        (topology, memory): (Topology, Option<Arc<Allocations>>),
        shared: Option<Shared>,
        keep: Option<KeepAlive>,
    ) -> Self {
        if config.rank == 0 {
            for what in config.tuning.unusable(&topology) {
                log::warn!("{}: {what}", config.options.name);
            }
        }
        let timeout = config.options.timeout;
        let inner = Inner {
            config,
            generation,
            topology,
            memory,
            shared,
            self_engine: OnceLock::new(),
            plans: Mutex::default(),
            pid: std::process::id(),
            forks: fork_count(),
            keep,
            destroyed: AtomicBool::new(false),
            #[cfg(feature = "nccl")]
            device_backends: Mutex::default(),
            subgroups: Mutex::default(),
            shrunk: Mutex::default(),
        };
        Self {
            inner: Arc::new(inner),
            timeout,
            fixed_limit: None,
            subgroup_name: None,
            tuning: None,
            #[cfg(feature = "nccl")]
            device: None,
        }
    }
}

impl Inner {
    /// Creates the engine of a group of one, if it does not exist yet.
    pub(super) fn ensure_shared(&self) -> Result<(), CommError> {
        if self.shared().is_none() {
            let shared = Shared::new(bootstrap::single_rank_engine(&self.config, self.generation)?);
            // If another thread has set the engine first, this second engine is dropped unused.
            let _ = self.self_engine.set(shared);
        }
        Ok(())
    }
}
