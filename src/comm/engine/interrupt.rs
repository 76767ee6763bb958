//! Ends the wait of a program that was interrupted, as by Ctrl-C.
//!
//! A signal handler cannot end a wait, and a binding to another language runs its handlers later. So a thread
//! that waits asks the binding from time to time whether its program was interrupted.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

static CHECK: OnceLock<fn() -> bool> = OnceLock::new();

/// Time between two checks of a thread that waits.
const INTERVAL: Duration = Duration::from_millis(100);

/// Sets the function that says whether the calling thread must stop waiting. It stays for the life of the process;
/// a second call changes nothing.
///
/// A thread that waits for an operation calls it about ten times a second, without a lock of the group. If it
/// returns true, the group ends with [`CommError::Aborted`](crate::CommError::Aborted). The error says that the
/// program was interrupted, and for which rank it waited.
pub fn set_interrupt_check(check: fn() -> bool) {
    let _ = CHECK.set(check);
}

/// Returns when a thread that waits from now on must check; `None` if there is no check.
pub(crate) fn check_at() -> Option<Instant> {
    CHECK.get().map(|_| Instant::now() + INTERVAL)
}

/// Returns how long a thread may wait until it must check; [`Duration::MAX`] if there is no check.
#[must_use]
pub fn interrupt_interval() -> Duration {
    CHECK.get().map_or(Duration::MAX, |_| INTERVAL)
}

/// Returns whether the calling thread must stop waiting.
#[must_use]
pub fn is_interrupted() -> bool {
    CHECK.get().is_some_and(|check| check())
}
