//! Agrees on the generation, a random number that is part of the store keys with which ranks find each
//! other. The launcher gives it, or rank 0 draws it and announces it in the store.
//!
//! An announcement may be left over from a crashed job. So a rank reads the announcement again until
//! rank 0 has confirmed the generation in a handshake.

use std::time::Instant;

use convoke_env::Generation;

use super::gather::Polls;
use super::record::Announcement;
use super::{Bootstrap, RoundError};
use crate::error::CommError;
use crate::json;

impl Bootstrap<'_> {
    pub(super) fn announcement_key(&self) -> Vec<u8> {
        format!("{}/generation", self.name()).into_bytes()
    }

    /// Returns the generation that the launcher gave. If it gave none, rank 0 draws one, and the other
    /// ranks wait until rank 0 announces it in the store.
    pub(super) fn initial_generation(&self) -> Result<Generation, CommError> {
        let given = self.config.options.generation;
        if self.config.rank == 0 {
            let Some(generation) = given else { return self.announce_new_generation() };
            let announcement = Announcement { generation: generation.to_string(), given: true };
            self.store().set(&self.announcement_key(), &json::encode(&announcement), self.deadline)?;
            return Ok(generation);
        }
        if let Some(given) = given {
            return Ok(given);
        }
        let mut polls = Polls::new(self.deadline);
        loop {
            let read = |until| self.store().get(&self.announcement_key(), until);
            let Some(announced) = polls.read(read, |end| self.rank_0_absent_error(end))? else {
                self.check_world_entry()?;
                continue;
            };
            if let Some((generation, _)) = Announcement::decode(&announced) {
                return Ok(generation);
            }
            self.pause()?;
        }
    }

    /// Draws a generation and announces it, unless another process that still listens has announced one as
    /// rank 0. If two processes with rank 0 start together, exactly one of them announces.
    fn announce_new_generation(&self) -> Result<Generation, CommError> {
        let key = self.announcement_key();
        loop {
            let announced = self.store().try_get(&key, self.deadline)?;
            self.check_announcer(announced.as_deref())?;
            let generation = Generation::random()
                .map_err(|error| CommError::system("cannot get random numbers", error))?;
            // Another process with rank 0 that sees the announcement must find the record as well.
            self.publish_record(generation)?;
            let announcement = Announcement { generation: generation.to_string(), given: false };
            let bytes = json::encode(&announcement);
            let expected = announced.as_deref().unwrap_or(b"");
            if self.store().compare_set(&key, expected, &bytes, self.deadline)? == bytes {
                return Ok(generation);
            }
            let _ = self.store().delete(&self.record_key(generation, 0), self.deadline);
        }
    }

    /// Returns an error if the process that made the announcement as rank 0 still listens.
    fn check_announcer(&self, announced: Option<&[u8]>) -> Result<(), CommError> {
        let Some((generation, _)) = announced.and_then(Announcement::decode) else {
            return Ok(());
        };
        let record = self.store().try_get(&self.record_key(generation, 0), self.deadline)?;
        record.map_or(Ok(()), |record| self.check_duplicate(generation, &record))
    }

    /// Returns [`RoundError::Stale`] if rank 0 has now announced a generation other than `current` in the
    /// store.
    pub(super) fn check_generation(&self, current: Generation) -> Result<(), RoundError> {
        if self.config.rank == 0 {
            return Ok(());
        }
        let announced = match self.store().try_get(&self.announcement_key(), self.deadline) {
            // The caller reports the timeout, since only the caller knows for what it waits.
            Err(_) if Instant::now() >= self.deadline => return Ok(()),
            other => other?,
        };
        match announced.as_deref().and_then(Announcement::decode) {
            // If launchers gave both generations, the announcement belongs to another round of the
            // job, and this rank waits for rank 0 of its own round. Otherwise the announced generation
            // replaces the current one.
            Some((_, true)) if self.config.options.generation.is_some() => Ok(()),
            Some((generation, _)) if generation != current => Err(RoundError::Stale(generation)),
            Some(_) | None => Ok(()),
        }
    }
}
