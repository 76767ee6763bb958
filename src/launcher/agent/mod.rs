//! One node's agent: meets the other nodes, runs the workers, restarts them, and tells how it ended.

mod environment;
mod machine;
mod run;
mod workers;

pub(crate) use run::run;
