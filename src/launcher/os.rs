//! System calls of the launcher that need `unsafe`; `child` has one more fork.

use std::convert::Infallible;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{SigHandler, SigSet, Signal, raise, signal};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{ForkResult, Pid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::cause::{StartFailure, StartStep};
use crate::child::check_single_thread;
use crate::limits::Limits;

/// Tells each of the two processes after [`fork_guard`] which one it is.
#[derive(Debug)]
pub(crate) enum Forked {
    /// This process is the launcher: `guard` is the guard's pid, `socket` the connection to it.
    Launcher { guard: Pid, socket: UnixStream },
    /// This process is the guard: `socket` is the connection to the launcher.
    Guard { socket: UnixStream },
}

/// Makes this process a subreaper, then forks the guard. To be called while this process has only one thread.
///
/// The order matters. prctl(PR_SET_CHILD_SUBREAPER) marks all descendants, without a lock, in the word that
/// also holds each descendant's own flag. A guard that makes itself a subreaper at that moment may lose the
/// flag, and its orphaned descendants then escape it. Linux 6.18 lost the flag in 118 of 60,000 concurrent
/// tries.
///
/// # Errors
/// More than one thread runs, or the system refuses a socket, a process or the role of a subreaper.
pub(crate) fn fork_guard() -> io::Result<Forked> {
    check_single_thread()?;
    nix::sys::prctl::set_child_subreaper(true)?;
    let (launcher, guard) = UnixStream::pair()?;
    // SAFETY: one thread runs (checked above), so the child is a whole copy of this process. No other thread
    // can hold a lock at the fork, so the child may allocate and call any function.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Forked::Launcher { guard: child, socket: launcher }),
        ForkResult::Child => Ok(Forked::Guard { socket: guard }),
    }
}

/// A program and all data that its start needs, allocated before the fork.
#[derive(Debug)]
pub(crate) struct PreparedProgram {
    /// Paths at which the program may be, in the order in which exec tries them.
    paths: Vec<CString>,
    argv: Vec<CString>,
    environment: Vec<CString>,
    cpus: Option<CpuSet>,
    own_session: bool,
}

/// Waits until a forked process has executed its program, whose `status` is that of [`start_worker`]. Returns
/// the failure if it cannot.
pub(crate) fn read_start_failure(status: &OwnedFd) -> Option<StartFailure> {
    let mut failure = [0; 256];
    let count = nix::unistd::read(status, &mut failure).ok()?;
    serde_json::from_slice(&failure[..count]).ok()
}

fn start_failure(step: StartStep, errno: Errno) -> StartFailure {
    StartFailure { step, errno: errno as i32 }
}

impl PreparedProgram {
    /// Prepares a program. Without `cpus` it keeps the CPUs of this process. With `own_session` it leads a
    /// session, otherwise only a process group in this process's session. The program is searched in this
    /// process's PATH.
    ///
    /// # Errors
    /// A word or variable contains a NUL, there is no program, or a CPU is above those that the system call
    /// supports.
    pub(crate) fn new(
        argv: Vec<OsString>,
        environment: Vec<(OsString, OsString)>,
        cpus: &[usize],
        own_session: bool,
    ) -> Result<Self, StartFailure> {
        let Some(program) = argv.first() else { return Err(start_failure(StartStep::Exec, Errno::ENOENT)) };
        let c = |text: OsString| {
            CString::new(text.into_vec()).map_err(|_| start_failure(StartStep::Exec, Errno::EINVAL))
        };
        let pair = |(mut name, value): (OsString, OsString)| {
            name.push("=");
            name.push(value);
            c(name)
        };
        let mut set = CpuSet::new();
        for &cpu in cpus {
            set.set(cpu).map_err(|errno| start_failure(StartStep::Bind, errno))?;
        }
        Ok(Self {
            paths: candidate_paths(program).into_iter().map(c).collect::<Result<_, _>>()?,
            cpus: (!cpus.is_empty()).then_some(set),
            own_session,
            argv: argv.into_iter().map(c).collect::<Result<_, _>>()?,
            environment: environment.into_iter().map(pair).collect::<Result<_, _>>()?,
        })
    }
}

/// Returns the paths at which a program may be, in the order in which exec tries them.
pub(crate) fn candidate_paths(program: &OsStr) -> Vec<OsString> {
    if program.is_empty() || program.as_bytes().contains(&b'/') {
        return vec![program.to_owned()];
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path).map(|folder| folder.join(program).into_os_string()).collect()
}

/// Replaces this process by the program; returns only if that fails. Like `execvpe`, it lets the shell run a
/// file of unknown format. Unlike `execvpe`, it does not do so with an ELF file, which was built for another
/// CPU.
fn execute(program: &PreparedProgram) -> Errno {
    let (argv, environment) = (&program.argv, &program.environment);
    let mut reason = Errno::ENOENT;
    for path in &program.paths {
        let Err(errno) = nix::unistd::execve(path, argv, environment);
        match errno {
            Errno::ENOEXEC if !is_elf(path) => {
                let words: Vec<&CStr> = [c"/bin/sh", path.as_c_str()]
                    .into_iter()
                    .chain(argv.iter().skip(1).map(CString::as_c_str))
                    .collect();
                let Err(errno) = nix::unistd::execve(c"/bin/sh", &words, environment);
                return errno;
            }
            // Another path may hold a program that can be executed.
            Errno::EACCES => reason = errno,
            Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE | Errno::ENODEV | Errno::ETIMEDOUT => {}
            errno => return errno,
        }
    }
    reason
}

fn is_elf(path: &CStr) -> bool {
    let mut start = [0; 4];
    let file = std::fs::File::open(OsStr::from_bytes(path.to_bytes()));
    file.and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *b"\x7fELF"
}

/// Forks a worker with its own session or process group and its own CPUs. The kernel kills the worker when
/// this process dies. The worker inherits the descriptor `channel` under the same number. The function does
/// not wait until the program executes, so that several workers start concurrently. It returns the pid, and
/// the status: a pipe that closes when the program executes. If it cannot execute, a [`StartFailure`] can be
/// read before that.
///
/// To be called by the only thread of the guard.
///
/// # Errors
/// The system refuses a pipe or a process.
pub(crate) fn start_worker(
    program: &PreparedProgram,
    limits: &Limits,
    channel: &OwnedFd,
    stdout: Option<&OwnedFd>,
    stderr: Option<&OwnedFd>,
) -> Result<(i32, OwnedFd), StartFailure> {
    let guard = Pid::this();
    let not_forked = |errno| start_failure(StartStep::Fork, errno);
    let (status, report) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(not_forked)?;
    // SAFETY: the guard has one thread, so the child is a whole copy of it and may call any function. (A test
    // that makes the guard die later adds a thread that only sleeps and holds no lock.)
    match unsafe { nix::unistd::fork() }.map_err(not_forked)? {
        ForkResult::Parent { child } => Ok((child.as_raw(), status)),
        ForkResult::Child => {
            let failure = become_worker(program, limits, guard, channel, stdout, stderr);
            let _ = serde_json::to_vec(&failure).map(|failure| nix::unistd::write(&report, &failure));
            // SAFETY: always sound. `exit` would also run functions that the guard has registered for its own
            // end.
            unsafe { nix::libc::_exit(127) }
        }
    }
}

/// Runs in the forked child: sets it up as a worker and executes the program. Returns only if that fails.
fn become_worker(
    program: &PreparedProgram,
    limits: &Limits,
    guard: Pid,
    channel: &OwnedFd,
    stdout: Option<&OwnedFd>,
    stderr: Option<&OwnedFd>,
) -> StartFailure {
    let mut step = StartStep::Exec;
    let result: Result<Infallible, Errno> = (|| {
        // The guard blocks nearly all signals and Rust ignores SIGPIPE; both settings survive exec. A shell
        // without job control starts background processes with SIGINT and SIGQUIT ignored, so that they
        // survive Ctrl-C. Workers get SIGINT and SIGQUIT only from the launcher, when it is configured to
        // handle them, and must then not ignore them.
        SigSet::empty().thread_set_mask()?;
        for ignored in [Signal::SIGPIPE, Signal::SIGINT, Signal::SIGQUIT] {
            // SAFETY: SIG_DFL runs no code of ours.
            unsafe { signal(ignored, SigHandler::SigDfl) }?;
        }
        if program.own_session {
            nix::unistd::setsid()?;
        } else {
            nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
        }
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        if Pid::parent() != guard {
            // The guard died before prctl could register the signal for its death.
            return Err(Errno::ESRCH);
        }
        if let Some(cpus) = &program.cpus {
            step = StartStep::Bind;
            sched_setaffinity(Pid::from_raw(0), cpus)?;
            step = StartStep::Exec;
        }
        stdout.map(nix::unistd::dup2_stdout).transpose()?;
        stderr.map(nix::unistd::dup2_stderr).transpose()?;
        fcntl(channel, FcntlArg::F_SETFD(FdFlag::empty()))?;
        limits.restore();
        Err(execute(program))
    })();
    let Err(errno) = result;
    start_failure(step, errno)
}

/// Ends this process by `signal`, as if the launcher had never handled the signal.
///
/// The kernel ignores the signal in PID 1 of a container. The process then exits with 128 plus the signal's
/// number, as shells report such a death.
pub(crate) fn exit_by_signal(number: i32) -> ! {
    // The library has no name for real-time signals. For these the process exits with a code at once.
    if let Ok(named) = Signal::try_from(number) {
        // SAFETY: SIG_DFL runs no code of ours.
        let _ = unsafe { signal(named, SigHandler::SigDfl) };
        let _ = SigSet::from(named).thread_unblock();
        let _ = raise(named);
    }
    // SAFETY: always sound; the launcher has registered no functions for its end.
    unsafe { nix::libc::_exit(128 + number) }
}

/// Stops this process until it is continued (SIGCONT).
pub(crate) fn stop_this_process() {
    // This cannot fail, since no process can catch or ignore SIGSTOP.
    let _ = raise(Signal::SIGSTOP);
}

/// Returns true if this process ignores the signal.
pub(crate) fn is_ignored(number: i32) -> bool {
    // SAFETY: integers and an optional function pointer make up a `sigaction`, and zero is valid for each.
    let mut current: nix::libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action the call only writes the present one to `current`, which lives longer.
    let result = unsafe { nix::libc::sigaction(number, std::ptr::null(), &raw mut current) };
    result == 0 && current.sa_sigaction == nix::libc::SIG_IGN
}

/// Registers a signalfd with the event loop, which can then wait for signals.
pub(crate) fn readable(signals: SignalFd) -> io::Result<AsyncFd<SignalFd>> {
    // SAFETY: a `SignalFd` owns its open descriptor, always returns the same one, and closes it only when
    // dropped.
    let registered = unsafe { AsyncFd::register_with_interest(signals, Interest::READABLE) };
    registered.map_err(Into::into)
}

/// Takes ownership of a file descriptor that just arrived by SCM_RIGHTS.
pub(crate) fn adopt_received_fd(fd: std::os::fd::RawFd) -> OwnedFd {
    // SAFETY: the kernel made `fd` for this process with the message that carried it. No other code knows its
    // number.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use nix::sched::sched_getaffinity;
    use nix::sys::wait::{WaitStatus, waitpid};

    use super::*;

    /// Starts a program on these CPUs. Returns its exit code, or the reason why it does not start. The child
    /// of a test with several threads needs only system calls and malloc, which works after glibc's fork.
    fn start(argv: &[&str], cpus: &[usize]) -> Result<i32, StartFailure> {
        let argv = argv.iter().map(OsString::from).collect();
        let prepared = PreparedProgram::new(argv, Vec::new(), cpus, true)?;
        let (channel, _other) = UnixStream::pair().expect("a channel");
        let limits = Limits::raise();
        let (pid, status) = start_worker(&prepared, &limits, &channel.into(), None, None).expect("a process");
        let failure = read_start_failure(&status);
        match waitpid(Pid::from_raw(pid), None).expect("its end") {
            WaitStatus::Exited(_, code) if failure.is_none() => Ok(code),
            _ => Err(failure.expect("the child did not execute the program")),
        }
    }

    #[test]
    fn worker_runs_only_on_its_cpus() {
        let own = sched_getaffinity(Pid::from_raw(0)).expect("CPUs");
        for cpu in (0..CpuSet::count()).filter(|cpu| own.is_set(*cpu).unwrap_or(false)).take(4) {
            let wanted = format!("^Cpus_allowed_list:.{cpu}$");
            assert_eq!(start(&["grep", "-q", &wanted, "/proc/self/status"], &[cpu]), Ok(0), "CPU {cpu}");
        }
        assert_eq!(start(&["true"], &[]), Ok(0));
    }

    #[test]
    fn refused_cpus_and_missing_program_are_distinguished() {
        let refused = start_failure(StartStep::Bind, Errno::EINVAL);
        if let Some(absent) = (0..CpuSet::count()).rev().find(|cpu| !exists(*cpu)) {
            assert_eq!(start(&["true"], &[absent]), Err(refused));
        }
        assert_eq!(start(&["true"], &[CpuSet::count()]), Err(refused), "no such bit");
        assert_eq!(start(&["/no/such"], &[]), Err(start_failure(StartStep::Exec, Errno::ENOENT)));
    }

    #[test]
    fn program_for_another_cpu_is_not_run_by_the_shell() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).expect("a file");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(&path, mode).expect("a mode");
            path.to_string_lossy().into_owned()
        };
        let mut header = b"\x7fELF\x02\x01\x01".to_vec();
        header.resize(64, 0);
        header[18] = 250;
        assert_eq!(
            start(&[&file("foreign", &header)], &[]),
            Err(start_failure(StartStep::Exec, Errno::ENOEXEC))
        );
        // The shell runs a file without a #! line, as with execvp.
        assert_eq!(start(&[&file("plain", b"exit $1"), "7"], &[]), Ok(7));
    }

    fn exists(cpu: usize) -> bool {
        std::path::Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists()
    }

    #[test]
    fn ignored_and_handled_signals_are_distinguished() {
        // Rust's start-up code ignores SIGPIPE. SIGKILL is queried like any other, and 32 is refused.
        assert!(is_ignored(Signal::SIGPIPE as i32));
        assert!(
            !is_ignored(Signal::SIGUSR2 as i32) && !is_ignored(Signal::SIGKILL as i32) && !is_ignored(32)
        );
    }
}
