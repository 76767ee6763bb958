//! The errors of reading the environment variables that describe a worker, and checks of their values.

/// The reason why the environment variables of a process do not describe a worker.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvError {
    /// Some of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (the variables of `env://`) are set, but not
    /// all.
    #[error(
        "{} set, but not {}: start the worker with convoke, torchrun, mpirun or srun, or set all of RANK, \
         WORLD_SIZE, MASTER_ADDR and MASTER_PORT (none of them for a world of one rank)",
        present.join(", "), missing.join(", ")
    )]
    Missing {
        /// Variables that are set.
        present: Vec<&'static str>,
        /// Variables that are missing.
        missing: Vec<&'static str>,
    },
    /// A variable has a value of the wrong form.
    #[error("{name}={value:?} is not {expected}")]
    Invalid {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable, cut to 64 characters.
        value: String,
        /// Description of a correct value.
        expected: &'static str,
    },
    /// mpirun or srun started this process, but the variables that it set do not tell a needed value.
    #[error(
        "{launcher} started this process as rank {rank} of {world_size}, but {variable} is not set: set it ({how})"
    )]
    NoMaster {
        /// Name of the program that started the process.
        launcher: String,
        /// Rank of the process.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// The variable to set.
        variable: &'static str,
        /// Command that sets the variable for all ranks.
        how: String,
    },
    /// A rank is not below the number of ranks.
    #[error("{rank_name}={rank} is out of range: {size_name}={size} allows 0 to {}", size.saturating_sub(1))]
    OutOfRange {
        /// Name of the rank variable.
        rank_name: &'static str,
        /// Value of the rank variable.
        rank: usize,
        /// Name of the size variable.
        size_name: &'static str,
        /// Value of the size variable.
        size: usize,
    },
}

crate::debug_as_display!(EnvError);

/// Parses the value of the variable `name`.
pub(crate) fn parse_value<N: std::str::FromStr>(
    name: &'static str,
    value: &str,
    expected: &'static str,
) -> Result<N, EnvError> {
    value.trim().parse().map_err(|_| invalid(name, value, expected))
}

/// Returns the values of both variables if the rank is below the size.
pub(crate) fn check_below(
    (rank_name, rank): (&'static str, usize),
    (size_name, size): (&'static str, usize),
) -> Result<(usize, usize), EnvError> {
    let in_range = (rank < size).then_some((rank, size));
    in_range.ok_or(EnvError::OutOfRange { rank_name, rank, size_name, size })
}

pub(crate) fn invalid(name: &'static str, value: &str, expected: &'static str) -> EnvError {
    EnvError::Invalid { name, value: value.chars().take(64).collect(), expected }
}
