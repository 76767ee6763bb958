//! The place that says where a job's coordinator is, and what another one must know to go on: a shared file, or etcd.
//!
//! Whoever finds no coordinator, or finds that it is gone, makes itself one: the entry is replaced only if it is still the
//! one that was read, with a higher term. One that has been replaced begins no round any more ([`super::claim`]).

// Without the feature the same type has no values.
#[cfg_attr(not(feature = "etcd"), path = "no_etcd.rs")]
mod etcd;
mod file;

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

pub(super) use etcd::EtcdDirectory;
pub(super) use file::FileDirectory;

use crate::membership::{AgentId, Ending, Record};

/// Why the place where a coordinator is written down says nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trouble {
    /// It may pass.
    Passing(String),
    /// It will not.
    Final(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passing(what) | Self::Final(what) => f.write_str(what),
        }
    }
}

/// Who coordinates a job. Small: every node reads it, and is told when it changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    version: u32,
    pub(super) term: u64,
    /// How many records its coordinator has written down.
    edition: u64,
    /// Where the coordinator of that term listens.
    pub(super) addresses: Vec<SocketAddr>,
    /// The agent that has it.
    pub(super) agent: AgentId,
    /// Proves to others that somebody may read this place; made by the first coordinator.
    pub(super) key: [u8; 32],
    /// How the job has ended, as its record says.
    pub(super) ending: Option<Ending>,
}

impl Entry {
    const VERSION: u32 = 4;

    pub(super) fn new(
        term: u64,
        addresses: Vec<SocketAddr>,
        agent: AgentId,
        key: [u8; 32],
        ending: Option<Ending>,
    ) -> Self {
        Self { version: Self::VERSION, term, edition: 0, addresses, agent, key, ending }
    }

    /// The same coordinator's when it has written down another record.
    pub(super) fn after(&self, record: &Record) -> Self {
        Self { edition: self.edition + 1, ending: record.ending.clone(), ..self.clone() }
    }

    /// Checks what a place says, `at`.
    fn check(version: Version, at: &str) -> Result<(), Trouble> {
        if version.version == Self::VERSION {
            return Ok(());
        }
        Err(Trouble::Final(format!(
            "{at}: an entry of version {}, this convoke writes {}: use one convoke on all nodes, or another --rdzv-id",
            version.version,
            Self::VERSION
        )))
    }
}

/// Of an entry of any version.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// As plain data into memory, it cannot fail.
fn to_json(what: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(what).unwrap_or_default()
}

/// Of what a place says, `at`.
fn from_json<'a, T: Deserialize<'a>>(text: &'a [u8], at: &str) -> Result<T, Trouble> {
    serde_json::from_slice(text)
        .map_err(|error| Trouble::Final(format!("{at}: no entry of convoke's: {error}")))
}

/// An entry as it was read, so that it can be replaced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) entry: Option<Entry>,
    /// The place vouches for the coordinator.
    pub(super) held: bool,
    /// Of all, as the file has it.
    text: Vec<u8>,
    /// Of the entry, and of all that was read, in etcd.
    revisions: (i64, i64),
}

impl Seen {
    /// Of the entry; 0 if there is none.
    pub(super) fn term(&self) -> u64 {
        self.entry.as_ref().map_or(0, |entry| entry.term)
    }
}

/// See the module's head.
#[derive(Debug, Clone)]
pub(super) enum Directory {
    File(FileDirectory),
    Etcd(EtcdDirectory),
}

impl Directory {
    /// What it says now.
    ///
    /// # Errors
    /// It cannot be reached, or what it says makes no sense.
    pub(super) async fn read(&self) -> Result<Seen, Trouble> {
        match self {
            Self::File(file) => file.read().await,
            Self::Etcd(etcd) => etcd.read().await,
        }
    }

    /// Looks whether the coordinator is there, without waiting for it, where nothing tells when it is not.
    pub(super) fn look(&self) {
        if let Self::File(file) = self {
            file.look();
        }
    }

    /// The record beside the entry that was `seen`, or beside a later one.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) async fn record(&self, seen: &Seen) -> Result<Option<Record>, Trouble> {
        match self {
            Self::File(file) => file.record(seen),
            Self::Etcd(etcd) => etcd.record().await,
        }
    }

    /// Replaces what was `seen`, if it is still there; what it says afterwards. It vouches for the coordinator of `entry`
    /// while the lease lives.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) async fn replace(
        &self,
        seen: &Seen,
        entry: &Entry,
        record: Option<&Record>,
        lease: &Lease,
    ) -> Result<Seen, Trouble> {
        match self {
            Self::File(file) => file.replace(seen, entry, record).await,
            Self::Etcd(etcd) => etcd.replace(seen, entry, record, lease).await,
        }
    }

    /// Ends when it says something else than was `seen`, or may do.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) async fn changed(&self, seen: &Seen) -> Result<(), Trouble> {
        match self {
            Self::File(file) => file.changed(seen).await,
            Self::Etcd(etcd) => etcd.changed(seen).await,
        }
    }

    /// What a coordinator keeps alive that claims the place.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) async fn lease(&self) -> Result<Lease, Trouble> {
        match self {
            Self::File(file) => Ok(file.lease()),
            Self::Etcd(etcd) => etcd.lease().await,
        }
    }

    /// Keeps a lease alive for once; false if it has ended.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) async fn keep(&self, lease: &Lease) -> Result<bool, Trouble> {
        match self {
            Self::File(file) => file.keep().await.map(|()| true),
            Self::Etcd(etcd) => etcd.keep(lease).await,
        }
    }

    /// Ends a lease; if that fails it ends by itself.
    pub(super) async fn release(&self, lease: &Lease) {
        match self {
            Self::File(file) => file.release().await,
            Self::Etcd(etcd) => etcd.release(lease).await,
        }
    }
}

/// A run id as one step of a path.
fn one_step(run_id: &str) -> String {
    run_id.replace('%', "%25").replace('/', "%2F")
}

/// While a coordinator keeps it alive, the place vouches for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lease {
    /// In etcd: of the coordinator, and of the entry, which stays for a while.
    ids: (i64, i64),
    /// It ends when the place has not heard of it for so long.
    pub(super) ttl: Duration,
    /// When it was asked for.
    pub(super) granted: Instant,
}

impl Lease {
    /// How long one lives without a word from its coordinator, at best.
    fn time(silence: Duration) -> Duration {
        silence * 2 / 3
    }
}
