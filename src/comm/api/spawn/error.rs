//! The errors of spawn.

use std::io;
use std::time::Duration;

use convoke_env::ExitCause;
use serde::{Deserialize, Serialize};

use crate::error::{LossReason, Ranks};

/// The reason why [`spawn`](crate::spawn()) failed. No rank is left running.
#[derive(thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SpawnError {
    /// A rank failed.
    #[error("rank {rank} of {size} {}; {}", LossReason::from(*how), last_lines(stderr))]
    Failed {
        /// The rank that failed first, by itself.
        rank: usize,
        /// Number of ranks.
        size: usize,
        /// Exit code or signal of the rank.
        how: ExitCause,
        /// End of its standard error, at most 4 KiB: the panic, or the error that `worker` returned.
        stderr: String,
    },
    /// A rank ended before it reached the call of spawn.
    #[error(
        "rank {rank} of {size} {} before it reached the call of spawn at {place}: does the program always \
         reach it? {}", LossReason::from(*how), last_lines(stderr)
    )]
    Unreached {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        size: usize,
        /// File, line and column of the call.
        place: String,
        /// Exit code or signal of the rank.
        how: ExitCause,
        /// End of its standard error, at most 4 KiB.
        stderr: String,
    },
    /// Ranks still ran at the time limit.
    #[error("rank(s) {} still ran after {} ms", Ranks(ranks), after.as_millis())]
    Timeout {
        /// Ranks that had not ended.
        ranks: Vec<usize>,
        /// The time limit.
        after: Duration,
    },
    /// Spawn cannot be called with these settings or at this point of the program; nothing was started.
    #[error("cannot spawn: {0}")]
    Unusable(String),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The operation that failed.
        what: String,
        /// The error of the operating system.
        #[serde(with = "io_error")]
        source: io::Error,
    },
}

convoke_env::debug_as_display!(SpawnError);

impl SpawnError {
    /// Returns the rank to inspect first: the failed rank, or the first that still ran at the time limit.
    #[must_use]
    pub fn suspect_rank(&self) -> Option<usize> {
        match self {
            Self::Failed { rank, .. } | Self::Unreached { rank, .. } => Some(*rank),
            Self::Timeout { ranks, .. } => ranks.first().copied(),
            Self::Unusable(_) | Self::System { .. } => None,
        }
    }

    /// Returns a copy in the form in which ranks read it.
    pub(super) fn copy(&self) -> Self {
        let copy = serde_json::to_vec(self).and_then(|bytes| serde_json::from_slice(&bytes));
        copy.expect("an error is plain data, and is read as it was written")
    }

    pub(super) fn system(what: &str, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.to_owned(), source: source.into() }
    }
}

/// Describes the end of standard error.
fn last_lines(stderr: &str) -> String {
    match stderr.trim_end() {
        "" => "it wrote nothing to stderr".to_owned(),
        words => format!("the last lines of its stderr:\n{words}"),
    }
}

/// Serializes an I/O error as its text.
mod io_error {
    use std::io;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(error: &io::Error, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(error)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<io::Error, D::Error> {
        String::deserialize(deserializer).map(io::Error::other)
    }
}
