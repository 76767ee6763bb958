//! The settings of the launcher, as types.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::etcd::EtcdCluster;
use crate::formatting;
use crate::scheduler::{NodeSearch, ScheduledJob};

/// The configuration of a launch, with all decisions made that do not depend on other nodes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    /// Number of nodes, from `--nnodes MIN:MAX` with 0 < MIN <= MAX.
    pub(crate) nodes: NodeRange,
    /// Number of workers on this node, from `--nproc-per-node`; at least 1.
    pub(crate) nproc_per_node: usize,
    pub(crate) rendezvous: Rendezvous,
    /// Id of the job: `--rdzv-id`, or a random UUID.
    pub(crate) run_id: String,
    /// The job as the cluster's scheduler describes it; `None` if the flags describe it.
    pub(crate) scheduled: Option<ScheduledJob>,
    /// The likely reason why the nodes do not meet, printed if they do not; `None` if none is likely.
    pub(crate) rendezvous_hint: Option<String>,
    /// Settings of `--rdzv-conf`, in order, trimmed. Unknown keys are kept and ignored.
    pub(crate) rendezvous_conf: Vec<(String, String)>,
    /// Address at which other nodes reach this node (`--local-addr`).
    pub(crate) local_addr: Option<String>,
    /// Most restarts after failures (`--max-restarts`).
    pub(crate) max_restarts: u32,
    /// Minimum delay before a restart (`--restart-delay`).
    pub(crate) restart_delay: Duration,
    /// Number of equal failures in a row after which there is no restart (`--restart-stop-after-same`).
    pub(crate) restart_stop_after_same: Option<u32>,
    /// `--monitor-interval`: failures within one interval of the first count as simultaneous, as with
    /// torchrun's polling. The launcher notices failures at once in any case.
    pub(crate) monitor_interval: Option<Duration>,
    pub(crate) role: String,
    pub(crate) program: Program,
    pub(crate) logs: LogConfig,
    /// CONVOKE_FLIGHT_DIR: folder in which workers record their collective calls.
    pub(crate) flight: FlightDir,
    /// The handling of events (`--event-log-handler`).
    pub(crate) events: EventHandler,
    /// `--signals-to-handle`: signals that the launcher forwards to the workers and that end the job.
    /// Unknown names are dropped.
    pub(crate) signals: Vec<nix::sys::signal::Signal>,
    /// True if the user has set `--signals-to-handle`.
    pub(crate) signals_given: bool,
    /// `--forward-signals`: signals that are forwarded to the workers that have a handler for them. The job
    /// continues.
    pub(crate) forward_signals: Vec<nix::sys::signal::Signal>,
    pub(crate) drain: DrainConfig,
    /// The text of `--signals-to-handle`, passed to workers as TORCHELASTIC_SIGNALS_TO_HANDLE.
    pub(crate) signals_text: String,
    /// Time from a signal that ends the job to SIGKILL: `--shutdown-timeout`, TORCH_ELASTIC_SHUTDOWN_TIMEOUT
    /// or 30 s.
    pub(crate) shutdown_timeout: Duration,
    /// `--virtual-local-rank`: each worker has LOCAL_RANK 0 and sees one device.
    pub(crate) virtual_local_rank: bool,
    /// OMP_NUM_THREADS of the workers; `None` if it stays as the user set it, or unset.
    pub(crate) omp_num_threads: Option<usize>,
    /// `--as-gloo`: the Python package convoke-dist takes gloo's place in the workers.
    pub(crate) as_gloo: bool,
    /// `--gpu-bind`, `--gpus-per-worker`: the environment variable that makes devices visible, and its value
    /// for each local rank. The list is empty if the workers see the same devices as the launcher.
    pub(crate) gpus: (&'static str, Vec<String>),
    /// `--bind`, `--numa-binding`: the CPUs of each worker by local rank. Empty if workers are not bound to
    /// CPUs.
    pub(crate) cpus: Vec<Vec<usize>>,
    /// True if each worker leads a session of its own, as under torchrun; false if it leads only a process
    /// group. False if there are more workers than CPUs and the scheduler groups tasks by session
    /// (autogroup). With sessions of their own, a worker that yields its CPU to another worker would keep it.
    pub(crate) own_sessions: bool,
    /// `--orphans`: what happens to processes that outlive a successful worker.
    pub(crate) orphans: Orphans,
    /// `--report-file`: the path of the JSON report.
    pub(crate) report_file: Option<PathBuf>,
    /// File for the root cause in a few lines (`--termination-log`).
    pub(crate) termination_log: Option<PathBuf>,
    /// The exit codes of the launcher (`--exit-codes`).
    pub(crate) exit_codes: ExitCodes,
    /// Form of the report on stderr (`--report`).
    pub(crate) report: ReportFormat,
    /// Notes on settings that the launcher made for the workers although the user did not ask for them.
    pub(crate) notes: Vec<String>,
    /// `--stderr-tail`: most lines of a failed worker's stderr that the report keeps.
    pub(crate) stderr_lines: usize,
    /// True if agents and workers use one key-value store; false with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    pub(crate) share_store: bool,
    /// Warnings to print before any worker starts, one line each (`--node-rank` without static, unknown
    /// signal, ...).
    pub(crate) warnings: Vec<String>,
}

impl Config {
    /// Returns the rank of this node if it has one before the rendezvous, else 0.
    pub(crate) fn node_rank(&self) -> usize {
        match &self.rendezvous {
            Rendezvous::Static { node_rank, .. } => *node_rank,
            Rendezvous::Standalone | Rendezvous::Elastic { .. } => 0,
        }
    }

    /// Returns true if this node is known to be the first before the rendezvous.
    pub(crate) fn is_first_node(&self) -> bool {
        match &self.rendezvous {
            Rendezvous::Static { node_rank, .. } => *node_rank == 0,
            Rendezvous::Standalone => true,
            Rendezvous::Elastic { .. } => false,
        }
    }

    /// Returns whether `--max-restarts` counts the restarts of all nodes together.
    pub(crate) fn has_job_budget(&self) -> bool {
        matches!(&self.rendezvous, Rendezvous::Elastic { settings, .. } if settings.job_budget)
    }
}

/// When and how the job is drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DrainConfig {
    /// `--drain-signal`: signals that begin a drain. Workers with a handler for the first one get it.
    pub(crate) signals: Vec<nix::sys::signal::Signal>,
    /// `--drain-timeout`: time of the workers from the begin of a drain to SIGKILL.
    pub(crate) timeout: Duration,
    /// `--drain-after`: time from the start of the launcher to a drain.
    pub(crate) after: Option<Duration>,
    /// `--drain-exit-code`
    pub(crate) exit_code: u8,
    pub(crate) on_drained: OnDrained,
    /// Id of the Slurm job that is requeued after a drain; `None` outside of Slurm.
    pub(crate) slurm_job: Option<String>,
}

/// The step that follows the drain of a Slurm job (`--on-drained`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnDrained {
    /// It is requeued if Slurm allows it.
    Auto,
    Exit,
    Requeue,
    /// Node 0 waits until Slurm ends the job.
    Hold,
}

/// Allowed number of nodes (`--nnodes`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRange {
    pub(crate) min: usize,
    pub(crate) max: usize,
}

/// Settings of `--rdzv-conf` that decide when rounds of an elastic job begin and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ElasticSettings {
    /// `last_call_timeout`: time for which more nodes may join the first round after it has the minimum
    /// number of nodes.
    pub(crate) last_call: Duration,
    /// `join_timeout`: longest time that a node waits for a round to begin.
    pub(crate) join_timeout: Duration,
    /// `close_timeout`: longest time for recording the end of a job at the coordinator.
    pub(crate) close_timeout: Duration,
    /// Heartbeat timeout: a node that sends no heartbeat for longer is lost. The value is
    /// `keep_alive_interval` times `keep_alive_max_attempt` if given.
    pub(crate) heartbeat_timeout: Duration,
    /// `restart_budget=job`: `--max-restarts` counts for all nodes together.
    pub(crate) job_budget: bool,
}

/// The place at which the nodes of an elastic job find the coordinator of the rendezvous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// The coordinator listens at this address, on one of the nodes.
    Host {
        host: String,
        port: u16,
        /// `is_host`: whether this node runs the coordinator. If `None`, any node that can listen at the
        /// address runs it.
        is_host: Option<bool>,
    },
    /// `store_type=file`: a shared file holds the address of the coordinator.
    File(PathBuf),
    /// `etcd`, `etcd-v2`: the etcd cluster holds the address of the coordinator.
    Etcd(EtcdCluster),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { host, port, .. } => f.write_str(&formatting::address(host, *port)),
            Self::File(path) => path.display().fmt(f),
            Self::Etcd(cluster) => cluster.fmt(f),
        }
    }
}

/// The way in which the nodes of the job find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rendezvous {
    /// The job has one node only: `--standalone`, or one node and neither endpoint nor port.
    Standalone,
    /// Backend `static`: the user gives the node ranks, and node 0 serves the key-value store.
    Static {
        /// Host of node 0, as the user wrote it.
        host: String,
        /// Port of the key-value store.
        port: u16,
        /// Rank of this node (`--node-rank`).
        node_rank: usize,
        /// The search for node 0 if the user gave no address. `host` and `port` are then the likeliest
        /// ones.
        search: Option<NodeSearch>,
        /// Longest wait for the other nodes (setting `timeout`, 900 s by default).
        timeout: Duration,
    },
    /// Backends `c10d`, `etcd`, `etcd-v2`: nodes may join and leave during the job.
    Elastic { endpoint: Endpoint, settings: ElasticSettings },
}

/// The program that workers execute, before macros are replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Program and its arguments, in which `${local_rank}` is not yet replaced. `argv[0]` is searched in
    /// PATH.
    pub(crate) argv: Vec<OsString>,
    /// The position in `argv` of the legacy argument `--local-rank=N`, and its spellings. Normally `None`.
    pub(crate) local_rank_argument: Option<LocalRankArgument>,
    /// Name of the program in the report: SCRIPT as the user wrote it, or PYTHON_EXEC if that is set.
    pub(crate) title: String,
    /// True if SCRIPT is no existing file, no program in PATH, and not called `*.py`. Python then gets a name
    /// that may be no script.
    pub(crate) assumed_python: bool,
    /// True if `argv[0]` is the Python that runs SCRIPT.
    pub(crate) is_python: bool,
}

/// The arguments that `--pass-local-rank` adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalRankArgument {
    /// Index in `argv` before which they are inserted.
    pub(crate) index: usize,
    /// True if `--local-rank=N` is passed.
    pub(crate) dash: bool,
    /// True if `--local_rank=N` is passed.
    pub(crate) underscore: bool,
}

/// The handling of events (`--event-log-handler`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventHandler {
    Null,
    /// Events are written to stderr, one JSON object a line.
    Console,
}

/// What happens to processes that outlive a successful worker (`--orphans`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphans {
    /// They are stopped: SIGTERM, then SIGKILL after the grace period.
    Stop,
    /// They continue to run, as under torchrun.
    Keep,
}

/// The exit codes of the launcher (`--exit-codes`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitCodes {
    /// Those of torchrun: every failed job has 1.
    Torchrun,
    /// Failed jobs have codes from which a scheduler can decide whether to start the job again.
    Scheduler,
}

/// Form of the report on stderr (`--report`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportFormat {
    /// One screen: the root cause, and the other failed workers in a few lines.
    Short,
    /// A block for each worker, as torchrun prints it.
    Full,
}

/// Which of the two output streams of a worker are selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Streams {
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
}

/// Value of `--redirects` (`-r`) or `--tee` (`-t`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StreamChoice {
    /// These output streams of all local ranks.
    All(Streams),
    /// Output streams for each of these local ranks. None are selected for other ranks.
    Some(std::collections::BTreeMap<usize, Streams>),
}

/// The destination of the workers' output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogConfig {
    /// Value of `--role`, for the line prefix.
    pub(crate) role: String,
    /// Folder of the log files (`--log-dir`).
    pub(crate) dir: LogDir,
    /// Output streams that go to files only (`--redirects`).
    pub(crate) redirects: StreamChoice,
    /// Output streams that go to files and to the console (`--tee`).
    pub(crate) tee: StreamChoice,
    /// Template of the line prefix: `--log-line-prefix-template`, its environment variable or the default.
    pub(crate) prefix_template: String,
    /// `--local-ranks-filter`: local ranks whose output goes to the console; `None` is all.
    pub(crate) local_ranks_filter: Option<std::collections::BTreeSet<usize>>,
    /// True if the launcher reads a stderr that goes to the console, so that it can keep the last lines.
    /// False with `--stderr-tail=0`. Also false with `--orphans=keep`, since the stderr must then outlive the
    /// launcher.
    pub(crate) keep_stderr_tail: bool,
    /// Texts of `--duplicate-stdout-filters`; empty if the filter is off.
    pub(crate) duplicate_stdout: Vec<String>,
    /// Texts of `--duplicate-stderr-filters`; empty if the filter is off.
    pub(crate) duplicate_stderr: Vec<String>,
}

/// Where flight recordings are stored (CONVOKE_FLIGHT_DIR).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FlightDir {
    /// In the log folder, since the variable is not set.
    LogFolder,
    Path(PathBuf),
    /// Nowhere: the variable is empty, so there are no recordings.
    Disabled,
}

/// Where log files are stored (`--log-dir`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogDir {
    /// In a new directory `torchelastic_<run id>_<random>` in the temporary directory.
    Temporary,
    /// In this directory, which is created with its parents.
    Path(PathBuf),
    /// Nowhere (`/dev/null`): there are no log files.
    Disabled,
}
