//! Subgroups of a group.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bootstrap::Joining;

use super::{
    BootstrapConfig, BorrowedBuffer, CallKind, CommError, Group, GroupOptions, Prepared, Transfer, ValueType,
    call,
};
use crate::collectives::plan::{Algorithms, fingerprint};
use crate::engine::{ParentLinks, Shared};
use crate::error::require;

/// Color of a rank that joins no group.
const NO_COLOR: i64 = -1;
/// Value that ranks compare in a call of `split`; for a list of ranks they compare its fingerprint.
const SPLIT: u64 = 0;
/// Limit, in bytes, on the text of a rank's choice of algorithms.
const MAX_TUNING_BYTES: i64 = 1 << 20;
/// Parts of the shared memory that a rank reserves in each agreement: most groups that an agreement makes.
const PARTS: u64 = 32;
/// Number that a rank without shared memory contributes instead of that of a reserved part.
const NO_PART: i64 = -1;

/// The agreement of all ranks on the subgroups that they make next.
#[derive(Debug)]
pub(crate) struct SubgroupAgreement<'a> {
    /// Number of agreements on subgroups of this group before this one.
    number: u64,
    /// For each rank, the two numbers that it contributed; for a split, color and key.
    values: Vec<[i64; 2]>,
    /// For each rank, the first part of the shared memory that it has reserved.
    parts: Vec<i64>,
    /// Number of groups of several ranks made so far.
    formed: Cell<u64>,
    /// The links and the memory that the new groups share with this group; `None` in a group of one.
    links: Option<ParentLinks>,
    /// Held until the groups are made, so that threads of a rank make subgroups one after the other, and
    /// all ranks exchange records in one order.
    _turn: MutexGuard<'a, u64>,
}

impl Group {
    /// Makes a group of `ranks` in the given order: the first becomes rank 0. Returns `None` on ranks outside
    /// the list.
    ///
    /// All ranks of this group call it with an equal list, also those outside the list. The new group has
    /// the timeouts of this handle. It works and fails independently, and may
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
    /// All-gathers of 32 bytes and of 16 bytes per rank. The new group uses the connections and the shared
    /// memory of its processes: it takes no descriptor, and about 70 KiB of memory for 4 ranks of a host. It
    /// takes more when it is used: up to 8 MiB per rank, and connections for data between hosts.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>, CommError> {
        let distinct: BTreeSet<usize> = ranks.iter().copied().collect();
        for &rank in ranks {
            self.check_rank(rank, "rank")?;
        }
        let what = format!("a group of the ranks {ranks:?}");
        require(!ranks.is_empty() && distinct.len() == ranks.len(), || {
            format!("{what}: name at least one rank, and each once")
        })?;
        let group = self.with_fixed_deadline();
        let agreed = group.agree(&what, fingerprint(ranks), [0; 2])?;
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
        &self.inner.config.origin
    }

    /// Returns the rank that rank `rank` of this group has in the group's first ancestor; `None` if there is
    /// no rank `rank`.
    #[must_use]
    #[doc(alias = "get_global_rank")]
    pub fn global_rank(&self, rank: usize) -> Option<usize> {
        self.inner.config.origin.get(rank).copied()
    }

    /// Returns the rank in this group of the member with rank `global_rank` in the group's first ancestor;
    /// `None` if no member has that rank.
    #[must_use]
    #[doc(alias = "get_group_rank")]
    pub fn group_rank(&self, global_rank: usize) -> Option<usize> {
        self.inner.config.origin.iter().position(|&origin| origin == global_rank)
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
        self.inner.check_caller()?;
        let links = self.inner.shared.as_ref().and_then(Shared::parent_links);
        let host = links.as_ref().and_then(|links| links.host.as_ref());
        let part = host.and_then(|(_, share)| share.arena.reserve(PARTS)).map_or(NO_PART, u64::cast_signed);
        let all = self.exchange([mark, values[0], values[1], part])?;
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
        let values = all.iter().map(|&[_, first, second, _]| [first, second]).collect();
        let parts = all.iter().map(|&[.., part]| part).collect();
        Ok(SubgroupAgreement { number, values, parts, formed: Cell::new(0), links, _turn: made })
    }

    /// Gathers `N` numbers of each rank.
    fn exchange<const N: usize>(&self, own: [i64; N]) -> Result<Vec<[i64; N]>, CommError> {
        let mut all = vec![0; N * self.size()];
        all[self.own_range(N)].copy_from_slice(&own);
        self.carry_out(self.subgroup_call::<i64>(N, &mut all))?;
        Ok(all.as_chunks::<N>().0.to_vec())
    }

    fn subgroup_call<'a, T: Transfer>(&self, count: usize, all: &'a mut [T]) -> Prepared<'a> {
        let call = call(ValueType::of::<T>(), CallKind::Subgroup, None, 0, count);
        self.planned(call, BorrowedBuffer::default().with_mut(0, all), None)
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
        let mut options = self.inner.config.options.clone().name(name).generation(self.generation());
        options.id =
            fingerprint(&[options.id as usize, number as usize, first, name_fingerprint(own) as usize]);
        // Ranks outside `ranks` take part too: NCCL splits a communicator with all of its ranks.
        #[cfg(feature = "nccl")]
        let attach_device = self.split_device(ranks)?;
        let rest = self.limit().deadline().saturating_duration_since(Instant::now());
        let config = self.bootstrap_config(ranks, options, rest);
        let part = |rank: usize| {
            let first = u64::try_from(agreed.parts[rank]).ok();
            first.filter(|_| agreed.formed.get() < PARTS).map(|first| first + agreed.formed.get())
        };
        let joining = config.as_ref().zip(agreed.links.as_ref()).filter(|(config, _)| config.size > 1);
        let joining =
            joining.map(|(config, links)| Joining::new(config, links, ranks, &self.inner.topology, part));
        let tuning = self.tuning.unwrap_or(self.inner.config.tuning).to_string();
        let succeeded = joining.as_ref().is_none_or(Joining::succeeded);
        let all = self.exchange([name_fingerprint(&tuning).cast_signed(), i64::from(succeeded)])?;
        agreed.formed.set(agreed.formed.get() + u64::from(ranks.len() > 1));
        let differ = all.iter().any(|of_rank| of_rank[0] != all[0][0]);
        let tunings = if differ { Some(self.exchange_tunings(tuning.as_bytes(), ranks)?) } else { None };
        let succeeded: Vec<bool> = ranks.iter().map(|&rank| all[rank][1] != 0).collect();
        let formed = joining.map(|joining| joining.finish(&succeeded, tunings.as_deref())).transpose()?;
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

    /// Exchanges the choices of algorithms of all ranks, and returns those of `ranks`; `own` is that of this
    /// rank.
    fn exchange_tunings(&self, own: &[u8], ranks: &[usize]) -> Result<Vec<String>, CommError> {
        let lens = self.exchange([own.len() as i64])?;
        let is_valid = |[len]: &[i64; 1]| (0..=MAX_TUNING_BYTES).contains(len);
        if let Some(rank) = lens.iter().position(|len| !is_valid(len)) {
            let what = format!(
                "rank {rank} sent {} bytes of settings; the limit is {MAX_TUNING_BYTES} bytes",
                lens[rank][0]
            );
            return Err(CommError::Bootstrap { group: self.name().to_owned(), what, ranks: vec![rank] });
        }
        let most = lens.iter().map(|&[len]| len as usize).max().unwrap_or_default();
        let mut all = vec![0; most * self.size()];
        all[self.own_range(most)][..own.len()].copy_from_slice(own);
        self.carry_out(self.subgroup_call::<u8>(most, &mut all))?;
        let texts = ranks.iter().map(|&rank| &all[rank * most..][..lens[rank][0] as usize]);
        Ok(texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect())
    }

    /// Returns a bootstrap configuration for `ranks` of this group, with the timeout of this handle and at
    /// most the time `within` to form; `None` if this rank is not in `ranks`.
    pub(super) fn bootstrap_config(
        &self,
        ranks: &[usize],
        options: GroupOptions,
        within: Duration,
    ) -> Option<BootstrapConfig> {
        let parent = &self.inner.config;
        let rank = ranks.iter().position(|&rank| rank == self.rank())?;
        let (store_id, init_timeout) =
            (format!("generation {}", self.generation()), options.init_timeout.min(within));
        let options = options.timeout(self.timeout).init_timeout(init_timeout);
        Some(BootstrapConfig {
            store_rank: ranks.iter().position(|&rank| Some(rank) == parent.store_rank),
            origin: ranks.iter().map(|&rank| parent.origin[rank]).collect(),
            tuning: self.tuning.unwrap_or(parent.tuning),
            // Only the group that a session makes receives the launcher's notices of dead peers.
            agent: None,
            sharing: parent.sharing,
            ..BootstrapConfig::new(Arc::clone(&parent.store), store_id, (rank, ranks.len()), options)
        })
    }

    /// Sets the `init_timeout` of `group`, which had less time to form, to that of this group again: groups
    /// made from it inherit the option.
    pub(super) fn restore_init_timeout(&self, mut group: Self) -> Self {
        if let Some(inner) = Arc::get_mut(&mut group.inner) {
            inner.config.options.init_timeout = self.inner.config.options.init_timeout;
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
                        [group, half].map(|group| group.inner.config.sharing.unwrap())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (rank, [group, half]) in sharings.into_iter().enumerate() {
            assert_eq!((group.place.map(|place| place.index), half), (Some(rank), group));
        }
    }
}
