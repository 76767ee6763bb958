//! Constants that the killed ranks share with the test that kills them.

/// Number of ranks in each job.
pub const WORLD_SIZE: usize = 3;
