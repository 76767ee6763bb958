//! Explains why a worker ended. The exit status, the last lines of stderr and the kernel's counters yield a
//! class, a sentence and advice. Pure.
//!
//! ```text
//! stderr ─► text ─► log_evidence ─┐
//! status, evidence ───────────────┴─► diagnose ─► Diagnosis ─► root_cause: which of them came first
//! ```
//!
//! `start_failure` explains why workers could not start their program.

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

/// Evidence about a worker's end besides its exit status, collected by the guard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Evidence {
    /// True if the kernel wrote a core file, or gave it to a handler.
    pub(crate) core_dumped: bool,
    /// OOM kills by the kernel while the worker ran; `None` if there were none.
    pub(crate) oom: Option<OomKills>,
}

/// An increase of the kernel's counter `oom_kill`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OomKills {
    /// Increase of the counter since the worker started, without kills that were attributed to workers that
    /// ended before.
    pub(crate) count: u64,
    /// The cgroup that has the counter; `None` if only the machine's counter could be read.
    pub(crate) cgroup: Option<String>,
    /// The cgroup's memory limit, if it has one.
    pub(crate) limit_bytes: Option<u64>,
    /// Largest amount of memory that the cgroup ever used.
    pub(crate) peak_bytes: Option<u64>,
}
