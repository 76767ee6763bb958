//! What can go wrong.

use convoke_comm::CommError;

/// Why a call of this crate failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The ranks could not do it together: one is gone, late, or does something else.
    #[error(transparent)]
    Comm(#[from] CommError),

    /// The ranks do not train the same network. The group goes on.
    #[error(
        "rank {rank} has other gradients than rank {with}: {difference}; all ranks need the same parameters in the same \
         order, and the same sizes of buckets"
    )]
    Layout {
        /// The first rank that differs.
        rank: usize,
        /// From which rank.
        with: usize,
        /// The first difference.
        difference: String,
    },

    /// Parameters got no gradient in a backward pass. The group has ended, if it has other ranks.
    #[error(
        "rank {rank}: a backward pass ended without a gradient for {}; if that is meant, allow it with \
         DdpOptions::unused_parameters(true) on all ranks",
        listed(names, *more)
    )]
    Unused {
        /// This rank.
        rank: usize,
        /// The first of them.
        names: Vec<String>,
        /// How many there are beside.
        more: usize,
    },

    /// An argument makes no sense; nothing was sent.
    #[error("{0}")]
    InvalidArgument(String),

    /// A rank that prepares something for others failed. The group goes on.
    #[error("rank {rank} failed to prepare what others wait for: {reason}")]
    Preparation {
        /// Which one.
        rank: usize,
        /// Its error.
        reason: String,
    },

    /// A trace cannot be written.
    #[error("cannot write the trace {}: {source}", path.display())]
    Trace {
        /// Where to.
        path: std::path::PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// As [`Display`](std::fmt::Display): what a `main` prints that returns it.
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
    /// The rank to look at first, if one is known.
    #[must_use]
    pub fn blame(&self) -> Option<usize> {
        match self {
            Self::Comm(error) => error.blame(),
            Self::Layout { rank, .. } | Self::Unused { rank, .. } | Self::Preparation { rank, .. } => {
                Some(*rank)
            }
            Self::InvalidArgument(_) | Self::Trace { .. } => None,
        }
    }
}
