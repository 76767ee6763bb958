//! A barrier for tests.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// How long the others may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// As [`std::sync::Barrier`], but whoever waits for a thread that has panicked panics as well, so that a test which
/// fails ends.
pub(crate) struct Gate {
    threads: usize,
    /// How many times threads have come, in all rounds together.
    came: Mutex<usize>,
    open: Condvar,
}

impl Gate {
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads, came: Mutex::new(0), open: Condvar::new() }
    }

    pub(crate) fn wait(&self) {
        let mut came = self.came.lock().unwrap();
        let enough = (*came / self.threads + 1) * self.threads;
        *came += 1;
        self.open.notify_all();
        let (came, _) = self.open.wait_timeout_while(came, PATIENCE, |came| *came < enough).unwrap();
        assert!(*came >= enough, "the others did not come");
    }
}
