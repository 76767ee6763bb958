//! Decides what happens to the other spawned ranks when one ends. Pure: the caller passes the time.

use std::time::{Duration, Instant};

use super::SpawnError;

/// Time to wait, after a rank failed because it lost a peer, for the rank that failed first to end.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How a rank ended.
#[derive(Debug)]
pub(super) enum RankExit {
    Success,
    /// The rank failed by itself.
    Failed(SpawnError),
    /// The rank most likely failed because another rank failed.
    Consequence(SpawnError),
}

/// The signal to send to the ranks that still run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Terminate,
    Kill,
}

/// The state of the ranks of one call of spawn, until all have ended.
#[derive(Debug)]
pub(super) struct Supervisor {
    state: State,
    grace: Duration,
}

#[derive(Debug)]
enum State {
    /// No rank has failed. `deadline` is the time limit of the call; `None` if it has no limit.
    Running { deadline: Option<Instant> },
    /// Ranks failed because they lost a peer; the peer that failed first still seems to run, until `until`.
    Waiting { first: SpawnError, until: Instant },
    /// The remaining ranks have got SIGTERM; those that still run at `kill_at` get SIGKILL.
    Stopping { cause: SpawnError, kill_at: Option<Instant> },
    /// All ranks got SIGKILL; only reaping is left.
    Killing { cause: SpawnError },
}

impl Supervisor {
    pub(super) fn new(deadline: Option<Instant>, grace: Duration) -> Self {
        Self { state: State::Running { deadline }, grace }
    }

    /// Returns the time at which [`Self::tick`] must be called; `None` if no time limit is running.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match self.state {
            State::Running { deadline } => deadline,
            State::Waiting { until, .. } => Some(until),
            State::Stopping { kill_at, .. } => kill_at,
            State::Killing { .. } => None,
        }
    }

    /// Handles the end of a rank; returns the signal to send to the other ranks, if any.
    pub(super) fn rank_exited(&mut self, now: Instant, end: RankExit) -> Option<Action> {
        match (&self.state, end) {
            (State::Running { .. } | State::Waiting { .. }, RankExit::Failed(cause)) => Some(self.stop(now, cause)),
            (State::Running { .. }, RankExit::Consequence(first)) => {
                self.state = State::Waiting { first, until: now + CAUSE_TIMEOUT };
                None
            }
            (State::Waiting { .. }, RankExit::Consequence(_))
            | (State::Running { .. } | State::Waiting { .. }, RankExit::Success)
            // Ranks that end now were ended by a signal of the spawner.
            | (State::Stopping { .. } | State::Killing { .. }, RankExit::Success | RankExit::Failed(_) | RankExit::Consequence(_)) => None,
        }
    }

    /// Acts if a time limit has expired at `now`; `late` makes the error for the time limit of the call.
    pub(super) fn tick(&mut self, now: Instant, late: impl FnOnce() -> SpawnError) -> Option<Action> {
        if self.wake_at().is_none_or(|at| now < at) {
            return None;
        }
        match std::mem::replace(&mut self.state, State::Running { deadline: None }) {
            State::Running { .. } => Some(self.stop(now, late())),
            State::Waiting { first, .. } => Some(self.stop(now, first)),
            State::Stopping { cause, .. } | State::Killing { cause } => {
                self.state = State::Killing { cause };
                Some(Action::Kill)
            }
        }
    }

    fn stop(&mut self, now: Instant, cause: SpawnError) -> Action {
        self.state = State::Stopping { cause, kill_at: now.checked_add(self.grace) };
        Action::Terminate
    }

    /// Returns the result of the call once all ranks have ended.
    pub(super) fn outcome(self) -> Result<(), SpawnError> {
        match self.state {
            State::Running { .. } => Ok(()),
            State::Waiting { first: cause, .. }
            | State::Stopping { cause, .. }
            | State::Killing { cause } => Err(cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn error(rank: usize) -> SpawnError {
        SpawnError::Timeout { ranks: vec![rank], after: SECOND }
    }

    fn supervisor() -> (Supervisor, Instant) {
        let start = Instant::now();
        (Supervisor::new(Some(start + 60 * SECOND), 5 * SECOND), start)
    }

    fn named(supervisor: Supervisor) -> Option<usize> {
        supervisor.outcome().err().and_then(|error| error.suspect_rank())
    }

    #[test]
    fn spawn_succeeds_when_all_ranks_exit_successfully() {
        let (mut supervisor, start) = supervisor();
        assert_eq!(supervisor.rank_exited(start, RankExit::Success), None);
        assert_eq!(supervisor.tick(start + 59 * SECOND, || error(0)), None);
        assert_eq!(supervisor.rank_exited(start + 59 * SECOND, RankExit::Success), None);
        assert_eq!(named(supervisor), None);
    }

    #[test]
    fn first_failure_stops_the_other_ranks_and_is_named() {
        let (mut supervisor, start) = supervisor();
        assert_eq!(supervisor.rank_exited(start, RankExit::Failed(error(1))), Some(Action::Terminate));
        assert_eq!(supervisor.rank_exited(start, RankExit::Failed(error(0))), None);
        assert_eq!(supervisor.tick(start + 4 * SECOND, || error(9)), None);
        assert_eq!(supervisor.tick(start + 5 * SECOND, || error(9)), Some(Action::Kill));
        assert_eq!(supervisor.wake_at(), None);
        assert_eq!(supervisor.tick(start + 500 * SECOND, || error(9)), None);
        assert_eq!(named(supervisor), Some(1));
    }

    #[test]
    fn consequential_failure_waits_for_its_cause() {
        let (mut supervisor, start) = supervisor();
        assert_eq!(supervisor.rank_exited(start, RankExit::Consequence(error(0))), None);
        assert_eq!(supervisor.rank_exited(start, RankExit::Consequence(error(2))), None);
        assert_eq!(
            supervisor.rank_exited(start + SECOND / 2, RankExit::Failed(error(1))),
            Some(Action::Terminate)
        );
        assert_eq!(named(supervisor), Some(1));
    }

    #[test]
    fn first_consequential_failure_is_reported_if_no_cause_follows() {
        let (mut supervisor, start) = supervisor();
        assert_eq!(supervisor.rank_exited(start, RankExit::Consequence(error(0))), None);
        assert_eq!(supervisor.tick(start + SECOND, || error(9)), Some(Action::Terminate));
        assert_eq!(named(supervisor), Some(0));
    }

    #[test]
    fn deadline_stops_all_ranks() {
        let (mut supervisor, start) = supervisor();
        assert_eq!(supervisor.wake_at(), Some(start + 60 * SECOND));
        assert_eq!(supervisor.tick(start + 60 * SECOND, || error(3)), Some(Action::Terminate));
        assert_eq!(named(supervisor), Some(3));
    }
}
