//! The agent of one node: meets the other nodes, runs the workers, restarts them, and reports the outcome.

mod backoff;
mod end;
mod environment;
mod machine;
mod pause;
mod refused;
mod run;
mod setup;
mod signalled;
mod signals;
mod start;
mod tell;
mod trial;
mod workers;

pub(crate) use environment::{Variables, command_line, variables};
pub(crate) use refused::no_process;
pub(crate) use run::run;
pub(crate) use setup::hold_signals;
