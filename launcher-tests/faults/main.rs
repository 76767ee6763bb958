//! The fault matrix of the runtime: real processes that die, stop, are slow or lose the network, at each
//! rank and in each phase. Every survivor must name the right rank in time, and all must name one cause.
//!
//! By default a short form runs; CONVOKE_FULL=1 selects the full matrix. Times run from just before the
//! fault to the return of the last survivor's call.
//! With CONVOKE_FAULT_TABLE=FILE the tests append the times to FILE as rows of the table in
//! docs/measurements/faults.md (`scripts/bench faults`).

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, clippy::print_stdout, unreachable_pub)] // this crate has only tests

mod cases;
mod deaths;
mod job;
mod kills;
mod networks;
mod silent_ranks;
mod table;
mod training;
