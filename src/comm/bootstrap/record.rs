//! The record that each rank publishes in the store, and the comparison of all records.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use convoke_env::Generation;
use convoke_env::host::boot_id;
use serde::{Deserialize, Serialize};

use super::cores::CoreSet;
use crate::error::Ranks;
use crate::error::cause::MAX_REPORTED_RANKS;
use crate::json;
use crate::transport::frame::VERSION;

/// Longest failure text that is read from a rank's record, in characters.
const FAILED_CHARS: usize = 512;
/// Longest text that is read from a refusal (the published reason why the group cannot form), in characters.
const REFUSED_CHARS: usize = 4096;
const TUNING: &str = "the choice of algorithms (CONVOKE_ALGO, build)";
/// Time limit for the connection that tests whether a process listens at a published address.
const PROBE: Duration = Duration::from_secs(1);

/// What one rank tells the other ranks about itself, so that they can connect to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Protocol version. Records of another version may have other fields.
    pub(super) version: u8,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) address: SocketAddr,
    /// Host key: equal for ranks that could share memory.
    pub(super) host: String,
    /// Cores that the rank's thread may use; empty if the record does not say.
    #[serde(default)]
    pub(super) cores: CoreSet,
    pub(super) pid: u32,
    /// All settings that influence the choice of algorithms.
    pub(super) tuning: String,
    /// True if the rank has a token, the secret of the job. The token itself is not published.
    pub(super) token: bool,
    /// True if the rank has shared memory enabled.
    pub(super) memory: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Announcement {
    pub(super) generation: String,
    /// True if a launcher gave the generation to all ranks.
    pub(super) given: bool,
}

impl Announcement {
    pub(super) fn decode(bytes: &[u8]) -> Option<(Generation, bool)> {
        let announcement: Self = serde_json::from_slice(bytes).ok()?;
        Some((announcement.generation.parse().ok()?, announcement.given))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum RecordError {
    /// The rank could not listen.
    #[error("rank {rank} {why}")]
    Failed { rank: usize, why: String },
    #[error("rank {rank} uses version {version} of the bootstrap protocol, this rank {VERSION}")]
    Version { rank: usize, version: u64 },
    #[error("rank {rank} published an invalid record in the store")]
    NoRecord { rank: usize },
    #[error("the record of rank {rank} names rank {claimed}")]
    WrongRank { rank: usize, claimed: usize },
    #[error("rank {rank} published a malformed record in the store: {error}")]
    Malformed { rank: usize, error: String },
    /// The table that rank 0 has published cannot be decoded.
    #[error("rank 0 published a malformed table of ranks in the store: {0}")]
    MalformedTable(String),
    /// A rank has published the reason `what` for which the group cannot form.
    #[error("{what}")]
    Refused { what: String, ranks: Vec<usize> },
    /// A setting that must be equal on all ranks differs. `here` and `there` are two of its values, with the
    /// ranks that have them.
    #[error(
        "{what} differs: {:?} on rank(s) {}, {:?} on rank(s) {}",
        here.0, Ranks(&here.1), there.0, Ranks(&there.1)
    )]
    Differs { what: &'static str, here: (String, Vec<usize>), there: (String, Vec<usize>) },
    #[error(
        "ranks {} and {} are on different hosts, and both listen at {address}, where they do not reach each other: set \
         CONVOKE_SOCKET_IFNAME to the network interface that leads to the other hosts", ranks[0], ranks[1]
    )]
    SameAddress { ranks: [usize; 2], address: IpAddr },
}

impl RecordError {
    /// Returns the ranks whose records are wrong.
    pub(super) fn ranks(&self) -> Vec<usize> {
        match self {
            Self::Failed { rank, .. }
            | Self::Version { rank, .. }
            | Self::NoRecord { rank }
            | Self::WrongRank { rank, .. }
            | Self::Malformed { rank, .. } => vec![*rank],
            Self::MalformedTable(_) => vec![0],
            Self::Refused { ranks, .. } => ranks.clone(),
            Self::Differs { there, .. } => there.1.clone(),
            Self::SameAddress { ranks, .. } => ranks.to_vec(),
        }
    }
}

impl Record {
    /// Decodes a record. Returns `None` if the bytes are no record, or a record of another version.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok().filter(|record: &Self| record.version == VERSION)
    }

    /// Returns true if a process listens at the record's address.
    pub(super) fn is_reachable(&self) -> bool {
        TcpStream::connect_timeout(&self.address, PROBE).is_ok()
    }

    /// Returns the part of the host key that identifies the address's network (boot id and network
    /// namespace), if there is one. Two hosts, or two containers of one host, may have equal addresses.
    fn network(&self) -> Option<&str> {
        let mut slashes = self.host.match_indices('/');
        slashes.nth(1).map(|(at, _)| &self.host[..at])
    }
}

/// Encodes the reason why the group cannot form, which replaces the table of records in the store.
pub(super) fn encode_refusal(what: &str, ranks: &[usize]) -> Vec<u8> {
    json::encode(&Refused { version: VERSION, refused: what.to_owned(), ranks: ranks.to_vec() })
}

#[derive(Serialize, Deserialize)]
struct Refused {
    version: u8,
    refused: String,
    ranks: Vec<usize>,
}

/// Encodes the failure of a rank that could not listen. The rank publishes it instead of its record.
pub(super) fn encode_failure(why: &str) -> Vec<u8> {
    serde_json::json!({ "version": VERSION, "failed": why }).to_string().into_bytes()
}

/// Decodes the records of all ranks. The error says what is wrong, and on which ranks.
pub(super) fn decode_all(values: &[impl AsRef<[u8]>]) -> Result<Vec<Record>, RecordError> {
    let mut records = Vec::with_capacity(values.len());
    for (rank, value) in values.iter().enumerate() {
        // The version is read first, since another version may have other fields.
        let fields = serde_json::from_slice::<serde_json::Value>(value.as_ref()).ok();
        let version = fields.as_ref().and_then(|fields| fields.get("version")?.as_u64());
        if let Some(why) = fields.as_ref().and_then(|fields| fields.get("failed")?.as_str()) {
            return Err(RecordError::Failed { rank, why: why.chars().take(FAILED_CHARS).collect() });
        }
        match version {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version) => return Err(RecordError::Version { rank, version }),
            None => return Err(RecordError::NoRecord { rank }),
        }
        match serde_json::from_slice::<Record>(value.as_ref()) {
            Ok(record) if record.rank == rank => records.push(record),
            Ok(record) => return Err(RecordError::WrongRank { rank, claimed: record.rank }),
            Err(error) => return Err(RecordError::Malformed { rank, error: error.to_string() }),
        }
    }
    Ok(records)
}

/// Decodes the table of all records that rank 0 published. The error says what is wrong, and on which
/// ranks.
pub(super) fn decode_table(bytes: &[u8]) -> Result<Vec<Record>, RecordError> {
    if let Ok(Refused { refused, mut ranks, .. }) = serde_json::from_slice(bytes) {
        ranks.truncate(MAX_REPORTED_RANKS);
        return Err(RecordError::Refused { what: refused.chars().take(REFUSED_CHARS).collect(), ranks });
    }
    let texts: Vec<String> =
        serde_json::from_slice(bytes).map_err(|error| RecordError::MalformedTable(error.to_string()))?;
    decode_all(&texts)
}

/// Checks that all ranks have equal settings, so that they choose equal algorithms.
pub(super) fn compare(records: &[Record]) -> Result<(), RecordError> {
    check_equal(records, TUNING, |record| record.tuning.clone())?;
    check_equal(records, "the number of ranks (WORLD_SIZE)", |record| record.size.to_string())?;
    check_equal(records, "the use of a token (CONVOKE_TOKEN)", |record| record.token.to_string())?;
    check_equal(records, "the use of shared memory (CONVOKE_SHM)", |record| record.memory.to_string())?;
    check_networks(records)
}

/// Checks that no ranks of two networks listen at the same address, where they could not reach each other.
fn check_networks(records: &[Record]) -> Result<(), RecordError> {
    let mut owners: HashMap<IpAddr, &Record> = HashMap::new();
    for record in records {
        let owner = *owners.entry(record.address.ip()).or_insert(record);
        let networks = owner.network().zip(record.network());
        if networks.is_some_and(|(one, other)| one != other) {
            let ranks = [owner.rank, record.rank];
            return Err(RecordError::SameAddress { ranks, address: record.address.ip() });
        }
    }
    Ok(())
}

/// Checks that all ranks choose algorithms alike; `tunings` are their choices, in rank order.
pub(super) fn compare_tunings(tunings: &[String]) -> Result<(), RecordError> {
    check_equal(tunings, TUNING, Clone::clone)
}

fn check_equal<R>(
    records: &[R],
    what: &'static str,
    value: impl Fn(&R) -> String,
) -> Result<(), RecordError> {
    let Some(first) = records.first().map(&value) else { return Ok(()) };
    let Some(other) = records.iter().map(&value).find(|other| *other != first) else { return Ok(()) };
    let with = |wanted: &String| -> Vec<usize> {
        let ranks = records.iter().enumerate().filter(|(_, record)| value(record) == *wanted);
        ranks.map(|(rank, _)| rank).take(MAX_REPORTED_RANKS).collect()
    };
    let (here, there) = (with(&first), with(&other));
    Err(RecordError::Differs { what, here: (first, here), there: (other, there) })
}

/// Returns a key of this host that is equal in two processes only if they could share memory. It consists of
/// the boot id, the namespaces (which include the user namespace) and `part`, the locality domain that the
/// program sets.
pub(super) fn host_key(part: &str) -> String {
    let boot = boot_id().map_or_else(String::new, |id| format!("{id:032x}"));
    let namespaces = ["net", "ipc", "pid", "user"].map(|name| {
        std::fs::read_link(format!("/proc/self/ns/{name}"))
            .map_or_else(|_| String::new(), |link| link.display().to_string())
    });
    format!("{boot}/{}/{part}", namespaces.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rank: usize) -> Record {
        Record {
            version: VERSION,
            rank,
            size: 3,
            address: SocketAddr::from(([127, 0, 0, 1], 1000 + rank as u16)),
            host: host_key(""),
            cores: [0, 1].into_iter().collect(),
            pid: 1,
            tuning: "table".to_owned(),
            token: false,
            memory: true,
        }
    }

    fn encode(records: &[Record]) -> Vec<Vec<u8>> {
        records.iter().map(|record| serde_json::to_vec(record).unwrap()).collect()
    }

    #[test]
    fn records_round_trip() {
        let records: Vec<_> = (0..3).map(record).collect();
        assert_eq!(decode_all(&encode(&records)), Ok(records.clone()));
        assert_eq!(compare(&records), Ok(()));
    }

    #[test]
    fn random_tables_and_announcements_never_cause_a_panic() {
        let test = "random_tables_and_announcements_never_cause_a_panic";
        let encode = |records: &Vec<Record>| {
            let texts: Vec<_> = records.iter().map(|record| serde_json::to_string(record).unwrap()).collect();
            serde_json::to_vec(&texts).unwrap()
        };
        let table = encode(&(0..3).map(record).collect());
        let decode = |bytes: &[u8]| decode_table(bytes).ok();
        convoke_testkit::fuzz(test, &[&table], 32 * table.len(), decode, encode);
        let encode = |&(generation, given): &(Generation, bool)| {
            serde_json::to_vec(&Announcement { generation: generation.to_string(), given }).unwrap()
        };
        let announced = encode(&(Generation::from_bytes([7; 16]), true));
        convoke_testkit::fuzz(test, &[&announced], 8 * announced.len(), Announcement::decode, encode);
    }

    fn text_and_ranks(error: &RecordError) -> (String, Vec<usize>) {
        (error.to_string(), error.ranks())
    }

    #[test]
    fn differences_name_setting_and_ranks() {
        let mut records: Vec<_> = (0..3).map(record).collect();
        records[2].tuning = "ring".to_owned();
        let (text, ranks) = text_and_ranks(&compare(&records).unwrap_err());
        assert_eq!(ranks, [2]);
        assert!(text.contains("CONVOKE_ALGO") && text.contains("\"ring\" on rank(s) 2"), "{text}");
        records[2] = Record { size: 4, ..record(2) };
        assert!(compare(&records).unwrap_err().to_string().contains("WORLD_SIZE"));
    }

    #[test]
    fn error_names_both_ranks_and_variable_for_a_duplicate_address() {
        let mut records: Vec<_> = (0..3).map(record).collect();
        let elsewhere = records[2].host.replace("net:", "net:9");
        records[2].host = elsewhere;
        let (text, ranks) = text_and_ranks(&compare(&records).unwrap_err());
        assert_eq!(ranks, [0, 2]);
        assert!(text.contains("127.0.0.1") && text.contains("CONVOKE_SOCKET_IFNAME"), "{text}");
        // Records that differ only in their PID or user namespace belong to one network.
        records[2].host = records[1].host.replace("pid:", "pid:9");
        assert_eq!(compare(&records), Ok(()));
    }

    #[test]
    fn refusal_is_read_instead_of_the_rank_table() {
        let refused = decode_table(&encode_refusal("rank 1 is there twice", &[1])).unwrap_err();
        assert_eq!(text_and_ranks(&refused), ("rank 1 is there twice".to_owned(), vec![1]));
    }

    #[test]
    fn malformed_records_name_their_rank() {
        let good = encode(&[record(0), record(1)]);
        let bad = [
            b"{\"version\": 9}".to_vec(),
            b"{}".to_vec(),
            b"\xFF".to_vec(),
            b"{\"version\": 2, \"rank\": 1}".to_vec(),
            good[0].clone(),
        ];
        for bytes in bad {
            let (text, ranks) = text_and_ranks(&decode_all(&[good[0].clone(), bytes]).unwrap_err());
            assert_eq!(ranks, [1], "{text}");
        }
        let gone = decode_all(&[good[0].clone(), encode_failure("has no descriptor left")]).unwrap_err();
        assert_eq!(text_and_ranks(&gone), ("rank 1 has no descriptor left".to_owned(), vec![1]));
    }
}
