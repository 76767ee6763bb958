//! Groups of some of a group's ranks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{CommError, Group, Invitation};
use crate::plan::fingerprint;

/// Stands for "in no group" among the colors.
const NO_COLOR: i64 = -1;

impl Group {
    /// A group of these ranks, in this order: the first becomes rank 0. `None` on ranks that are not among them.
    ///
    /// All ranks of this group call it, with the same list, also those that are not in it. The new group has the
    /// timeouts of this handle and connections of its own, works and fails by itself, and keeps this one alive.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the list is empty, names a rank twice or one that does not exist, and on
    /// all ranks if they disagree about it. [`CommError::Bootstrap`] if the new group does not form. Else as
    /// [`Self::all_gather`].
    ///
    /// # Cost
    /// An all-gather of 8 bytes, then as a new group of that size.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>, CommError> {
        let distinct: BTreeSet<usize> = ranks.iter().copied().collect();
        for &rank in ranks {
            self.check_rank(rank, "rank")?;
        }
        if ranks.is_empty() || distinct.len() < ranks.len() {
            let what = format!("a group of the ranks {ranks:?}: it needs some, each once");
            return Err(CommError::InvalidArgument(what));
        }
        let mine = fingerprint(ranks);
        let mut all = vec![0; self.size()];
        self.all_gather(&[mine], &mut all)?;
        if let Some(other) = all.iter().position(|&theirs| theirs != mine) {
            let what = format!("rank {other} makes a group of other ranks than {ranks:?}");
            return Err(CommError::InvalidArgument(what));
        }
        self.form(ranks)
    }

    /// Cuts this group in several: ranks with the same `color` are together, in the order of `key`, and of their
    /// ranks here where keys are equal. `None` on ranks without a color.
    ///
    /// All ranks of this group call it. The new groups are as those of [`Self::subgroup`].
    ///
    /// # Errors
    /// [`CommError::Bootstrap`] if the new group does not form. Else as [`Self::all_gather`].
    ///
    /// # Cost
    /// An all-gather of 16 bytes, then as a new group of that size.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>, CommError> {
        let color = color.map_or(NO_COLOR, i64::from);
        let mut all = vec![0; 2 * self.size()];
        self.all_gather(&[color, key], &mut all)?;
        let (pairs, _) = all.as_chunks::<2>();
        let with_us = |&rank: &usize| color != NO_COLOR && pairs[rank][0] == color;
        let mut together: Vec<usize> = (0..self.size()).filter(with_us).collect();
        together.sort_by_key(|&rank| (pairs[rank][1], rank));
        self.form(&together)
    }

    /// The ranks that this group's ranks have in the group that it comes from first: for subgroups of the world,
    /// and for theirs, ranks in the world.
    #[must_use]
    pub fn origin_ranks(&self) -> &[usize] {
        &self.inner.origin
    }

    /// Makes the group of `ranks`, of which this rank is one, if it is.
    fn form(&self, ranks: &[usize]) -> Result<Option<Self>, CommError> {
        let number = self.inner.subgroups.fetch_add(1, Ordering::Relaxed);
        let Some(rank) = ranks.iter().position(|&rank| rank == self.rank()) else { return Ok(None) };
        // Groups of one split have one number, and tell each other apart by their first rank.
        let name = format!("{}/{number}.{}", self.name(), ranks[0]);
        let origin: Vec<usize> = ranks.iter().map(|&rank| self.inner.origin[rank]).collect();
        let mut options = self.inner.options.clone().name(name).generation(self.generation());
        options.timeout = self.timeout;
        options.id = fingerprint(&[options.id as usize, number as usize, ranks[0]]);
        let invitation = Invitation {
            store: Arc::clone(&self.inner.store),
            place: format!("generation {}", self.generation()),
            store_rank: ranks.iter().position(|&rank| Some(rank) == self.inner.store_rank),
            rank,
            size: ranks.len(),
            origin,
            options,
            tuning: self.inner.tuning.clone(),
            // The launcher's word on a dead peer goes to the first group.
            agent: None,
        };
        Self::join(invitation, Some(Box::new(self.clone()))).map(Some)
    }
}
