//! The generation (unique id) of each round of a static job.

use convoke_env::Generation;
use convoke_store::Store;

use super::{Joined, RendezvousError, malformed, soon};

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
        if read_generation(self.job.as_ref(), self.round + 1)?.is_none() {
            let mine = Generation::random().map_err(RendezvousError::system("cannot get random numbers"))?;
            let (key, mine) = (generation_key(self.round + 1), mine.to_string());
            let agreed = self.job.compare_set(key.as_bytes(), b"", mine.as_bytes(), soon())?;
            if agreed == mine.as_bytes() {
                self.delete_worker_keys(run_id)?;
            }
        }
        while let Some(newest) = read_generation(self.job.as_ref(), self.round + 1)? {
            self.assignment.generation = Some(newest);
            self.round += 1;
        }
        Ok(())
    }

    /// Deletes the keys that the workers of the previous round left in the store, so that workers of the next
    /// round do not read them.
    fn delete_worker_keys(&self, run_id: &str) -> Result<(), RendezvousError> {
        let ours = [format!("{run_id}/torchelastic/"), format!("{run_id}/convoke/")];
        for key in self.store.list_keys(soon())? {
            if !ours.iter().any(|prefix| key.starts_with(prefix.as_bytes())) {
                self.store.delete(&key, soon())?;
            }
        }
        Ok(())
    }
}

/// Returns the generation of this round, or `None` if no node has written it.
pub(super) fn read_generation(job: &dyn Store, round: u64) -> Result<Option<Generation>, RendezvousError> {
    let key = generation_key(round);
    let text = job.try_get(key.as_bytes(), soon())?;
    let parse = |text: Vec<u8>| {
        let parsed = String::from_utf8_lossy(&text).parse::<Generation>();
        parsed.map_err(|error| malformed(0, key, error))
    };
    text.map(parse).transpose()
}

pub(super) fn generation_key(round: u64) -> String {
    format!("{GENERATION}{round}")
}
