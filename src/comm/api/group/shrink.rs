//! Shrinks a group to the survivors of a failure.
//!
//! Each rank that calls `shrink` registers in the store. The lowest survivor decides the membership once
//! every rank that is not known to be lost has registered. A rank whose time limit expires earlier decides
//! instead. The decision is one `compare_set`, so all ranks read the same decision, and each sees whether it
//! is a member. The members form a group under a generation that only the decision contains, and cross a
//! barrier in that group.
//!
//! If a member dies before the barrier completes, the other members agree again, under the name of the group
//! that failed. A rank that had already left the barrier shrinks that group later and uses the same store
//! keys, so it joins the agreement. The store holds ranks in the first ancestor, which are equal for both
//! kinds of callers.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::StoreError;
use serde::{Deserialize, Serialize};

use super::{CommError, Group};
use crate::error::require;
use crate::json;

/// Time limit of one store request.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval of the rank that decides. Other ranks start with it, and double it up to the longest.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A group that failed or did not form; the members agree on the next group under its name and generation.
struct FailedGroup {
    name: String,
    generation: Generation,
    /// Rank of each member in the group's first ancestor, indexed by rank.
    ranks: Vec<usize>,
}

/// The decision that the store holds: the members of the shrunk group, and its generation.
#[derive(Serialize, Deserialize)]
struct Decision {
    generation: String,
    ranks: Vec<usize>,
}

impl Group {
    /// Returns a group of the ranks that survived a failure or an abort of this group, in the order of their
    /// ranks.
    ///
    /// All survivors call `shrink`. It does not wait for ranks that are known to be dead or have dropped this
    /// group. It excludes ranks that do not call it within `within` of the first call, and a rank that caused
    /// [`CommError::PeerLost`]. One write to the store decides the members; an excluded rank gets an error.
    /// If the group has not failed, it is aborted first, so that no rank waits in it.
    ///
    /// The new group has the timeouts of this handle and a generation of its own, and may be shrunk again.
    /// Subgroups and meshes must be made again from the new group. The old group remains ended, and may be
    /// dropped.
    ///
    /// # Errors
    /// [`CommError::Excluded`] if other ranks continued without this rank. [`CommError::Store`] if the store
    /// cannot be reached; a store that rank 0 serves is lost with rank 0. [`CommError::InvalidArgument`] if
    /// this group has been shrunk already. The errors of [`Group::new`] if all members live but the new group
    /// does not form.
    ///
    /// # Cost
    /// A few store requests for each rank, then the cost of a new group of that size. Each further death
    /// during the call costs the same again; `within` then limits anew the time to arrive and the time to
    /// form.
    ///
    /// Counterpart of `MPI_Comm_shrink` of ULFM.
    pub fn shrink(&self, within: Duration) -> Result<Self, CommError> {
        self.inner.check_caller()?;
        let mut shrunk = self.inner.shrunk.lock().unwrap_or_else(PoisonError::into_inner);
        let name = self.name().to_owned();
        require(!*shrunk, || {
            format!("group {name} has already been shrunk: call shrink on the group that it returned")
        })?;
        self.abort("it called shrink to continue with the surviving ranks");
        let (generation, ranks) = (self.generation(), self.global_ranks().to_vec());
        let mut failed_group = FailedGroup { name, generation, ranks };
        // Groups that this call formed and that failed in their barrier. They are kept: other ranks would
        // take a dropped group for the loss of this rank.
        let mut formed: Vec<Self> = Vec::new();
        let mut failed = None;
        loop {
            let gone = || self.missing_ranks(&failed_group, &formed);
            let (generation, ranks) = self.decide(&failed_group, within, gone)?;
            let survivors: Vec<usize> = ranks.iter().filter_map(|&rank| self.group_rank(rank)).collect();
            if !survivors.contains(&self.rank()) {
                return Err(CommError::Excluded { group: self.name().to_owned(), survivors });
            }
            if let Some(error) = failed.take().filter(|_| ranks.len() == failed_group.ranks.len()) {
                // No member was excluded, so all members live, but the group does not form.
                return Err(error);
            }
            *shrunk = true;
            let came = failed_group.key("came");
            failed_group = FailedGroup { name: format!("{}/shrunk", failed_group.name), generation, ranks };
            let options =
                self.inner.config.options.clone().name(failed_group.name.clone()).generation(generation);
            let Some(mut config) = self.bootstrap_config(&survivors, options, within) else { continue };
            // The dead ranks have freed CPU cores, so the sharing of cores is computed again.
            config.sharing = None;
            let joined = Self::join(config, self.inner.keep.clone()).and_then(|group| {
                let group = self.restore_init_timeout(group);
                let crossed = group.with_timeout(within).barrier();
                formed.push(group.clone());
                crossed.map(|()| group)
            });
            match joined {
                Ok(group) => {
                    if group.rank() == 0 {
                        let _ = self.inner.config.store.delete(&came, Instant::now() + STORE_TIMEOUT);
                    }
                    return Ok(group);
                }
                Err(error) if error.ends_group() || matches!(error, CommError::Bootstrap { .. }) => {
                    failed = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Agrees with the ranks that call `shrink` on the generation and members of the next group. `gone`
    /// returns the ranks that are known to be lost.
    fn decide(
        &self,
        failed_group: &FailedGroup,
        within: Duration,
        gone: impl Fn() -> BTreeSet<usize>,
    ) -> Result<(Generation, Vec<usize>), CommError> {
        let (store, me) = (&self.inner.config.store, self.inner.config.origin[self.rank()]);
        let deadline = Instant::now().checked_add(within);
        let soon = || Instant::now() + STORE_TIMEOUT;
        let (came_key, decided) = (failed_group.key("came"), failed_group.key("decided"));
        if let Some(decision) = store.try_get(&decided, soon())? {
            return read(&decision);
        }
        store.append(&came_key, format!("{me} ").as_bytes(), soon())?;
        let mut interval = POLL_INTERVAL;
        loop {
            let gone = gone();
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            let decides = failed_group.ranks.iter().find(|rank| !gone.contains(rank)) == Some(&me);
            if decides || late {
                let came = store.try_get(&came_key, soon())?.unwrap_or_default();
                let came = String::from_utf8_lossy(&came);
                let came: BTreeSet<usize> =
                    came.split_whitespace().filter_map(|rank| rank.parse().ok()).collect();
                let left = failed_group.ranks.iter().copied().filter(|rank| !gone.contains(rank));
                let (here, awaited): (Vec<_>, Vec<_>) = left.partition(|rank| came.contains(rank));
                if here.contains(&me) && (late || awaited.is_empty()) {
                    let generation = Generation::random()
                        .map_err(|error| CommError::system("cannot get random numbers", error))?;
                    let decision = Decision { generation: generation.to_string(), ranks: here };
                    let decision = json::encode(&decision);
                    return read(&store.compare_set(&decided, b"", &decision, soon())?);
                }
                if late {
                    // The other ranks consider this rank lost and none has decided, so this rank excludes
                    // itself.
                    return Ok((failed_group.generation, here));
                }
            } else {
                interval = (interval * 2).min(MAX_POLL_INTERVAL);
            }
            let until = Instant::now() + interval;
            match store.get(&decided, deadline.map_or(until, |deadline| deadline.min(until))) {
                Ok(decision) => return read(&decision),
                Err(StoreError::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns the ranks of `failed_group` that will not register. Their processes have ended, they have
    /// dropped this group or one of `formed`, or they caused one of these groups to end.
    fn missing_ranks(&self, failed_group: &FailedGroup, formed: &[Self]) -> BTreeSet<usize> {
        let (mut present, mut lost) = (BTreeSet::new(), BTreeSet::new());
        for group in formed.iter().chain([self]) {
            let Some(shared) = &group.inner.shared else { continue };
            let seen = shared.live_ranks();
            present.extend(seen.live.into_iter().filter_map(|rank| group.global_rank(rank)));
            lost.extend(seen.lost.and_then(|rank| group.global_rank(rank)));
        }
        present.extend(self.global_rank(self.rank()));
        let ranks = failed_group.ranks.iter().copied();
        ranks.filter(|rank| !present.contains(rank) || lost.contains(rank)).collect()
    }
}

impl FailedGroup {
    fn key(&self, what: &str) -> Vec<u8> {
        format!("{}/{}/shrink/{what}", self.name, self.generation).into_bytes()
    }
}

fn read(decision: &[u8]) -> Result<(Generation, Vec<usize>), CommError> {
    let wrong = |what: String| StoreError::Protocol { store: "the group's store".to_owned(), what };
    let decision: Decision = serde_json::from_slice(decision)
        .map_err(|error| wrong(format!("malformed decision on which ranks survive: {error}")))?;
    let generation = decision.generation.parse();
    Ok((generation.map_err(|error| wrong(format!("{error}")))?, decision.ranks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_decisions_never_cause_a_panic() {
        let encode = |(generation, ranks): &(Generation, Vec<usize>)| {
            serde_json::to_vec(&Decision { generation: generation.to_string(), ranks: ranks.clone() })
                .unwrap()
        };
        let good = [
            encode(&(Generation::from_bytes([1; 16]), vec![0, 2, 17])),
            encode(&(Generation::from_bytes([2; 16]), vec![])),
        ];
        let decode = |bytes: &[u8]| read(bytes).ok();
        convoke_testkit::fuzz("random_decisions_never_cause_a_panic", &good, 4000, decode, encode);
    }
}
