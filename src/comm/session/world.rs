//! All ranks of a job.

use std::fmt;
use std::ops::Deref;

use convoke_env::vars;

use crate::group::Group;

/// All ranks of a job, in one round.
///
/// Is a [`Group`], and knows more about where this process stands.
pub struct World {
    group: Group,
    local_rank: usize,
    local_world_size: usize,
    restart_count: u32,
}

impl World {
    /// `told`: what a launcher says about rank and number of ranks on this node.
    pub(super) fn new(group: Group, told: Option<(usize, usize)>, restart_count: u32) -> Self {
        let (local_rank, local_world_size) = told.unwrap_or_else(|| group.place_on_host());
        Self { group, local_rank, local_world_size, restart_count }
    }

    /// Index of this process among those of its node: as the launcher says, else in the order of the
    /// ranks that share this host.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Number of processes on this node.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.local_world_size
    }

    /// How often this node's launcher has restarted its workers.
    #[must_use]
    pub fn restart_count(&self) -> u32 {
        self.restart_count
    }

    /// The group of all ranks, as a handle of its own.
    #[must_use]
    pub fn group(&self) -> Group {
        self.group.clone()
    }
}

/// Whether an elastic launcher (convoke, torchrun) has started this process: as torch's
/// `is_torchelastic_launched` it asks for TORCHELASTIC_RUN_ID.
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

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("group", &self.group)
            .field("local_rank", &self.local_rank)
            .field("local_world_size", &self.local_world_size)
            .field("restart_count", &self.restart_count)
            .finish()
    }
}
