//! Subgroups of a group.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bootstrap::{self, ListeningRank, StoreLocation};

use super::{BootstrapConfig, BorrowedBuffer, CallKind, CommError, Group, GroupOptions, ValueType, call};
use crate::collectives::plan::{Algorithms, fingerprint};

/// Color of a rank that joins no group.
const NO_COLOR: i64 = -1;
/// Value that ranks compare in a call of `split`; for a list of ranks they compare its fingerprint.
const SPLIT: u64 = 0;
/// Numbers that each rank contributes to the agreement on the next subgroup.
const VALUES_PER_RANK: usize = 3;
/// Limit, in bytes, on the connection record of a rank: its address, its cores, its choice of algorithms.
const MAX_RECORD_BYTES: i64 = 1 << 20;

/// The agreement of all ranks on the subgroups that they make next.
#[derive(Debug)]
pub(crate) struct SubgroupAgreement<'a> {
    /// Number of agreements on subgroups of this group before this one.
    number: u64,
    /// For each rank, the two numbers that it contributed; for a split, color and key.
    values: Vec<[i64; 2]>,
    /// Held until the groups are made, so that threads of a rank make subgroups one after the other, and
    /// all ranks exchange records in one order.
    _turn: MutexGuard<'a, u64>,
}

impl Group {
    /// Makes a group of `ranks` in the given order: the first becomes rank 0. Returns `None` on ranks outside
    /// the list.
    ///
    /// All ranks of this group call it with an equal list, also those outside the list. The new group has
    /// the timeouts of this handle and its own connections. It works and fails independently, and may
    /// outlive this group.
    ///
    /// All ranks make their subgroups in the same order, like all collectives. Threads that make subgroups
    /// concurrently must give them different [names](Self::with_subgroup_name). Then threads that run in
    /// different orders on two ranks get an error instead of the wrong group.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the list is empty, contains a rank twice, or contains a rank that
    /// does not exist. Also on all ranks if their lists differ. [`CommError::Bootstrap`] if the new group
    /// does not form. Otherwise the errors of [`Self::all_gather`]. The time limit of a call covers all of
    /// these steps.
    ///
    /// # Cost
    /// All-gathers of 24 bytes, of 8 bytes, and of some hundred bytes per rank; then the connections of the
    /// new group.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>, CommError> {
        let distinct: BTreeSet<usize> = ranks.iter().copied().collect();
        for &rank in ranks {
            self.check_rank(rank, "rank")?;
        }
        if ranks.is_empty() || distinct.len() < ranks.len() {
            let what = format!("a group of the ranks {ranks:?}: name at least one rank, and each once");
            return Err(CommError::InvalidArgument(what));
        }
        let group = self.with_fixed_deadline();
        let agreed = group.agree(&format!("a group of the ranks {ranks:?}"), fingerprint(ranks), [0; 2])?;
        group.form(&agreed, ranks)
    }

    /// Partitions this group, like `MPI_Comm_split`: ranks with equal `color` form a group. In each new
    /// group, ranks are ordered by `key`, and by their ranks in this group if keys are equal. Returns `None`
    /// on ranks that pass no color.
    ///
    /// All ranks of this group call it. The new groups have the properties described at [`Self::subgroup`].
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] on all ranks if some make subgroups by another function or name.
    /// [`CommError::Bootstrap`] if the new group does not form. Otherwise the errors of [`Self::all_gather`].
    ///
    /// # Cost
    /// The cost of [`Self::subgroup`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>, CommError> {
        let color = color.map_or(NO_COLOR, i64::from);
        let group = self.with_fixed_deadline();
        let agreed = group.agree("a split", SPLIT, [color, key])?;
        let has_same_color = |&rank: &usize| color != NO_COLOR && agreed.values[rank][0] == color;
        let mut together: Vec<usize> = (0..self.size()).filter(has_same_color).collect();
        together.sort_by_key(|&rank| (agreed.values[rank][1], rank));
        group.form(&agreed, &together)
    }

    /// Returns a handle that adds `name` to the names of the subgroups that it makes. Errors show the name,
    /// and ranks that pass different names get an error instead of a group.
    #[must_use]
    pub fn with_subgroup_name(&self, name: &str) -> Self {
        Self { subgroup_name: Some(name.into()), ..self.clone() }
    }

    /// Returns a handle whose subgroups use these algorithms instead of this group's, to measure several
    /// algorithms in one job.
    ///
    /// All ranks pass equal algorithms: they compare them when a subgroup forms, and a difference is
    /// [`CommError::Bootstrap`].
    #[must_use]
    pub fn with_algorithms(&self, algorithms: Algorithms) -> Self {
        Self { tuning: Some(algorithms), ..self.clone() }
    }

    /// Returns, for each rank of this group, its rank in the group's first ancestor. For subgroups of the
    /// world, and their subgroups, these are ranks in the world.
    #[must_use]
    #[doc(alias = "get_process_group_ranks")]
    pub fn global_ranks(&self) -> &[usize] {
        &self.inner.origin
    }

    /// Returns the rank that rank `rank` of this group has in the group's first ancestor; `None` if there is
    /// no rank `rank`.
    #[must_use]
    #[doc(alias = "get_global_rank")]
    pub fn global_rank(&self, rank: usize) -> Option<usize> {
        self.inner.origin.get(rank).copied()
    }

    /// Returns the rank in this group of the member with rank `global_rank` in the group's first ancestor;
    /// `None` if no member has that rank.
    #[must_use]
    #[doc(alias = "get_group_rank")]
    pub fn group_rank(&self, global_rank: usize) -> Option<usize> {
        self.inner.origin.iter().position(|&origin| origin == global_rank)
    }

    /// Agrees with all ranks on the subgroup to make next, and exchanges the two numbers `values` of each
    /// rank. Ranks compare `mark`, which identifies the subgroup; `what` describes it in the error.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] on all ranks if some make another subgroup. Otherwise the errors of
    /// [`Self::all_gather`].
    pub(crate) fn agree(
        &self,
        what: &str,
        mark: u64,
        values: [i64; 2],
    ) -> Result<SubgroupAgreement<'_>, CommError> {
        let name = self.subgroup_name.as_deref().unwrap_or_default();
        let mark = fingerprint(&[mark as usize, name_fingerprint(name) as usize]) as i64;
        // The lock numbers agreements in the order in which they are made, also if several threads make them.
        let mut made = self.inner.subgroups.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = vec![0; VALUES_PER_RANK * self.size()];
        self.own_block_mut(&mut all, VALUES_PER_RANK).copy_from_slice(&[mark, values[0], values[1]]);
        let call = call(ValueType::of::<i64>(), CallKind::Subgroup, None, 0, VALUES_PER_RANK);
        self.carry_out(self.planned(call, BorrowedBuffer::default().with_mut(0, &mut all[..]), None))?;
        let (all, _) = all.as_chunks::<VALUES_PER_RANK>();
        if let Some(other) = all.iter().position(|theirs| theirs[0] != mark) {
            let named = if name.is_empty() { String::new() } else { format!(" named {name:?}") };
            let what = format!(
                "rank {other} creates another subgroup than {what}{named}: all ranks must create the same \
                 subgroups in the same order"
            );
            return Err(CommError::InvalidArgument(what));
        }
        let number = *made;
        *made += 1;
        let values = all.iter().map(|&[_, first, second]| [first, second]).collect();
        Ok(SubgroupAgreement { number, values, _turn: made })
    }

    /// Makes the group of `ranks`; returns `None` if this rank is not a member. All ranks of this group
    /// call it.
    ///
    /// One agreement may serve several disjoint groups; overlapping groups also need different names.
    pub(crate) fn form(
        &self,
        agreed: &SubgroupAgreement<'_>,
        ranks: &[usize],
    ) -> Result<Option<Self>, CommError> {
        let (number, first) = (agreed.number, ranks.first().copied().unwrap_or_default());
        let own = self.subgroup_name.as_deref().unwrap_or_default();
        let dash = if own.is_empty() { "" } else { "-" };
        let name = format!("{}/{number}{dash}{own}.{first}", self.name());
        let mut options = self.inner.options.clone().name(name).generation(self.generation());
        options.id =
            fingerprint(&[options.id as usize, number as usize, first, name_fingerprint(own) as usize]);
        // Ranks outside `ranks` take part too: NCCL splits a communicator with all of its ranks.
        #[cfg(feature = "nccl")]
        let attach_device = self.split_device(ranks)?;
        let rest = self.limit().deadline().saturating_duration_since(Instant::now());
        let config = self.bootstrap_config(ranks, options).map(|config| BootstrapConfig {
            is_successor: true,
            options: config.options.clone().init_timeout(config.options.init_timeout.min(rest)),
            ..config
        });
        let waiting = config.as_ref().filter(|config| config.size > 1).map(|config| {
            ListeningRank::new(config).map_err(|error| (bootstrap::failure_record(config, &error), error))
        });
        let record = match &waiting {
            None => Vec::new(),
            Some(Ok(waiting)) => waiting.record(),
            Some(Err((record, _))) => record.clone(),
        };
        let records = self.exchange_records(&record)?;
        let records: Vec<&[u8]> = ranks.iter().map(|&rank| records[rank].as_slice()).collect();
        let formed = match waiting {
            Some(Ok(waiting)) => Some(bootstrap::connect_with_records(waiting, &records)?),
            Some(Err((_, error))) => return Err(error),
            None => None,
        };
        let Some(config) = config else { return Ok(None) };
        let keep = self.inner.keep.clone();
        let group = match formed {
            Some(formed) => Self::from_bootstrap(config, formed, keep),
            None => Self::join(config, keep)?,
        };
        let group = self.restore_init_timeout(group);
        #[cfg(feature = "nccl")]
        if let Some(attach_device) = attach_device {
            return attach_device(&group).map(Some);
        }
        Ok(Some(group))
    }

    /// Exchanges the connection records of all ranks; `own` is this rank's record.
    fn exchange_records(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut lens = vec![0; self.size()];
        self.own_block_mut(&mut lens, 1).copy_from_slice(&[own.len() as i64]);
        let first = call(ValueType::of::<i64>(), CallKind::Subgroup, None, 0, 1);
        self.carry_out(self.planned(first, BorrowedBuffer::default().with_mut(0, &mut lens[..]), None))?;
        let is_valid = |len: &i64| (0..=MAX_RECORD_BYTES).contains(len);
        if let Some(rank) = lens.iter().position(|len| !is_valid(len)) {
            let what = format!(
                "rank {rank} sent a record of {} bytes; the limit is {MAX_RECORD_BYTES} bytes",
                lens[rank]
            );
            return Err(CommError::Bootstrap { group: self.name().to_owned(), what, ranks: vec![rank] });
        }
        let most = lens.iter().copied().max().unwrap_or_default() as usize;
        let mut all = vec![0; most * self.size()];
        self.own_block_mut(&mut all, most)[..own.len()].copy_from_slice(own);
        let second = call(ValueType::of::<u8>(), CallKind::Subgroup, None, 0, most);
        self.carry_out(self.planned(second, BorrowedBuffer::default().with_mut(0, &mut all[..]), None))?;
        let values = lens.iter().enumerate().map(|(rank, &len)| all[rank * most..][..len as usize].to_vec());
        Ok(values.collect())
    }

    /// Returns a bootstrap configuration for `ranks` of this group, with the timeout of this handle; `None`
    /// if this rank is not in `ranks`.
    pub(super) fn bootstrap_config(&self, ranks: &[usize], options: GroupOptions) -> Option<BootstrapConfig> {
        Some(BootstrapConfig {
            store: Arc::clone(&self.inner.store),
            store_id: format!("generation {}", self.generation()),
            store_rank: ranks.iter().position(|&rank| Some(rank) == self.inner.store_rank),
            rank: ranks.iter().position(|&rank| rank == self.rank())?,
            size: ranks.len(),
            store_location: StoreLocation::default(),
            entry_guard: None,
            origin: ranks.iter().map(|&rank| self.inner.origin[rank]).collect(),
            is_successor: false,
            options: options.timeout(self.timeout),
            tuning: self.tuning.unwrap_or(self.inner.tuning),
            // Only the group that a session makes receives the launcher's notices of dead peers.
            agent: None,
            sharing: self.inner.sharing,
        })
    }

    /// Joins a group that descends from this one, within the shorter of `time` and `init_timeout`.
    pub(super) fn join_successor(
        &self,
        mut config: BootstrapConfig,
        time: Duration,
    ) -> Result<Self, CommError> {
        config.options.init_timeout = config.options.init_timeout.min(time);
        Ok(self.restore_init_timeout(Self::join(config, self.inner.keep.clone())?))
    }

    /// Sets the `init_timeout` of `group`, which had less time to form, to that of this group again: groups
    /// made from it inherit the option.
    fn restore_init_timeout(&self, mut group: Self) -> Self {
        if let Some(inner) = Arc::get_mut(&mut group.inner) {
            inner.options.init_timeout = self.inner.options.init_timeout;
        }
        group
    }
}

fn name_fingerprint(name: &str) -> u64 {
    let bytes: Vec<usize> = name.bytes().map(usize::from).collect();
    fingerprint(&bytes)
}

#[cfg(test)]
mod tests {
    use convoke_store::MemoryStore;

    use super::*;

    #[test]
    fn subgroup_counts_ranks_outside_it_that_share_its_cores() {
        let size = convoke_env::host::allowed_cpus().len() + 2;
        let store: Arc<dyn convoke_store::Store> = Arc::new(MemoryStore::new());
        let sharings: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..size)
                .map(|rank| {
                    let (store, options) = (Arc::clone(&store), GroupOptions::default().name("sharing"));
                    scope.spawn(move || {
                        let group = Group::new(store, rank, size, options).unwrap();
                        let half = group.split(Some((2 * rank / size) as u32), 0).unwrap().unwrap();
                        [group, half].map(|group| group.inner.sharing.unwrap())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (rank, [group, half]) in sharings.into_iter().enumerate() {
            assert_eq!((group.core_index, half), (Some(rank), group));
        }
    }
}
