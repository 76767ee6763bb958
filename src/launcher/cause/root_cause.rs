//! Selects the root cause of a job's end among several failures. Pure.

use super::Class;
use super::class::CauseKind;

/// A failure, with the facts that decide the selection of the root cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) rank: usize,
    pub(crate) class: Class,
    /// True if the launcher was already stopping the worker when it ended.
    pub(crate) stopped: bool,
    /// The rank that this worker reports as lost.
    pub(crate) suspect_rank: Option<usize>,
    /// Time of the failure, in seconds since 1970.
    pub(crate) time: i64,
}

/// Returns the index of the root cause, or `None` without candidates. `candidates` are in the order in which
/// their ends were noticed.
///
/// A failure that arose in its own process has priority over one that follows from the end of another
/// process. Both have priority over processes that the launcher stopped. Among equals the earliest wins, then
/// the first noticed. A worker that fails by itself after the launcher told it to stop counts only if no
/// other worker has a cause of its own. An early exit counts last among own causes.
pub(crate) fn select_root_cause(candidates: &[Candidate]) -> Option<usize> {
    let suspect_in_list = |candidate: &Candidate| {
        let rank = candidate.suspect_rank?;
        candidates.iter().position(|other| other.rank == rank && other.class != Class::Stopped)
    };
    (0..candidates.len()).min_by_key(|&at| {
        let candidate = &candidates[at];
        // A candidate that blames a rank outside this list comes before one that blames another candidate,
        // since that other candidate can be considered itself.
        (priority(candidate), suspect_in_list(candidate).is_some(), candidate.time)
    })
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
