//! The store entry of a formed world, kept while the world lives. From it a late process, or one that uses
//! the port of another job, learns its error at once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::Store;
use serde::{Deserialize, Serialize};

use super::{CLEAN_UP, Ours};
use crate::error::CommError;

/// Time limit for removing the entry. If removal fails, a later process may only get a misleading error.
const REMOVAL: Duration = Duration::from_millis(500);
/// Limit on the remembered generations of which this process was part.
const REMEMBERED: usize = 10_000;

/// The entry of a living world.
#[derive(Debug, Serialize, Deserialize)]
struct Standing {
    generation: String,
    size: usize,
    /// Process id of rank 0.
    pid: u32,
    address: String,
}

/// Removes the entry from the store when the world and all groups that come from it are dropped.
#[derive(Debug)]
pub(crate) struct Removal {
    store: Arc<dyn Store>,
    key: OnceLock<Vec<u8>>,
    /// Process that owns the entry; a forked child removes nothing.
    pid: u32,
}

impl Removal {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, key: OnceLock::new(), pid: std::process::id() }
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        let Some(key) = self.key.get().filter(|_| std::process::id() == self.pid) else { return };
        let _ = self.store.delete(key, Instant::now() + REMOVAL);
    }
}

/// The generations of which this process was part, oldest first.
fn known() -> MutexGuard<'static, VecDeque<Generation>> {
    static KNOWN: Mutex<VecDeque<Generation>> = Mutex::new(VecDeque::new());
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ours<'_> {
    /// Returns the key of the entry, or `None` if the entry could outlive the world. It cannot if each
    /// round has a new generation, or if the store ends with rank 0.
    fn standing_key(&self) -> Option<Vec<u8>> {
        self.invitation.removal.as_ref()?;
        match (self.invitation.options.generation, self.invitation.store_rank) {
            (Some(generation), _) => Some(self.key(generation, "formed")),
            (None, Some(_)) => Some(format!("{}/formed", self.name()).into_bytes()),
            (None, None) => None,
        }
    }

    /// Records that all ranks are connected. Rank 0 writes the entry.
    pub(super) fn has_formed(&self, generation: Generation) {
        let mut known = known();
        if known.len() >= REMEMBERED {
            known.pop_front();
        }
        known.push_back(generation);
        drop(known);
        let (Some(key), 0) = (self.standing_key(), self.invitation.rank) else { return };
        let standing = Standing {
            generation: generation.to_string(),
            size: self.invitation.size,
            pid: self.record.pid,
            address: self.record.address.ip().to_string(),
        };
        let text = serde_json::to_vec(&standing).unwrap_or_default();
        if self.store().set(&key, &text, Instant::now() + CLEAN_UP).is_ok()
            && let Some(removal) = &self.invitation.removal
        {
            let _ = removal.key.set(key);
        }
    }

    /// Returns an error if a world was formed here without this process: no rank then waits for it.
    pub(super) fn check_standing(&self) -> Result<(), CommError> {
        let Some(key) = self.standing_key() else { return Ok(()) };
        let found = match self.store().try_get(&key, self.deadline) {
            // The caller reports the timeout, since it knows what it waits for.
            Err(_) if Instant::now() >= self.deadline => return Ok(()),
            found => found?,
        };
        let Some(Standing { generation: formed, size, pid, address }) =
            found.and_then(|text| serde_json::from_slice(&text).ok())
        else {
            return Ok(());
        };
        if formed.parse().is_ok_and(|formed| known().contains(&formed)) {
            return Ok(());
        }
        let Self { invitation, .. } = self;
        let what = format!(
            "a world of {size} ranks, of which rank 0 is process {pid} at {address}, has formed without this process (rank {} of \
             {}){}; does each process have a RANK of its own, and each job a port of its own?",
            invitation.rank, invitation.size, invitation.whereabouts
        );
        Err(self.failed(what, vec![invitation.rank]))
    }
}
