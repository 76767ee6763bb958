//! Counts kills by the kernel's OOM killer: those in the workers' cgroup, or on the machine.
//!
//! Workers inherit the guard's cgroup. The guard reads the counters when workers start and after a worker has
//! ended. The cgroup of a dead process cannot be looked up any more (v1), and the kernel counts a kill before
//! it kills.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use convoke_env::ExitCause;
use convoke_env::host::cgroup::{Cgroup, groups};

use crate::cause::OomKills;

/// The OOM kills counted so far, and those already attributed to workers.
#[derive(Debug, Default)]
pub(super) struct OomCounter {
    /// File that holds the counter, looked up when the first workers start.
    source: Option<Source>,
    /// Value of the counter when each running worker started, by worker id.
    at_start: HashMap<u64, u64>,
    /// Number of kills that are attributed to workers that have ended.
    accounted: u64,
}

/// Location of the kernel's OOM kill counter.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    /// Cgroup version 1: `memory.oom_control` and other files in this folder.
    V1(Cgroup),
    /// Cgroup version 2: `memory.events` and other files.
    V2(Cgroup),
    /// The machine's counter in `/proc/vmstat`, if no cgroup has one.
    Machine,
}

impl OomCounter {
    /// Records the counter's value for workers that have just started. One call for all of them reads the
    /// counter once, and so delays none of their starts.
    pub(super) fn started(&mut self, workers: &[u64]) {
        if workers.is_empty() {
            return;
        }
        let source = self.source.get_or_insert_with(Source::of_this_process);
        if let Some(count) = source.count() {
            self.at_start.extend(workers.iter().map(|&worker| (worker, count)));
        }
    }

    /// Returns the OOM kills since the worker started, without those attributed to other workers. `None` if
    /// there are none or they cannot be counted.
    pub(super) fn oom_kills(&mut self, worker: u64, cause: ExitCause) -> Option<OomKills> {
        let (source, start) = (self.source.as_ref()?, *self.at_start.get(&worker)?);
        let since = start.max(self.accounted);
        let count = source.count()?.checked_sub(since).filter(|&count| count > 0)?;
        if matches!(cause, ExitCause::Signal(9) | ExitCause::Code(137)) {
            self.accounted = since + 1;
        }
        let (limit, peak) = match source {
            Source::V1(group) => {
                (group.number("memory.limit_in_bytes"), group.number("memory.max_usage_in_bytes"))
            }
            Source::V2(group) => (group.number("memory.max"), group.number("memory.peak")),
            Source::Machine => (None, None),
        };
        // Version 1 represents "no limit" by a number near 2^63.
        let limit_bytes = limit.filter(|&bytes| bytes < 1 << 60);
        Some(OomKills { count, cgroup: source.name(), limit_bytes, peak_bytes: peak })
    }

    /// Forgets the start of a worker that has ended.
    pub(super) fn forget(&mut self, worker: u64) {
        self.at_start.remove(&worker);
    }
}

impl Source {
    fn of_this_process() -> Self {
        let groups = groups(Path::new("/"), "memory").into_iter();
        let mut sources = groups.map(|group| if group.is_v2 { Self::V2(group) } else { Self::V1(group) });
        sources.find(|source| source.count().is_some()).unwrap_or(Self::Machine)
    }

    fn count(&self) -> Option<u64> {
        match self {
            Self::V1(group) => field(&group.read("memory.oom_control")?, "oom_kill"),
            Self::V2(group) => field(&group.read("memory.events")?, "oom_kill"),
            Self::Machine => field(&fs::read_to_string("/proc/vmstat").ok()?, "oom_kill"),
        }
    }

    fn name(&self) -> Option<String> {
        match self {
            Self::V1(group) | Self::V2(group) => Some(group.name.clone()),
            Self::Machine => None,
        }
    }
}

/// Returns the number after `name` in lines of `name number`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_fields_are_matched_by_their_whole_name() {
        let events = "low 0\noom 3\noom_kill 2\noom_group_kill 7\n";
        assert_eq!(field(events, "oom_kill"), Some(2));
        assert_eq!(field("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", "oom_kill"), Some(5));
        assert_eq!(field("", "oom_kill"), None);
    }

    #[test]
    fn each_oom_kill_explains_one_death() {
        let folder = tempfile::tempdir().unwrap();
        let count = |count: u64| {
            fs::write(folder.path().join("memory.events"), format!("oom_kill {count}\n")).unwrap();
        };
        fs::write(folder.path().join("memory.max"), "1048576\n").unwrap();
        let (name, folder, top) = ("/g".to_owned(), folder.path().to_owned(), folder.path().to_owned());
        let group = Cgroup { name, folder, top, is_v2: true };
        let mut memory = OomCounter { source: Some(Source::V2(group)), ..OomCounter::default() };
        count(4);
        memory.started(&[0, 1, 2]);
        assert_eq!(memory.oom_kills(0, ExitCause::Signal(9)), None, "an old kill is no evidence");
        count(6);
        // A worker that was not killed may report kills, but does not use them up.
        assert_eq!(memory.oom_kills(1, ExitCause::Code(1)).map(|oom| oom.count), Some(2));
        let first = memory.oom_kills(0, ExitCause::Signal(9));
        let expected = OomKills {
            count: 2,
            cgroup: Some("/g".to_owned()),
            limit_bytes: Some(1 << 20),
            peak_bytes: None,
        };
        assert_eq!(first, Some(expected));
        assert_eq!(memory.oom_kills(1, ExitCause::Signal(9)).map(|oom| oom.count), Some(1));
        assert_eq!(memory.oom_kills(2, ExitCause::Signal(9)), None, "two kills, two deaths");
    }
}
