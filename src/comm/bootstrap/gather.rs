//! Collects the records of all ranks through the store.
//!
//! If the group cannot form, a rank writes the reason under the key of the table. All ranks read that key,
//! so all fail at once with one error.

use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::StoreError;

use super::record::{self, Record};
use super::{CLEAN_UP, LOOKED_UP, NOTICE, Ours, Outcome, RECHECK};
use crate::error::{CommError, Ranks};
use crate::fault::moment;

/// Longest pause between two polls of the store.
const SLOWEST_LOOK: Duration = Duration::from_secs(2);

/// Deadlines of repeated looks at the store, at growing intervals.
pub(super) struct Looks {
    interval: Duration,
    deadline: Instant,
}

impl Looks {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { interval: RECHECK, deadline }
    }

    /// Returns when the next look ends.
    pub(super) fn until(&mut self) -> Instant {
        let until = (Instant::now() + self.interval).min(self.deadline);
        self.interval = (self.interval * 2).min(SLOWEST_LOOK);
        until
    }
}

impl Ours<'_> {
    /// Tries to connect under `generation`.
    pub(super) fn round(&self, generation: Generation) -> Result<Outcome, CommError> {
        let own_key = self.record_key(generation, self.invitation.rank);
        self.leave_record(generation)?;
        moment("recorded", 0, 0);
        let table = match self.table(generation)? {
            Ok(table) => table,
            Err(announced) => {
                let _ = self.store().delete(&own_key, self.deadline);
                return Ok(Outcome::Stale(announced));
            }
        };
        // The record is no longer needed. The store may vanish later: rank 0 may serve it and exit.
        let _ = self.store().delete(&own_key, Instant::now() + CLEAN_UP);
        let outcome = self.meet(generation, &table)?;
        if let Outcome::Connected(_) = outcome {
            self.has_formed(generation);
            let soon = Instant::now() + CLEAN_UP;
            if self.invitation.rank == 0 {
                let _ = self.store().delete(&self.announcement_key(), soon);
                let _ = self.store().delete(&self.key(generation, "table"), soon);
            }
        }
        Ok(outcome)
    }

    /// Writes the record of this rank. Fails if another living process has written a record for this rank.
    fn leave_record(&self, generation: Generation) -> Result<(), CommError> {
        let own = self.encoded();
        let key = self.record_key(generation, self.invitation.rank);
        let mut expected = Vec::new();
        loop {
            let there = self.store().compare_set(&key, &expected, &own, self.deadline)?;
            if there == own {
                return Ok(());
            }
            if let Some(other) = Record::decode(&there).filter(Record::answers) {
                return Err(self.is_there_twice(generation, &other));
            }
            // The record belongs to a process that no longer answers, so this rank replaces it.
            expected = there;
        }
    }

    /// Reports to all ranks that another living process also claims this rank.
    pub(super) fn is_there_twice(&self, generation: Generation, other: &Record) -> CommError {
        let who = |record: &Record| format!("process {} at {}", record.pid, record.address.ip());
        let what = format!(
            "rank {} is there twice: {} and {}; does each process have a RANK of its own, and each job a port of its own?",
            self.invitation.rank,
            who(other),
            who(&self.record)
        );
        self.refuse_all(generation, what, vec![self.invitation.rank])
    }

    /// Publishes to all ranks the reason why the group does not form.
    fn refuse_all(&self, generation: Generation, what: String, ranks: Vec<usize>) -> CommError {
        let refusal = record::refusal(&what, &ranks);
        // A rank that cannot read the reason fails at its own deadline.
        let _ = self.store().set(&self.key(generation, "table"), &refusal, Instant::now() + CLEAN_UP);
        self.failed(what, ranks)
    }

    /// Returns the records of all ranks, or the generation that rank 0 has announced meanwhile.
    fn table(&self, generation: Generation) -> Result<Result<Vec<Record>, Generation>, CommError> {
        let key = self.key(generation, "table");
        if self.invitation.rank == 0 {
            let values = self.gather(generation)?;
            let table = self.checked(record::decode_all(&values));
            // Invalid records are published too, so that the other ranks fail with this error instead of
            // waiting.
            let texts: Vec<_> = values.iter().map(|value| String::from_utf8_lossy(value)).collect();
            let bytes = serde_json::to_vec(&texts).unwrap_or_default();
            self.store().set(&key, &bytes, self.deadline)?;
            return table.map(Ok);
        }
        let mut looks = Looks::new(self.deadline);
        loop {
            match self.store().get(&key, looks.until()) {
                Ok(bytes) => {
                    let table = self.checked(record::decode_table(&bytes))?;
                    if table.get(self.invitation.rank) == Some(&self.record) {
                        return Ok(Ok(table));
                    }
                    // The table contains the record of an earlier process that had this rank.
                    self.pause()?;
                }
                Err(error) if self.may_yet_come(&error) => {}
                Err(StoreError::Timeout { .. }) => return Err(self.missing(generation)),
                Err(error) => return Err(error.into()),
            }
            self.check_standing()?;
            if let Some(announced) = self.announced(generation)? {
                return Ok(Err(announced));
            }
        }
    }

    /// Compares the records of all ranks.
    pub(super) fn checked(
        &self,
        records: Result<Vec<Record>, record::Wrong>,
    ) -> Result<Vec<Record>, CommError> {
        let compared = records.and_then(|records| record::compare(&records).map(|()| records));
        compared.map_err(|(what, ranks)| self.failed(what, ranks))
    }

    fn gather(&self, generation: Generation) -> Result<Vec<Vec<u8>>, CommError> {
        let keys: Vec<_> = (0..self.invitation.size).map(|rank| self.record_key(generation, rank)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let mut notice = Instant::now() + NOTICE.min(self.invitation.options.init_timeout / 3);
        let mut looks = Looks::new(self.deadline);
        loop {
            match self.store().multi_get(&keys, looks.until()) {
                Err(error) if self.may_yet_come(&error) => {}
                Err(StoreError::Timeout { .. }) => return Err(self.missing(generation)),
                other => return Ok(other?),
            }
            self.check_standing()?;
            let refusal = self.store().try_get(&self.key(generation, "table"), self.deadline)?;
            if let Some(Err((what, ranks))) = refusal.map(|bytes| record::decode_table(&bytes)) {
                return Err(self.failed(what, ranks));
            }
            if Instant::now() >= notice {
                notice = Instant::now() + NOTICE;
                let absent = self.absent(generation);
                log::warn!("{}: rank(s) {} have not come yet", self.name(), Ranks(&absent));
            }
        }
    }

    /// Returns the ranks that left no record, among the first [`LOOKED_UP`].
    fn absent(&self, generation: Generation) -> Vec<usize> {
        let soon = Instant::now() + CLEAN_UP;
        let absent = |&rank: &usize| {
            let found = self.store().try_get(&self.record_key(generation, rank), soon);
            matches!(found, Ok(None))
        };
        (0..self.invitation.size).take(LOOKED_UP).filter(absent).collect()
    }

    /// Returns the error that names the ranks without a record. Rank 0 publishes it to all ranks.
    fn missing(&self, generation: Generation) -> CommError {
        let missing = self.absent(generation);
        if missing.is_empty() {
            let waited = self.invitation.options.init_timeout.as_millis();
            return self.failed(format!("rank 0 gathered nobody within {waited} ms: did it die?"), vec![0]);
        }
        let what = self.absence(&missing);
        match self.invitation.rank {
            0 => self.refuse_all(generation, what, missing),
            _ => self.failed(what, missing),
        }
    }

    /// Describes the absence of these ranks, with the place where they were awaited and the settings that lead there.
    fn absence(&self, missing: &[usize]) -> String {
        let Self { invitation, .. } = self;
        format!(
            "rank(s) {} of {} did not come within {} ms{}",
            Ranks(missing),
            invitation.size,
            invitation.options.init_timeout.as_millis(),
            invitation.whereabouts
        )
    }

    /// Returns the error of a rank that awaited rank 0 in vain.
    pub(super) fn without_rank_0(&self) -> CommError {
        self.failed(self.absence(&[0]), vec![0])
    }

    /// Returns true if a store call that found nothing may succeed when repeated before the deadline. On a
    /// slow network, connecting alone may take longer than one poll.
    pub(super) fn may_yet_come(&self, error: &StoreError) -> bool {
        let in_vain = matches!(error, StoreError::Timeout { .. } | StoreError::Unreachable { .. });
        in_vain && Instant::now() < self.deadline
    }

    pub(super) fn pause(&self) -> Result<(), CommError> {
        if Instant::now() >= self.deadline {
            return Err(self.without_rank_0());
        }
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }
}
