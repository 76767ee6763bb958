//! The registry: a shared file or etcd. It holds the address of a job's coordinator and the record that a
//! successor needs.
//!
//! A node that finds no coordinator, or a lost one, makes itself the coordinator. It replaces the entry by
//! one with a higher term, by compare-and-swap, so that only one node succeeds. A replaced coordinator starts
//! no more rounds ([`super::leadership`]).

// Without the feature `etcd`, the type `EtcdRegistry` has no values.
#[cfg_attr(not(feature = "etcd"), path = "no_etcd.rs")]
mod etcd;
mod file;

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

pub(super) use etcd::EtcdRegistry;
pub(super) use file::FileRegistry;

use crate::membership::{AgentId, JobResult, Record};

/// Reason for which the registry gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RegistryError {
    /// A temporary error, with its description: the caller tries again.
    Transient(String),
    /// A permanent error, with its description: another attempt would fail as well.
    Permanent(String),
}

impl fmt::Display for RegistryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transient(what) | Self::Permanent(what) => f.write_str(what),
        }
    }
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
    const VERSION: u32 = 4;

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

/// The registry of one job.
#[derive(Debug, Clone)]
pub(super) enum Registry {
    File(FileRegistry),
    Etcd(EtcdRegistry),
}

impl Registry {
    /// Reads the current entry of the job.
    ///
    /// # Errors
    /// The registry cannot be reached, or its content is invalid.
    pub(super) async fn read(&self) -> Result<EntrySnapshot, RegistryError> {
        match self {
            Self::File(file) => file.read().await,
            Self::Etcd(etcd) => etcd.read().await,
        }
    }

    /// Checks in the background whether the coordinator's lease is alive, if the registry does not report a
    /// lost lease by itself.
    pub(super) fn check_in_background(&self) {
        if let Self::File(file) = self {
            file.check_in_background();
        }
    }

    /// Reads the record that belongs to the entry `seen`, or to a later one.
    ///
    /// # Errors
    /// The registry cannot be reached, or its content is invalid.
    pub(super) async fn record(&self, seen: &EntrySnapshot) -> Result<Option<Record>, RegistryError> {
        match self {
            Self::File(file) => file.record(seen),
            Self::Etcd(etcd) => etcd.record().await,
        }
    }

    /// Replaces the registry's entry by `entry` if it is still `seen`, and writes `record`. Returns the entry
    /// that the registry then holds. The new coordinator counts as alive while `lease` is renewed.
    ///
    /// # Errors
    /// The registry cannot be reached, or its content is invalid.
    pub(super) async fn replace(
        &self,
        seen: &EntrySnapshot,
        entry: &Entry,
        record: Option<&Record>,
        lease: &Lease,
    ) -> Result<EntrySnapshot, RegistryError> {
        match self {
            Self::File(file) => file.replace(seen, entry, record).await,
            Self::Etcd(etcd) => etcd.replace(seen, entry, record, lease).await,
        }
    }

    /// Completes when the registry's entry differs from `seen`, or may differ.
    ///
    /// # Errors
    /// The registry cannot be reached, or its content is invalid.
    pub(super) async fn changed(&self, seen: &EntrySnapshot) -> Result<(), RegistryError> {
        match self {
            Self::File(file) => file.changed(seen).await,
            Self::Etcd(etcd) => etcd.changed(seen).await,
        }
    }

    /// Returns a new lease for a coordinator.
    ///
    /// # Errors
    /// The registry cannot be reached, or its content is invalid.
    pub(super) async fn lease(&self) -> Result<Lease, RegistryError> {
        match self {
            Self::File(file) => Ok(file.lease()),
            Self::Etcd(etcd) => etcd.lease().await,
        }
    }

    /// Renews a lease once. Returns false if it has expired.
    ///
    /// # Errors
    /// The registry cannot be reached, or its content is invalid.
    pub(super) async fn keep(&self, lease: &Lease) -> Result<bool, RegistryError> {
        match self {
            Self::File(file) => file.keep().await.map(|()| true),
            Self::Etcd(etcd) => etcd.keep(lease).await,
        }
    }

    /// Ends a lease. If that fails, the lease expires by itself.
    pub(super) async fn release(&self, lease: &Lease) {
        match self {
            Self::File(file) => file.release().await,
            Self::Etcd(etcd) => etcd.release(lease).await,
        }
    }
}

/// Escapes a run id so that it is one path component.
fn escape_path_component(run_id: &str) -> String {
    run_id.replace('%', "%25").replace('/', "%2F")
}

/// Lease of a coordinator. The registry treats the coordinator as alive while the coordinator renews the
/// lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lease {
    /// Ids of two leases in etcd: that of the coordinator, and that of the entry, which outlives the
    /// coordinator.
    ids: (i64, i64),
    /// Time without renewal after which the lease expires.
    pub(super) ttl: Duration,
    /// Time at which the lease was requested.
    pub(super) granted: Instant,
}

impl Lease {
    /// Returns the time without renewal after which a requested lease expires. A registry may grant another
    /// time.
    fn max_ttl(heartbeat_timeout: Duration) -> Duration {
        heartbeat_timeout * 2 / 3
    }
}
