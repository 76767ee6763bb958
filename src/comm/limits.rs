//! Checks of resource limits before an allocation, for limits that kill the process (SIGXFSZ, out of
//! memory) instead of returning an error.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit};

/// Checks that the file size limit of this process allows a file, also one in memory, of `bytes` bytes.
///
/// # Errors
/// `EFBIG` if the file size limit (`ulimit -f`) is lower.
pub(crate) fn check_file_size(bytes: usize) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(most) if (bytes as u64) > most => Err(Errno::FBIG.into()),
        Some(_) | None => Ok(()),
    }
}

/// Checks that the control groups of this process have `bytes` bytes of free memory.
///
/// # Errors
/// `ENOMEM` if they have less. Limits that cannot be read are ignored.
pub(crate) fn check_memory(bytes: usize) -> io::Result<()> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    match free_memory(&groups, Path::new("/sys/fs/cgroup")) {
        Some(free) if (bytes as u64) > free => Err(Errno::NOMEM.into()),
        Some(_) | None => Ok(()),
    }
}

/// Returns true if the error means that no file descriptor is left.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Returns the message for an error that [`is_out_of_descriptors`], in a group of `size` ranks, of which
/// `on_host` are on this host.
pub(crate) fn descriptor_limit_message(error: &io::Error, size: usize, on_host: usize) -> String {
    // Descriptors: the listener and its duplicate, an epoll set, an eventfd; three connections to each
    // peer; an eventfd and a pidfd for each rank of this host.
    let needed = 4 + 3 * size.saturating_sub(1) + 2 * on_host;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let (Some(most), true) = (current, Errno::from_io_error(error) == Some(Errno::MFILE)) else {
        return format!("{error}, and a group of {size} ranks needs up to {needed}: raise fs.file-max");
    };
    let enough = (most + needed as u64).next_power_of_two();
    let bound = maximum.map_or_else(String::new, |maximum| format!(", at most {maximum} here"));
    format!(
        "all {most} that this process may have are open, and a group of {size} ranks needs up to {needed}: raise the limit \
         (`ulimit -n {enough}`{bound}), or drop groups that are not used"
    )
}

/// The names of the files with the memory limits in one version of control groups (v1 or v2).
struct CgroupVersion {
    /// Root of the version's hierarchy.
    root: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// Fields of `memory.stat` for cached files, which the kernel can drop or write back.
    cached: [&'static str; 2],
}

/// Returns the bytes that the control groups and their ancestors leave free; `None` without a limit.
/// `groups` has the format of `/proc/self/cgroup`.
fn free_memory(groups: &str, root: &Path) -> Option<u64> {
    let free = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let version = match controllers {
            "" => CgroupVersion {
                root: root.to_owned(),
                limit: "memory.max",
                used: "memory.current",
                cached: ["inactive_file", "active_file"],
            },
            _ if controllers.split(',').any(|name| name == "memory") => CgroupVersion {
                root: root.join("memory"),
                limit: "memory.limit_in_bytes",
                used: "memory.usage_in_bytes",
                cached: ["total_inactive_file", "total_active_file"],
            },
            _ => return None,
        };
        // In a container, the path may be that of the host while the mount is the container's own, so all
        // ancestors are tried.
        let path = Path::new(path.trim_start_matches('/'));
        path.ancestors().filter_map(|path| version.free_in(&version.root.join(path))).min()
    });
    free.min()
}

impl CgroupVersion {
    fn free_in(&self, folder: &Path) -> Option<u64> {
        let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let cached = stat.lines().filter_map(|line| line.split_once(' '));
        let cached = cached.filter(|(name, _)| self.cached.contains(name));
        let cached: u64 = cached.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum();
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct CgroupFolder(PathBuf);

    impl CgroupFolder {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("convoke-limits-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for CgroupFolder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn smallest_cgroup_limit_counts_and_page_cache_is_free() {
        let folder = CgroupFolder::new(
            "unified",
            &[
                ("job/memory.max", "1000\n"),
                ("job/memory.current", "900\n"),
                ("job/memory.stat", "anon 500\ninactive_file 30\nactive_file 20\nshmem 7\n"),
                ("job/step/memory.max", "max\n"),
                ("job/step/memory.current", "800\n"),
                ("job/other/memory.max", "10\n"),
                ("job/other/memory.current", "20\n"),
            ],
        );
        assert_eq!(free_memory("0::/job/step\n", &folder.0), Some(150));
        assert_eq!(free_memory("0::/job\n", &folder.0), Some(150));
        assert_eq!(free_memory("0::/job/other\n", &folder.0), Some(0));
        assert_eq!(free_memory("0::/\n", &folder.0), None);
        assert_eq!(free_memory("0::/gone\n", &folder.0), None);
    }

    #[test]
    fn container_memory_limit_is_read_at_the_cgroup_root() {
        let own = [("memory.max", "500"), ("memory.current", "400")];
        let folder = CgroupFolder::new("container", &own);
        assert_eq!(free_memory("0::/kubepods/pod7/c1\n", &folder.0), Some(100));
    }

    #[test]
    fn cgroup_v1_is_read() {
        let folder = CgroupFolder::new(
            "first",
            &[
                ("memory/a/memory.limit_in_bytes", "2000"),
                ("memory/a/memory.usage_in_bytes", "1500"),
                ("memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712"),
                ("memory/memory.usage_in_bytes", "5000"),
            ],
        );
        let groups = "9:cpu,cpuacct:/a\n7:memory,hugetlb:/a\n1:name=systemd:/a\n0::/a\n";
        assert_eq!(free_memory(groups, &folder.0), Some(650));
    }

    #[test]
    fn descriptor_exhaustion_error_states_the_number_needed() {
        let text = descriptor_limit_message(&Errno::MFILE.into(), 4, 4);
        assert!(text.contains("4 ranks needs up to 21") && text.contains("`ulimit -n "), "{text}");
        let text = descriptor_limit_message(&Errno::NFILE.into(), 4, 0);
        assert!(text.contains("needs up to 13: raise fs.file-max"), "{text}");
        assert!(is_out_of_descriptors(&Errno::MFILE.into()) && !is_out_of_descriptors(&Errno::AGAIN.into()));
    }

    #[test]
    fn malformed_cgroup_files_set_no_limit() {
        for groups in ["", "0", "0:", "x::/..\n::", "7:memory", "0::/\u{0}\n"] {
            assert_eq!(free_memory(groups, Path::new("/nonexistent")), None, "{groups:?}");
        }
        assert!(check_file_size(0).is_ok() && check_memory(0).is_ok());
    }
}
