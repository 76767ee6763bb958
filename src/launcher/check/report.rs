//! The report of a check: as text for people, as JSON for programs. Pure.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::problem::{Level, Problem, merge};
use crate::formatting::count;

/// Most messages of a report for people.
const MAX_SHOWN: usize = 40;
/// Version of the report's form.
const FORM: u32 = 1;

/// A node that took part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CheckedNode {
    pub(super) node: usize,
    pub(super) host: String,
}

/// The result of a check of all nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    convoke_check: u32,
    /// True if there is no failure.
    pub(crate) healthy: bool,
    pub(super) seconds: f64,
    pub(super) nodes: Vec<CheckedNode>,
    pub(crate) problems: Vec<Problem>,
    /// Names of checks that at least one host could not do, with the reason.
    pub(super) not_checked: Vec<String>,
    /// Pairs of hosts whose throughput was measured, the median and the least, in MB/s.
    pub(super) throughput: Option<(usize, f64, f64)>,
}

impl Report {
    pub(super) fn new(
        nodes: Vec<CheckedNode>,
        problems: Vec<Problem>,
        mut not_checked: Vec<String>,
        throughput: Option<(usize, f64, f64)>,
        seconds: f64,
    ) -> Self {
        let problems = merge(problems);
        not_checked.sort();
        not_checked.dedup();
        let healthy = !problems.iter().any(|problem| problem.level == Level::Fail);
        let seconds = (seconds * 1000.0).round() / 1000.0;
        Self { convoke_check: FORM, healthy, seconds, nodes, problems, not_checked, throughput }
    }

    /// Returns the hosts with a failure, each once.
    pub(crate) fn failed_hosts(&self) -> Vec<&str> {
        let failed = self.problems.iter().filter(|problem| problem.level == Level::Fail);
        let mut hosts: Vec<&str> = failed.flat_map(|problem| &problem.hosts).map(String::as_str).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// Formats the report for people.
    pub(crate) fn text(&self) -> String {
        let mut out: String = self.problems.iter().take(MAX_SHOWN).map(Problem::lines).collect();
        if let Some(more) = self.problems.len().checked_sub(MAX_SHOWN).filter(|more| *more > 0) {
            let _ =
                writeln!(out, "convoke check: {} are not shown; --json has all", count(more, "more message"));
        }
        let number = |level: Level| self.problems.iter().filter(|problem| problem.level == level).count();
        let warnings = match number(Level::Warning) {
            0 => String::new(),
            warnings => format!(", {}", count(warnings, "warning")),
        };
        let verdict = match number(Level::Fail) {
            0 => "ready for the job".to_owned(),
            failures => count(failures, "failure"),
        };
        let nodes = count(self.nodes.len(), "node");
        let _ = writeln!(out, "convoke check: {nodes} checked in {:.1} s: {verdict}{warnings}", self.seconds);
        if let Some((pairs, median, least)) = self.throughput {
            let pairs = count(pairs, "pair");
            let _ = writeln!(
                out,
                "convoke check: throughput of {pairs}: median {median:.0} MB/s, least {least:.0} MB/s"
            );
        }
        if !self.not_checked.is_empty() {
            let _ = writeln!(out, "convoke check: not checked: {}", self.not_checked.join(", "));
        }
        out
    }

    /// Formats the report as one line of JSON.
    pub(crate) fn json(&self) -> String {
        let mut text = serde_json::to_string(self).expect("a report is plain data");
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(problems: Vec<Problem>) -> Report {
        let nodes = vec![CheckedNode { node: 0, host: "h1".to_owned() }];
        Report::new(nodes, problems, vec!["GPUs (none)".to_owned(); 2], None, 0.4321)
    }

    #[test]
    fn hosts_without_a_failure_are_ready_also_with_warnings() {
        let text = "convoke check: 1 node checked in 0.4 s: ready for the job\nconvoke check: not checked: GPUs (none)\n";
        assert_eq!(report(Vec::new()).text(), text);
        let warned = report(vec![Problem::warning("clock", "h1", "late", "")]);
        assert!(warned.healthy && warned.failed_hosts().is_empty(), "{warned:?}");
        assert!(warned.text().contains("ready for the job, 1 warning\n"), "{}", warned.text());
    }

    #[test]
    fn failed_hosts_are_listed_once_and_json_holds_everything() {
        let failed = report(vec![
            Problem::fail("disk", "h1", "full", "free"),
            Problem::fail("clock", "h1", "late", ""),
        ]);
        assert_eq!(failed.failed_hosts(), ["h1"]);
        assert!(failed.text().contains("2 failures\n"), "{}", failed.text());
        let parsed: Report = serde_json::from_str(&failed.json()).unwrap();
        assert_eq!(parsed, failed);
        assert!(failed.json().starts_with("{\"convoke_check\":1,\"healthy\":false,"), "{}", failed.json());
    }
}
