//! The ways in which an authenticated peer can break the protocol of a group. Pure.

use convoke_env::Generation;

use crate::collectives::call::{Call, CallError};
use crate::transport::frame::{FrameError, Kind};

/// The reason why bytes are not a valid failure report.
#[derive(Debug, thiserror::Error)]
#[error("malformed report: {0}")]
pub(crate) struct ReportError(#[from] serde_json::Error);

/// An action of a peer that the protocol forbids.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerMisbehaved {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error("it sent a {kind:?} frame of another generation or group")]
    ForeignControl { kind: Kind },
    #[error("it sent a {kind:?} frame on the control connection")]
    NoControlFrame { kind: Kind },
    #[error("it asks for connection kind {number}, which does not exist")]
    ConnectionKind { number: u64 },
    #[error("it sent a message of generation {generation}, group {group}")]
    ForeignMessage { generation: Generation, group: u64 },
    #[error("it sent a {kind:?} frame on the connection for messages")]
    NoMessageFrame { kind: Kind },
    #[error("it asks for message {seq}, which is not waiting to be sent")]
    NotAnnounced { seq: u64 },
    #[error("it asks twice for message {seq}")]
    AskedTwice { seq: u64 },
    #[error("it sent message {seq}, which was not asked for")]
    NotAskedFor { seq: u64 },
    #[error("it sent message {seq} with a wrong length of {len} bytes")]
    MessageLength { seq: u64, len: u64 },
    #[error("it sent message {seq} where message {next} was due")]
    MessageOrder { seq: u64, next: u64 },
    /// The length of a message frame is not that of its call, or is too long for a message that is sent
    /// eagerly.
    #[error("it sent {len} bytes for {call}")]
    EagerLength { len: u64, call: Call },
    #[error("it returned credit for {bytes} bytes that it never received")]
    CreditTooLarge { bytes: u64 },
    #[error("it sends more than it has credit for")]
    CreditExceeded,
    #[error("it sent a {kind:?} frame on the connection for collectives")]
    NoDataFrame { kind: Kind },
    #[error(
        "it sent data of generation {}, group {} in generation {}, group {}", theirs.0, theirs.1, ours.0, ours.1
    )]
    ForeignData { theirs: (Generation, u64), ours: (Generation, u64) },
    #[error("it sent {len} bytes for {call}, expected {expected}")]
    DataLength { len: u64, call: Call, expected: usize },
    /// In shared memory: the peer named a location outside of its own memory.
    #[error("it offers memory that it does not have")]
    ForeignMemory,
}
