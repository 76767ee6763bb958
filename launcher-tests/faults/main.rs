//! The fault matrix of the runtime: real processes that die, stop, are slow or are cut off, at each rank and in
//! each phase. Every survivor must name the right rank, all the same cause, in time.
//!
//! A short form runs by default, the whole one with CONVOKE_FULL=1. Times are counted from just before the fault to
//! the return of the last survivor's call; with CONVOKE_FAULT_TABLE=FILE they are added to FILE as rows of the
//! table in docs/measurements/faults.md (`scripts/bench faults`).

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, clippy::print_stdout, unreachable_pub)] // all of it is tests

mod cases;
mod deaths;
mod job;
mod kills;
mod networks;
mod stops;
mod table;
mod training;
