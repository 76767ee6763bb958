//! Delays a restart after quick failures.

use std::time::{Duration, Instant};

use super::event_loop::EventLoop;
use crate::messages::{Progress, print_message};
use crate::report::Failure;

/// A restart that waits until its delay is over.
#[derive(Debug)]
pub(super) struct PendingRestart {
    until: Instant,
    restarts: u32,
    progress: Progress,
    what: String,
}

impl PendingRestart {
    /// Returns the time of the next action: the restart, or a report of the remaining delay.
    pub(super) fn wake_at(&self) -> Instant {
        self.until.min(Instant::now() + Progress::INTERVAL)
    }
}

/// Counts how often in a row the workers failed in the same way.
#[derive(Debug, Default)]
pub(super) struct FailureStreak {
    failure: String,
    count: u32,
}

impl FailureStreak {
    /// Records a failure. Returns how many times in a row it has been recorded.
    fn record(&mut self, failure: &Failure) -> u32 {
        let now = format!("{} {} {}", failure.rank, failure.describe(), failure.explanation);
        self.count = if now == self.failure { self.count + 1 } else { 1 };
        self.failure = now;
        self.count
    }
}

impl EventLoop {
    /// Joins the next round after the restart delay, if there is one.
    pub(super) fn restart(&mut self, restarts: u32) {
        let delay = std::mem::take(&mut self.next_restart_delay);
        if delay.is_zero() {
            self.join(restarts);
            return;
        }
        let until = Instant::now() + delay;
        let what = match self.backoff.quick_failures() {
            0..=1 => "waiting before the restart".to_owned(),
            quick => format!("waiting before the restart: the workers failed quickly {quick} times in a row"),
        };
        let mut progress = Progress::new(until);
        progress.show(&what);
        self.pending_restart = Some(PendingRestart { until, restarts, progress, what });
    }

    /// Reports the remaining delay before a restart, or restarts when the delay is over.
    pub(super) fn continue_restart_delay(&mut self) {
        let Some(pause) = &mut self.pending_restart else { return };
        if Instant::now() < pause.until {
            pause.progress.show(&pause.what);
            return;
        }
        let restarts = pause.restarts;
        self.pending_restart = None;
        self.join(restarts);
    }

    /// Records a failure of the workers after which a restart is left. Returns false if the same failure has
    /// come so often that a restart is useless.
    pub(super) fn record_failure(&mut self, root: Option<&Failure>) -> bool {
        let began = self.round.as_ref().map(|round| round.began);
        self.next_restart_delay =
            self.backoff.record_failure(began.map_or(Duration::MAX, |began| began.elapsed()));
        let (Some(root), Some(most)) = (root, self.config.restart_stop_after_same) else { return true };
        let times = self.failure_streak.record(root);
        if times < most {
            return true;
        }
        print_message(&format!(
            "error: rank {} {} for the same reason {times} times in a row: it is not restarted again \
             (--restart-stop-after-same={most})",
            root.rank,
            root.describe()
        ));
        self.agent.disable_restarts();
        false
    }
}
