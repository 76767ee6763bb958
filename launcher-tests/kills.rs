//! Constants that the killed ranks share with the test that kills them.

/// Number of ranks in each job.
pub const WORLD: usize = 3;
