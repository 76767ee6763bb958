//! Selects the root cause among several failures. Pure.

use super::Class;
use super::class::Weight;

/// The facts about one process that decide the election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) rank: usize,
    pub(crate) class: Class,
    /// It was told to stop before it ended.
    pub(crate) stopped: bool,
    /// The rank that it says is gone.
    pub(crate) blames: Option<usize>,
    /// When it failed, in seconds.
    pub(crate) time: i64,
}

/// Returns the index of the root cause. The order of `candidates` is the order in which their ends were
/// noticed.
///
/// A failure with a cause of its own wins over a failure that follows from the end of another process. Both
/// win over processes that the launcher stopped. Among equals the earliest wins, then the first noticed. A
/// worker that fails by itself after the launcher told it to stop counts only if no other worker has a cause
/// of its own. An early exit counts last among own causes.
pub(crate) fn elect(candidates: &[Candidate]) -> Option<usize> {
    let blamed_and_here = |candidate: &Candidate| {
        let rank = candidate.blames?;
        candidates.iter().position(|other| other.rank == rank && other.class != Class::Stopped)
    };
    let best = (0..candidates.len()).min_by_key(|&at| {
        let candidate = &candidates[at];
        // A candidate that blames a rank outside this list knows more than one that blames another
        // candidate: that candidate has a reason of its own.
        (place(candidate), blamed_and_here(candidate).is_some(), candidate.time)
    })?;
    Some(best)
}

fn place(candidate: &Candidate) -> u8 {
    match (candidate.class.weight(), candidate.stopped) {
        (Weight::Own, false) if candidate.class != Class::EarlyExit => 0,
        (Weight::Own, true) => 1,
        (Weight::Own, false) => 2,
        (Weight::Consequence, false) => 3,
        (Weight::Consequence, true) => 4,
        (Weight::Ours, _) => 5,
    }
}
