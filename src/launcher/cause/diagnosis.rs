//! Determines the class, the explanation and the advice for a worker's failure. Pure.

use convoke_env::ExitCause;
use nix::sys::signal::Signal;

use super::log_evidence::{LogEvidence, NO_MAIN};
use super::{CauseKind, Class, Evidence, OomKills};
use crate::formatting;

/// The known facts about the end of one process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts<'a> {
    /// The exit code or signal of the process.
    pub(crate) cause: ExitCause,
    /// True if the launcher was already stopping the process when it ended.
    pub(crate) stopped: bool,
    /// True if the launcher gave the program to Python because no executable of that name exists.
    pub(crate) assumed_python: bool,
    pub(crate) evidence: &'a Evidence,
    /// Evidence from the worker's stderr and error file.
    pub(crate) log: &'a LogEvidence,
}

/// Class, explanation and advice that the report shows for a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    pub(crate) class: Class,
    pub(crate) explanation: String,
    pub(crate) advice: Option<String>,
    /// The rank that the worker reports as lost, if its failure is a consequence of another.
    pub(crate) suspect_rank: Option<usize>,
}

impl Diagnosis {
    pub(crate) fn new(class: Class, explanation: impl Into<String>) -> Self {
        Self { class, explanation: explanation.into(), advice: None, suspect_rank: None }
    }

    pub(crate) fn with_advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
}

/// Diagnoses the failure of a worker. `facts.cause` is not exit code 0.
pub(crate) fn diagnose(facts: &Facts<'_>) -> Diagnosis {
    let Facts { cause, stopped, log, .. } = *facts;
    if !stopped {
        return diagnose_own_failure(facts);
    }
    let how = match cause {
        ExitCause::Signal(signal) => formatting::signal(signal),
        ExitCause::Code(code) => format!("exit code {code}"),
    };
    let stopped_by_launcher =
        Diagnosis::new(Class::Stopped, format!("by the launcher, after another worker had failed ({how})"));
    if matches!(cause, ExitCause::Signal(9 | 15) | ExitCause::Code(137 | 143)) {
        // The worker may have been failing by itself when it was stopped: Python takes a while to exit after
        // an uncaught exception.
        let exception = log.exception.as_deref().filter(|exception| is_own(exception));
        let own = exception.map(|exception| diagnose_exception(facts, exception));
        let primary = own.filter(|own| own.class.cause_kind() == CauseKind::Primary);
        return primary.unwrap_or(stopped_by_launcher);
    }
    let diagnosis = diagnose_own_failure(facts);
    let says_so = log.exception.as_deref().is_some_and(|exception| !is_own(exception));
    use Class::{Exit, Killed, PeerLost, Signal, Terminated, Timeout};
    match diagnosis.class {
        Exit | PeerLost | Timeout | Terminated | Killed | Signal => stopped_by_launcher,
        _ if says_so => stopped_by_launcher,
        _ => diagnosis,
    }
}

/// Returns whether the exception is a failure of the program, and not only Python's reaction to SIGTERM or
/// SIGINT.
fn is_own(exception: &str) -> bool {
    let to_stop = ["KeyboardInterrupt", "SystemExit", "SIGTERM", "SIGINT", "SignalException", "signal: 15"];
    !to_stop.iter().any(|text| exception.contains(text))
}

fn diagnose_own_failure(facts: &Facts<'_>) -> Diagnosis {
    match facts.cause {
        ExitCause::Signal(signal) => diagnose_signal(facts, signal, None),
        ExitCause::Code(code) => diagnose_exit_code(facts, code),
    }
}

fn diagnose_signal(facts: &Facts<'_>, signal: i32, code: Option<i32>) -> Diagnosis {
    let Facts { evidence, log, .. } = *facts;
    // A shell or wrapper script exits with 128 + signal if a signal ended the program that it ran.
    let name = formatting::signal(signal);
    let by = |text: &str| match code {
        Some(code) => format!("{text} (exit code {code} = 128 + {signal}: its program was ended by {name})"),
        None => text.to_owned(),
    };
    let Ok(known) = Signal::try_from(signal) else {
        return Diagnosis::new(Class::Signal, by(&format!("ended by signal {signal}")));
    };
    match known {
        Signal::SIGKILL => match &evidence.oom {
            Some(oom) => diagnose_oom(oom),
            None => Diagnosis::new(
                Class::Killed,
                by("SIGKILL from outside: not sent by this launcher, and no out-of-memory kill was counted"),
            )
            .with_advice("look for who sent it: a scheduler's limit, kill -9, the container runtime, dmesg"),
        },
        Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT => Diagnosis::new(
            Class::Terminated,
            by(&format!("{known} from outside: not sent by this launcher")),
        )
        .with_advice("look for who sent it: a scheduler's time limit, kill, a watchdog; did the worker hang before?"),
        Signal::SIGABRT | Signal::SIGTRAP => diagnose_abort(log, &by("aborted itself (SIGABRT)")),
        Signal::SIGSEGV => {
            let said = log.abort_message.as_deref().filter(|words| !words.contains("Segmentation fault"));
            Diagnosis::new(Class::Segfault, by(&with_line("access to invalid memory (SIGSEGV)", said)))
                .with_advice("native code is at fault; PYTHONFAULTHANDLER=1 shows where Python was, a core file where the program was")
        }
        Signal::SIGBUS => Diagnosis::new(Class::BusError, by("access to mapped memory without storage behind it (SIGBUS)"))
            .with_advice("most often /dev/shm, or a mapped file's disk, is full: df -h /dev/shm; containers: --shm-size or --ipc=host"),
        Signal::SIGILL => Diagnosis::new(Class::IllegalInstruction, by("an instruction that this CPU does not have (SIGILL)"))
            .with_advice("the program or a library was built for another CPU: compare its target with lscpu"),
        Signal::SIGFPE => Diagnosis::new(Class::ArithmeticError, by("an arithmetic error, most often an integer divided by zero (SIGFPE)")),
        Signal::SIGXCPU => Diagnosis::new(Class::CpuLimit, by("its CPU time limit is used up (SIGXCPU)"))
            .with_advice("ulimit -t shows the limit"),
        Signal::SIGXFSZ => Diagnosis::new(Class::FileSizeLimit, by("a file became larger than allowed (SIGXFSZ)"))
            .with_advice("ulimit -f shows the limit"),
        Signal::SIGPIPE => Diagnosis::new(Class::Signal, by("it wrote to a pipe or socket that its reader has closed (SIGPIPE)"))
            .with_advice("if that was stdout: look at what the output of convoke is piped into, such as `head`"),
        _ => Diagnosis::new(Class::Signal, by(&format!("ended by {known}"))),
    }
}

fn diagnose_oom(oom: &OomKills) -> Diagnosis {
    let place =
        oom.cgroup.as_ref().map_or("on this machine".to_owned(), |cgroup| format!("in cgroup {cgroup}"));
    let mut text = format!(
        "out of memory, likely: SIGKILL that was not sent by this launcher, while the kernel's OOM killer ended {} process(es) \
         {place}",
        oom.count
    );
    let numbers = [("limit", oom.limit_bytes), ("peak", oom.peak_bytes)];
    let numbers = numbers.iter().filter_map(|(what, bytes)| Some(format!("{what} {} MiB", (*bytes)? >> 20)));
    let numbers: Vec<String> = numbers.collect();
    if !numbers.is_empty() {
        text.push_str(&format!(" ({})", numbers.join(", ")));
    }
    Diagnosis::new(Class::OutOfMemory, text)
        .with_advice("raise the memory limit, or lower batch size, loader workers or workers per node; dmesg names the process")
}

/// Message of the C++ runtime if a thread object is destroyed while its thread runs. Threads of gloo may
/// still run while Python exits.
const THREAD_AT_EXIT: &str = "terminate called without an active exception";

fn diagnose_abort(log: &LogEvidence, otherwise: &str) -> Diagnosis {
    if let Some((line, rank)) = &log.timeout {
        return timeout(line, *rank);
    }
    if let Some((line, rank)) = &log.peer_lost {
        return peer_lost(line, *rank);
    }
    if let Some(panic) = &log.panic {
        return Diagnosis::new(Class::Panic, panic.clone());
    }
    let words = log.abort_message.as_deref();
    let diagnosis = Diagnosis::new(Class::Abort, with_line(otherwise, words.or(log.exception.as_deref())));
    if words.is_some_and(|words| words.contains(THREAD_AT_EXIT)) {
        return diagnosis.with_advice(
            "a thread of a library still ran while the program ended; with gloo and DDP: `del model; gc.collect(); \
             dist.destroy_process_group()` at the end, or run it with --as-gloo",
        );
    }
    diagnosis
}

fn diagnose_exit_code(facts: &Facts<'_>, code: i32) -> Diagnosis {
    let log = facts.log;
    if let Some(exception) = &log.exception {
        return diagnose_exception(facts, exception);
    }
    if let Some(panic) = &log.panic {
        return diagnose_consequence(log).unwrap_or_else(|| Diagnosis::new(Class::Panic, panic.clone()));
    }
    if let Some(line) = &log.library {
        return missing_library(line);
    }
    if let Some(diagnosis) = diagnose_arguments(log, code) {
        return diagnosis;
    }
    if code == 126 {
        let what = "exit code 126: a program was found but cannot be executed";
        return Diagnosis::new(Class::NotExecutable, with_line(what, log.not_permitted.as_deref()))
            .with_advice("chmod +x, the #! line, or a file system mounted noexec");
    }
    if code == 127 {
        let text = with_line("exit code 127: a program was not found", log.not_found.as_deref());
        return Diagnosis::new(Class::MissingProgram, text)
            .with_advice("is it installed on this node, and in PATH?");
    }
    if let Some(line) = log.not_found.as_deref().filter(|line| line.contains("can't open file")) {
        return Diagnosis::new(Class::MissingProgram, line).with_advice(if facts.assumed_python {
            "no such file here and no program of that name in PATH, so it was given to Python; is it built, and on this node? relative paths start in the current directory"
        } else {
            "does the script exist on this node, under this path? relative paths start in the current directory"
        });
    }
    if let Some(line) = log.not_found.as_deref().filter(|line| line.contains(NO_MAIN)) {
        return Diagnosis::new(Class::MissingProgram, line)
            .with_advice("a folder or zip is run by its __main__.py, which stands at its top: put one there, or name a script");
    }
    if let Some(line) = log.not_found.as_deref().filter(|line| line.contains("No module named")) {
        return import_error(line);
    }
    if let Some(diagnosis) = diagnose_consequence(log).or_else(|| diagnose_resource(log)) {
        return diagnosis;
    }
    if let Some(signal) = code.checked_sub(128).filter(|signal| (1..=64).contains(signal)) {
        return diagnose_signal(facts, signal, Some(code));
    }
    Diagnosis::new(Class::Exit, format!("exited with code {code}{}", exit_code_meaning(code)))
}

/// Returns the conventional meaning of an exit code.
fn exit_code_meaning(code: i32) -> &'static str {
    match code {
        2 => ", by convention a usage error",
        101 => ", as Rust programs do after a panic",
        255 => ", as ssh and exit(-1) do",
        _ => "",
    }
}

fn diagnose_exception(facts: &Facts<'_>, exception: &str) -> Diagnosis {
    let log = facts.log;
    let has = |text: &str| exception.contains(text);
    if has("ModuleNotFoundError") || has("ImportError") {
        return match &log.library {
            Some(line) if has("cannot open shared object file") => missing_library(line),
            Some(_) | None => import_error(exception),
        };
    }
    if exception.starts_with("MemoryError") || has("std::bad_alloc") || has("Cannot allocate memory") {
        return Diagnosis::new(Class::OutOfMemory, format!("host memory: {exception}"))
            .with_advice("lower batch size, loader workers or workers per node; ulimit -v and the memory cgroup may set limits");
    }
    let killed_child = log.killed_child.is_some() && (has("DataLoader") || has("BrokenProcessPool"));
    if let Some(oom) = facts.evidence.oom.as_ref().filter(|_| killed_child) {
        let diagnosis = diagnose_oom(oom);
        return Diagnosis { explanation: format!("{exception}; {}", diagnosis.explanation), ..diagnosis };
    }
    let by_text = |line: &Option<String>| {
        line.as_deref().is_some_and(|line| line.contains(exception) || exception.contains(line))
    };
    if by_text(&log.device_memory) || has("OutOfMemoryError") || has("out of memory") {
        return device_memory(exception);
    }
    if has("No space left on device") || has("Disk quota exceeded") {
        return disk_full(exception);
    }
    if has("Address already in use") || has("EADDRINUSE") {
        return address_in_use(exception);
    }
    if exception.starts_with("KeyboardInterrupt") {
        return Diagnosis::new(
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
        || log.peer_lost.as_ref().is_some_and(|(line, _)| line.contains(exception))
        || log.timeout.is_some()
    {
        return diagnose_consequence(log).unwrap_or_else(|| peer_lost(exception, None));
    }
    Diagnosis::new(Class::Exception, exception)
}

/// Returns the diagnosis for a program that rejected its arguments.
fn diagnose_arguments(log: &LogEvidence, code: i32) -> Option<Diagnosis> {
    let usage = (log.usage && code == 2).then_some("exit code 2 after its usage text");
    let line = log.argument.as_deref().or(usage)?;
    let advice = if line.contains("--local-rank") {
        "the script does not know --local-rank: give convoke --pass-local-rank=underscore if it knows --local_rank, or leave --pass-local-rank out (--use-env) if it reads LOCAL_RANK"
    } else if line.contains("--local_rank") {
        "the script does not know --local_rank: give convoke --pass-local-rank=dash if it knows --local-rank, or leave --pass-local-rank out (--use-env) if it reads LOCAL_RANK"
    } else {
        "flags of convoke stand before SCRIPT, those of the script after it"
    };
    Some(Diagnosis::new(Class::UsageError, line).with_advice(advice))
}

/// Returns the diagnosis for a process to which the kernel or a device refused a resource.
fn diagnose_resource(log: &LogEvidence) -> Option<Diagnosis> {
    let device = log.device_memory.as_deref().map(device_memory);
    let disk = || log.no_space.as_deref().map(disk_full);
    device.or_else(disk).or_else(|| log.address_in_use.as_deref().map(address_in_use))
}

fn diagnose_consequence(log: &LogEvidence) -> Option<Diagnosis> {
    match (&log.timeout, &log.peer_lost) {
        (_, Some((line, rank))) => Some(peer_lost(line, *rank)),
        (Some((line, rank)), None) => Some(timeout(line, *rank)),
        (None, None) => None,
    }
}

fn peer_lost(line: &str, rank: Option<usize>) -> Diagnosis {
    let advice = match rank {
        Some(rank) => format!("look at rank {rank} first"),
        None if line.contains("Broken pipe") => "look first at the worker that ended before this one, on whatever node; or, if this was about stdout, at what the output of convoke is piped into".to_owned(),
        None => "look first at the worker that ended before this one, on whatever node".to_owned(),
    };
    let text = format!("a consequence of another worker's end: {line}");
    Diagnosis { suspect_rank: rank, ..Diagnosis::new(Class::PeerLost, text).with_advice(advice) }
}

fn timeout(line: &str, rank: Option<usize>) -> Diagnosis {
    let advice = match rank {
        Some(rank) => format!("look at what rank {rank} does: it is slow, hangs, or makes other calls"),
        None => "one rank did not reach the same call: it is slow, hangs, or makes other calls".to_owned(),
    };
    Diagnosis { suspect_rank: rank, ..Diagnosis::new(Class::Timeout, line).with_advice(advice) }
}

fn device_memory(line: &str) -> Diagnosis {
    Diagnosis::new(Class::DeviceOutOfMemory, format!("the device's memory is used up: {line}"))
        .with_advice("lower the batch size, and look whether other processes use the device (nvidia-smi)")
}

fn disk_full(line: &str) -> Diagnosis {
    Diagnosis::new(Class::DiskFull, format!("a file system is full, or a quota: {line}"))
        .with_advice("df -h and df -i, also of /tmp and /dev/shm")
}

fn address_in_use(line: &str) -> Diagnosis {
    Diagnosis::new(Class::AddressInUse, format!("another process has the port: {line}"))
        .with_advice("ss -ltnp shows who; --standalone needs no port, else choose another --master-port")
}

fn import_error(line: &str) -> Diagnosis {
    Diagnosis::new(Class::ImportError, line)
        .with_advice("is it installed on this node, in this Python? compare `which python` and PYTHONPATH with the other nodes")
}

fn missing_library(line: &str) -> Diagnosis {
    Diagnosis::new(Class::MissingLibrary, line)
        .with_advice("ldd shows what is missing on this node; LD_LIBRARY_PATH or the package that has it")
}

fn with_line(text: &str, line: Option<&str>) -> String {
    line.map_or_else(|| text.to_owned(), |line| format!("{text}: {line}"))
}
