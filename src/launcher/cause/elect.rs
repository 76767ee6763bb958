//! Which of several failures is the root cause. Pure.

use super::Class;
use super::class::Weight;

/// What counts in the election.
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

/// Index of the root cause; `candidates` stand in the order in which their ends were noticed.
///
/// What happened in a process itself comes before what follows from another's end, and that before
/// those whom we stopped; among equals the earliest, then the first noticed. A worker that fails by
/// itself although it had been told to stop counts only if nobody failed before by a cause of its own.
pub(crate) fn elect(candidates: &[Candidate]) -> Option<usize> {
    let blamed_and_here = |candidate: &Candidate| {
        let rank = candidate.blames?;
        candidates.iter().position(|other| other.rank == rank && other.class != Class::Stopped)
    };
    let best = (0..candidates.len()).min_by_key(|&at| {
        let candidate = &candidates[at];
        // Who blames a rank elsewhere knows more than who blames one of these, for that one has its own reason.
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
