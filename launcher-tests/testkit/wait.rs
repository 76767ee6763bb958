//! Bounded waits for a condition.

use std::time::{Duration, Instant};

/// The longest time that a test waits for one condition.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Time between two checks of the condition.
const INTERVAL: Duration = Duration::from_millis(2);

/// Polls until `check` returns a value, for at most [`TEST_TIMEOUT`]; then panics and names `what`.
pub fn wait_until<T>(what: &str, check: impl FnMut() -> Option<T>) -> T {
    try_wait_until_within(TEST_TIMEOUT, check).unwrap_or_else(|| panic!("waited {TEST_TIMEOUT:?} for {what}"))
}

/// Polls until `check` returns a value; `None` after `limit`.
pub fn try_wait_until_within<T>(limit: Duration, mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        let value = check();
        if value.is_some() || Instant::now() >= end {
            return value;
        }
        std::thread::sleep(INTERVAL);
    }
}
