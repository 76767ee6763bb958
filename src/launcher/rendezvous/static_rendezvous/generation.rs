//! The generation (unique id) of each round of a static job.

use std::time::Instant;

use convoke_env::Generation;
use convoke_store::Store;

use super::{Joined, OPERATION_TIMEOUT, RendezvousError};

/// Prefix of the keys that hold the generation (unique id) of each round, by round number. Only convoke uses
/// these keys.
const GENERATION: &str = "convoke/generation/";

impl Joined {
    /// Agrees with the other nodes on the generation of the round after a restart. Each node restarts its own
    /// workers only, but all nodes use the same generation. The first node that restarts creates it, and
    /// nodes that restart later use the newest generation.
    pub(super) fn next_generation(&mut self, run_id: &str) -> Result<(), RendezvousError> {
        if self.assignment.generation.is_none() {
            return Ok(());
        }
        let mut newest = None;
        while let Some(generation) = read_generation(self.job.as_ref(), self.round + 1)? {
            newest = Some(generation);
            self.round += 1;
        }
        if newest.is_none() {
            let mine = Generation::random().map_err(RendezvousError::system("cannot get random numbers"))?;
            let deadline = Instant::now() + OPERATION_TIMEOUT;
            let key = generation_key(self.round + 1);
            let text = mine.to_string();
            let agreed = self.job.compare_set(key.as_bytes(), b"", text.as_bytes(), deadline)?;
            self.round += 1;
            if agreed == text.as_bytes() {
                newest = Some(mine);
                self.delete_worker_keys(run_id)?;
            } else {
                newest = read_generation(self.job.as_ref(), self.round)?;
            }
        }
        self.assignment.generation = newest;
        Ok(())
    }

    /// Deletes the keys that the workers of the previous round left in the store, so that workers of the next
    /// round do not read them.
    fn delete_worker_keys(&self, run_id: &str) -> Result<(), RendezvousError> {
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let ours = [format!("{run_id}/torchelastic/"), format!("{run_id}/convoke/")];
        for key in self.store.list_keys(deadline)? {
            if !ours.iter().any(|prefix| key.starts_with(prefix.as_bytes())) {
                self.store.delete(&key, deadline)?;
            }
        }
        Ok(())
    }
}

/// Returns the generation of this round, or `None` if no node has written it.
pub(super) fn read_generation(job: &dyn Store, round: u64) -> Result<Option<Generation>, RendezvousError> {
    let key = generation_key(round);
    let text = job.try_get(key.as_bytes(), Instant::now() + OPERATION_TIMEOUT)?;
    let parse = |text: Vec<u8>| {
        let text = String::from_utf8_lossy(&text);
        text.parse().map_err(|error: convoke_env::ParseGenerationError| RendezvousError::Malformed {
            node: 0,
            key: key.clone(),
            what: error.to_string(),
        })
    };
    text.map(parse).transpose()
}

pub(super) fn generation_key(round: u64) -> String {
    format!("{GENERATION}{round}")
}
