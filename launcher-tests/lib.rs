//! Tests of convoke with real processes; see `e2e/`, `faults/`, `conformance/` and `tidy.rs`.

pub mod fault;
#[path = "testbed/hosts.rs"]
pub mod hosts;

use std::time::{Duration, Instant};

/// Longest wait for anything that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until `check` gives something.
///
/// # Panics
/// After [`PATIENCE`].
pub fn wait_until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    loop {
        let value = try_until(&mut check);
        assert!(value.is_some(), "waited {PATIENCE:?} for {what}");
        if let Some(value) = value {
            return value;
        }
    }
}

/// The same, but `None` after [`PATIENCE`].
pub fn try_until<T>(mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        let value = check();
        if value.is_some() || Instant::now() >= end {
            return value;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What `plain_worker lines` writes: rank, number, and a filler whose length changes from line to line.
#[must_use]
pub fn numbered_line(rank: usize, number: usize) -> String {
    format!("{rank} {number} {}", "x".repeat(number % 97))
}
