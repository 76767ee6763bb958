//! A problem of `convoke check`: what is wrong on which hosts, and what to do. Pure.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// The severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// The job would fail, hang or compute something else.
    Fail,
    /// The job may run, but slower or less safely.
    Warning,
}

/// Something that is wrong on some hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Problem {
    pub(crate) level: Level,
    /// Name of the check that found it.
    pub(crate) check: String,
    /// The hosts that have the problem.
    pub(crate) hosts: Vec<String>,
    pub(crate) text: String,
    pub(crate) remedy: String,
}

impl Problem {
    pub(super) fn fail(check: &str, host: &str, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (check, hosts) = (check.to_owned(), vec![host.to_owned()]);
        Self { level: Level::Fail, check, hosts, text: text.into(), remedy: remedy.into() }
    }

    pub(super) fn warning(
        check: &str,
        host: &str,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { level: Level::Warning, ..Self::fail(check, host, text, remedy) }
    }

    /// Creates a failure from a message that says what to do behind its last `; `.
    pub(super) fn fail_of_message(check: &str, host: &str, message: &str) -> Self {
        let (text, remedy) = message.rsplit_once("; ").unwrap_or((message, ""));
        Self::fail(check, host, text, remedy)
    }

    /// Formats the problem as two or three lines.
    pub(super) fn lines(&self) -> String {
        let level = match self.level {
            Level::Fail => "FAIL",
            Level::Warning => "WARN",
        };
        let mut out = format!("{level} {}: {}\n", host_list(&self.hosts), self.text);
        if !self.remedy.is_empty() {
            let _ = writeln!(out, "     try: {}", self.remedy);
        }
        out
    }
}

/// Returns the problems with equal ones merged, failures first.
pub(super) fn merge(problems: Vec<Problem>) -> Vec<Problem> {
    let mut merged: Vec<Problem> = Vec::new();
    for problem in problems {
        let is_equal = |other: &&mut Problem| {
            (other.level, &other.check, &other.text, &other.remedy)
                == (problem.level, &problem.check, &problem.text, &problem.remedy)
        };
        match merged.iter_mut().find(is_equal) {
            Some(other) => {
                let new = problem.hosts.into_iter().filter(|host| !other.hosts.contains(host));
                let new: Vec<_> = new.collect();
                other.hosts.extend(new);
            }
            None => merged.push(problem),
        }
    }
    merged.sort_by_key(|problem| problem.level);
    merged
}

/// Most hosts that a problem names on a terminal. JSON has all.
const MAX_NAMED: usize = 8;

/// Formats host names, `h1, h2` or `h1, h2, ... (40 hosts)`.
pub(super) fn host_list(hosts: &[String]) -> String {
    let named = hosts.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
    if hosts.len() > MAX_NAMED { format!("{named}, ... ({} hosts)", hosts.len()) } else { named }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_problems_of_several_hosts_are_merged_and_failures_come_first() {
        let merged = merge(vec![
            Problem::warning("clock", "h1", "slow", ""),
            Problem::fail("disk", "h2", "full", "free some"),
            Problem::fail("disk", "h3", "full", "free some"),
            Problem::fail("disk", "h2", "full", "free some"),
        ]);
        let lines: Vec<_> = merged.iter().map(Problem::lines).collect();
        assert_eq!(lines, ["FAIL h2, h3: full\n     try: free some\n", "WARN h1: slow\n"]);
    }

    #[test]
    fn remedy_of_a_message_stands_behind_its_last_semicolon() {
        let message = "8 workers need 104 open files, and 103 are allowed; raise it";
        let problem = Problem::fail_of_message("limits", "h1", message);
        assert_eq!(
            problem.lines(),
            "FAIL h1: 8 workers need 104 open files, and 103 are allowed\n     try: raise it\n"
        );
    }

    #[test]
    fn many_hosts_are_counted() {
        let hosts: Vec<_> = (1..=40).map(|host| format!("h{host}")).collect();
        assert_eq!(host_list(&hosts), "h1, h2, h3, h4, h5, h6, h7, h8, ... (40 hosts)");
    }
}
