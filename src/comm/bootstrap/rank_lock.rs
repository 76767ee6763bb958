//! Prevents two threads of one process from joining a group as the same rank.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use super::BootstrapConfig;
use crate::error::CommError;

/// The ranks (each with group and store) as which threads of this process are joining a group now.
static FORMING: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

fn forming() -> MutexGuard<'static, HashSet<String>> {
    FORMING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The exclusive right of one thread to act as a rank while its group forms. Two threads with the same
/// rank would write their records under one key, and other ranks could connect to either thread.
#[derive(Debug)]
pub(super) struct RankLock {
    what: String,
}

impl RankLock {
    pub(super) fn new(config: &BootstrapConfig) -> Result<Self, CommError> {
        let BootstrapConfig { rank, store_id, options, .. } = config;
        let what = format!("rank {rank} of {} at {store_id}", options.name);
        if forming().insert(what.clone()) { Ok(Self { what }) } else { Err(CommError::Concurrent { what }) }
    }
}

impl Drop for RankLock {
    fn drop(&mut self) {
        forming().remove(&self.what);
    }
}
