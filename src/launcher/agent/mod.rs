//! The agent of one node: meets the other nodes, runs the workers, restarts them, and reports the outcome.

mod backoff;
mod environment;
mod event_loop;
mod exit_code;
mod forwarded_signals;
mod job_outcome;
mod outcome_files;
mod reporting;
mod restart_delay;
mod rounds;
mod shutdown;
mod signal_handling;
mod signals;
mod start;
mod start_failure;
mod state_machine;

pub(crate) use environment::{Variables, command_line, variables};
pub(crate) use event_loop::run;
pub(crate) use exit_code::WOULD_FAIL_AGAIN;
pub(crate) use signals::block_signals;
pub(crate) use start_failure::process_creation_error;
