//! Delays a restart after quick failures.

use std::time::{Duration, Instant};

use super::backoff::Backoff;
use crate::messages::{Progress, print_message};
use crate::report::Failure;

/// Decides when, and whether, failed workers are restarted.
pub(super) struct RestartDelay {
    backoff: Backoff,
    /// Delay before the next restart, computed when the last round failed.
    next: Duration,
    pending: Option<PendingRestart>,
    /// The latest failure, and how many times in a row the workers failed in this way.
    last_failure: (String, u32),
    /// Number of equal failures in a row after which a restart is useless.
    max_same: Option<u32>,
}

/// A restart that waits until its delay is over.
struct PendingRestart {
    until: Instant,
    restarts: u32,
    progress: Progress,
    what: String,
}

impl RestartDelay {
    pub(super) fn new(min_delay: Duration, max_same: Option<u32>) -> Self {
        let (backoff, last_failure) = (Backoff::new(min_delay), (String::new(), 0));
        Self { backoff, next: Duration::ZERO, pending: None, last_failure, max_same }
    }

    /// Starts the delay before a restart. Returns false if there is none.
    pub(super) fn begin(&mut self, restarts: u32) -> bool {
        let delay = std::mem::take(&mut self.next);
        if delay.is_zero() {
            return false;
        }
        let until = Instant::now() + delay;
        let what = match self.backoff.quick_failures {
            0..=1 => "waiting before the restart".to_owned(),
            quick => format!("waiting before the restart: the workers failed quickly {quick} times in a row"),
        };
        let mut progress = Progress::new(until);
        progress.show(&what);
        self.pending = Some(PendingRestart { until, restarts, progress, what });
        true
    }

    /// Returns the time of the next action: the restart, or a report of the remaining delay.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.pending.as_ref().map(|pause| pause.until.min(Instant::now() + Progress::INTERVAL))
    }

    /// Reports the remaining delay before a restart. Returns the number of restarts when the delay is over.
    pub(super) fn advance(&mut self) -> Option<u32> {
        let pause = self.pending.as_mut()?;
        if Instant::now() < pause.until {
            pause.progress.show(&pause.what);
            return None;
        }
        self.cancel()
    }

    /// Ends the delay. Returns the number of restarts if there was one.
    pub(super) fn cancel(&mut self) -> Option<u32> {
        self.pending.take().map(|pause| pause.restarts)
    }

    /// Records a failure, `lasted` after the start of the round, after which a restart is left. Returns false
    /// if the same failure has come so often that a restart is useless.
    pub(super) fn record_failure(&mut self, lasted: Duration, root: Option<&Failure>) -> bool {
        self.next = self.backoff.record_failure(lasted);
        let (Some(root), Some(most)) = (root, self.max_same) else { return true };
        let failure = format!("{} {} {}", root.rank, root.describe(), root.explanation);
        let times = if failure == self.last_failure.0 { self.last_failure.1 + 1 } else { 1 };
        self.last_failure = (failure, times);
        if times < most {
            return true;
        }
        print_message(&format!(
            "error: rank {} {} for the same reason {times} times in a row: it is not restarted again \
             (--restart-stop-after-same={most})",
            root.rank,
            root.describe()
        ));
        false
    }
}
