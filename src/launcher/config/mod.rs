//! The configuration from the command line and PET_* variables, checked once and valid from then on.

mod accelerators;
mod binding;
pub(crate) mod build;
mod devices;
mod endpoint;
mod etcd;
mod file;
mod machine;
mod macros;
mod output;
mod program;
mod rdzv_conf;
mod rendezvous_flags;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod topology;

pub(crate) use build::count;
pub(crate) use devices::{omp_num_threads, visible_devices};
pub(crate) use endpoint::is_loopback;
pub(crate) use etcd::EtcdCluster;
pub(crate) use file::FileKind;
pub(crate) use machine::{Machine, is_executable};
pub(crate) use macros::{expand, substitute};
pub(crate) use output::is_quiet;
pub(crate) use rendezvous_flags::is_named;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A launch with all decisions made, except those that depend on other nodes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    /// `--nnodes MIN:MAX`, 0 < MIN <= MAX.
    pub(crate) nodes: NodeRange,
    /// `--nproc-per-node`, resolved; at least 1.
    pub(crate) nproc_per_node: usize,
    /// The method by which the nodes of the job find each other.
    pub(crate) rendezvous: Rendezvous,
    /// `--rdzv-id`, or a random UUID.
    pub(crate) run_id: String,
    /// The likely reason if the nodes do not meet.
    pub(crate) rendezvous_hint: Option<String>,
    /// `--rdzv-conf`, in order, trimmed; unknown keys are kept and ignored.
    pub(crate) rendezvous_conf: Vec<(String, String)>,
    /// `--local-addr`.
    pub(crate) local_addr: Option<String>,
    /// `--max-restarts`.
    pub(crate) max_restarts: u32,
    /// `--restart-delay`: the least time before a restart.
    pub(crate) restart_delay: Duration,
    /// `--restart-stop-after-same`: after so many equal failures in a row there is no restart.
    pub(crate) restart_stop_after_same: Option<u32>,
    /// `--monitor-interval`. Failures are noticed at once; if it was given, failures within one interval
    /// of the first count as simultaneous, as torchrun's polling makes them.
    pub(crate) monitor_interval: Option<Duration>,
    /// `--role`.
    pub(crate) role: String,
    /// The program to execute.
    pub(crate) program: Program,
    /// The destinations of output.
    pub(crate) logs: LogConfig,
    /// CONVOKE_FLIGHT_DIR: the folder in which workers record their calls.
    pub(crate) flight: FlightDir,
    /// `--event-log-handler`.
    pub(crate) events: EventHandler,
    /// `--signals-to-handle`: signals that the launcher forwards to the workers and that end the job.
    /// Unknown names are dropped.
    pub(crate) signals: Vec<nix::sys::signal::Signal>,
    /// The user gave that list.
    pub(crate) signals_given: bool,
    /// `--forward-signals`: signals that are passed on to the workers that catch them, and end nothing.
    pub(crate) forward_signals: Vec<nix::sys::signal::Signal>,
    /// The value of `--signals-to-handle` as given (for TORCHELASTIC_SIGNALS_TO_HANDLE).
    pub(crate) signals_text: String,
    /// `--shutdown-timeout`, TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30 s: from a signal to SIGKILL.
    pub(crate) shutdown_timeout: Duration,
    /// `--virtual-local-rank`.
    pub(crate) virtual_local_rank: bool,
    /// `--gpu-bind`, `--gpus-per-worker`: the variable that selects devices, and its value for each local
    /// rank. The list is empty if the workers see what the launcher sees.
    pub(crate) gpus: (&'static str, Vec<String>),
    /// `--bind`, `--numa-binding`: the CPUs of each worker by local rank; empty if they are not bound.
    pub(crate) cpus: Vec<Vec<usize>>,
    /// Each worker leads a session of its own, as under torchrun, and not only a process group. False if
    /// there are more workers than CPUs and the scheduler groups tasks by session. A worker that yields its
    /// CPU to another worker would then keep it.
    pub(crate) own_sessions: bool,
    /// `--orphans`: what happens to processes that outlive a successful worker.
    pub(crate) orphans: Orphans,
    /// `--report-file`: the path of the JSON report.
    pub(crate) report_file: Option<PathBuf>,
    /// `--report`.
    pub(crate) report: ReportFormat,
    /// Settings that the launcher made for the workers without a request.
    pub(crate) notes: Vec<String>,
    /// `--stderr-tail`: lines of a failed worker's stderr in the report.
    pub(crate) stderr_lines: usize,
    /// Serve one store for the agents and the workers; off with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    pub(crate) share_store: bool,
    /// Warnings to print before anything starts, one line each (`--node-rank` without static, unknown
    /// signal, ...).
    pub(crate) warnings: Vec<String>,
}

impl Config {
    /// Returns whether `--max-restarts` counts for all nodes together.
    pub(crate) fn has_job_budget(&self) -> bool {
        matches!(&self.rendezvous, Rendezvous::Elastic { settings, .. } if settings.job_budget)
    }
}

/// `--nnodes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRange {
    /// Fewest nodes.
    pub(crate) min: usize,
    /// Most nodes.
    pub(crate) max: usize,
}

/// The rules by which rounds of an elastic job begin and end (`--rdzv-conf`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ElasticSettings {
    /// `last_call_timeout`: the time for which a first round stays open after it has the minimum of nodes.
    pub(crate) last_call: Duration,
    /// `join_timeout`: the time for which a node waits for a round.
    pub(crate) join_timeout: Duration,
    /// `close_timeout`: the time limit for recording the end of a job.
    pub(crate) close_timeout: Duration,
    /// The heartbeat timeout: a node that stays silent for longer is lost. The value is
    /// `keep_alive_interval` times `keep_alive_max_attempt` if given.
    pub(crate) heartbeat_timeout: Duration,
    /// `restart_budget=job`: `--max-restarts` counts for all nodes together.
    pub(crate) job_budget: bool,
}

/// The rendezvous endpoint of an elastic job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A coordinator that one node serves at this address.
    Host {
        /// Its name or address.
        host: String,
        /// Its port.
        port: u16,
        /// `is_host`: says whether this node serves it; `None` leaves it to any node that can.
        is_host: Option<bool>,
    },
    /// `store_type=file`: a shared file names the coordinator.
    File(PathBuf),
    /// `etcd`, `etcd-v2`: etcd names the coordinator.
    Etcd(EtcdCluster),
}

/// The method by which the nodes of the job find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rendezvous {
    /// One node without peers: `--standalone`, or one node and neither endpoint nor port.
    Standalone,
    /// `static`: node ranks are given, node 0 serves the store.
    Static {
        /// Host of node 0, as given.
        host: String,
        /// Port of the store.
        port: u16,
        /// `--node-rank`.
        node_rank: usize,
        /// Longest wait for the other nodes (`timeout`, 900 s).
        timeout: Duration,
    },
    /// `c10d`, `etcd`, `etcd-v2`: nodes may join and leave.
    Elastic {
        /// The endpoint at which the nodes meet.
        endpoint: Endpoint,
        /// The rules by which rounds begin and end.
        settings: ElasticSettings,
    },
}

/// The program to execute, before macros are replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Program and its arguments; `${local_rank}` is not yet replaced. `argv[0]` is searched in PATH.
    pub(crate) argv: Vec<OsString>,
    /// Index in `argv` before which the legacy `--local-rank=N` is inserted, with its spellings. Normally
    /// `None`.
    pub(crate) local_rank_argument: Option<LocalRankArgument>,
    /// The program's name in the report: the script as given, or PYTHON_EXEC if that is set.
    pub(crate) title: String,
    /// SCRIPT is no file here, no program in PATH, and not called `*.py`: Python gets a text that may be no
    /// script.
    pub(crate) assumed_python: bool,
}

/// `--pass-local-rank`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalRankArgument {
    /// The index in `argv`.
    pub(crate) index: usize,
    /// Pass `--local-rank=N`.
    pub(crate) dash: bool,
    /// Pass `--local_rank=N`.
    pub(crate) underscore: bool,
}

/// `--event-log-handler`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventHandler {
    /// Events are dropped.
    Null,
    /// Events go to stderr, one JSON object a line.
    Console,
}

/// `--orphans`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphans {
    /// They get the grace period, then SIGKILL.
    Stop,
    /// They live on, as under torchrun.
    Keep,
}

/// `--report`: the part of the report that goes to stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportFormat {
    /// One screen: the root cause, and the other workers that failed.
    Short,
    /// A block for each worker, as torchrun prints it.
    Full,
}

/// Selects among the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Streams {
    /// Standard output.
    pub(crate) stdout: bool,
    /// Standard error.
    pub(crate) stderr: bool,
}

/// One `-r` or `-t` value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StreamChoice {
    /// One choice for all local ranks.
    All(Streams),
    /// For these local ranks; none for the rest.
    Some(std::collections::BTreeMap<usize, Streams>),
}

/// The destinations of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogConfig {
    /// `--role`, for the prefix.
    pub(crate) role: String,
    /// `--log-dir`.
    pub(crate) dir: LogDir,
    /// `--redirects`.
    pub(crate) redirects: StreamChoice,
    /// `--tee`.
    pub(crate) tee: StreamChoice,
    /// `--log-line-prefix-template`, its variable or the default.
    pub(crate) prefix_template: String,
    /// `--local-ranks-filter`: the only local ranks on the console; `None` is all.
    pub(crate) local_ranks_filter: Option<std::collections::BTreeSet<usize>>,
    /// The launcher reads a stderr that goes to the console, so that it can keep the last lines. Off with
    /// `--stderr-tail=0`. Also off with `--orphans=keep`, since the stderr must then outlive the launcher.
    pub(crate) keep_stderr_tail: bool,
    /// `--duplicate-stdout-filters`; empty is off.
    pub(crate) duplicate_stdout: Vec<String>,
    /// `--duplicate-stderr-filters`; empty is off.
    pub(crate) duplicate_stderr: Vec<String>,
}

/// CONVOKE_FLIGHT_DIR.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FlightDir {
    /// Not set: the recordings lie in the log folder.
    LogFolder,
    /// This directory.
    Path(PathBuf),
    /// Set but empty: there are no recordings.
    Disabled,
}

/// `--log-dir`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogDir {
    /// A new `torchelastic_<run id>_<random>` in the temporary directory.
    Temporary,
    /// This directory, created with its parents.
    Path(PathBuf),
    /// `/dev/null`: no files at all.
    Disabled,
}
