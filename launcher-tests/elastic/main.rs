//! Elastic jobs on simulated hosts, with each rendezvous backend. The tests check the outcome of each fault,
//! the time to detect it, and the time until all workers run again.
//!
//! By default a short form runs; CONVOKE_FULL=1 selects the full set. With CONVOKE_ELASTIC_TABLE=FILE the
//! tests append the rows of the table in docs/measurements/faults.md to FILE (`scripts/bench elastic`).

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, clippy::print_stdout, unreachable_pub)] // this crate has only tests

mod addresses;
mod cases;
mod cluster;
mod table;
