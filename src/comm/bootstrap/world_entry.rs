//! The store entry of a formed world (the group of all ranks), kept until the world is dropped. A process
//! that comes too late, or that uses the port of another job, finds the entry and fails at once instead of
//! waiting.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::Store;
use serde::{Deserialize, Serialize};

use super::{Bootstrap, CLEANUP_TIMEOUT};
use crate::error::CommError;
use crate::json;

/// Time limit for removing the entry from the store. If removal fails, a later process may only get a
/// misleading error.
const REMOVAL_TIMEOUT: Duration = Duration::from_millis(500);
/// Most generations that a process remembers of those in which it has joined a world.
const MAX_GENERATIONS: usize = 10_000;

/// The store entry of a world that has formed and was not dropped.
#[derive(Debug, Serialize, Deserialize)]
struct WorldEntry {
    generation: String,
    size: usize,
    /// Process id of rank 0.
    pid: u32,
    address: String,
}

/// Removes the entry from the store when the world and all groups derived from the world are dropped.
#[derive(Debug)]
pub(crate) struct WorldEntryGuard {
    store: Arc<dyn Store>,
    key: OnceLock<Vec<u8>>,
    /// Process that owns the entry; a forked child removes nothing.
    pid: u32,
}

impl WorldEntryGuard {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, key: OnceLock::new(), pid: std::process::id() }
    }
}

impl Drop for WorldEntryGuard {
    fn drop(&mut self) {
        let Some(key) = self.key.get().filter(|_| std::process::id() == self.pid) else { return };
        let _ = self.store.delete(key, Instant::now() + REMOVAL_TIMEOUT);
    }
}

/// The generations in which this process has joined a world, oldest first.
fn own_generations() -> MutexGuard<'static, VecDeque<Generation>> {
    static GENERATIONS: Mutex<VecDeque<Generation>> = Mutex::new(VecDeque::new());
    GENERATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bootstrap<'_> {
    /// Returns the key of the entry, or `None` if the entry could outlive the world and stop a later job. It
    /// cannot if a launcher gives each round a new generation, or if a rank serves the store.
    fn world_entry_key(&self) -> Option<Vec<u8>> {
        self.config.entry_guard.as_ref()?;
        match (self.config.options.generation, self.config.store_rank) {
            (Some(generation), _) => Some(self.key(generation, "formed")),
            (None, Some(_)) => Some(format!("{}/formed", self.name()).into_bytes()),
            (None, None) => None,
        }
    }

    /// Remembers the generation of the world, whose ranks are now all connected. Rank 0 also writes the store
    /// entry.
    pub(super) fn record_formed(&self, generation: Generation) {
        let mut known = own_generations();
        if known.len() >= MAX_GENERATIONS {
            known.pop_front();
        }
        known.push_back(generation);
        drop(known);
        let (Some(key), 0) = (self.world_entry_key(), self.config.rank) else { return };
        let (generation, address) = (generation.to_string(), self.record.address.ip().to_string());
        let entry = WorldEntry { generation, size: self.config.size, pid: self.record.pid, address };
        let text = json::encode(&entry);
        if self.store().set(&key, &text, Instant::now() + CLEANUP_TIMEOUT).is_ok()
            && let Some(entry_guard) = &self.config.entry_guard
        {
            let _ = entry_guard.key.set(key);
        }
    }

    /// Returns an error if the store has the entry of a world without this process: no rank then waits for
    /// this process.
    pub(super) fn check_world_entry(&self) -> Result<(), CommError> {
        let Some(key) = self.world_entry_key() else { return Ok(()) };
        let found = match self.store().try_get(&key, self.deadline) {
            // The caller reports the timeout, since only the caller knows for what it waits.
            Err(_) if Instant::now() >= self.deadline => return Ok(()),
            found => found?,
        };
        let Some(WorldEntry { generation: formed, size, pid, address }) =
            found.and_then(|text| serde_json::from_slice(&text).ok())
        else {
            return Ok(());
        };
        if formed.parse().is_ok_and(|formed| own_generations().contains(&formed)) {
            return Ok(());
        }
        let Self { config, .. } = self;
        let what = format!(
            "a world of {size} ranks, of which rank 0 is process {pid} at {address}, has formed without this process (rank {} of \
             {}){}; does each process have its own RANK, and each job its own port?",
            config.rank, config.size, config.store_location
        );
        Err(self.bootstrap_error(what, vec![config.rank]))
    }
}
