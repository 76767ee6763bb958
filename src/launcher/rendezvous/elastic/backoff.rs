//! Time between attempts in vain. Pure.

use std::time::Duration;

/// Twice as long after each, up to a most.
pub(super) struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    pub(super) fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, next: first }
    }

    /// How long to wait now.
    pub(super) fn next(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.most);
        now
    }

    /// An attempt has gone well.
    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}
