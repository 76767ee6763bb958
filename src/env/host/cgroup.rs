//! The control groups (cgroups, version 1 and 2) of this process, and the limits that they and their
//! ancestors set.

use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};

use super::kernel_file;

/// A cgroup of this process that has a certain controller, such as `memory`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// The cgroup's name in /proc/self/cgroup.
    pub name: String,
    /// The cgroup's folder.
    pub folder: PathBuf,
    /// The mount point of the cgroup's hierarchy. Ancestors outside of it are not visible.
    pub top: PathBuf,
    /// The hierarchy is of version 2.
    pub is_v2: bool,
}

/// A limit on the number of tasks (processes and threads), and how many there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskLimit {
    /// Folder of the cgroup that sets the limit.
    pub folder: PathBuf,
    /// The limit.
    pub max: u64,
    /// Tasks that count towards the limit.
    pub current: u64,
}

impl Cgroup {
    /// Returns the text of a file of the cgroup; `None` if it cannot be read.
    #[must_use]
    pub fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(file)).ok()
    }

    /// Returns the number in a file of the cgroup; `None` if it has none.
    #[must_use]
    pub fn number(&self, file: &str) -> Option<u64> {
        number(&self.folder, file)
    }
}

/// Returns the cgroups of this process with this controller. Paths are read below `root`. Cgroups of version
/// 1 come before those of version 2; a controller belongs to only one of the versions.
#[must_use]
pub fn groups(root: &Path, controller: &str) -> Vec<Cgroup> {
    let mounts = OnceCell::new();
    let mut found = Vec::new();
    for (is_v2, name) in own_cgroups(&kernel_file::read(&root.join("proc/self/cgroup")), controller) {
        let place = usual_place(root, is_v2, name, controller).or_else(|| {
            let mounts = mounts.get_or_init(|| kernel_file::read(&root.join("proc/self/mountinfo")));
            mounted(mounts, is_v2, name, controller)
                .map(|(top, folder)| (below(root, &top), below(root, &folder)))
        });
        found.extend(place.map(|(top, folder)| Cgroup { name: name.to_owned(), folder, top, is_v2 }));
    }
    found.sort_by_key(|group| group.is_v2);
    found
}

/// Returns the number of CPUs whose time the cgroups' quotas allow, rounded down but at least one. `None`
/// means no quota.
#[must_use]
pub fn cpu_quota(root: &Path) -> Option<usize> {
    let groups = groups(root, "cpu");
    let cpus = folders(&groups).filter_map(|(folder, is_v2)| quota_in(folder, is_v2)).min()?;
    Some(cpus.max(1))
}

/// Returns the limit that leaves the least room for further tasks; `None` if there is no limit.
#[must_use]
pub fn task_limit(root: &Path) -> Option<TaskLimit> {
    let groups = groups(root, "pids");
    let limits = folders(&groups).filter_map(|(folder, _)| {
        let (max, current) = (number(folder, "pids.max")?, number(folder, "pids.current")?);
        Some(TaskLimit { folder: folder.to_owned(), max, current })
    });
    limits.min_by_key(|tasks| tasks.max.saturating_sub(tasks.current))
}

/// Returns the bytes of memory that the cgroups and their ancestors leave free; `None` without a limit.
/// Cached files count as free, since the kernel can drop them or write them back.
#[must_use]
pub fn free_memory(root: &Path) -> Option<u64> {
    let groups = groups(root, "memory");
    folders(&groups).filter_map(|(folder, is_v2)| free_in(folder, is_v2)).min()
}

/// Returns the folders of the cgroups and of their visible ancestors, whose limits also apply, and whether
/// they are of version 2.
fn folders(groups: &[Cgroup]) -> impl Iterator<Item = (&Path, bool)> {
    groups.iter().flat_map(|group| {
        let folders = group.folder.ancestors().take_while(|folder| folder.starts_with(&group.top));
        folders.map(|folder| (folder, group.is_v2))
    })
}

fn free_in(folder: &Path, is_v2: bool) -> Option<u64> {
    let (limit, used, cached) = match is_v2 {
        true => ("memory.max", "memory.current", ["inactive_file", "active_file"]),
        false => {
            let cached = ["total_inactive_file", "total_active_file"];
            ("memory.limit_in_bytes", "memory.usage_in_bytes", cached)
        }
    };
    let (limit, used) = (number(folder, limit)?, number(folder, used)?);
    let stat = kernel_file::read(&folder.join("memory.stat"));
    let fields = stat.lines().filter_map(|line| line.split_once(' '));
    let cached =
        fields.filter(|(name, _)| cached.contains(name)).filter_map(|(_, bytes)| bytes.parse::<u64>().ok());
    Some(limit.saturating_sub(used.saturating_sub(cached.sum())))
}

fn quota_in(folder: &Path, is_v2: bool) -> Option<usize> {
    // No quota is the value `max` (version 2) or -1 (version 1). Neither parses as an unsigned number.
    let (quota, period): (u64, u64) = if is_v2 {
        let text = fs::read_to_string(folder.join("cpu.max")).ok()?;
        let (quota, period) = text.trim().split_once(' ')?;
        (quota.parse().ok()?, period.parse().ok()?)
    } else {
        (number(folder, "cpu.cfs_quota_us")?, number(folder, "cpu.cfs_period_us")?)
    };
    usize::try_from(quota.checked_div(period)?).ok()
}

fn number(folder: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
}

fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the lines of /proc/self/cgroup that have this controller: true for version 2, and the cgroup's
/// name.
fn own_cgroups<'a>(cgroups: &'a str, controller: &str) -> impl Iterator<Item = (bool, &'a str)> {
    cgroups.lines().filter_map(move |line| {
        let mut parts = line.splitn(3, ':');
        let (id, controllers, name) = (parts.next()?, parts.next()?, parts.next()?);
        let is_v2 = id == "0" && controllers.is_empty();
        (is_v2 || controllers.split(',').any(|known| known == controller)).then_some((is_v2, name))
    })
}

/// Returns the mount point and the folder of a cgroup if its hierarchy is mounted where systemd mounts it.
/// The kernel needs 0.1 ms to list all mounts, which is saved at every start of the launcher and the guard.
fn usual_place(root: &Path, is_v2: bool, name: &str, controller: &str) -> Option<(PathBuf, PathBuf)> {
    let points: &[&str] = if is_v2 { &["", "unified"] } else { &[controller] };
    points.iter().find_map(|point| {
        let top = root.join("sys/fs/cgroup").join(point);
        let folder = below(&top, Path::new(name));
        // The kernel has this file in each cgroup, and no other file system has it.
        folder.join("cgroup.procs").exists().then_some((top, folder))
    })
}

/// Returns the mount point of the cgroup hierarchy, and the folder of the cgroup `name` in it.
fn mounted(mounts: &str, is_v2: bool, name: &str, controller: &str) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        // Format of a line: 36 35 98:0 ROOT POINT options ... - TYPE source SUPEROPTIONS
        let (mount, system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let is_it = match is_v2 {
            true => kind == "cgroup2",
            false => kind == "cgroup" && options.split(',').any(|option| option == controller),
        };
        // In a container the mount's root may be the container's own cgroup. A cgroup outside of it cannot be
        // reached.
        let below = Path::new(name).strip_prefix(root).ok().filter(|_| is_it)?;
        Some((PathBuf::from(point), Path::new(point).join(below)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1_MOUNTS: &str = "\
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
    const V2_MOUNTS: &str = "40 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";

    fn folders(cgroups: &str, mounts: &str, files: &[(&str, &str)]) -> Vec<String> {
        let version = |group: &Cgroup| if group.is_v2 { "v2" } else { "v1" };
        let root = machine(cgroups, mounts, files);
        let path = |group: &Cgroup| format!("/{}", group.folder.strip_prefix(root.path()).unwrap().display());
        groups(root.path(), "memory")
            .iter()
            .map(|group| format!("{} {}", version(group), path(group)))
            .collect()
    }

    #[test]
    fn memory_cgroup_is_found_in_v1_and_v2() {
        let hybrid = "9:name=systemd:/\n4:memory:/job/step:0\n1:cpu,cpuacct:/\n0::/\n";
        assert_eq!(
            folders(hybrid, V1_MOUNTS, &[]),
            ["v1 /sys/fs/cgroup/memory/job/step:0", "v2 /sys/fs/cgroup/unified"]
        );
        assert_eq!(folders("0::/user.slice/x\n", V2_MOUNTS, &[]), ["v2 /sys/fs/cgroup/user.slice/x"]);
        let container = "40 24 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        assert_eq!(folders("4:memory:/docker/abc\n", container, &[]), ["v1 /sys/fs/cgroup/memory"]);
        assert_eq!(folders("4:memory:/elsewhere\n", container, &[]), [""; 0]);
        assert_eq!(folders("", "", &[]), [""; 0]);
    }

    #[test]
    fn cgroup_at_the_usual_mount_point_needs_no_list_of_mounts() {
        let v1 = [("sys/fs/cgroup/memory/job/cgroup.procs", "1\n")];
        assert_eq!(folders("4:memory:/job\n", "", &v1), ["v1 /sys/fs/cgroup/memory/job"]);
        let v2 = [("sys/fs/cgroup/job/cgroup.procs", "1\n")];
        assert_eq!(folders("0::/job\n", "", &v2), ["v2 /sys/fs/cgroup/job"]);
        let hybrid = [("sys/fs/cgroup/unified/cgroup.procs", "1\n")];
        assert_eq!(folders("0::/\n", "", &hybrid), ["v2 /sys/fs/cgroup/unified"]);
        // A container's own cgroup is mounted there, but under another name.
        let container = "40 24 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let procs = [("sys/fs/cgroup/memory/cgroup.procs", "1\n")];
        assert_eq!(folders("4:memory:/docker/abc\n", container, &procs), ["v1 /sys/fs/cgroup/memory"]);
    }

    /// A machine whose process is in this group, with these files.
    fn machine(cgroups: &str, mounts: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let proc = [("proc/self/cgroup", cgroups), ("proc/self/mountinfo", mounts)];
        for (path, text) in proc.iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn smallest_cpu_quota_of_all_ancestor_cgroups_counts() {
        let v2 = |files: &[(&str, &str)]| cpu_quota(machine("0::/a/b\n", V2_MOUNTS, files).path());
        let [a, b] = ["sys/fs/cgroup/a/cpu.max", "sys/fs/cgroup/a/b/cpu.max"];
        assert_eq!(v2(&[]), None);
        assert_eq!(v2(&[(a, "max 100000\n"), (b, "max 100000\n")]), None);
        assert_eq!(v2(&[(a, "max 100000\n"), (b, "250000 100000\n")]), Some(2));
        assert_eq!(v2(&[(a, "150000 50000\n"), (b, "800000 100000\n")]), Some(3), "of the group above");
        assert_eq!(v2(&[(b, "50000 100000\n")]), Some(1), "at least one");
        assert_eq!(v2(&[(b, "50000 0\n")]), None, "no sense");

        let v1 = |quota: &str, above: &str| {
            let [own, parent] = ["a/b", "a"].map(|group| format!("sys/fs/cgroup/cpu/{group}/cpu.cfs_"));
            let [own_quota, own_period] = ["quota_us", "period_us"].map(|file| own.clone() + file);
            let [parent_quota, parent_period] = ["quota_us", "period_us"].map(|file| parent.clone() + file);
            let files = [
                (own_quota.as_str(), quota),
                (own_period.as_str(), "100000\n"),
                (parent_quota.as_str(), above),
                (parent_period.as_str(), "100000\n"),
            ];
            cpu_quota(machine("1:cpu,cpuacct:/a/b\n0::/\n", V1_MOUNTS, &files).path())
        };
        assert_eq!(v1("-1\n", "-1\n"), None);
        assert_eq!(
            (v1("200000\n", "-1\n"), v1("-1\n", "300000\n"), v1("400000\n", "300000\n")),
            (Some(2), Some(3), Some(3))
        );
    }

    #[test]
    fn ancestor_cgroup_with_fewest_free_tasks_sets_the_limit() {
        let files = [
            ("sys/fs/cgroup/a/pids.max", "100\n"),
            ("sys/fs/cgroup/a/pids.current", "90\n"),
            ("sys/fs/cgroup/a/b/pids.max", "30\n"),
            ("sys/fs/cgroup/a/b/pids.current", "7\n"),
        ];
        let root = machine("0::/a/b\n", V2_MOUNTS, &files);
        let limit = task_limit(root.path()).map(|tasks| (tasks.folder, tasks.max, tasks.current));
        assert_eq!(limit, Some((root.path().join("sys/fs/cgroup/a"), 100, 90)));
        assert_eq!(task_limit(machine("0::/a\n", V2_MOUNTS, &[]).path()), None);
        let free = [("sys/fs/cgroup/a/pids.max", "max\n"), ("sys/fs/cgroup/a/pids.current", "90\n")];
        assert_eq!(task_limit(machine("0::/a\n", V2_MOUNTS, &free).path()), None);
    }

    #[test]
    fn smallest_memory_limit_counts_and_page_cache_is_free() {
        let files = [
            ("sys/fs/cgroup/job/memory.max", "1000\n"),
            ("sys/fs/cgroup/job/memory.current", "900\n"),
            ("sys/fs/cgroup/job/memory.stat", "anon 500\ninactive_file 30\nactive_file 20\nshmem 7\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/step/memory.current", "800\n"),
            ("sys/fs/cgroup/job/other/memory.max", "10\n"),
            ("sys/fs/cgroup/job/other/memory.current", "20\n"),
        ];
        let free = |cgroups: &str| free_memory(machine(cgroups, V2_MOUNTS, &files).path());
        assert_eq!(free("0::/job/step\n"), Some(150));
        assert_eq!(free("0::/job\n"), Some(150));
        assert_eq!(free("0::/job/other\n"), Some(0));
        assert_eq!((free("0::/\n"), free("0::/gone\n")), (None, None));
    }

    #[test]
    fn container_memory_limit_is_read_at_the_mount_point() {
        let mount = "40 24 0:26 /kubepods/pod7/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let files = [("sys/fs/cgroup/memory.max", "500"), ("sys/fs/cgroup/memory.current", "400")];
        assert_eq!(free_memory(machine("0::/kubepods/pod7/c1\n", mount, &files).path()), Some(100));
    }

    #[test]
    fn memory_limits_of_version_1_are_read() {
        let files = [
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2000"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1500"),
            (
                "sys/fs/cgroup/memory/a/memory.stat",
                "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000"),
        ];
        let cgroups = "9:cpu,cpuacct:/a\n7:memory,hugetlb:/a\n1:name=systemd:/a\n0::/a\n";
        assert_eq!(free_memory(machine(cgroups, V1_MOUNTS, &files).path()), Some(650));
    }

    #[test]
    fn malformed_cgroup_files_set_no_limit() {
        for cgroups in ["", "0", "0:", "x::/..\n::", "7:memory", "0::/\u{0}\n"] {
            assert_eq!(free_memory(machine(cgroups, V2_MOUNTS, &[]).path()), None, "{cgroups:?}");
        }
    }
}
