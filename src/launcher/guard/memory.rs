//! How often the kernel killed for want of memory: the counters of the workers' cgroup, or of the machine.
//!
//! Workers inherit the guard's cgroup. The counters are read when workers start and after one ended: a
//! dead process has no cgroup any more (v1), and the kernel counts before it kills.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use convoke_env::ExitCause;

use crate::cause::OomKills;

/// What is known of the kills so far.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Looked up at the first start.
    source: Option<Source>,
    /// The counter when each running worker was started.
    at_start: HashMap<u64, u64>,
    /// Up to here, kills are accounted for by deaths.
    accounted: u64,
}

/// Where the counter is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    /// Version 1: `memory.oom_control` and others in this folder.
    V1(Group),
    /// Version 2: `memory.events` and others.
    V2(Group),
    /// `/proc/vmstat`.
    Machine,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    /// As /proc/self/cgroup has it.
    name: String,
    folder: PathBuf,
}

impl Memory {
    /// Workers have been started together, a moment ago: looking costs the first of them no time.
    pub(super) fn started(&mut self, workers: &[u64]) {
        if workers.is_empty() {
            return;
        }
        let source = self.source.get_or_insert_with(Source::of_this_process);
        if let Some(count) = source.count() {
            self.at_start.extend(workers.iter().map(|&worker| (worker, count)));
        }
    }

    /// The kills since the worker started, unless other deaths account for them.
    pub(super) fn kills(&mut self, worker: u64, cause: ExitCause) -> Option<OomKills> {
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
        // Version 1 says "no limit" by a number near 2^63.
        let limit_bytes = limit.filter(|&bytes| bytes < 1 << 60);
        Some(OomKills { count, cgroup: source.name(), limit_bytes, peak_bytes: peak })
    }

    /// The worker is gone.
    pub(super) fn forget(&mut self, worker: u64) {
        self.at_start.remove(&worker);
    }
}

impl Source {
    fn of_this_process() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let groups = groups(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
        groups.into_iter().find(|source| source.count().is_some()).unwrap_or(Self::Machine)
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

impl Group {
    fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(file)).ok()
    }

    fn number(&self, file: &str) -> Option<u64> {
        self.read(file)?.trim().parse().ok()
    }
}

/// The number after `name` in lines of `name number`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The memory cgroups of a process by its /proc/PID/cgroup and the mounts: version 1 before 2, since a
/// controller is in one of them only.
fn groups(cgroups: &str, mounts: &str) -> Vec<Source> {
    let mut found = Vec::new();
    for line in cgroups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(name)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let v2 = id == "0" && controllers.is_empty();
        if !v2 && !controllers.split(',').any(|controller| controller == "memory") {
            continue;
        }
        if let Some(folder) = folder(mounts, v2, name) {
            let group = Group { name: name.to_owned(), folder };
            if v2 {
                found.push(Source::V2(group));
            } else {
                found.insert(0, Source::V1(group));
            }
        }
    }
    found
}

/// Where the cgroup `name` is mounted.
fn folder(mounts: &str, v2: bool, name: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        // 36 35 98:0 ROOT POINT options ... - TYPE source SUPEROPTIONS
        let (mount, system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let is_it = match v2 {
            true => kind == "cgroup2",
            false => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
        };
        // In a container the mount may begin at its own cgroup; a name outside of that cannot be reached.
        let below = Path::new(name).strip_prefix(root).ok().filter(|_| is_it)?;
        Some(Path::new(point).join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1_MOUNTS: &str = "\
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
32 30 0:28 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    fn folders(cgroups: &str, mounts: &str) -> Vec<String> {
        let folder = |source: &Source| match source {
            Source::V1(group) => format!("v1 {}", group.folder.display()),
            Source::V2(group) => format!("v2 {}", group.folder.display()),
            Source::Machine => "machine".to_owned(),
        };
        groups(cgroups, mounts).iter().map(folder).collect()
    }

    #[test]
    fn the_memory_cgroup_is_found_in_both_versions() {
        let hybrid = "9:name=systemd:/\n4:memory:/job/step:0\n1:cpu,cpuacct:/\n0::/\n";
        assert_eq!(
            folders(hybrid, V1_MOUNTS),
            ["v1 /sys/fs/cgroup/memory/job/step:0", "v2 /sys/fs/cgroup/unified/"]
        );
        let v2 = "40 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(folders("0::/user.slice/x\n", v2), ["v2 /sys/fs/cgroup/user.slice/x"]);
        let container = "40 24 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        assert_eq!(folders("4:memory:/docker/abc\n", container), ["v1 /sys/fs/cgroup/memory/"]);
        assert_eq!(folders("4:memory:/elsewhere\n", container), [""; 0]);
        assert_eq!(folders("", ""), [""; 0]);
    }

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let events = "low 0\noom 3\noom_kill 2\noom_group_kill 7\n";
        assert_eq!(field(events, "oom_kill"), Some(2));
        assert_eq!(field("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", "oom_kill"), Some(5));
        assert_eq!(field("", "oom_kill"), None);
    }

    #[test]
    fn each_kill_accounts_for_one_death() {
        let folder = tempfile::tempdir().unwrap();
        let count = |count: u64| {
            fs::write(folder.path().join("memory.events"), format!("oom_kill {count}\n")).unwrap();
        };
        fs::write(folder.path().join("memory.max"), "1048576\n").unwrap();
        let group = Group { name: "/g".to_owned(), folder: folder.path().to_owned() };
        let mut memory = Memory { source: Some(Source::V2(group)), ..Memory::default() };
        count(4);
        memory.started(&[0, 1, 2]);
        assert_eq!(memory.kills(0, ExitCause::Signal(9)), None, "an old kill is no evidence");
        count(6);
        // Who is not killed may tell of it, but uses none up.
        assert_eq!(memory.kills(1, ExitCause::Code(1)).map(|oom| oom.count), Some(2));
        let first = memory.kills(0, ExitCause::Signal(9));
        let expected = OomKills {
            count: 2,
            cgroup: Some("/g".to_owned()),
            limit_bytes: Some(1 << 20),
            peak_bytes: None,
        };
        assert_eq!(first, Some(expected));
        assert_eq!(memory.kills(1, ExitCause::Signal(9)).map(|oom| oom.count), Some(1));
        assert_eq!(memory.kills(2, ExitCause::Signal(9)), None, "two kills, two deaths");
    }
}
