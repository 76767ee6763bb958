//! Computes the delay before a restart. Pure: it reads no clock.

use std::time::Duration;

/// A round that fails sooner than this after its start is a quick failure.
const QUICK_FAILURE: Duration = Duration::from_secs(10);
/// Number of quick failures in a row that cause no delay.
const FAILURES_WITHOUT_DELAY: u32 = 3;
/// Delay after the first quick failure beyond [`FAILURES_WITHOUT_DELAY`]. Each further quick failure doubles
/// the delay, up to [`MAX_DELAY`].
const INITIAL_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(60);

/// Counts quick failures in a row and computes the restart delay from them.
#[derive(Debug)]
pub(super) struct Backoff {
    /// Minimum delay before every restart (`--restart-delay`).
    min_delay: Duration,
    /// Number of rounds in a row that failed sooner than [`QUICK_FAILURE`] after their start.
    pub(super) quick_failures: u32,
}

impl Backoff {
    pub(super) fn new(min_delay: Duration) -> Self {
        Self { min_delay, quick_failures: 0 }
    }

    /// Records a round that failed `lasted` after its start. Returns the delay before the next round.
    pub(super) fn record_failure(&mut self, lasted: Duration) -> Duration {
        self.quick_failures = if lasted < QUICK_FAILURE { self.quick_failures.saturating_add(1) } else { 0 };
        let doubled = |times: u32| INITIAL_DELAY.saturating_mul(1 << times.min(16)).min(MAX_DELAY);
        self.quick_failures
            .checked_sub(FAILURES_WITHOUT_DELAY + 1)
            .map_or(Duration::ZERO, doubled)
            .max(self.min_delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::from_millis(1);

    #[test]
    fn restart_delay_doubles_from_a_second_to_a_minute() {
        let mut backoff = Backoff::new(Duration::ZERO);
        let waits: Vec<u64> = (0..11).map(|_| backoff.record_failure(AT_ONCE).as_secs()).collect();
        assert_eq!(waits, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60]);
        (0..1000).for_each(|_| assert_eq!(backoff.record_failure(AT_ONCE), MAX_DELAY));
    }

    #[test]
    fn instantly_failing_worker_starts_at_most_ten_times_per_minute() {
        let mut backoff = Backoff::new(Duration::ZERO);
        let (mut now, mut starts) = (Duration::ZERO, 0);
        while now < Duration::from_secs(60) {
            starts += 1;
            now += AT_ONCE + backoff.record_failure(AT_ONCE);
        }
        assert!(starts <= 10, "{starts}");
    }

    #[test]
    fn long_attempt_resets_the_restart_delay() {
        let mut backoff = Backoff::new(Duration::ZERO);
        for _ in 0..5 {
            let _ = backoff.record_failure(AT_ONCE);
        }
        assert_eq!(backoff.record_failure(QUICK_FAILURE), Duration::ZERO);
        assert_eq!((backoff.record_failure(AT_ONCE), backoff.quick_failures), (Duration::ZERO, 1));
    }

    #[test]
    fn restart_delay_is_never_below_the_user_setting() {
        let mut backoff = Backoff::new(Duration::from_secs(5));
        let waits: Vec<u64> = (0..8).map(|_| backoff.record_failure(AT_ONCE).as_secs()).collect();
        assert_eq!(waits, [5, 5, 5, 5, 5, 5, 8, 16]);
    }
}
