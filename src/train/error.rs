//! Errors of this crate.

use convoke_comm::CommError;

/// An error of a call of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Communication failed: a rank is gone, is late, or made a different call.
    #[error(transparent)]
    Comm(#[from] CommError),

    /// The ranks do not train the same network. The group stays usable.
    #[error(
        "rank {rank} has other gradients than rank {with}: {difference}; all ranks need the same parameters in the same \
         order, and the same sizes of buckets"
    )]
    Layout {
        /// The first rank that differs.
        rank: usize,
        /// The rank whose parameters are the reference.
        with: usize,
        /// The first difference.
        difference: String,
    },

    /// Parameters got no gradient in a backward pass. The group is aborted if it has other ranks.
    #[error(
        "rank {rank}: a backward pass ended without a gradient for {}; if that is meant, allow it with \
         DdpOptions::unused_parameters(true) on all ranks",
        listed(names, *more)
    )]
    Unused {
        /// The rank that reports the error.
        rank: usize,
        /// The first parameters without a gradient.
        names: Vec<String>,
        /// Number of further parameters without a gradient.
        more: usize,
    },

    /// An argument is invalid; nothing was sent.
    #[error("{0}")]
    InvalidArgument(String),

    /// A rank failed to prepare something that other ranks wait for. The group stays usable.
    #[error("rank {rank} failed to prepare what others wait for: {reason}")]
    Preparation {
        /// The rank that failed.
        rank: usize,
        /// The error of `prepare` on that rank.
        reason: String,
    },

    /// A trace file cannot be written.
    #[error("cannot write the trace {}: {source}", path.display())]
    Trace {
        /// The path of the trace file.
        path: std::path::PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
}

/// Prints the text of [`Display`](std::fmt::Display), which appears when a `main` returns this error.
impl std::fmt::Debug for TrainError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

fn listed(names: &[String], more: usize) -> String {
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", names.join(", "))
}

impl TrainError {
    /// The rank to investigate first, if one is known.
    #[must_use]
    pub fn suspect_rank(&self) -> Option<usize> {
        match self {
            Self::Comm(error) => error.suspect_rank(),
            Self::Layout { rank, .. } | Self::Unused { rank, .. } | Self::Preparation { rank, .. } => {
                Some(*rank)
            }
            Self::InvalidArgument(_) | Self::Trace { .. } => None,
        }
    }
}
