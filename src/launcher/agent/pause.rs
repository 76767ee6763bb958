//! The delay before a restart.

use std::time::{Duration, Instant};

use super::run::Shell;
use crate::report::Failure;
use crate::say::{Progress, say};

/// A restart that is being delayed.
#[derive(Debug)]
pub(super) struct Pause {
    until: Instant,
    restarts: u32,
    progress: Progress,
    what: String,
}

impl Pause {
    /// Returns the time of the next action: to restart, or to report the remaining delay.
    pub(super) fn wake_at(&self) -> Instant {
        self.until.min(Instant::now() + Progress::INTERVAL)
    }
}

/// Counter of equal failures in a row.
#[derive(Debug, Default)]
pub(super) struct Same {
    failure: String,
    times: u32,
}

impl Same {
    /// Returns how often in a row this failure has come.
    fn count(&mut self, failure: &Failure) -> u32 {
        let now = format!("{} {} {}", failure.rank, failure.describe(), failure.explanation);
        self.times = if now == self.failure { self.times + 1 } else { 1 };
        self.failure = now;
        self.times
    }
}

impl Shell {
    /// Joins the next round after the delay that quick failures caused.
    pub(super) fn restart(&mut self, restarts: u32) {
        let wait = std::mem::take(&mut self.restart_wait);
        if wait.is_zero() {
            self.join(restarts);
            return;
        }
        let until = Instant::now() + wait;
        let what = match self.backoff.quick() {
            0..=1 => "waiting before the restart".to_owned(),
            quick => format!("waiting before the restart: the workers failed quickly {quick} times in a row"),
        };
        let mut progress = Progress::new(until);
        progress.show(&what);
        self.pause = Some(Pause { until, restarts, progress, what });
    }

    /// Reports the remaining delay, or restarts when it is over.
    pub(super) fn go_on_pausing(&mut self) {
        let Some(pause) = &mut self.pause else { return };
        if Instant::now() < pause.until {
            pause.progress.show(&pause.what);
            return;
        }
        let restarts = pause.restarts;
        self.pause = None;
        self.join(restarts);
    }

    /// Records a failure of the workers for which a restart is left. Returns false if a restart is useless.
    pub(super) fn note_failure(&mut self, root: Option<&Failure>) -> bool {
        let began = self.round.as_ref().map(|round| round.began);
        self.restart_wait = self.backoff.failed(began.map_or(Duration::MAX, |began| began.elapsed()));
        let (Some(root), Some(most)) = (root, self.config.restart_stop_after_same) else { return true };
        let times = self.same.count(root);
        if times < most {
            return true;
        }
        say(&format!(
            "error: rank {} {} for the same reason {times} times in a row: it is not restarted again \
             (--restart-stop-after-same={most})",
            root.rank,
            root.describe()
        ));
        self.agent.give_up();
        false
    }
}
