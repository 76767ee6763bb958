//! The group of all ranks of a job.

use std::ops::Deref;

use convoke_env::vars;

use crate::api::group::Group;

/// The group of all ranks of a job, in one rendezvous round.
///
/// Dereferences to a [`Group`], and adds local rank and restart count.
#[derive(Debug)]
pub struct World {
    group: Group,
    /// Local rank and local world size.
    local: (usize, usize),
    restart_count: u32,
}

impl World {
    /// `local` holds the local rank and local world size that a launcher passed; `None` without a launcher.
    pub(super) fn new(group: Group, local: Option<(usize, usize)>, restart_count: u32) -> Self {
        let local = local.unwrap_or_else(|| group.local_rank_and_size());
        Self { group, local, restart_count }
    }

    /// Returns the index of this process on its node, from the launcher. Without a launcher, it is the
    /// index among the ranks that share this host.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local.0
    }

    /// Returns the number of processes on this node.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.local.1
    }

    /// Returns the number of times that this node's launcher has restarted its workers.
    #[must_use]
    pub fn restart_count(&self) -> u32 {
        self.restart_count
    }

    /// Returns another handle to the group of all ranks.
    #[must_use]
    pub fn group(&self) -> Group {
        self.group.clone()
    }
}

/// Returns true if TORCHELASTIC_RUN_ID is set, which elastic launchers (convoke, torchrun) do. Counterpart
/// of torch's `is_torchelastic_launched`.
#[must_use]
pub fn is_elastic() -> bool {
    std::env::var_os(vars::RUN_ID).is_some()
}

impl Deref for World {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.group
    }
}
