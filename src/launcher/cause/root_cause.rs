//! Selects the root cause among several failures. Pure.

use super::Class;
use super::class::CauseKind;

/// The facts about one process that decide the selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) rank: usize,
    pub(crate) class: Class,
    /// It was told to stop before it ended.
    pub(crate) stopped: bool,
    /// The rank that it says is gone.
    pub(crate) suspect_rank: Option<usize>,
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
pub(crate) fn select_root_cause(candidates: &[Candidate]) -> Option<usize> {
    let suspect_in_list = |candidate: &Candidate| {
        let rank = candidate.suspect_rank?;
        candidates.iter().position(|other| other.rank == rank && other.class != Class::Stopped)
    };
    let best = (0..candidates.len()).min_by_key(|&at| {
        let candidate = &candidates[at];
        // A candidate that blames a rank outside this list knows more than one that blames another
        // candidate: that candidate has a reason of its own.
        (priority(candidate), suspect_in_list(candidate).is_some(), candidate.time)
    })?;
    Some(best)
}

fn priority(candidate: &Candidate) -> u8 {
    match (candidate.class.cause_kind(), candidate.stopped) {
        (CauseKind::Primary, false) if candidate.class != Class::EarlyExit => 0,
        (CauseKind::Primary, true) => 1,
        (CauseKind::Primary, false) => 2,
        (CauseKind::Consequence, false) => 3,
        (CauseKind::Consequence, true) => 4,
        (CauseKind::ByLauncher, _) => 5,
    }
}
