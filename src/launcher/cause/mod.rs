//! Explains why a worker ended. The exit status, the last lines of stderr and the kernel's counters yield a
//! class, a sentence and advice. Pure.
//!
//! ```text
//! stderr ─► text ─► log_evidence ─┐
//! status, evidence ───────────────┴─► diagnose ─► Diagnosis ─► root_cause: which of them came first
//! ```
//!
//! `start_failure` explains workers that could not start their program.

mod class;
mod diagnosis;
mod log_evidence;
mod root_cause;
mod start_failure;
#[cfg(test)]
mod tests;
mod text;

use serde::{Deserialize, Serialize};

pub(crate) use class::{CauseKind, Class};
pub(crate) use diagnosis::{Diagnosis, Facts, diagnose};
pub(crate) use log_evidence::{LogEvidence, format_traceback};
pub(crate) use root_cause::{Candidate, select_root_cause};
pub(crate) use start_failure::{
    NotStarted, ProgramFile, StartContext, StartFailure, StartStep, explain_start_failure,
};
pub(crate) use text::lines;

/// The evidence about a worker's death besides its exit status. The guard gathers it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Evidence {
    /// The kernel wrote a core file, or gave it to a handler.
    pub(crate) core_dumped: bool,
    /// Processes that the kernel killed for lack of memory while the worker ran.
    pub(crate) oom: Option<OomKills>,
}

/// The counter `oom_kill` rose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OomKills {
    /// The increase since the worker started, minus the part that earlier deaths explain.
    pub(crate) count: u64,
    /// The cgroup whose counter it is; `None` if only the machine's counter could be read.
    pub(crate) cgroup: Option<String>,
    /// The cgroup's limit, if it has one.
    pub(crate) limit_bytes: Option<u64>,
    /// The most that the cgroup ever used.
    pub(crate) peak_bytes: Option<u64>,
}
