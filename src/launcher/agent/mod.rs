//! The agent of one node: meets the other nodes, runs the workers, restarts them, and reports the outcome.

mod backoff;
mod drain;
mod draining;
mod environment;
mod event_loop;
mod exit_code;
mod forwarded_signals;
mod job_outcome;
mod outcome_files;
mod reporting;
mod requeue;
mod restart_delay;
mod rounds;
mod shutdown;
mod signal_handling;
mod signals;
mod slurm_job;
mod start;
mod start_failure;
mod state_machine;

pub(crate) use drain::REQUEST_FILE;
pub(crate) use environment::{Variables, WorkerFiles, command_line, variables};
pub(crate) use event_loop::run;
pub(crate) use exit_code::WOULD_FAIL_AGAIN;
pub(crate) use signals::block_signals;
pub(crate) use start_failure::process_creation_error;
