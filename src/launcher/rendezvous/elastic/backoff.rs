//! Delay between failed attempts. Pure.

use std::time::Duration;

/// A delay that doubles after each attempt, up to a maximum.
pub(super) struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    pub(super) fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, next: first }
    }

    /// Returns the delay before the next attempt.
    pub(super) fn next(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.most);
        now
    }

    /// Resets the delay after a successful attempt.
    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}
