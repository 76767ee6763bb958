//! Elastic jobs on simulated hosts, with each rendezvous: what becomes of them when something goes wrong, how soon it
//! is noticed, and how soon all workers run again.
//!
//! A short form runs by default, the whole one with CONVOKE_FULL=1. With CONVOKE_ELASTIC_TABLE=FILE the rows of the
//! table in docs/measurements/faults.md are added to FILE (`scripts/bench elastic`).

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, clippy::print_stdout, unreachable_pub)] // all of it is tests

mod addresses;
mod cases;
mod table;
mod world;
