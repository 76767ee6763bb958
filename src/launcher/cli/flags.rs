//! The table of all flags. The parser, the help text and the completions are made from it.

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flag {
    /// Long name with dashes between words, without the two leading dashes.
    pub(crate) name: &'static str,
    /// Letter of the short form, if the flag has one.
    pub(crate) short: Option<char>,
    pub(crate) takes: Takes,
    /// True if the environment variable `PET_<NAME>` sets the flag's default.
    pub(crate) pet: bool,
    /// True if torchrun has the flag. An abbreviated flag (unique prefix) is searched among torchrun's flags
    /// first, so that convoke's own flags make no abbreviation ambiguous.
    pub(crate) torchrun: bool,
    /// The help text, without the default and the environment variable.
    pub(crate) help: &'static str,
    /// The default as the help shows it; empty if there is nothing to show.
    pub(crate) default: &'static str,
}

/// Whether a flag takes a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takes {
    Nothing,
    /// The flag needs a value: `--flag VALUE` or `--flag=VALUE`. The text is the value's name in the help.
    Value(&'static str),
    /// The value is optional: `--flag` or `--flag=VALUE`. The next word is never the value.
    MaybeValue(&'static str),
}

/// The flags under one heading of the help text.
#[derive(Debug)]
pub(crate) struct FlagGroup {
    pub(crate) heading: &'static str,
    /// Flags of this group, in the order of the help text.
    pub(crate) flags: &'static [Flag],
}

impl Flag {
    /// Returns the long name with underscores, if it differs from the one with dashes.
    pub(crate) fn underscored(&self) -> Option<String> {
        self.name.contains('-').then(|| self.name.replace('-', "_"))
    }

    /// Returns the environment variable that sets the flag's default, PET_ and the name in capitals; `None`
    /// if there is none.
    pub(crate) fn variable(&self) -> Option<String> {
        self.pet.then(|| format!("PET_{}", self.name.replace('-', "_").to_uppercase()))
    }

    /// Returns the flag as messages write it, `--name`.
    pub(crate) fn dashed(&self) -> String {
        format!("--{}", self.name)
    }
}

/// Heading of the flags that only `convoke check` has.
const CHECK: &str = "convoke check";

/// Returns the flags that only `convoke check` has.
pub(crate) fn of_check() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().filter(|group| group.heading == CHECK).flat_map(|group| group.flags)
}

/// Returns all flags, in the order of the help text.
pub(crate) fn all() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|group| group.flags)
}

/// Returns the flag of this exact name, if there is one.
pub(crate) fn named(name: &str) -> Option<&'static Flag> {
    all().find(|flag| flag.name == name)
}

const fn flag(name: &'static str, takes: Takes, help: &'static str, default: &'static str) -> Flag {
    Flag { name, short: None, takes, pet: true, torchrun: true, help, default }
}

impl Flag {
    const fn short(mut self, letter: char) -> Self {
        self.short = Some(letter);
        self
    }
    const fn no_variable(mut self) -> Self {
        self.pet = false;
        self
    }
    const fn convoke_only(mut self) -> Self {
        self.torchrun = false;
        self
    }
}

use Takes::{MaybeValue, Nothing, Value};

/// The table of all flags, by heading of the help text.
#[rustfmt::skip] // one or two lines for a flag: its name and value, then its help and default
pub(crate) const GROUPS: &[FlagGroup] = &[
    FlagGroup {
        heading: "Nodes and workers",
        flags: &[
            flag("nnodes", Value("N|MIN:MAX"), "Number of nodes, or a range", "1:1"),
            flag("nproc-per-node", Value("N|KIND"),
                "Workers on this node: a number, cpu, gpu, xpu or auto", "1"),
            flag("node-rank", Value("N"), "Rank of this node, 0 up (static)", "0"),
            flag("master-addr", Value("HOST"), "Host of node 0 (static)", "127.0.0.1"),
            flag("master-port", Value("PORT"), "Port on node 0 (static)", "29500"),
            flag("standalone", Nothing, "A job of this node alone; endpoint, backend and id are ignored", ""),
            flag("scheduler", Value("NAME"),
                "Which scheduler describes the nodes: auto, none, slurm, k8s; flags for the nodes or the rendezvous win", "auto")
                .convoke_only(),
            flag("hosts", Value("HOST,..."),
                "Start a launcher on each of these hosts by ssh; HOST:N starts N workers there", "").convoke_only(),
            flag("hostfile", Value("FILE"),
                "Like --hosts, from a file: HOST, HOST slots=N, HOST:N", "").convoke_only(),
            flag("rsh", Value("PROGRAM"), "The program that runs a command on a host", "ssh").convoke_only(),
            flag("start-timeout", Value("SECONDS"), "Time for the connections to all hosts", "60").convoke_only(),
            flag("copy-binary", Nothing, "Copy convoke to hosts that lack it, into ~/.cache/convoke", "").convoke_only(),
            flag("env", Value("NAME,..."),
                "Variables for the workers on all hosts, NAME or NAME=VALUE, besides PATH, PYTHON*, NCCL_* and the like", "")
                .convoke_only(),
            flag("max-restarts", Value("N"), "Restarts after a failure before the job fails", "0"),
            flag("role", Value("NAME"), "Role of the workers of this node", "default"),
        ],
    },
    FlagGroup {
        heading: "Rendezvous",
        flags: &[
            flag("rdzv-backend", Value("NAME"),
                "How nodes find each other: static, c10d, etcd-v2 or etcd", "static"),
            flag("rdzv-endpoint", Value("HOST:PORT"),
                "Address of the rendezvous; an IPv6 address is written [addr]:port", ""),
            flag("rdzv-id", Value("ID"), "Id of the job, the same on all nodes; empty is random", "none"),
            flag("rdzv-conf", Value("K=V,..."), "More settings, such as timeout=900 or join_timeout=600", ""),
            flag("local-addr", Value("HOST"),
                "Address at which other nodes reach this node", "full host name"),
        ],
    },
    FlagGroup {
        heading: "Program",
        flags: &[
            flag("module", Nothing, "SCRIPT is a Python module, run as python -m", "").short('m'),
            flag("no-python", Nothing, "SCRIPT is a program of its own, not run by Python", ""),
            flag("run-path", Nothing, "Run SCRIPT as __main__ by Python's runpy", ""),
            flag("start-method", Value("METHOD"),
                "spawn, fork or forkserver; accepted for --run-path, no effect", "spawn"),
            flag("virtual-local-rank", Nothing,
                "LOCAL_RANK is 0 everywhere, one visible device per worker", ""),
            flag("gpu-bind", Nothing,
                "Each worker sees only its own GPU, as device 0; LOCAL_RANK stays", "")
                .no_variable().convoke_only(),
            flag("gpus-per-worker", Value("N"),
                "GPUs of each worker, which sees no others; --nproc-per-node=gpu starts as many workers as that leaves", "1")
                .no_variable().convoke_only(),
            flag("numa-binding", Value("KIND"),
                "Bind workers to CPUs near their device: node, socket, exclusive, core-complex", "")
                .no_variable(),
            flag("bind", Value("KIND"),
                "Spread workers over CPUs, with or without devices: node, socket, core-complex, core, none", "none")
                .no_variable().convoke_only(),
            flag("as-gloo", Nothing,
                "convoke takes gloo's place in torch.distributed; needs the Python package convoke-dist", "")
                .no_variable().convoke_only(),
            flag("pass-local-rank", MaybeValue("FORM"),
                "Add --local-rank=N to SCRIPT's arguments: dash, underscore or both", "off")
                .no_variable().convoke_only(),
            flag("use-env", MaybeValue("BOOL"),
                "Do not add --local-rank, whatever --pass-local-rank says", "").no_variable().convoke_only(),
        ],
    },
    FlagGroup {
        heading: "Output",
        flags: &[
            flag("log-dir", Value("DIR"),
                "Where log and error files go; /dev/null: there are none", "a new one in TMPDIR"),
            flag("redirects", Value("STREAMS"),
                "Streams to files only: 0 none, 1 stdout, 2 stderr, 3 both, or 0:3,1:2 by local rank", "0")
                .short('r'),
            flag("tee", Value("STREAMS"),
                "Streams to files and, with a prefix, to the console; values as for -r", "0").short('t'),
            flag("log-line-prefix-template", Value("TEXT"),
                "Prefix of teed lines; placeholders are role_name, local_rank, rank, hostname", "[${role_name}${local_rank}]:"),
            flag("local-ranks-filter", Value("N,..."), "Only these local ranks write to the console", "all"),
            flag("duplicate-stdout-filters", Value("TEXT,..."),
                "Teed stdout lines with such a text also go to filtered_stdout.log", ""),
            flag("duplicate-stderr-filters", Value("TEXT,..."),
                "Teed stderr lines with such a text also go to filtered_stderr.log", ""),
            flag("report", Value("FORM"),
                "What is printed of a failed job: short (one screen), full (a block for each worker, as torchrun)", "short")
                .convoke_only(),
            flag("report-file", Value("FILE"),
                "How the job ended, as JSON: causes, tracebacks, last lines", "").convoke_only(),
            flag("termination-log", Value("FILE"),
                "Where the root cause goes in at most 3 KiB, for kubectl describe", "/dev/termination-log in a pod")
                .convoke_only(),
            flag("exit-codes", Value("KIND"),
                "torchrun: 0, 1, 2; scheduler: also 75, ended from outside, and 78, would fail again", "torchrun")
                .convoke_only(),
            flag("stderr-tail", Value("LINES"),
                "Last lines of a failed worker's stderr in the report; 0: stderr does not pass through convoke", "64")
                .convoke_only(),
            flag("event-log-handler", Value("NAME"),
                "Events: null drops them, console writes JSON lines to stderr", "null"),
            flag("logs-specs", Value("NAME"),
                "Python plug-in for logs; convoke supports none", "").no_variable(),
        ],
    },
    FlagGroup {
        heading: "Watching and stopping",
        flags: &[
            flag("monitor-interval", Value("SECONDS"),
                "Failures this close together count as simultaneous", "0.1"),
            flag("restart-delay", Value("SECONDS"),
                "Least time before a restart; after three quick failures restarts wait 1 to 60 s in any case", "0")
                .convoke_only(),
            flag("restart-stop-after-same", Value("N"),
                "Give up after N equal failures in a row", "").convoke_only(),
            flag("signals-to-handle", Value("NAME,..."),
                "Signals that end the job; they are passed on to the workers", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
            flag("forward-signals", Value("NAME,..."),
                "Signals passed on to the workers that catch them; the job continues", "SIGUSR1,SIGUSR2")
                .convoke_only(),
            flag("drain-signal", Value("NAME,..."),
                "Signals that drain the job: workers get time to stop at one step, and are not restarted", "SIGUSR1 in Slurm")
                .convoke_only(),
            flag("drain-timeout", Value("SECONDS"),
                "Time from the begin of a drain to SIGKILL; SIGTERM comes 5 s before", "90").convoke_only(),
            flag("drain-after", Value("SECONDS"),
                "Drain the job this long after its start", "").convoke_only(),
            flag("drain-exit-code", Value("N"),
                "Exit code of a drained job, and of workers that a drain stopped", "75").convoke_only(),
            flag("on-drained", Value("WHAT"),
                "After a drain in Slurm: auto, exit, requeue or hold (until Slurm ends the job)", "auto").convoke_only(),
            flag("shutdown-timeout", Value("SECONDS"),
                "Time from a signal that ends the job to SIGKILL", "30"),
            flag("orphans", Value("WHAT"),
                "Processes that outlive a successful worker: stop or keep", "stop").convoke_only(),
        ],
    },
    FlagGroup {
        heading: CHECK,
        flags: &[
            flag("net", Nothing,
                "Also measure the throughput of every pair of hosts, at most 20 s", "").no_variable().convoke_only(),
            flag("wait", Value("SECONDS"),
                "Longest wait for the other nodes", "60, 3 in Slurm and with --hosts, 300 in a pod").no_variable().convoke_only(),
            flag("json", Nothing, "Print the report as JSON", "").no_variable().convoke_only(),
            flag("failed-hosts", Value("FILE"),
                "Write the names of failed hosts, one a line, as srun --exclude=./FILE reads them", "")
                .no_variable().convoke_only(),
        ],
    },
    FlagGroup {
        heading: "Help",
        flags: &[
            flag("help", Nothing, "This text", "").short('h').no_variable(),
            flag("version", Nothing,
                "Version, commit and target", "").short('V').no_variable().convoke_only(),
            flag("print-completion", Value("SHELL"),
                "Completions for bash, zsh, fish, elvish or powershell", "").no_variable(),
            flag("print-man", Nothing, "The manual page, for man -l -", "").no_variable().convoke_only(),
            flag("dry-run", Nothing,
                "Show what would be started, with which variables, and start nothing", "")
                .no_variable().convoke_only(),
        ],
    },
];
