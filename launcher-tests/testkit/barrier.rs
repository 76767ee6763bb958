//! A barrier for the threads of a test.

use std::sync::{Condvar, Mutex};

use crate::TEST_TIMEOUT;

/// A [`std::sync::Barrier`] with a bounded wait. If one thread panics before it arrives, the other threads
/// panic too, and the test ends.
pub struct TimedBarrier {
    threads: usize,
    /// Number of arrivals in all rounds together.
    arrivals: Mutex<usize>,
    all_arrived: Condvar,
}

impl TimedBarrier {
    /// A barrier for `threads` threads.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { threads, arrivals: Mutex::new(0), all_arrived: Condvar::new() }
    }

    /// Waits until all threads have arrived.
    pub fn wait(&self) {
        let mut arrivals = self.arrivals.lock().unwrap();
        let enough = (*arrivals / self.threads + 1) * self.threads;
        *arrivals += 1;
        self.all_arrived.notify_all();
        let (arrivals, _) =
            self.all_arrived.wait_timeout_while(arrivals, TEST_TIMEOUT, |count| *count < enough).unwrap();
        assert!(*arrivals >= enough, "the others did not come");
    }
}
