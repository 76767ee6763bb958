//! Collects the records of all ranks through the store.
//!
//! If the group cannot form, a rank writes the reason in place of the table of records. All ranks read the
//! table's key, so all fail at once with the same error.

use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::StoreError;
use convoke_store::interrupt::{self, INTERRUPTED};

use super::record::{self, Record};
use super::{
    Bootstrap, BootstrapConfig, CLEANUP_TIMEOUT, ConnectedGroup, MAX_LOOKUPS, POLL_INTERVAL, RoundError,
    WARN_INTERVAL,
};
use crate::error::{CommError, Ranks};
use crate::fault::fault_point;
use crate::json;

/// Longest pause between two polls of the store.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Successive reads of the store. Each may take longer than the one before, up to a limit.
pub(super) struct Polls {
    interval: Duration,
    deadline: Instant,
}

impl Polls {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { interval: POLL_INTERVAL, deadline }
    }

    /// Calls `read` with the time until which it may wait. Returns `None` if it is to be repeated because it
    /// timed out or could not connect, and the deadline has not passed. On a slow network, connecting to the
    /// store alone may take longer than one read is allowed. `failed` returns the error at the deadline, and
    /// of a program that was interrupted.
    pub(super) fn read<T>(
        &mut self,
        read: impl FnOnce(Instant) -> Result<T, StoreError>,
        failed: impl FnOnce(WaitEnd) -> CommError,
    ) -> Result<Option<T>, CommError> {
        let until = (Instant::now() + self.interval).min(self.deadline);
        self.interval = (self.interval * 2).min(MAX_POLL_INTERVAL);
        match read(until) {
            Ok(value) => Ok(Some(value)),
            Err(StoreError::Timeout { .. } | StoreError::Unreachable { .. })
                if Instant::now() < self.deadline =>
            {
                Ok(None)
            }
            Err(StoreError::Timeout { .. }) => Err(failed(WaitEnd::Deadline)),
            Err(StoreError::Interrupted { .. }) => Err(failed(WaitEnd::Interrupted)),
            Err(error) => Err(error.into()),
        }
    }
}

/// The reason for which this rank no longer waits for the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitEnd {
    Deadline,
    Interrupted,
}

impl Bootstrap<'_> {
    /// Publishes this rank's record under `generation`, reads the table of all records, and connects to the
    /// ranks in it.
    pub(super) fn run_round(&self, generation: Generation) -> Result<ConnectedGroup, RoundError> {
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
        let table = self.table(generation, stale_table).inspect_err(|error| {
            if let RoundError::Stale(_) = error {
                let _ = self.store().delete(&own_key, self.deadline);
            }
        })?;
        // The record is no longer needed. It is deleted now, since the store may end later: rank 0 may serve
        // it and exit.
        let _ = self.store().delete(&own_key, Instant::now() + CLEANUP_TIMEOUT);
        let connected = self.connect_ranks(generation, &table)?;
        self.record_formed(generation);
        let soon = Instant::now() + CLEANUP_TIMEOUT;
        if self.config.rank == 0 {
            let _ = self.store().delete(&self.announcement_key(), soon);
            let _ = self.store().delete(&self.key(generation, "table"), soon);
        }
        Ok(connected)
    }

    /// Writes the record of this rank to the store. Fails if another process that still listens has written a
    /// record for this rank.
    pub(super) fn publish_record(&self, generation: Generation) -> Result<(), CommError> {
        let key = self.record_key(generation, self.config.rank);
        // A record of a process that no longer listens is replaced.
        let may_replace = |there: &[u8]| self.check_duplicate(generation, there);
        self.replace(&key, Vec::new(), &json::encode(&self.record), may_replace)
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

    /// Returns an error if `record`, of this rank, is that of another process that still listens. Reports it
    /// to all ranks.
    pub(super) fn check_duplicate(&self, generation: Generation, record: &[u8]) -> Result<(), CommError> {
        let Some(other) = Record::decode(record).filter(Record::is_reachable) else { return Ok(()) };
        let who = |record: &Record| format!("process {} at {}", record.pid, record.address.ip());
        let what = format!(
            "two processes have rank {}: {} and {}; does each process have its own RANK, and each job its \
             own port?",
            self.config.rank,
            who(&other),
            who(&self.record)
        );
        let refusal = record::encode_refusal(&what, &[self.config.rank]);
        // If rank 0 has published a table, the group forms without this process. If this write fails, the
        // other ranks fail at their own deadlines.
        let soon = Instant::now() + CLEANUP_TIMEOUT;
        let _ = self.store().compare_set(&self.key(generation, "table"), b"", &refusal, soon);
        Err(self.bootstrap_error(what, vec![self.config.rank]))
    }

    /// Publishes to all ranks the reason `what` for which the group cannot form. Returns it as an error of
    /// this rank.
    fn publish_refusal(&self, generation: Generation, what: String, ranks: Vec<usize>) -> CommError {
        let refusal = record::encode_refusal(&what, &ranks);
        // If this write fails, the other ranks do not see the reason and fail at their own deadlines.
        let _ = self.store().set(&self.key(generation, "table"), &refusal, Instant::now() + CLEANUP_TIMEOUT);
        self.bootstrap_error(what, ranks)
    }

    fn table(&self, generation: Generation, stale_table: Option<Vec<u8>>) -> Result<Vec<Record>, RoundError> {
        let key = self.key(generation, "table");
        if self.config.rank == 0 {
            let values = self.gather(generation, stale_table.as_deref())?;
            let table = self.check_records(record::decode_all(&values));
            // Invalid records are published too, so that the other ranks fail with this error instead of
            // waiting.
            let texts: Vec<_> = values.iter().map(|value| String::from_utf8_lossy(value)).collect();
            let bytes = json::encode(&texts);
            self.publish_table(&key, &bytes, stale_table.as_deref().unwrap_or(b""))?;
            return Ok(table?);
        }
        let mut polls = Polls::new(self.deadline);
        loop {
            let read = |until| self.store().get(&key, until);
            if let Some(bytes) = polls.read(read, |end| self.missing_ranks_error(generation, end))? {
                let table = self.check_records(record::decode_table(&bytes))?;
                if table.get(self.config.rank) == Some(&self.record) {
                    return Ok(table);
                }
                // The table contains the record of an earlier process that had this rank.
                self.pause()?;
            }
            self.check_world_entry()?;
            self.check_generation(generation)?;
        }
    }

    /// Publishes the table `bytes`, which replaces `stale`. Fails if another process published a refusal
    /// after `stale`: other ranks may have read it.
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
        let mut polls = Polls::new(self.deadline);
        loop {
            let read = |until| self.store().multi_get(&keys, until);
            if let Some(records) = polls.read(read, |end| self.missing_ranks_error(generation, end))? {
                return Ok(records);
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

    /// Returns the error that names the ranks without a record. Rank 0 publishes it to all ranks. Another rank
    /// that was interrupted withdraws its record, since it will not connect.
    fn missing_ranks_error(&self, generation: Generation, end: WaitEnd) -> CommError {
        let rank = self.config.rank;
        if rank != 0 && end == WaitEnd::Interrupted {
            let soon = Instant::now() + CLEANUP_TIMEOUT;
            let _ = self.store().delete(&self.record_key(generation, rank), soon);
        }
        let mut missing = self.absent_ranks(generation);
        // The record of this rank may have been withdrawn just now.
        missing.retain(|&absent| absent != rank);
        if missing.is_empty() {
            let what = match end {
                WaitEnd::Deadline => {
                    let waited = self.config.options.init_timeout.as_millis();
                    format!(
                        "rank 0 did not publish the addresses of the ranks within {waited} ms: did it die?"
                    )
                }
                WaitEnd::Interrupted => {
                    self.describe_interruption("rank 0 to publish the addresses of the ranks")
                }
            };
            return self.bootstrap_error(what, vec![0]);
        }
        let what = self.describe_absence(&missing, end);
        match (rank, end) {
            (0, WaitEnd::Deadline) => self.publish_refusal(generation, what, missing),
            (0, WaitEnd::Interrupted) => {
                // For the other ranks, rank 0 is the cause.
                self.publish_refusal(generation, what.clone(), vec![0]);
                self.bootstrap_error(what, missing)
            }
            _ => self.bootstrap_error(what, missing),
        }
    }

    /// Says in a text that the ranks `missing` did not join, at which store they were expected, and which
    /// settings lead a rank to that store.
    fn describe_absence(&self, missing: &[usize], end: WaitEnd) -> String {
        let BootstrapConfig { size, options, store_location, .. } = self.config;
        let (ranks, waited) = (Ranks(missing), options.init_timeout.as_millis());
        match end {
            WaitEnd::Deadline => {
                format!("rank(s) {ranks} of {size} did not join within {waited} ms{store_location}")
            }
            WaitEnd::Interrupted => {
                self.describe_interruption(&format!("rank(s) {ranks} of {size} to join{store_location}"))
            }
        }
    }

    fn describe_interruption(&self, awaited: &str) -> String {
        let rank = self.config.rank;
        format!("rank {rank} was {INTERRUPTED}, while it waited for {awaited}")
    }

    /// Returns the error of a rank that no longer waits for rank 0, which did not join.
    pub(super) fn rank_0_absent_error(&self, end: WaitEnd) -> CommError {
        self.bootstrap_error(self.describe_absence(&[0], end), vec![0])
    }

    pub(super) fn pause(&self) -> Result<(), CommError> {
        if Instant::now() >= self.deadline {
            return Err(self.rank_0_absent_error(WaitEnd::Deadline));
        }
        if interrupt::is_interrupted() {
            return Err(self.rank_0_absent_error(WaitEnd::Interrupted));
        }
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }
}
