//! Prevents two threads of one process from joining a group as one rank.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use super::Invitation;
use crate::error::CommError;

/// The ranks that threads of this process are connecting now.
static FORMING: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

fn forming() -> MutexGuard<'static, HashSet<String>> {
    FORMING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The exclusive right of one thread to act as a rank while its group forms. Two threads would write
/// records under one key, and other ranks could connect to either.
#[derive(Debug)]
pub(super) struct Claim {
    what: String,
}

impl Claim {
    pub(super) fn new(invitation: &Invitation) -> Result<Self, CommError> {
        let Invitation { rank, place, options, .. } = invitation;
        let what = format!("rank {rank} of {} at {place}", options.name);
        if forming().insert(what.clone()) { Ok(Self { what }) } else { Err(CommError::Concurrent { what }) }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        forming().remove(&self.what);
    }
}
