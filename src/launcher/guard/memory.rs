//! Counts kills by the kernel's OOM killer: those in the workers' cgroup, or on the machine.
//!
//! Workers inherit the guard's cgroup. The guard reads the counters when workers start and after a worker has
//! ended. The cgroup of a dead process cannot be looked up any more (v1), and the kernel counts a kill before
//! it kills.

use std::cell::OnceCell;
use std::fs;
use std::path::Path;

use convoke_env::ExitCause;
use convoke_env::host::cgroup::{Cgroup, groups};

use crate::cause::OomKills;

/// Counts OOM kills, and attributes them to workers.
#[derive(Debug, Default)]
pub(super) struct OomCounter {
    /// The cgroup that has the counter, looked up when the first workers start. `None` if no cgroup has one:
    /// the machine's counter in `/proc/vmstat` counts.
    group: OnceCell<Option<Cgroup>>,
    /// Number of kills that are attributed to workers that have ended.
    accounted: u64,
}

impl OomCounter {
    /// Returns the number of OOM kills so far; `None` if they cannot be counted.
    pub(super) fn count(&self) -> Option<u64> {
        let find = || groups(Path::new("/"), "memory").into_iter().find(|group| count(Some(group)).is_some());
        count(self.group.get_or_init(find).as_ref())
    }

    /// Returns the OOM kills since a worker started, when the counter was `start`, without those attributed
    /// to other workers. `None` if there are none or they cannot be counted.
    pub(super) fn kills_since(&mut self, start: u64, cause: ExitCause) -> Option<OomKills> {
        let since = start.max(self.accounted);
        let count = self.count()?.checked_sub(since).filter(|&count| count > 0)?;
        if matches!(cause, ExitCause::Signal(9) | ExitCause::Code(137)) {
            self.accounted = since + 1;
        }
        let group = self.group.get()?.as_ref();
        let number =
            |v1: &str, v2: &str| group.and_then(|group| group.number(if group.is_v2 { v2 } else { v1 }));
        // Version 1 represents "no limit" by a number near 2^63.
        let limit = number("memory.limit_in_bytes", "memory.max").filter(|&bytes| bytes < 1 << 60);
        let peak = number("memory.max_usage_in_bytes", "memory.peak");
        let cgroup = group.map(|group| group.name.clone());
        Some(OomKills { count, cgroup, limit_bytes: limit, peak_bytes: peak })
    }
}

/// Returns the OOM kills that the kernel has counted in a cgroup, or on the machine.
fn count(group: Option<&Cgroup>) -> Option<u64> {
    let text = match group {
        Some(group) => group.read(if group.is_v2 { "memory.events" } else { "memory.oom_control" })?,
        None => fs::read_to_string("/proc/vmstat").ok()?,
    };
    field(&text, "oom_kill")
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
        let mut memory = OomCounter { group: OnceCell::from(Some(group)), ..OomCounter::default() };
        count(4);
        assert_eq!(memory.count(), Some(4));
        assert_eq!(memory.kills_since(4, ExitCause::Signal(9)), None, "an old kill is no evidence");
        count(6);
        // A worker that was not killed may report kills, but does not use them up.
        assert_eq!(memory.kills_since(4, ExitCause::Code(1)).map(|oom| oom.count), Some(2));
        let first = memory.kills_since(4, ExitCause::Signal(9));
        let expected = OomKills {
            count: 2,
            cgroup: Some("/g".to_owned()),
            limit_bytes: Some(1 << 20),
            peak_bytes: None,
        };
        assert_eq!(first, Some(expected));
        assert_eq!(memory.kills_since(4, ExitCause::Signal(9)).map(|oom| oom.count), Some(1));
        assert_eq!(memory.kills_since(4, ExitCause::Signal(9)), None, "two kills, two deaths");
    }
}
