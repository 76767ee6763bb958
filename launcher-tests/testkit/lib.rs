//! Helpers for the tests of several packages. Users do not get this crate.

// This crate is test code: it fails by panics and writes to stderr.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_panics_doc,
    missing_debug_implementations
)]

mod asleep;
mod fuzz;
mod gate;
pub mod gpu;
pub mod memory;
mod ports;
pub mod process;
pub mod programs;
mod random;
mod scene;
mod skip;
mod wait;

pub use asleep::Thread;
pub use fuzz::fuzz;
pub use gate::Gate;
pub use ports::{free_port, free_ports};
pub use random::Random;
pub use scene::{assert_one_passed, scene, scene_variable};
pub use skip::skip;
pub use wait::{PATIENCE, try_until, try_until_within, wait_until};

/// Returns true if tests run in their long form: `scripts/check --full` sets CONVOKE_FULL.
#[must_use]
pub fn is_full() -> bool {
    std::env::var_os("CONVOKE_FULL").is_some_and(|value| value == "1")
}
