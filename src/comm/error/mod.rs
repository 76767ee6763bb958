//! The errors of this crate: each names the rank, the cause and the progress of the call.

pub(crate) mod cause;
#[cfg(feature = "nccl")]
mod device;
mod execution;
mod peer_misbehaved;

use std::fmt;
use std::io;
use std::time::Duration;

use convoke_env::{ChannelError, EnvError, ExitCause, TokenError};
use convoke_store::StoreError;
use serde::{Deserialize, Serialize};

use crate::collectives::call::Call;
#[cfg(feature = "nccl")]
pub use device::DeviceError;
pub(crate) use execution::ExecutionError;
pub(crate) use peer_misbehaved::{PeerMisbehaved, ReportError};

/// The reason why a call failed.
///
/// Some errors [end the group](Self::ends_group): every pending or later call, on every rank, then returns
/// one common cause. The buffers of failed calls have unspecified contents. The other errors concern one call
/// only.
///
/// Variants, and their fields, may be added in later versions: match with `_` and `..`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A rank was lost: its process died or panicked, it left the group, or it cannot be reached.
    #[error("rank {rank} at {address} {how}; {context}")]
    #[non_exhaustive]
    PeerLost {
        /// The lost rank.
        rank: usize,
        /// The address at which the lost rank listened.
        address: String,
        /// The way in which the rank was lost, as far as it is known.
        how: LossReason,
        /// The call that failed on this rank, and its progress.
        context: Box<CallContext>,
    },
    /// A call did not end within its timeout.
    #[error("timed out after {} ms waiting for rank(s) {}; {context}", after.as_millis(), Ranks(missing))]
    #[non_exhaustive]
    Timeout {
        /// The ranks that the call waited for; at most 64 of them.
        missing: Vec<usize>,
        /// How long the first rank whose call timed out had waited.
        after: Duration,
        /// The call that failed on this rank, and its progress.
        context: Box<CallContext>,
    },
    /// Two ranks made different calls where all ranks must make equal calls.
    #[error(
        "rank {rank} called {theirs} as call {theirs_seq} of the group, rank {by} called {ours} as call {ours_seq}; {context}"
    )]
    #[non_exhaustive]
    Mismatch {
        /// The rank whose call differs from that of `by`.
        rank: usize,
        /// The call of `rank`.
        theirs: Call,
        /// Sequence number of `theirs` among the collectives of `rank`, from 0.
        theirs_seq: u64,
        /// The rank that detected the mismatch.
        by: usize,
        /// The call of `by`.
        ours: Call,
        /// Sequence number of `ours` among the collectives of `by`, from 0.
        ours_seq: u64,
        /// The call that failed on this rank, and its progress.
        context: Box<CallContext>,
    },
    /// The program ended the group.
    #[error("aborted by rank {by}: {reason}; {context}")]
    #[non_exhaustive]
    Aborted {
        /// The rank that called `abort`.
        by: usize,
        /// The text that rank `by` passed to `abort`.
        reason: String,
        /// The call that failed on this rank, and its progress.
        context: Box<CallContext>,
    },
    /// A rank has no file descriptor left for the connections of the group, or no shared memory for its data.
    #[error("rank {rank} has run out of {what}; {context}")]
    #[non_exhaustive]
    Exhausted {
        /// The rank that has too little.
        rank: usize,
        /// The lacking resource; for descriptors also the limit, the number that the group needs, and advice.
        what: String,
        /// The call that failed on this rank, and its progress.
        context: Box<CallContext>,
    },
    /// A connected rank sent an invalid frame.
    #[error("rank {peer} broke the protocol: {what}; {context}")]
    #[non_exhaustive]
    Protocol {
        /// The rank that sent the invalid frame.
        peer: usize,
        /// How the frame violates the protocol.
        what: String,
        /// The call that failed on this rank, and its progress.
        context: Box<CallContext>,
    },
    /// A message was longer than the buffer of its receive. The buffer has its beginning, the rest is lost,
    /// and the group continues.
    #[error("the message of rank {from} with tag {tag} has {count} elements, and the buffer room for {room}")]
    #[non_exhaustive]
    Truncated {
        /// The rank that sent the message.
        from: usize,
        /// The tag of the message.
        tag: u32,
        /// Number of elements of the message.
        count: u64,
        /// Number of elements of the buffer.
        room: u64,
    },
    /// A connection could not prove that it belongs to this job.
    #[error("{from} does not belong to this job: {what}")]
    #[non_exhaustive]
    Unauthorized {
        /// The address or rank at the other end of the connection.
        from: String,
        /// The reason for which the connection was refused.
        what: String,
    },
    /// The group did not form.
    #[error("group {group} could not form: {what}")]
    #[non_exhaustive]
    Bootstrap {
        /// Name of the group.
        group: String,
        /// The reason; if ranks are missing, with the meeting place: the address or path at which ranks find
        /// each other.
        what: String,
        /// The ranks that are missing or at fault; at most 64 of them.
        ranks: Vec<usize>,
    },
    /// The arguments of this call are invalid; nothing was sent, and the group continues.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// The URL for joining a world does not name a meeting place of the ranks (an address or path) or a rank.
    #[error("cannot join at {url:?}: {what}")]
    #[non_exhaustive]
    Url {
        /// The URL.
        url: String,
        /// The fault in the URL, and advice.
        what: String,
    },
    /// Another thread of this process is joining the group as this rank at this moment.
    #[error("another thread of this process is already joining as {what}")]
    #[non_exhaustive]
    Concurrent {
        /// Rank, group, and the address or path at which the ranks meet.
        what: String,
    },
    /// This process has joined this world before, as the same rank, and still holds it or a group that comes
    /// from it.
    #[error(
        "this process has already joined a world, as {what}: use that world, or drop it and all groups that \
         come from it before joining again"
    )]
    #[non_exhaustive]
    AlreadyJoined {
        /// Rank, and the address or path at which the ranks met.
        what: String,
    },
    /// This rank has destroyed its handle of the group; the other ranks are not affected by this call.
    #[error("group {group} was destroyed on this rank")]
    #[non_exhaustive]
    Destroyed {
        /// Name of the group.
        group: String,
    },
    /// The ranks that survived a failure have continued without this rank.
    #[error(
        "the survivors of group {group}, rank(s) {}, continued without this rank: it joined too late, or \
         they had lost it",
        Ranks(survivors)
    )]
    #[non_exhaustive]
    Excluded {
        /// Name of the group that failed.
        group: String,
        /// The ranks that continued, numbered as in the failed group.
        survivors: Vec<usize>,
    },
    /// An object of a call that sends objects could not be serialized or deserialized; the group continues.
    #[error("the object of rank {rank} {what}")]
    #[non_exhaustive]
    Object {
        /// The rank that sent the object.
        rank: usize,
        /// The fault in the object.
        what: String,
    },
    /// This build or platform does not support the operation.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// A device, its driver or NCCL is unusable or failed.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The operating system refused an operation.
    #[error("{what}: {source}")]
    #[non_exhaustive]
    System {
        /// The operation that failed.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The environment variables of this process do not describe a worker.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The channel to the launcher cannot be used.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The token that the user gave cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

convoke_env::debug_as_display!(CommError);

impl CommError {
    /// Returns the rank to inspect first, if the error points to one.
    #[must_use]
    pub fn suspect_rank(&self) -> Option<usize> {
        match self {
            Self::PeerLost { rank, .. }
            | Self::Mismatch { rank, .. }
            | Self::Aborted { by: rank, .. }
            | Self::Exhausted { rank, .. }
            | Self::Protocol { peer: rank, .. }
            | Self::Truncated { from: rank, .. }
            | Self::Object { rank, .. } => Some(*rank),
            Self::Timeout { missing: ranks, .. } | Self::Bootstrap { ranks, .. } => ranks.first().copied(),
            #[cfg(feature = "nccl")]
            Self::Device(error) => error.suspect_rank(),
            _ => None,
        }
    }

    /// Returns the failed call and its progress; `None` for errors that do not end the group.
    #[must_use]
    pub fn context(&self) -> Option<&CallContext> {
        match self {
            Self::PeerLost { context, .. }
            | Self::Timeout { context, .. }
            | Self::Mismatch { context, .. }
            | Self::Aborted { context, .. }
            | Self::Exhausted { context, .. }
            | Self::Protocol { context, .. } => Some(context),
            #[cfg(feature = "nccl")]
            Self::Device(_) => None,
            Self::Object { .. }
            | Self::Truncated { .. }
            | Self::Unauthorized { .. }
            | Self::Bootstrap { .. }
            | Self::InvalidArgument(_)
            | Self::Url { .. }
            | Self::Concurrent { .. }
            | Self::AlreadyJoined { .. }
            | Self::Destroyed { .. }
            | Self::Excluded { .. }
            | Self::Unsupported(_)
            | Self::System { .. }
            | Self::Env(_)
            | Self::Channel(_)
            | Self::Token(_)
            | Self::Store(_) => None,
        }
    }

    /// Returns whether the error ended the group on all ranks. Then [`Group::shrink`](crate::Group::shrink)
    /// makes a group of the ranks that are left. `false` for an error that concerns this call only, and for
    /// `Device` (with the feature `nccl`), after which a later call returns the cause if the group has ended.
    #[must_use]
    pub fn ends_group(&self) -> bool {
        self.context().is_some()
    }

    pub(crate) fn system(what: &str, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.to_owned(), source: source.into() }
    }
}

/// Returns [`CommError::InvalidArgument`] with the text of `otherwise` unless `condition` is true.
#[inline]
pub(crate) fn require(condition: bool, otherwise: impl FnOnce() -> String) -> Result<(), CommError> {
    if condition { Ok(()) } else { Err(CommError::InvalidArgument(otherwise())) }
}

/// The way in which a rank was lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
#[non_exhaustive]
pub enum LossReason {
    /// The launcher reports that a signal ended the process.
    Signal {
        /// Number of the signal.
        signal: i32,
    },
    /// The launcher reports that the process exited without leaving the group.
    Exit {
        /// The exit code of the process.
        code: i32,
    },
    /// The connections of the rank closed without a goodbye, as when a process dies.
    Disconnected,
    /// The rank's host or the network path to it does not answer.
    Unreachable {
        /// The error of the operating system.
        what: String,
    },
    /// The rank left the group in good order, but this call needs it.
    Left,
    /// A thread of the rank panicked and thereby dropped the group.
    Panicked,
}

impl From<ExitCause> for LossReason {
    fn from(cause: ExitCause) -> Self {
        match cause {
            ExitCause::Code(code) => Self::Exit { code },
            ExitCause::Signal(signal) => Self::Signal { signal },
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal { signal } => match signal_name(*signal) {
                Some(name) => write!(f, "was ended by {name}"),
                None => write!(f, "was ended by signal {signal}"),
            },
            Self::Exit { code } => write!(f, "exited with code {code}"),
            Self::Disconnected => write!(f, "closed its connections without leaving the group: did it die?"),
            Self::Unreachable { what } => write!(f, "cannot be reached: {what}"),
            Self::Left => write!(f, "has left the group"),
            Self::Panicked => write!(f, "panicked"),
        }
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        15 => "SIGTERM",
        _ => return None,
    })
}

/// The call of this rank that failed with its group, and the progress of that call.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallContext {
    /// Name of the group.
    pub group: String,
    /// The call, if one was pending or being made.
    pub call: Option<Call>,
    /// Sequence number of the collective in the group, from 0; for a message, the number that its sender gave
    /// it.
    pub seq: u64,
    /// Bytes of this call that this rank had received.
    pub received_bytes: u64,
    /// Bytes of this call that this rank was to receive.
    pub expected_bytes: u64,
    /// The rank that found the cause first, as far as this rank knows.
    pub reported_by: usize,
    /// True if the ranks agreed on the cause through the store; false if only this rank observed it.
    pub confirmed: bool,
}

impl fmt::Display for CallContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, call, seq, received_bytes, expected_bytes, reported_by, confirmed } = self;
        write!(f, "group {group}")?;
        if let Some(call) = call {
            write!(f, ", call {seq} {call}, {received_bytes} of {expected_bytes} bytes received")?;
        }
        write!(f, ", reported by rank {reported_by}")?;
        if *confirmed { Ok(()) } else { write!(f, " (not confirmed)") }
    }
}

/// Formats a list of ranks; names at most 16.
pub(crate) struct Ranks<'a>(pub(crate) &'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, rank) in self.0.iter().take(16).enumerate() {
            write!(f, "{}{rank}", if index == 0 { "" } else { ", " })?;
        }
        match self.0.len() {
            0 => write!(f, "unknown"),
            1..=16 => Ok(()),
            more => write!(f, " and {} more", more - 16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returning_an_error_from_main_prints_its_message() {
        let context = CallContext {
            group: "world".to_owned(),
            call: None,
            seq: 7,
            received_bytes: 0,
            expected_bytes: 8,
            reported_by: 1,
            confirmed: true,
        };
        let lost = |how| CommError::PeerLost {
            rank: 3,
            address: "10.0.0.1:4000".to_owned(),
            how,
            context: Box::new(context.clone()),
        };
        // The launcher matches these texts in the last output of a worker (`cause`).
        assert_eq!(
            format!("Error: {:?}", lost(LossReason::Disconnected)),
            "Error: rank 3 at 10.0.0.1:4000 closed its connections without leaving the group: did it die?; \
             group world, reported by rank 1"
        );
        let refused =
            CommError::System { what: "cannot listen".to_owned(), source: io::ErrorKind::AddrInUse.into() };
        for error in [lost(LossReason::Left), refused, CommError::InvalidArgument("no".to_owned())] {
            assert_eq!(format!("{error:?}"), error.to_string());
            assert_eq!(format!("{error:#?}"), error.to_string());
        }
    }
}
