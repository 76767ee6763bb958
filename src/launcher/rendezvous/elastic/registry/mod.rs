//! The registry: a shared file or etcd. It holds the address of a job's coordinator and the record that a
//! successor needs.
//!
//! A node that finds no coordinator, or a lost one, makes itself the coordinator. It replaces the entry by
//! one with a higher term, by compare-and-swap, so that only one node succeeds. A replaced coordinator starts
//! no more rounds ([`super::leadership`]).

#[cfg(feature = "etcd")]
mod etcd;
mod file;

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

#[cfg(feature = "etcd")]
pub(super) use etcd::EtcdRegistry;
pub(super) use file::FileRegistry;

use crate::membership::{AgentId, JobResult, Record};

/// Reason for which the registry gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum RegistryError {
    /// A temporary error, with its description: the caller tries again.
    #[error("{0}")]
    Transient(String),
    /// A permanent error, with its description: another attempt would fail as well.
    #[error("{0}")]
    Permanent(String),
}

/// Registry entry that names a job's coordinator. It is small because every node reads it and is notified of
/// changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    version: u32,
    pub(super) term: u64,
    /// Number of records that the coordinator of this term has written.
    #[serde(rename = "edition")]
    record_count: u64,
    /// Addresses at which the coordinator of this term listens.
    pub(super) addresses: Vec<SocketAddr>,
    /// Agent that runs the coordinator.
    pub(super) agent: AgentId,
    /// Random key of the job. A node that knows the key proves that it may read the registry. The job's first
    /// coordinator creates the key.
    pub(super) key: [u8; 32],
    /// Outcome of the job, if it has ended, copied from the record.
    #[serde(rename = "ending")]
    pub(super) result: Option<JobResult>,
}

impl Entry {
    const VERSION: u32 = 5;

    pub(super) fn new(
        term: u64,
        addresses: Vec<SocketAddr>,
        agent: AgentId,
        key: [u8; 32],
        result: Option<JobResult>,
    ) -> Self {
        Self { version: Self::VERSION, term, record_count: 0, addresses, agent, key, result }
    }

    /// Returns the entry of this coordinator after it has written another record.
    pub(super) fn after(&self, record: &Record) -> Self {
        Self { record_count: self.record_count + 1, result: record.result.clone(), ..self.clone() }
    }

    /// Checks the version of an entry. `at` names the file or etcd key from which it was read.
    fn check(version: Version, at: &str) -> Result<(), RegistryError> {
        if version.version == Self::VERSION {
            return Ok(());
        }
        Err(RegistryError::Permanent(format!(
            "{at}: the entry has version {}, this convoke writes {}: use one version of convoke on all nodes, or another --rdzv-id",
            version.version,
            Self::VERSION
        )))
    }
}

/// Version of an entry. Parsing it ignores the other fields, which another version may have changed.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

fn to_json(what: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(what).expect("entries and records are plain data")
}

/// Parses JSON that was read from the file or etcd key `at`.
fn from_json<'a, T: Deserialize<'a>>(text: &'a [u8], at: &str) -> Result<T, RegistryError> {
    serde_json::from_slice(text)
        .map_err(|error| RegistryError::Permanent(format!("{at}: not an entry of convoke: {error}")))
}

/// An entry as it was read, for a later compare-and-swap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct EntrySnapshot {
    pub(super) entry: Option<Entry>,
    /// True if the lease of the coordinator has not expired.
    pub(super) is_leased: bool,
    /// Whole value in the registry file, with which a later write compares. Empty for etcd.
    text: Vec<u8>,
    /// Revisions in etcd: of the entry's last change, and of the whole etcd store when the entry was read.
    revisions: (i64, i64),
}

impl EntrySnapshot {
    /// Returns the term of the entry; 0 if there is none.
    pub(super) fn term(&self) -> u64 {
        self.entry.as_ref().map_or(0, |entry| entry.term)
    }
}

/// The registry of one job. Each method fails if the registry cannot be reached, or if its content is
/// invalid.
#[derive(Clone)]
pub(super) enum Registry {
    File(FileRegistry),
    #[cfg(feature = "etcd")]
    Etcd(EtcdRegistry),
}

impl Registry {
    /// Reads the current entry of the job.
    pub(super) async fn read(&self) -> Result<EntrySnapshot, RegistryError> {
        match self {
            Self::File(file) => file.read().await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.read().await,
        }
    }

    /// Checks in the background whether the coordinator's lease is alive, if the registry does not report a
    /// lost lease by itself.
    pub(super) fn check_in_background(&self) {
        match self {
            Self::File(file) => file.check_in_background(),
            #[cfg(feature = "etcd")]
            Self::Etcd(_) => {}
        }
    }

    /// Reads the record that belongs to the entry `seen`, or to a later one.
    pub(super) async fn record(&self, seen: &EntrySnapshot) -> Result<Option<Record>, RegistryError> {
        match self {
            Self::File(file) => file.record(seen),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.record().await,
        }
    }

    /// Replaces the registry's entry by `entry` if it is still `seen`, and writes `record`. Returns the entry
    /// that the registry then holds.
    pub(super) async fn replace(
        &self,
        seen: &EntrySnapshot,
        entry: &Entry,
        record: Option<&Record>,
    ) -> Result<EntrySnapshot, RegistryError> {
        match self {
            Self::File(file) => file.replace(seen, entry, record).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.replace(seen, entry, record).await,
        }
    }

    /// Completes when the registry's entry differs from `seen`, or may differ.
    pub(super) async fn changed(&self, seen: &EntrySnapshot) -> Result<(), RegistryError> {
        match self {
            Self::File(file) => file.changed(seen).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.changed(seen).await,
        }
    }

    /// Gets a new lease for a coordinator, which counts as alive while it renews the lease. Entries that this
    /// value writes from now on belong to the lease. Returns the time without renewal after which it expires.
    pub(super) async fn lease(&self) -> Result<Duration, RegistryError> {
        match self {
            Self::File(file) => Ok(file.ttl),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.lease().await,
        }
    }

    /// Renews the lease once. Returns false if it has expired.
    pub(super) async fn keep(&self) -> Result<bool, RegistryError> {
        match self {
            Self::File(file) => file.keep().await.map(|()| true),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.keep().await,
        }
    }

    /// Ends the lease. If that fails, the lease expires by itself.
    pub(super) async fn release(&self) {
        match self {
            Self::File(file) => file.release().await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.release().await,
        }
    }
}

/// Escapes a run id so that it is one path component.
fn escape_path_component(run_id: &str) -> String {
    run_id.replace('%', "%25").replace('/', "%2F")
}

/// Returns the requested time to live of a lease. A registry may grant another time.
fn requested_ttl(heartbeat_timeout: Duration) -> Duration {
    heartbeat_timeout * 2 / 3
}
