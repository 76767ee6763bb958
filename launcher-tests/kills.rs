//! Constants that the killed ranks and the test that kills them share.

/// Ranks of each job.
pub const WORLD: usize = 3;
