//! Counts the live worlds of this process, and prevents a rank from joining a world twice.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::CommError;

/// Number of bits of [`LIVE_WORLDS`] that hold the count.
const COUNT_BITS: u32 = 32;

/// Number of live worlds, with the process id in the high bits: a forked child does not count its parent's.
static LIVE_WORLDS: AtomicU64 = AtomicU64::new(0);

/// Returns true if this process has a [`World`](crate::World) whose group is not dropped yet.
///
/// Groups made by [`Group::new`](crate::Group::new) do not count, as torch counts only the default group.
#[must_use]
pub fn is_initialized() -> bool {
    count(LIVE_WORLDS.load(Ordering::SeqCst)) > 0
}

/// Counts one live world from its creation until it is dropped.
#[derive(Debug)]
pub(super) struct LiveWorld;

impl LiveWorld {
    pub(super) fn new() -> Self {
        change(|count| count + 1);
        Self
    }
}

impl Drop for LiveWorld {
    fn drop(&mut self) {
        change(|count| count.saturating_sub(1));
    }
}

/// The membership of this process, as one rank, in the world at one rendezvous. It lasts until the world and
/// all groups made from it are dropped.
#[derive(Debug)]
pub(super) struct Membership {
    key: (u32, String),
}

impl Membership {
    /// # Errors
    /// [`CommError::AlreadyJoined`]; [`CommError::Concurrent`] if the world is still forming.
    pub(super) fn new(rank: usize, rendezvous: &str) -> Result<Self, CommError> {
        let what = format!("rank {rank} of the world at {rendezvous}");
        let key = (std::process::id(), what.clone());
        match joined_worlds().entry(key.clone()) {
            Entry::Occupied(entry) if *entry.get() => Err(CommError::AlreadyJoined { what }),
            Entry::Occupied(_) => Err(CommError::Concurrent { what }),
            Entry::Vacant(entry) => {
                entry.insert(false);
                Ok(Self { key })
            }
        }
    }

    /// Records that the world has formed.
    pub(super) fn record_formed(&self) {
        joined_worlds().insert(self.key.clone(), true);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        joined_worlds().remove(&self.key);
    }
}

/// Whether each world has formed; the key is the process id and a text with rank and rendezvous.
type JoinedWorlds = BTreeMap<(u32, String), bool>;

fn joined_worlds() -> MutexGuard<'static, JoinedWorlds> {
    static JOINED: Mutex<JoinedWorlds> = Mutex::new(BTreeMap::new());
    JOINED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn change(change: impl Fn(u64) -> u64) {
    // The update cannot fail, since the closure always returns a value.
    let _ = LIVE_WORLDS
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |word| Some(process() | change(count(word))));
}

fn process() -> u64 {
    u64::from(std::process::id()) << COUNT_BITS
}

/// Returns the number of live worlds in `word`, or 0 if another process (the parent of a fork) wrote `word`.
fn count(word: u64) -> u64 {
    let count = word & ((1 << COUNT_BITS) - 1);
    if word - count == process() { count } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn world_count_ignores_other_processes() {
        assert_eq!(count(process() | 3), 3);
        assert_eq!(count((process() + (1 << COUNT_BITS)) | 3), 0);
        assert_eq!(count(0), 0);
    }
}
