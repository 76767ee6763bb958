//! Why a call failed: always who, what and how far.

use std::fmt;
use std::io;
use std::time::Duration;

use convoke_env::{ChannelError, EnvError, ExitCause, TokenError};
use convoke_store::StoreError;
use serde::{Deserialize, Serialize};

use crate::call::Call;

/// Why a call failed.
///
/// [`PeerLost`](Self::PeerLost), [`Timeout`](Self::Timeout), [`Mismatch`](Self::Mismatch),
/// [`Aborted`](Self::Aborted), [`Exhausted`](Self::Exhausted) and [`Protocol`](Self::Protocol) end the group: every call that is
/// pending or made later, on every rank, returns the same cause. Buffers of failed calls have
/// unspecified contents. The other variants concern one call only.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A rank is gone.
    #[error("rank {rank} at {address} {how}; {place}")]
    PeerLost {
        /// The rank that is gone.
        rank: usize,
        /// Where it listened.
        address: String,
        /// How it went, as far as anybody knows.
        how: Loss,
        /// Which call this ended here.
        place: Box<Place>,
    },
    /// The deadline passed.
    #[error("timed out after {} ms waiting for rank(s) {}; {place}", after.as_millis(), Ranks(missing))]
    Timeout {
        /// Ranks that did not come; at most 64 of them.
        missing: Vec<usize>,
        /// How long the rank waited whose deadline passed first.
        after: Duration,
        /// Which call this ended here.
        place: Box<Place>,
    },
    /// Two ranks made different calls where all must make the same.
    #[error(
        "rank {rank} called {theirs} as call {theirs_seq} of the group, rank {by} called {ours} as call {ours_seq}; {place}"
    )]
    Mismatch {
        /// The rank whose call differs from that of `by`.
        rank: usize,
        /// What it called.
        theirs: Call,
        /// Which of its collectives that was.
        theirs_seq: u64,
        /// The rank that noticed.
        by: usize,
        /// What that one called.
        ours: Call,
        /// Which of its collectives that was.
        ours_seq: u64,
        /// Which call this ended here.
        place: Box<Place>,
    },
    /// The program ended the group.
    #[error("aborted by rank {by}: {reason}; {place}")]
    Aborted {
        /// The rank that called `abort`.
        by: usize,
        /// Its reason.
        reason: String,
        /// Which call this ended here.
        place: Box<Place>,
    },
    /// A rank has no file descriptor left for the connections of the group.
    #[error("rank {rank} has no file descriptor left: {what}; {place}")]
    Exhausted {
        /// The rank.
        rank: usize,
        /// How many it may have, how many the group needs, and what to do.
        what: String,
        /// Which call this ended here.
        place: Box<Place>,
    },
    /// A connected rank sent what makes no sense.
    #[error("rank {peer} broke the protocol: {what}; {place}")]
    Protocol {
        /// Who sent it.
        peer: usize,
        /// What is wrong with it.
        what: String,
        /// Which call this ended here.
        place: Box<Place>,
    },
    /// A connection could not prove that it belongs to this job.
    #[error("{from} does not belong to this job: {what}")]
    Unauthorized {
        /// Rank and address that were called.
        from: String,
        /// What went wrong.
        what: String,
    },
    /// The ranks did not find together.
    #[error("group {group} could not form: {what}")]
    Bootstrap {
        /// Name of the group.
        group: String,
        /// What is missing, and where it was waited for.
        what: String,
        /// Ranks that are missing or differ; at most 64 of them.
        ranks: Vec<usize>,
    },
    /// The arguments of this call make no sense; nothing was sent, the group goes on.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// A URL does not tell where and as whom to join.
    #[error("cannot join at {url:?}: {what}")]
    Url {
        /// The URL.
        url: String,
        /// What is wrong with it, and what to do.
        what: String,
    },
    /// Another thread of this process is making the same.
    #[error("another thread of this process is already joining as {what}")]
    Concurrent {
        /// Which rank of which group, and where.
        what: String,
    },
    /// This process is in that world already.
    #[error(
        "this process is in a world already, as {what}: use that one, or drop it and all groups that come from it before it \
         joins again"
    )]
    AlreadyJoined {
        /// Which rank, and where.
        what: String,
    },
    /// This rank has destroyed its handle of the group; the others are not concerned by this call.
    #[error("group {group} was destroyed on this rank")]
    Destroyed {
        /// Name of the group.
        group: String,
    },
    /// The survivors of a failure went on without this rank.
    #[error(
        "the survivors of group {group}, rank(s) {}, went on without this rank: it came too late, or was lost to them",
        Ranks(survivors)
    )]
    Excluded {
        /// Name of the group that failed.
        group: String,
        /// Who went on, as ranks of that group.
        survivors: Vec<usize>,
    },
    /// An object could not be sent or read; the group goes on.
    #[error("the object of rank {rank} {what}")]
    Object {
        /// Whose object it is.
        rank: usize,
        /// What is wrong with it.
        what: String,
    },
    /// This build or platform cannot do that.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// A device, its driver or NCCL cannot be used, or failed.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Device(#[from] crate::device::DeviceError),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was asked for.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The variables of this process do not describe a worker.
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

/// As [`Display`](fmt::Display): what a `main` prints that returns it.
impl fmt::Debug for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl CommError {
    /// The rank to look at first, if one is to blame.
    #[must_use]
    pub fn blame(&self) -> Option<usize> {
        match self {
            Self::PeerLost { rank, .. } | Self::Mismatch { rank, .. } => Some(*rank),
            Self::Timeout { missing: ranks, .. } | Self::Bootstrap { ranks, .. } => ranks.first().copied(),
            Self::Aborted { by, .. } => Some(*by),
            Self::Protocol { peer: rank, .. } | Self::Exhausted { rank, .. } | Self::Object { rank, .. } => {
                Some(*rank)
            }
            #[cfg(feature = "nccl")]
            Self::Device(error) => error.blame(),
            Self::Unauthorized { .. }
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

    /// Which call failed, and how far it came; `None` for errors that do not end the group.
    #[must_use]
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::PeerLost { place, .. }
            | Self::Timeout { place, .. }
            | Self::Mismatch { place, .. }
            | Self::Aborted { place, .. }
            | Self::Exhausted { place, .. }
            | Self::Protocol { place, .. } => Some(place),
            #[cfg(feature = "nccl")]
            Self::Device(_) => None,
            Self::Object { .. }
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

    pub(crate) fn system(what: &str, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.to_owned(), source: source.into() }
    }
}

/// How a rank went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
#[non_exhaustive]
pub enum Loss {
    /// A signal ended it, says the launcher.
    Signal {
        /// Number of the signal.
        signal: i32,
    },
    /// It exited without leaving the group, says the launcher.
    Exit {
        /// Its exit code.
        code: i32,
    },
    /// Its connections closed without a word, as when a process dies.
    Disconnected,
    /// Its host or the way to it does not answer.
    Unreachable {
        /// What the system said.
        what: String,
    },
    /// It left the group in good order, but this call needs it.
    Left,
    /// It dropped the group while its thread panicked.
    Panicked,
}

impl From<ExitCause> for Loss {
    fn from(cause: ExitCause) -> Self {
        match cause {
            ExitCause::Code(code) => Self::Exit { code },
            ExitCause::Signal(signal) => Self::Signal { signal },
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal { signal } => match signal_name(*signal) {
                Some(name) => write!(f, "was ended by {name}"),
                None => write!(f, "was ended by signal {signal}"),
            },
            Self::Exit { code } => write!(f, "exited with code {code}"),
            Self::Disconnected => write!(f, "closed its connections without a word: did it die?"),
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

/// Which call failed, and how far it came.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// Name of the group.
    pub group: String,
    /// The call, if one was pending or being made.
    pub call: Option<Call>,
    /// Which collective of the group it is, from 0; for a message which one of its sender.
    pub seq: u64,
    /// Bytes of this call that this rank had received.
    pub received_bytes: u64,
    /// Bytes of this call that this rank was to receive.
    pub expected_bytes: u64,
    /// Rank that found the cause first, as far as this rank knows.
    pub reported_by: usize,
    /// Whether the cause is agreed through the store; otherwise it is what this rank saw.
    pub confirmed: bool,
}

impl fmt::Display for Place {
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

/// Ranks as a short list.
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
    fn what_main_prints_of_an_error_is_its_message() {
        let place = Place {
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
            place: Box::new(place.clone()),
        };
        // As the launcher knows them in what a worker wrote last (`cause`).
        assert_eq!(
            format!("Error: {:?}", lost(Loss::Disconnected)),
            "Error: rank 3 at 10.0.0.1:4000 closed its connections without a word: did it die?; group world, \
             reported by rank 1"
        );
        let refused =
            CommError::System { what: "cannot listen".to_owned(), source: io::ErrorKind::AddrInUse.into() };
        for error in [lost(Loss::Left), refused, CommError::InvalidArgument("no".to_owned())] {
            assert_eq!(format!("{error:?}"), error.to_string());
            assert_eq!(format!("{error:#?}"), error.to_string());
        }
    }
}
