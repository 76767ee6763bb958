//! Helpers for the tests of several packages. Users do not get this crate.

// This crate is test code: it fails by panics and writes to stderr.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_panics_doc,
    missing_debug_implementations
)]

mod barrier;
mod fuzz;
pub mod gpu;
pub mod memory;
mod ports;
pub mod process;
pub mod programs;
mod random;
mod skip;
mod subprocess;
mod thread;
mod wait;

pub use barrier::TimedBarrier;
pub use fuzz::fuzz;
pub use ports::{free_port, free_ports};
pub use random::Random;
pub use skip::skip;
pub use subprocess::{assert_one_passed, subprocess_test, subprocess_variable};
pub use thread::Thread;
pub use wait::{TEST_TIMEOUT, try_wait_until_within, wait_until};

/// Returns true if tests run in their long form: `scripts/check --full` sets CONVOKE_FULL.
#[must_use]
pub fn is_full_test_run() -> bool {
    std::env::var_os("CONVOKE_FULL").is_some_and(|value| value == "1")
}
