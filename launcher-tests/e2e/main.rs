//! The real launcher with real processes. Each module is one promise to the user.

// All of this crate is tests, also what stands outside of #[test] functions.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    unreachable_pub,
    missing_debug_implementations
)]

mod bind;
mod causes;
mod harness;
mod kill;
mod nodes;
mod processes;
mod terminal;
mod workers;
