//! Raises the resource limits (ulimit) of the launcher as far as allowed, since it holds descriptors and
//! files for all workers. Workers get the limits with which the launcher was started. Before the first worker
//! starts, the launcher reports limits that cannot suffice.

use std::path::Path;

use convoke_env::host::cgroup::{TaskLimit, task_limit};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use crate::config::{Config, Rendezvous, StreamChoice, Streams};
use crate::formatting::count;

/// Number of file descriptors that the launcher has open besides those for each worker.
const OWN_DESCRIPTORS: usize = 32;
/// Most file descriptors of workers' channels, stdout and stderr that are in transit to the guard at once.
const DESCRIPTORS_IN_TRANSIT: usize = 256;
/// Processes and threads besides the workers: the guard, the thread that copies output, and those that write
/// to the console.
const OWN_TASKS: u64 = 4;
/// Amount of locked memory in bytes below which RDMA network cards probably do not work.
const RDMA_LOCKED_MEMORY_MIN: u64 = 64 << 20;

const RAISED: [Resource; 4] =
    [Resource::RLIMIT_NOFILE, Resource::RLIMIT_NPROC, Resource::RLIMIT_MEMLOCK, Resource::RLIMIT_FSIZE];

/// The resource limits that the launcher was started with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Soft and hard limits, in the order of [`RAISED`]; `None` if the system does not report one.
    before: [Option<(u64, u64)>; RAISED.len()],
}

impl Limits {
    /// Raises the soft resource limits of this process to the hard limits.
    pub(crate) fn raise() -> Self {
        let before = RAISED.map(|resource| {
            let (soft, hard) = getrlimit(resource).ok()?;
            // If the system refuses a value (one above fs.nr_open, say), the limit stays unchanged.
            let _ = setrlimit(resource, hard, hard);
            Some((soft, hard))
        });
        Self { before }
    }

    /// Restores the original resource limits in this process. To be called in a forked worker before its
    /// program executes.
    pub(crate) fn restore(&self) {
        for (resource, before) in RAISED.into_iter().zip(self.before) {
            if let Some((soft, hard)) = before {
                let _ = setrlimit(resource, soft, hard);
            }
        }
    }

    /// Checks whether the resource limits suffice for this job. Returns warnings, one line each.
    ///
    /// # Errors
    /// A limit cannot suffice. One line states the need, the limit, and how to raise it.
    pub(crate) fn check(&self, config: &Config) -> Result<Vec<String>, String> {
        let now =
            |resource| getrlimit(resource).ok().map(|(soft, _)| soft).filter(|soft| *soft != RLIM_INFINITY);
        let is_root = nix::unistd::geteuid().is_root();
        // Workers get the original limit of locked memory, the third of [`RAISED`].
        let [_, _, locked, _] = self.before;
        let locked = locked.map(|(soft, _)| soft).filter(|soft| *soft != RLIM_INFINITY);
        let has_rdma = Path::new("/dev/infiniband").exists();
        check(
            &Needs::of(config),
            &SystemLimits {
                descriptors: now(Resource::RLIMIT_NOFILE),
                // The kernel does not apply this limit to root.
                processes: now(Resource::RLIMIT_NPROC).filter(|_| !is_root),
                tasks: task_limit(Path::new("/")),
                file_bytes: now(Resource::RLIMIT_FSIZE),
                locked_bytes: locked.filter(|_| has_rdma),
            },
        )
    }
}

/// What a job needs on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Needs {
    workers: usize,
    /// File descriptors that the launcher needs.
    descriptors: usize,
    /// `descriptors` plus one connection of every worker to the store, which this node may serve. If the
    /// guard needs more descriptors than that, the guard's number.
    most: usize,
    /// True if the launcher copies output to files.
    copies: bool,
}

/// Limits that apply to this launcher; `None` is no limit.
#[derive(Debug, Default)]
struct SystemLimits {
    descriptors: Option<u64>,
    processes: Option<u64>,
    tasks: Option<TaskLimit>,
    file_bytes: Option<u64>,
    /// The limit of locked memory in bytes. `None` also if the host has no RDMA device, because only RDMA
    /// needs much locked memory.
    locked_bytes: Option<u64>,
}

impl Needs {
    fn of(config: &Config) -> Self {
        let workers = config.nproc_per_node;
        let teed: Vec<Streams> = match &config.logs.tee {
            StreamChoice::All(streams) => vec![*streams],
            StreamChoice::Some(of_rank) => of_rank.values().copied().collect(),
        };
        let tee = Streams {
            stdout: teed.iter().any(|streams| streams.stdout),
            stderr: teed.iter().any(|streams| streams.stderr),
        };
        // For each worker the launcher holds the agent channel, a pipe and a file for each copied stream, and
        // a pipe for the last lines of stderr.
        let stderr = if tee.stderr { 2 } else { usize::from(config.logs.keep_stderr_tail) };
        let in_launcher = workers * (1 + 2 * usize::from(tee.stdout) + stderr);
        // For each worker the guard holds one descriptor to see its end, and one until its program has
        // started.
        let in_guard = 2 * workers + (3 * workers).min(DESCRIPTORS_IN_TRANSIT);
        let serves = match &config.rendezvous {
            Rendezvous::Standalone | Rendezvous::Elastic { .. } => true,
            Rendezvous::Static { node_rank, .. } => *node_rank == 0,
        };
        let descriptors = OWN_DESCRIPTORS + in_launcher;
        let connections = if serves && config.share_store { workers * config.nodes.max } else { 0 };
        Self {
            workers,
            descriptors,
            most: (descriptors + connections).max(OWN_DESCRIPTORS + in_guard),
            copies: tee.stdout || tee.stderr,
        }
    }
}

fn check(needs: &Needs, there: &SystemLimits) -> Result<Vec<String>, String> {
    const DESCRIPTORS: &str = "raise the hard limit: ulimit -n as root, nofile in /etc/security/limits.conf, LimitNOFILE= of \
                               systemd, docker run --ulimit nofile=N:N";
    let workers = count(needs.workers, "worker");
    let wanted = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let mut warnings = Vec::new();
    match there.descriptors {
        Some(limit) if limit < wanted(needs.descriptors) => {
            let needed = needs.descriptors;
            return Err(format!("{workers} need {needed} open files, and {limit} are allowed; {DESCRIPTORS}"));
        }
        Some(limit) if limit < wanted(needs.most) => warnings.push(format!(
            "this node may need {} open files, as if all workers use its store, and {limit} are allowed; {DESCRIPTORS}",
            needs.most
        )),
        Some(_) | None => {}
    }
    let tasks = wanted(needs.workers).saturating_add(OWN_TASKS);
    if let Some(limit) = there.processes.filter(|limit| *limit < tasks) {
        return Err(format!(
            "{workers} need {tasks} processes and threads, and this user may have {limit}; raise the hard limit: ulimit -u as \
             root, nproc in /etc/security/limits.conf, LimitNPROC= of systemd"
        ));
    }
    if let Some(limit) = &there.tasks
        && limit.max.saturating_sub(limit.current) < tasks
    {
        let (folder, max, current) = (limit.folder.display(), limit.max, limit.current);
        return Err(format!(
            "{workers} need {tasks} more processes and threads, and {folder} allows {max} (pids.max) and has {current}; raise \
             it: docker run --pids-limit, podPidsLimit of the kubelet, TasksMax= of systemd"
        ));
    }
    if let Some(limit) = there.file_bytes.filter(|_| needs.copies) {
        warnings.push(format!(
            "a file may have {} KiB, so log files end there; raise the hard limit: ulimit -f as root, fsize in \
             /etc/security/limits.conf",
            limit / 1024
        ));
    }
    if let Some(limit) = there.locked_bytes.filter(|limit| *limit < RDMA_LOCKED_MEMORY_MIN) {
        warnings.push(format!(
            "workers may lock {} KiB of memory, and this host has RDMA devices, for which NCCL and UCX lock more; raise it: \
             ulimit -l unlimited, memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of systemd, docker run \
             --ulimit memlock=-1",
            limit / 1024
        ));
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs { workers: 8, descriptors: 104, most: 120, copies: true };

    #[test]
    fn insufficient_limit_error_states_need_limit_and_remedy() {
        let tasks = Some(TaskLimit { folder: "/cg/pod".into(), max: 20, current: 9 });
        for (there, parts) in [
            (
                SystemLimits { descriptors: Some(103), ..SystemLimits::default() },
                ["8 workers need 104", "103 are allowed", "ulimit -n"],
            ),
            (
                SystemLimits { processes: Some(11), ..SystemLimits::default() },
                ["8 workers need 12", "may have 11", "LimitNPROC="],
            ),
            (
                SystemLimits { tasks, ..SystemLimits::default() },
                ["need 12 more", "/cg/pod allows 20 (pids.max) and has 9", "--pids-limit"],
            ),
        ] {
            let error = check(&NEEDS, &there).expect_err("too little");
            assert!(parts.iter().all(|part| error.contains(part)) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn possibly_insufficient_limit_is_a_warning_and_sufficient_is_silent() {
        let warnings = |there: SystemLimits| check(&NEEDS, &there).expect("enough").concat();
        let store = warnings(SystemLimits { descriptors: Some(119), ..SystemLimits::default() });
        assert!(store.contains("may need 120 open files") && store.contains("119 are allowed"), "{store}");
        let files = warnings(SystemLimits { file_bytes: Some(2048), ..SystemLimits::default() });
        assert!(files.contains("a file may have 2 KiB") && files.contains("ulimit -f"), "{files}");
        let locked = warnings(SystemLimits { locked_bytes: Some(65536), ..SystemLimits::default() });
        assert!(locked.contains("lock 64 KiB") && locked.contains("memlock=-1"), "{locked}");
        let enough = SystemLimits {
            descriptors: Some(120),
            processes: Some(12),
            tasks: Some(TaskLimit { folder: "/".into(), max: 21, current: 9 }),
            file_bytes: None,
            locked_bytes: Some(1 << 30),
        };
        assert_eq!(warnings(enough) + &warnings(SystemLimits::default()), "");
    }
}
