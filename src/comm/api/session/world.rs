//! The group of all ranks of a job.

use std::ops::Deref;
use std::path::PathBuf;

use convoke_env::vars;

use crate::api::group::Group;
use crate::collectives::dtype::ReduceOp;
use crate::error::CommError;

/// The group of all ranks of a job, in one rendezvous round.
///
/// Dereferences to a [`Group`], and adds local rank and restart count.
#[derive(Debug)]
pub struct World {
    group: Group,
    /// Local rank and local world size.
    local: (usize, usize),
    restart_count: u32,
    /// The file that the launcher creates when the job is drained (CONVOKE_DRAIN_FILE).
    drain_file: Option<PathBuf>,
}

impl World {
    /// `local` holds the local rank and local world size that a launcher passed; `None` without a launcher.
    pub(super) fn new(group: Group, local: Option<(usize, usize)>, restart_count: u32) -> Self {
        let local = local.unwrap_or_else(|| group.local_rank_and_size());
        let drain_file = std::env::var_os(vars::DRAIN_FILE).map(PathBuf::from);
        Self { group, local, restart_count, drain_file }
    }

    /// Returns the world of a group whose launcher creates this file when the job is drained.
    #[cfg(all(test, not(loom)))]
    pub(super) fn with_drain_file(group: Group, file: PathBuf) -> Self {
        Self { drain_file: Some(file), ..Self::new(group, None, 0) }
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

    /// Returns true if the job is being drained: its ranks should save their state now, and exit with the
    /// launcher's `--drain-exit-code` (75).
    ///
    /// All ranks call this function at the same point of their program, usually once in each step, and all of
    /// them get the same answer. The launcher asks for a drain when its scheduler is about to end the job. Some
    /// ranks may learn of that earlier than others, so they agree by an all-reduce of one byte. A rank looks for
    /// the file CONVOKE_DRAIN_FILE, which costs a system call.
    ///
    /// # Errors
    /// The errors of [`Group::all_reduce`].
    pub fn drain(&self) -> Result<bool, CommError> {
        let is_asked = self.drain_file.as_ref().is_some_and(|file| file.exists());
        let mut asked = [u8::from(is_asked)];
        if self.group.size() > 1 {
            self.group.all_reduce(&mut asked, ReduceOp::Max)?;
        }
        Ok(asked[0] > 0)
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
