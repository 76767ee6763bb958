//! Why spawning failed.

use std::io;
use std::time::Duration;

use convoke_env::ExitCause;
use serde::{Deserialize, Serialize};

use crate::error::{Loss, Ranks};

/// Why [`spawn`](crate::spawn()) failed. No rank is left running.
#[derive(thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SpawnError {
    /// A rank failed.
    #[error("rank {rank} of {size} {}; {}", Loss::from(*how), LastWords(stderr))]
    Failed {
        /// The rank that failed first, by itself.
        rank: usize,
        /// Number of ranks.
        size: usize,
        /// How it ended.
        how: ExitCause,
        /// The end of what it wrote to standard error: the panic, or the error that it returned.
        stderr: String,
    },
    /// A rank ended before it came to the call.
    #[error(
        "rank {rank} of {size} {} before it came to the call of spawn at {place}: does the program always come \
         there? {}", Loss::from(*how), LastWords(stderr)
    )]
    Unreached {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        size: usize,
        /// Where the call is.
        place: String,
        /// How it ended.
        how: ExitCause,
        /// The end of what it wrote to standard error.
        stderr: String,
    },
    /// The time is over.
    #[error("rank(s) {} still ran after {} ms", Ranks(ranks), after.as_millis())]
    Timeout {
        /// Ranks that had not ended.
        ranks: Vec<usize>,
        /// How long they had.
        after: Duration,
    },
    /// Spawning cannot be done so, or here; nothing was started.
    #[error("cannot spawn: {0}")]
    Unusable(String),
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        #[serde(with = "io_error")]
        source: io::Error,
    },
}

/// As [`Display`](std::fmt::Display): what a `main` prints that returns it.
impl std::fmt::Debug for SpawnError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl SpawnError {
    /// The rank to look at first, if one is to blame.
    #[must_use]
    pub fn blame(&self) -> Option<usize> {
        match self {
            Self::Failed { rank, .. } | Self::Unreached { rank, .. } => Some(*rank),
            Self::Timeout { ranks, .. } => ranks.first().copied(),
            Self::Unusable(_) | Self::System { .. } => None,
        }
    }

    pub(super) fn system(what: &str, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.to_owned(), source: source.into() }
    }
}

/// The end of standard error, for the end of a message.
struct LastWords<'a>(&'a str);

impl std::fmt::Display for LastWords<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.trim_end() {
            "" => f.write_str("it wrote nothing to stderr"),
            words => write!(f, "its last words:\n{words}"),
        }
    }
}

/// An error of the system as its text.
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
