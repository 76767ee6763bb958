//! Decides on the class, the explanation and the advice for a worker's death. Pure.

use convoke_env::ExitCause;
use nix::sys::signal::Signal;

use super::findings::{Findings, NO_MAIN};
use super::{Class, Evidence, OomKills};
use crate::words;

/// The known facts about the end of one process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts<'a> {
    /// The exit code or signal of the process.
    pub(crate) cause: ExitCause,
    /// The launcher had told it to stop before.
    pub(crate) stopped: bool,
    /// The program was given to Python because no program of that name exists.
    pub(crate) guessed: bool,
    pub(crate) evidence: &'a Evidence,
    /// The evidence from its stderr and from its error file.
    pub(crate) findings: &'a Findings,
}

/// The class, explanation and advice that the report shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) class: Class,
    pub(crate) explanation: String,
    pub(crate) advice: Option<String>,
    /// The rank that it names as lost, if it is a consequence.
    pub(crate) blames: Option<usize>,
}

impl Verdict {
    pub(crate) fn new(class: Class, explanation: impl Into<String>) -> Self {
        Self { class, explanation: explanation.into(), advice: None, blames: None }
    }

    pub(crate) fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    fn blame(mut self, rank: Option<usize>) -> Self {
        self.blames = rank;
        self
    }
}

/// Decides on the verdict. `facts.cause` is not exit code 0.
pub(crate) fn decide(facts: &Facts<'_>) -> Verdict {
    let Facts { cause, stopped, findings, .. } = *facts;
    if !stopped {
        return by_itself(facts);
    }
    let how = match cause {
        ExitCause::Signal(signal) => words::signal(signal),
        ExitCause::Code(code) => format!("exit code {code}"),
    };
    let told =
        Verdict::new(Class::Stopped, format!("by the launcher, after another worker had failed ({how})"));
    if matches!(cause, ExitCause::Signal(9 | 15) | ExitCause::Code(137 | 143)) {
        // The worker may have been about to end by itself: an uncaught exception takes a while to end
        // Python.
        return match &findings.exception {
            Some(exception) if is_own(exception) => {
                let verdict = of_exception(facts, exception);
                if verdict.class.weight() == super::class::Weight::Own { verdict } else { told }
            }
            Some(_) | None => told,
        };
    }
    let verdict = by_itself(facts);
    let says_so = findings.exception.as_deref().is_some_and(|exception| !is_own(exception));
    match verdict.class {
        Class::Exit
        | Class::PeerLost
        | Class::Timeout
        | Class::Terminated
        | Class::Killed
        | Class::Signal => told,
        _ if says_so => told,
        _ => verdict,
    }
}

/// Returns whether the exception is more than Python's reaction to SIGTERM or SIGINT.
fn is_own(exception: &str) -> bool {
    let to_stop = ["KeyboardInterrupt", "SystemExit", "SIGTERM", "SIGINT", "SignalException", "signal: 15"];
    !to_stop.iter().any(|text| exception.contains(text))
}

fn by_itself(facts: &Facts<'_>) -> Verdict {
    match facts.cause {
        ExitCause::Signal(signal) => of_signal(facts, signal, None),
        ExitCause::Code(code) => of_code(facts, code),
    }
}

fn of_signal(facts: &Facts<'_>, signal: i32, code: Option<i32>) -> Verdict {
    let Facts { evidence, findings, .. } = *facts;
    // A shell or wrapper script exits with 128 + signal if a signal ended its program.
    let by = |text: &str| match code {
        Some(code) => {
            format!(
                "{text} (exit code {code} = 128 + {signal}: its program was ended by {})",
                words::signal(signal)
            )
        }
        None => text.to_owned(),
    };
    let Ok(known) = Signal::try_from(signal) else {
        return Verdict::new(Class::Signal, by(&format!("ended by signal {signal}")));
    };
    match known {
        Signal::SIGKILL => match &evidence.oom {
            Some(oom) => of_oom(oom),
            None => Verdict::new(
                Class::Killed,
                by("SIGKILL from outside: not sent by this launcher, and no out-of-memory kill was counted"),
            )
            .advise("look for who sent it: a scheduler's limit, kill -9, the container runtime, dmesg"),
        },
        Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT => Verdict::new(
            Class::Terminated,
            by(&format!("{known} from outside: not sent by this launcher")),
        )
        .advise("look for who sent it: a scheduler's time limit, kill, a watchdog; did the worker hang before?"),
        Signal::SIGABRT | Signal::SIGTRAP => of_abort(findings, &by("aborted itself (SIGABRT)")),
        Signal::SIGSEGV => {
            let said = findings.last_words.as_deref().filter(|words| !words.contains("Segmentation fault"));
            let text = said.map_or_else(
                || "access to memory that is not its own (SIGSEGV)".to_owned(),
                |words| format!("access to memory that is not its own (SIGSEGV): {words}"),
            );
            Verdict::new(Class::Segfault, by(&text))
                .advise("native code is at fault; PYTHONFAULTHANDLER=1 shows where Python was, a core file where the program was")
        }
        Signal::SIGBUS => Verdict::new(Class::BusError, by("access to memory that has nothing behind it (SIGBUS)"))
            .advise("most often /dev/shm, or a mapped file's disk, is full: df -h /dev/shm; containers: --shm-size or --ipc=host"),
        Signal::SIGILL => Verdict::new(Class::IllegalInstruction, by("an instruction that this CPU does not have (SIGILL)"))
            .advise("the program or a library was built for another CPU: compare its target with lscpu"),
        Signal::SIGFPE => Verdict::new(Class::ArithmeticError, by("an arithmetic error, most often an integer divided by zero (SIGFPE)")),
        Signal::SIGXCPU => Verdict::new(Class::CpuLimit, by("its CPU time limit is used up (SIGXCPU)"))
            .advise("ulimit -t shows the limit"),
        Signal::SIGXFSZ => Verdict::new(Class::FileSizeLimit, by("a file became larger than allowed (SIGXFSZ)"))
            .advise("ulimit -f shows the limit"),
        Signal::SIGPIPE => Verdict::new(Class::Signal, by("it wrote to what nobody reads any more (SIGPIPE)"))
            .advise("if that was stdout: look at what the output of convoke is piped into, such as `head`"),
        _ => Verdict::new(Class::Signal, by(&format!("ended by {known}"))),
    }
}

fn of_oom(oom: &OomKills) -> Verdict {
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let mut text = format!(
        "out of memory, likely: SIGKILL that was not sent by this launcher, while the kernel ended {} process(es) for want of memory",
        oom.count
    );
    match &oom.cgroup {
        Some(cgroup) => text.push_str(&format!(" in cgroup {cgroup}")),
        None => text.push_str(" on this machine"),
    }
    let numbers = [("limit", oom.limit_bytes), ("peak", oom.peak_bytes)];
    let numbers: Vec<String> = numbers
        .iter()
        .filter_map(|(what, bytes)| bytes.map(|bytes| format!("{what} {}", mib(bytes))))
        .collect();
    if !numbers.is_empty() {
        text.push_str(&format!(" ({})", numbers.join(", ")));
    }
    Verdict::new(Class::OutOfMemory, text)
        .advise("raise the memory limit, or lower batch size, loader workers or workers per node; dmesg names the process")
}

/// The message of the C++ runtime if a running thread is destroyed. Threads of gloo may still run while
/// Python exits.
const THREAD_AT_EXIT: &str = "terminate called without an active exception";

fn of_abort(findings: &Findings, otherwise: &str) -> Verdict {
    if let Some((line, rank)) = &findings.timeout {
        return timeout(line, *rank);
    }
    if let Some((line, rank)) = &findings.peer_lost {
        return peer_lost(line, *rank);
    }
    if let Some(panic) = &findings.panic {
        return Verdict::new(Class::Panic, panic.clone());
    }
    match (&findings.last_words, &findings.exception) {
        (Some(words), _) if words.contains(THREAD_AT_EXIT) => {
            Verdict::new(Class::Abort, format!("{otherwise}: {words}")).advise(
                "a thread of a library still ran while the program ended; with torch.distributed call \
                 dist.destroy_process_group() before the script ends",
            )
        }
        (Some(words), _) => Verdict::new(Class::Abort, format!("{otherwise}: {words}")),
        (None, Some(exception)) => Verdict::new(Class::Abort, format!("{otherwise}: {exception}")),
        (None, None) => Verdict::new(Class::Abort, otherwise),
    }
}

fn of_code(facts: &Facts<'_>, code: i32) -> Verdict {
    let findings = facts.findings;
    if let Some(exception) = &findings.exception {
        return of_exception(facts, exception);
    }
    if let Some(panic) = &findings.panic {
        return consequence(findings).unwrap_or_else(|| Verdict::new(Class::Panic, panic.clone()));
    }
    if let Some(line) = &findings.library {
        return missing_library(line);
    }
    if let Some(verdict) = of_argument(findings, code) {
        return verdict;
    }
    match code {
        126 => {
            return Verdict::new(
                Class::NotExecutable,
                with(
                    "exit code 126: a program was found but cannot be executed",
                    findings.not_permitted.as_deref(),
                ),
            )
            .advise("chmod +x, the #! line, or a file system mounted noexec");
        }
        127 => {
            return Verdict::new(
                Class::MissingProgram,
                with("exit code 127: a program was not found", findings.not_found.as_deref()),
            )
            .advise("is it installed on this node, and in PATH?");
        }
        _ => {}
    }
    if let Some(line) = findings.not_found.as_deref().filter(|line| line.contains("can't open file")) {
        return Verdict::new(Class::MissingProgram, line).advise(if facts.guessed {
            "no such file here and no program of that name in PATH, so it was given to Python; is it built, and on this node? relative paths start in the current directory"
        } else {
            "does the script exist on this node, under this path? relative paths start in the current directory"
        });
    }
    if let Some(line) = findings.not_found.as_deref().filter(|line| line.contains(NO_MAIN)) {
        return Verdict::new(Class::MissingProgram, line)
            .advise("a folder or zip is run by its __main__.py, which stands at its top: put one there, or name a script");
    }
    if let Some(line) = findings.not_found.as_deref().filter(|line| line.contains("No module named")) {
        return import_error(line);
    }
    if let Some(verdict) = consequence(findings).or_else(|| of_resource(findings)) {
        return verdict;
    }
    if let Some(signal) = code.checked_sub(128).filter(|signal| (1..=64).contains(signal)) {
        return of_signal(facts, signal, Some(code));
    }
    Verdict::new(Class::Exit, format!("exited with code {code}{}", meaning(code)))
}

/// Returns the conventional meaning of an exit code.
fn meaning(code: i32) -> &'static str {
    match code {
        2 => ", by convention a usage error",
        101 => ", as Rust programs do after a panic",
        255 => ", as ssh and exit(-1) do",
        _ => "",
    }
}

fn of_exception(facts: &Facts<'_>, exception: &str) -> Verdict {
    let findings = facts.findings;
    let has = |text: &str| exception.contains(text);
    if has("ModuleNotFoundError") || has("ImportError") {
        return match &findings.library {
            Some(line) if has("cannot open shared object file") => missing_library(line),
            Some(_) | None => import_error(exception),
        };
    }
    if exception.starts_with("MemoryError") || has("std::bad_alloc") || has("Cannot allocate memory") {
        return Verdict::new(Class::OutOfMemory, format!("host memory: {exception}"))
            .advise("lower batch size, loader workers or workers per node; ulimit -v and the memory cgroup may set limits");
    }
    let killed_child = findings.killed_child.is_some() && (has("DataLoader") || has("BrokenProcessPool"));
    if let Some(oom) = facts.evidence.oom.as_ref().filter(|_| killed_child) {
        let verdict = of_oom(oom);
        return Verdict { explanation: format!("{exception}; {}", verdict.explanation), ..verdict };
    }
    let by_text = |line: &Option<String>| {
        line.as_deref().is_some_and(|line| line.contains(exception) || exception.contains(line))
    };
    if by_text(&findings.device_memory) || has("OutOfMemoryError") || has("out of memory") {
        return device_memory(exception);
    }
    if has("No space left on device") || has("Disk quota exceeded") {
        return disk_full(exception);
    }
    if has("Address already in use") || has("EADDRINUSE") {
        return address_in_use(exception);
    }
    if exception.starts_with("KeyboardInterrupt") {
        return Verdict::new(
            Class::Terminated,
            "SIGINT from outside: not sent by this launcher (KeyboardInterrupt)",
        );
    }
    let lost = [
        "ConnectionResetError",
        "BrokenPipeError",
        "ConnectionAbortedError",
        "DistNetworkError",
        "DistBackendError",
    ];
    let lost = lost.iter().any(|kind| exception.starts_with(kind) || exception.contains(&format!(".{kind}")));
    if lost
        || findings.peer_lost.as_ref().is_some_and(|(line, _)| line.contains(exception))
        || findings.timeout.is_some()
    {
        return consequence(findings).unwrap_or_else(|| peer_lost(exception, None));
    }
    Verdict::new(Class::Exception, exception)
}

/// Returns the verdict on arguments that a program rejects.
fn of_argument(findings: &Findings, code: i32) -> Option<Verdict> {
    let line = match (&findings.argument, findings.usage && code == 2) {
        (Some(line), _) => line.clone(),
        (None, true) => "exit code 2 after its usage text".to_owned(),
        (None, false) => return None,
    };
    let verdict = Verdict::new(Class::UsageError, line.clone());
    let given = |spelling: &str| line.contains(spelling);
    Some(if given("--local-rank") {
        verdict.advise("the script does not know --local-rank: give convoke --pass-local-rank=underscore if it knows --local_rank, or leave --pass-local-rank out (--use-env) if it reads LOCAL_RANK")
    } else if given("--local_rank") {
        verdict.advise("the script does not know --local_rank: give convoke --pass-local-rank=dash if it knows --local-rank, or leave --pass-local-rank out (--use-env) if it reads LOCAL_RANK")
    } else {
        verdict.advise("flags of convoke stand before SCRIPT, those of the script after it")
    })
}

/// Returns the verdict on a resource that the kernel or a device refused.
fn of_resource(findings: &Findings) -> Option<Verdict> {
    if let Some(line) = &findings.device_memory {
        return Some(device_memory(line));
    }
    if let Some(line) = &findings.no_space {
        return Some(disk_full(line));
    }
    findings.address_in_use.as_deref().map(address_in_use)
}

fn consequence(findings: &Findings) -> Option<Verdict> {
    match (&findings.timeout, &findings.peer_lost) {
        (_, Some((line, rank))) => Some(peer_lost(line, *rank)),
        (Some((line, rank)), None) => Some(timeout(line, *rank)),
        (None, None) => None,
    }
}

fn peer_lost(line: &str, rank: Option<usize>) -> Verdict {
    let verdict =
        Verdict::new(Class::PeerLost, format!("a consequence of another's end: {line}")).blame(rank);
    match rank {
        Some(rank) => verdict.advise(format!("look at rank {rank} first")),
        None if line.contains("Broken pipe") => verdict.advise(
            "look first at the worker that ended before this one, on whatever node; or, if this was about stdout, at what the output of convoke is piped into",
        ),
        None => verdict.advise("look first at the worker that ended before this one, on whatever node"),
    }
}

fn timeout(line: &str, rank: Option<usize>) -> Verdict {
    let verdict = Verdict::new(Class::Timeout, line).blame(rank);
    match rank {
        Some(rank) => {
            verdict.advise(format!("look at what rank {rank} does: it is slow, hangs, or makes other calls"))
        }
        None => {
            verdict.advise("one rank did not come to the same call: it is slow, hangs, or makes other calls")
        }
    }
}

fn device_memory(line: &str) -> Verdict {
    Verdict::new(Class::DeviceOutOfMemory, format!("the device's memory is used up: {line}"))
        .advise("lower the batch size, and look whether other processes use the device (nvidia-smi)")
}

fn disk_full(line: &str) -> Verdict {
    Verdict::new(Class::DiskFull, format!("a file system is full, or a quota: {line}"))
        .advise("df -h and df -i, also of /tmp and /dev/shm")
}

fn address_in_use(line: &str) -> Verdict {
    Verdict::new(Class::AddressInUse, format!("another process has the port: {line}"))
        .advise("ss -ltnp shows who; --standalone needs no port, else choose another --master-port")
}

fn import_error(line: &str) -> Verdict {
    Verdict::new(Class::ImportError, line)
        .advise("is it installed on this node, in this Python? compare `which python` and PYTHONPATH with the other nodes")
}

fn missing_library(line: &str) -> Verdict {
    Verdict::new(Class::MissingLibrary, line)
        .advise("ldd shows what is missing on this node; LD_LIBRARY_PATH or the package that has it")
}

fn with(text: &str, line: Option<&str>) -> String {
    line.map_or_else(|| text.to_owned(), |line| format!("{text}: {line}"))
}
