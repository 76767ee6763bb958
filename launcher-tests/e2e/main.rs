//! The real launcher with real processes. Each module tests one promise to the user.

// This crate contains only tests, including the code outside of #[test] functions.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    unreachable_pub,
    missing_debug_implementations
)]

mod bind;
mod causes;
mod check;
mod check_silence;
mod check_software;
mod checked_hosts;
mod container;
mod drain;
mod elastic;
mod etcd;
mod examples;
mod flight;
mod gpus;
mod host_limits;
mod hosts;
mod kill;
mod kubernetes;
mod kubernetes_cluster;
mod kubernetes_manifests;
mod kubernetes_returns;
mod mpi_and_slurm;
mod nodes;
mod output;
mod perf;
mod processes;
mod restarts;
mod root_causes;
mod screens;
mod signals;
mod slurm;
mod slurm_drains;
mod slurm_losses;
mod ssh;
mod ssh_errors;
mod ssh_hosts;
mod standalone;
mod terminal;
mod tutorials;
mod workers;
