//! Groups of some of a group's ranks.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bootstrap::{self, Waiting, Whereabouts};

use super::{CallKind, CommError, Group, GroupOptions, Invitation, Lent, call};
use crate::plan::{Tuning, fingerprint};

/// Stands for "in no group" among the colors.
const NO_COLOR: i64 = -1;
/// Stands for a split where ranks compare what they make; a list of ranks has a fingerprint.
const SPLIT: u64 = 0;
/// Numbers that a rank tells the others when it makes subgroups.
const TOLD: usize = 3;
/// Most bytes that it tells of itself: its address, its cores, how it chooses algorithms.
const MOST_TOLD: i64 = 1 << 20;

/// Groups that all ranks have agreed to make next.
#[derive(Debug)]
pub(crate) struct Agreed<'a> {
    /// How many times subgroups were made before.
    number: u64,
    /// What each rank told the others beside.
    told: Vec<[i64; 2]>,
    /// Threads of a rank make subgroups one after the other: so all ranks tell their records in one order.
    _turn: MutexGuard<'a, u64>,
}

impl Group {
    /// A group of these ranks, in this order: the first becomes rank 0. `None` on ranks that are not among them.
    ///
    /// All ranks of this group call it, with the same list, also those that are not in it. The new group has the
    /// timeouts of this handle and connections of its own, works and fails by itself, and may outlive this one.
    ///
    /// The ranks make their subgroups in the same order, as all they do together. Threads that do so side by side
    /// give them different [names](Self::with_subgroup_name): then two that meet in different order get an error
    /// instead of each other's group.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the list is empty, names a rank twice or one that does not exist, and on
    /// all ranks if they disagree about it. [`CommError::Bootstrap`] if the new group does not form. Else as
    /// [`Self::all_gather`]. The time of a call covers all of it.
    ///
    /// # Cost
    /// All-gathers of 24, of 8, and of some hundred bytes; then the connections of the new group.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>, CommError> {
        let distinct: BTreeSet<usize> = ranks.iter().copied().collect();
        for &rank in ranks {
            self.check_rank(rank, "rank")?;
        }
        if ranks.is_empty() || distinct.len() < ranks.len() {
            let what = format!("a group of the ranks {ranks:?}: it needs some, each once");
            return Err(CommError::InvalidArgument(what));
        }
        let group = self.in_parts();
        let agreed = group.agree(&format!("a group of the ranks {ranks:?}"), fingerprint(ranks), [0; 2])?;
        group.form(&agreed, ranks)
    }

    /// Cuts this group in several: ranks with the same `color` are together, in the order of `key`, and of their
    /// ranks here where keys are equal. `None` on ranks without a color.
    ///
    /// All ranks of this group call it. The new groups are as those of [`Self::subgroup`].
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] on all ranks if some make other subgroups. [`CommError::Bootstrap`] if the new
    /// group does not form. Else as [`Self::all_gather`].
    ///
    /// # Cost
    /// As [`Self::subgroup`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>, CommError> {
        let color = color.map_or(NO_COLOR, i64::from);
        let group = self.in_parts();
        let agreed = group.agree("a split", SPLIT, [color, key])?;
        let with_us = |&rank: &usize| color != NO_COLOR && agreed.told[rank][0] == color;
        let mut together: Vec<usize> = (0..self.size()).filter(with_us).collect();
        together.sort_by_key(|&rank| (agreed.told[rank][1], rank));
        group.form(&agreed, &together)
    }

    /// The same group; subgroups that are made through this handle have `name` in theirs, for error messages, and
    /// are never taken for others.
    #[must_use]
    pub fn with_subgroup_name(&self, name: &str) -> Self {
        Self { subgroup_name: Some(name.into()), ..self.clone() }
    }

    /// The same group; groups that are made through this handle choose algorithms with these overrides, as in
    /// [`GroupOptions::algorithms`], instead of this group's: for who measures several in one job. The empty text
    /// leaves all to the table.
    ///
    /// All ranks pass the same: they compare it when a group forms, and a difference is [`CommError::Bootstrap`].
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] says what is wrong with the text, and what there is.
    pub fn with_algorithms(&self, overrides: &str) -> Result<Self, CommError> {
        let tuning = Tuning::parse(overrides).map_err(CommError::InvalidArgument)?;
        Ok(Self { tuning: Some(Arc::new(tuning)), ..self.clone() })
    }

    /// The ranks that this group's ranks have in the group that it comes from first: for subgroups of the world,
    /// and for theirs, ranks in the world.
    #[must_use]
    #[doc(alias = "get_process_group_ranks")]
    pub fn global_ranks(&self) -> &[usize] {
        &self.inner.origin
    }

    /// The rank that rank `rank` of this group has in the group that this one comes from first; `None` if there is
    /// no such rank.
    #[must_use]
    #[doc(alias = "get_global_rank")]
    pub fn global_rank(&self, rank: usize) -> Option<usize> {
        self.inner.origin.get(rank).copied()
    }

    /// The rank in this group of the one that has `global_rank` in the group that this one comes from first; `None`
    /// if it is not in this group.
    #[must_use]
    #[doc(alias = "get_group_rank")]
    pub fn group_rank(&self, global_rank: usize) -> Option<usize> {
        self.inner.origin.iter().position(|&origin| origin == global_rank)
    }

    /// Agrees with all ranks to make `what` next, for which `mark` stands, and exchanges what each has to tell.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] on all ranks if some make something else. Else as [`Self::all_gather`].
    pub(crate) fn agree(&self, what: &str, mark: u64, told: [i64; 2]) -> Result<Agreed<'_>, CommError> {
        let name = self.subgroup_name.as_deref().unwrap_or_default();
        let mark = fingerprint(&[mark as usize, name_fingerprint(name) as usize]) as i64;
        // Locked, so that what is agreed first has the lower number also where threads do so side by side.
        let mut made = self.inner.subgroups.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = vec![0; TOLD * self.size()];
        self.own(&mut all, TOLD).copy_from_slice(&[mark, told[0], told[1]]);
        let call = call::<i64>(CallKind::Subgroup, None, 0, TOLD);
        self.carry_out(self.planned(call, Lent::default().filled(0, &mut all), None))?;
        let (all, _) = all.as_chunks::<TOLD>();
        if let Some(other) = all.iter().position(|theirs| theirs[0] != mark) {
            let named = if name.is_empty() { String::new() } else { format!(" named {name:?}") };
            let what = format!(
                "rank {other} makes another subgroup now than {what}{named}: all ranks make the same, in the same \
                 order"
            );
            return Err(CommError::InvalidArgument(what));
        }
        let number = *made;
        *made += 1;
        let told = all.iter().map(|&[_, first, second]| [first, second]).collect();
        Ok(Agreed { number, told, _turn: made })
    }

    /// Makes the group of `ranks`, of which this rank is one, if it is. All ranks of this group call it.
    ///
    /// Groups of which no rank is in two may have one agreement; others need different names as well.
    pub(crate) fn form(&self, agreed: &Agreed<'_>, ranks: &[usize]) -> Result<Option<Self>, CommError> {
        let (number, first) = (agreed.number, ranks.first().copied().unwrap_or_default());
        let own = self.subgroup_name.as_deref().unwrap_or_default();
        let dash = if own.is_empty() { "" } else { "-" };
        let name = format!("{}/{number}{dash}{own}.{first}", self.name());
        let mut options = self.inner.options.clone().name(name).generation(self.generation());
        options.id =
            fingerprint(&[options.id as usize, number as usize, first, name_fingerprint(own) as usize]);
        // Also of ranks that are in none of the groups: NCCL cuts with all.
        #[cfg(feature = "nccl")]
        let side = self.split_side(ranks)?;
        let rest = self.limit().deadline().saturating_duration_since(Instant::now());
        let invitation = self.invitation(ranks, options).map(|invitation| Invitation {
            is_successor: true,
            options: invitation.options.clone().init_timeout(invitation.options.init_timeout.min(rest)),
            ..invitation
        });
        let waiting = invitation.as_ref().filter(|invitation| invitation.size > 1).map(Waiting::new);
        let record = match (&waiting, &invitation) {
            (Some(Ok(waiting)), _) => waiting.record(),
            (Some(Err(error)), Some(invitation)) => bootstrap::no_record(invitation, error),
            (Some(Err(_)) | None, _) => Vec::new(),
        };
        let records = self.tell_all(&record)?;
        let records: Vec<&[u8]> = ranks.iter().map(|&rank| records[rank].as_slice()).collect();
        let formed = match waiting {
            Some(waiting) => Some(bootstrap::connect_to(waiting?, &records)?),
            None => None,
        };
        let Some(invitation) = invitation else { return Ok(None) };
        let keep = self.inner.keep.clone();
        let group = match formed {
            Some(formed) => Self::formed(invitation, formed, keep),
            None => Self::join(invitation, keep)?,
        };
        let group = self.with_usual_time(group);
        #[cfg(feature = "nccl")]
        if let Some(side) = side {
            return side.of(&group).map(Some);
        }
        Ok(Some(group))
    }

    /// Exchanges what all ranks tell of themselves.
    fn tell_all(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut lens = vec![0; self.size()];
        self.own(&mut lens, 1).copy_from_slice(&[own.len() as i64]);
        let first = call::<i64>(CallKind::Subgroup, None, 0, 1);
        self.carry_out(self.planned(first, Lent::default().filled(0, &mut lens), None))?;
        let is_sound = |len: &i64| (0..=MOST_TOLD).contains(len);
        if let Some(rank) = lens.iter().position(|len| !is_sound(len)) {
            let what =
                format!("rank {rank} tells {} bytes of itself, at most {MOST_TOLD} make sense", lens[rank]);
            return Err(CommError::Bootstrap { group: self.name().to_owned(), what, ranks: vec![rank] });
        }
        let most = lens.iter().copied().max().unwrap_or_default() as usize;
        let mut all = vec![0; most * self.size()];
        self.own(&mut all, most)[..own.len()].copy_from_slice(own);
        let second = call::<u8>(CallKind::Subgroup, None, 0, most);
        self.carry_out(self.planned(second, Lent::default().filled(0, &mut all), None))?;
        let told = all.chunks(most.max(1)).zip(&lens);
        let mut told: Vec<Vec<u8>> = told.map(|(bytes, &len)| bytes[..len as usize].to_vec()).collect();
        told.resize(self.size(), Vec::new());
        Ok(told)
    }

    /// An invitation for `ranks` of this group, with the time of this handle; `None` if this rank is not among them.
    pub(super) fn invitation(&self, ranks: &[usize], options: GroupOptions) -> Option<Invitation> {
        Some(Invitation {
            store: Arc::clone(&self.inner.store),
            place: format!("generation {}", self.generation()),
            store_rank: ranks.iter().position(|&rank| Some(rank) == self.inner.store_rank),
            rank: ranks.iter().position(|&rank| rank == self.rank())?,
            size: ranks.len(),
            whereabouts: Whereabouts::default(),
            removal: None,
            origin: ranks.iter().map(|&rank| self.inner.origin[rank]).collect(),
            is_successor: false,
            options: options.timeout(self.timeout),
            tuning: self.tuning.as_deref().unwrap_or(&self.inner.tuning).clone(),
            // The launcher's word on a dead peer goes to the first group.
            agent: None,
            sharing: self.inner.sharing,
        })
    }

    /// Joins a group that comes from this one, within `time` if that is less than its ranks have as a rule.
    pub(super) fn join_successor(
        &self,
        mut invitation: Invitation,
        time: Duration,
    ) -> Result<Self, CommError> {
        invitation.options.init_timeout = invitation.options.init_timeout.min(time);
        Ok(self.with_usual_time(Self::join(invitation, self.inner.keep.clone())?))
    }

    /// A group that had less time to form than its own successors have as a rule.
    fn with_usual_time(&self, mut group: Self) -> Self {
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
    use crate::engine;

    #[test]
    fn a_subgroup_shares_cores_with_the_ranks_that_are_not_in_it() {
        let size = engine::allowed_cores().len() + 2;
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
            assert_eq!((group.place, half), (Some(rank), group));
        }
    }
}
