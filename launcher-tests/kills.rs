//! What the ranks that are killed and the test that kills them both know.

/// Ranks of each job.
pub const WORLD: usize = 3;
