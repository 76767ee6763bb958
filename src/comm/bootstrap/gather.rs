//! Collects the records of all ranks through the store.
//!
//! If the group cannot form, a rank writes the reason in place of the table of records. All ranks read the
//! table's key, so all fail at once with the same error.

use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::StoreError;

use super::record::{self, Record};
use super::{Bootstrap, CLEANUP_TIMEOUT, MAX_LOOKUPS, POLL_INTERVAL, RoundOutcome, WARN_INTERVAL};
use crate::error::{CommError, Ranks};
use crate::fault::fault_point;
use crate::json;

/// Longest pause between two polls of the store.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Deadlines of successive reads of the store. Each read may take longer than the one before, up to a limit.
pub(super) struct PollDeadlines {
    interval: Duration,
    deadline: Instant,
}

impl PollDeadlines {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { interval: POLL_INTERVAL, deadline }
    }

    /// Returns the deadline of the next read.
    pub(super) fn next_deadline(&mut self) -> Instant {
        let until = (Instant::now() + self.interval).min(self.deadline);
        self.interval = (self.interval * 2).min(MAX_POLL_INTERVAL);
        until
    }
}

impl Bootstrap<'_> {
    /// Publishes this rank's record under `generation`, reads the table of all records, and connects to the
    /// ranks in it.
    pub(super) fn run_round(&self, generation: Generation) -> Result<RoundOutcome, CommError> {
        let own_key = self.record_key(generation, self.config.rank);
        let is_given = self.config.options.generation.is_some();
        // A refusal that is there before the record of this rank belongs to an earlier attempt. A generation
        // that rank 0 has drawn had none.
        let stale_table = match self.config.rank {
            0 if is_given => self.store().try_get(&self.key(generation, "table"), self.deadline)?,
            _ => None,
        };
        // Rank 0 has published its record before it announced a generation that it has drawn.
        if self.config.rank != 0 || is_given {
            self.publish_record(generation)?;
        }
        fault_point("recorded", 0, 0);
        let table = match self.table(generation, stale_table)? {
            Ok(table) => table,
            Err(announced) => {
                let _ = self.store().delete(&own_key, self.deadline);
                return Ok(RoundOutcome::Stale(announced));
            }
        };
        // The record is no longer needed. It is deleted now, since the store may end later: rank 0 may serve
        // it and exit.
        let _ = self.store().delete(&own_key, Instant::now() + CLEANUP_TIMEOUT);
        let outcome = self.connect_ranks(generation, &table)?;
        if let RoundOutcome::Connected(_) = outcome {
            self.record_formed(generation);
            let soon = Instant::now() + CLEANUP_TIMEOUT;
            if self.config.rank == 0 {
                let _ = self.store().delete(&self.announcement_key(), soon);
                let _ = self.store().delete(&self.key(generation, "table"), soon);
            }
        }
        Ok(outcome)
    }

    /// Writes the record of this rank to the store. Fails if another process that still listens has written a
    /// record for this rank.
    pub(super) fn publish_record(&self, generation: Generation) -> Result<(), CommError> {
        let key = self.record_key(generation, self.config.rank);
        // A record of a process that no longer listens is replaced.
        self.replace(&key, Vec::new(), &self.encoded_record(), |there| {
            match Record::decode(there).filter(Record::is_reachable) {
                Some(other) => Err(self.duplicate_rank_error(generation, &other)),
                None => Ok(()),
            }
        })
    }

    /// Stores `value` under `key` if the value there is `expected` (absent if empty), or any other for which
    /// `may_replace` returns no error.
    fn replace(
        &self,
        key: &[u8],
        mut expected: Vec<u8>,
        value: &[u8],
        may_replace: impl Fn(&[u8]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        loop {
            let there = self.store().compare_set(key, &expected, value, self.deadline)?;
            if there == value {
                return Ok(());
            }
            if there == expected {
                // The key was deleted: the store returns the expected value and stores nothing.
                expected.clear();
                continue;
            }
            may_replace(&there)?;
            expected = there;
        }
    }

    /// Reports to all ranks that another living process also claims this rank.
    pub(super) fn duplicate_rank_error(&self, generation: Generation, other: &Record) -> CommError {
        let who = |record: &Record| format!("process {} at {}", record.pid, record.address.ip());
        let what = format!(
            "two processes have rank {}: {} and {}; does each process have its own RANK, and each job its \
             own port?",
            self.config.rank,
            who(other),
            who(&self.record)
        );
        let refusal = record::encode_refusal(&what, &[self.config.rank]);
        // If rank 0 has published a table, the group forms without this process. If this write fails, the
        // other ranks fail at their own deadlines.
        let soon = Instant::now() + CLEANUP_TIMEOUT;
        let _ = self.store().compare_set(&self.key(generation, "table"), b"", &refusal, soon);
        self.bootstrap_error(what, vec![self.config.rank])
    }

    /// Publishes to all ranks the reason `what` for which the group cannot form. Returns it as an error of
    /// this rank.
    fn publish_refusal(&self, generation: Generation, what: String, ranks: Vec<usize>) -> CommError {
        let refusal = record::encode_refusal(&what, &ranks);
        // If this write fails, the other ranks do not see the reason and fail at their own deadlines.
        let _ = self.store().set(&self.key(generation, "table"), &refusal, Instant::now() + CLEANUP_TIMEOUT);
        self.bootstrap_error(what, ranks)
    }

    /// Returns the records of all ranks, or the inner `Err` with the new generation if rank 0 has announced
    /// another one.
    fn table(
        &self,
        generation: Generation,
        stale_table: Option<Vec<u8>>,
    ) -> Result<Result<Vec<Record>, Generation>, CommError> {
        let key = self.key(generation, "table");
        if self.config.rank == 0 {
            let values = self.gather(generation, stale_table.as_deref())?;
            let table = self.check_records(record::decode_all(&values));
            // Invalid records are published too, so that the other ranks fail with this error instead of
            // waiting.
            let texts: Vec<_> = values.iter().map(|value| String::from_utf8_lossy(value)).collect();
            let bytes = json::encode(&texts);
            self.publish_table(&key, &bytes, stale_table.as_deref().unwrap_or(b""))?;
            return table.map(Ok);
        }
        let mut polls = PollDeadlines::new(self.deadline);
        loop {
            match self.store().get(&key, polls.next_deadline()) {
                Ok(bytes) => {
                    let table = self.check_records(record::decode_table(&bytes))?;
                    if table.get(self.config.rank) == Some(&self.record) {
                        return Ok(Ok(table));
                    }
                    // The table contains the record of an earlier process that had this rank.
                    self.pause()?;
                }
                Err(error) if self.can_retry(&error) => {}
                Err(StoreError::Timeout { .. }) => return Err(self.missing_ranks_error(generation)),
                Err(error) => return Err(error.into()),
            }
            self.check_world_entry()?;
            if let Some(announced) = self.superseding_generation(generation)? {
                return Ok(Err(announced));
            }
        }
    }

    /// Publishes the table `bytes`, which replaces `stale`. Fails if another process published a refusal after
    /// `stale`: other ranks may have read it.
    fn publish_table(&self, key: &[u8], bytes: &[u8], stale: &[u8]) -> Result<(), CommError> {
        self.replace(key, stale.to_vec(), bytes, |there| match record::decode_table(there) {
            Err(error @ record::RecordError::Refused { .. }) => {
                Err(self.bootstrap_error(error.to_string(), error.ranks()))
            }
            Ok(_) | Err(_) => Ok(()),
        })
    }

    /// Checks that all records could be decoded and that all ranks have equal settings.
    pub(super) fn check_records(
        &self,
        records: Result<Vec<Record>, record::RecordError>,
    ) -> Result<Vec<Record>, CommError> {
        let compared = records.and_then(|records| record::compare(&records).map(|()| records));
        compared.map_err(|error| self.bootstrap_error(error.to_string(), error.ranks()))
    }

    fn gather(&self, generation: Generation, stale_table: Option<&[u8]>) -> Result<Vec<Vec<u8>>, CommError> {
        let keys: Vec<_> = (0..self.config.size).map(|rank| self.record_key(generation, rank)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let mut notice = Instant::now() + WARN_INTERVAL.min(self.config.options.init_timeout / 3);
        let mut polls = PollDeadlines::new(self.deadline);
        loop {
            match self.store().multi_get(&keys, polls.next_deadline()) {
                Err(error) if self.can_retry(&error) => {}
                Err(StoreError::Timeout { .. }) => return Err(self.missing_ranks_error(generation)),
                other => return Ok(other?),
            }
            self.check_world_entry()?;
            let table = self.store().try_get(&self.key(generation, "table"), self.deadline)?;
            let refusal = table.filter(|bytes| stale_table != Some(bytes.as_slice()));
            if let Some(Err(error)) = refusal.map(|bytes| record::decode_table(&bytes)) {
                return Err(self.bootstrap_error(error.to_string(), error.ranks()));
            }
            if Instant::now() >= notice {
                notice = Instant::now() + WARN_INTERVAL;
                let absent = self.absent_ranks(generation);
                log::warn!("{}: rank(s) {} have not joined yet", self.name(), Ranks(&absent));
            }
        }
    }

    /// Returns the ranks that have no record in the store. Looks up only the first [`MAX_LOOKUPS`] ranks.
    fn absent_ranks(&self, generation: Generation) -> Vec<usize> {
        let soon = Instant::now() + CLEANUP_TIMEOUT;
        let absent = |&rank: &usize| {
            let found = self.store().try_get(&self.record_key(generation, rank), soon);
            matches!(found, Ok(None))
        };
        (0..self.config.size).take(MAX_LOOKUPS).filter(absent).collect()
    }

    /// Returns the error that names the ranks without a record. Rank 0 publishes it to all ranks.
    fn missing_ranks_error(&self, generation: Generation) -> CommError {
        let missing = self.absent_ranks(generation);
        if missing.is_empty() {
            let waited = self.config.options.init_timeout.as_millis();
            return self.bootstrap_error(
                format!("rank 0 did not publish the addresses of the ranks within {waited} ms: did it die?"),
                vec![0],
            );
        }
        let what = self.describe_absence(&missing);
        match self.config.rank {
            0 => self.publish_refusal(generation, what, missing),
            _ => self.bootstrap_error(what, missing),
        }
    }

    /// Says in a text that the ranks `missing` did not join, at which store they were expected, and which
    /// settings lead a rank to that store.
    fn describe_absence(&self, missing: &[usize]) -> String {
        let Self { config, .. } = self;
        format!(
            "rank(s) {} of {} did not join within {} ms{}",
            Ranks(missing),
            config.size,
            config.options.init_timeout.as_millis(),
            config.store_location
        )
    }

    /// Returns the error of a rank for which rank 0 did not join in time.
    pub(super) fn rank_0_absent_error(&self) -> CommError {
        self.bootstrap_error(self.describe_absence(&[0]), vec![0])
    }

    /// Returns true if a store operation that timed out or could not connect may be repeated, since the
    /// deadline for joining has not passed. On a slow network, connecting to the store alone may take longer
    /// than one read is allowed.
    pub(super) fn can_retry(&self, error: &StoreError) -> bool {
        let in_vain = matches!(error, StoreError::Timeout { .. } | StoreError::Unreachable { .. });
        in_vain && Instant::now() < self.deadline
    }

    pub(super) fn pause(&self) -> Result<(), CommError> {
        if Instant::now() >= self.deadline {
            return Err(self.rank_0_absent_error());
        }
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }
}
