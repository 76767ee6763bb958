//! Ends the wait of a program that was interrupted, as by Ctrl-C.
//!
//! A signal handler cannot end a wait, and a binding to another language runs its handlers later. So a thread
//! that waits asks the binding from time to time whether its program was interrupted. The waits of stores and
//! of groups (`convoke-comm`) do this.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

static CHECK: OnceLock<fn() -> bool> = OnceLock::new();

/// Time between two checks of a thread that waits.
const INTERVAL: Duration = Duration::from_millis(100);

/// The reason of an interruption, for error messages.
pub const INTERRUPTED: &str = "interrupted by a signal, as by Ctrl-C";

/// The calling thread must stop waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interrupted;

/// Sets the function that says whether the calling thread must stop waiting. It stays for the life of the process;
/// a second call changes nothing.
///
/// A thread that waits for a store or for an operation of a group calls `check` about ten times a second. `check`
/// may take the lock of an interpreter. Then no thread may hold that lock while it calls a store or a group.
///
/// If it returns true, the call of a store ends with [`StoreError::Interrupted`](crate::StoreError::Interrupted),
/// and the group ends with `CommError::Aborted`. The error says that the program was interrupted, and for which
/// key or rank it waited.
pub fn set_interrupt_check(check: fn() -> bool) {
    let _ = CHECK.set(check);
}

/// Returns when a thread that waits from now on must check; `None` if there is no check.
#[must_use]
pub fn check_at() -> Option<Instant> {
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

/// Returns until when a thread may wait that waits until `deadline`: until then, or until it must check.
#[must_use]
pub fn next_check(deadline: Instant) -> Instant {
    check_at().map_or(deadline, |at| at.min(deadline))
}

/// Sleeps for `duration`. Ends early if the program was interrupted.
pub(crate) fn sleep(duration: Duration) -> Result<(), Interrupted> {
    let end = Instant::now() + duration;
    loop {
        let now = Instant::now();
        if now >= end {
            return Ok(());
        }
        thread::sleep(next_check(end).saturating_duration_since(now));
        if is_interrupted() {
            return Err(Interrupted);
        }
    }
}
