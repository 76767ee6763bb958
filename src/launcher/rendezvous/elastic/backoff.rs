//! Delay between failed attempts. Pure.

use std::time::Duration;

/// A delay that doubles after each attempt, up to a maximum.
pub(super) struct Backoff {
    first: Duration,
    max_delay: Duration,
    next: Duration,
}

impl Backoff {
    pub(super) fn new(first: Duration, max_delay: Duration) -> Self {
        Self { first, max_delay, next: first }
    }

    /// Returns the delay before the next attempt.
    pub(super) fn next(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.max_delay);
        now
    }

    /// Resets the delay after a successful attempt.
    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}
