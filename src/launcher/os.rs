//! The fence: every system call of the launcher that Rust cannot prove safe.

use std::convert::Infallible;
use std::ffi::{CString, OsString};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{SigHandler, SigSet, Signal, raise, signal};
use nix::unistd::{ForkResult, Pid};

/// Which of the two processes this is after [`fork_guard`].
#[derive(Debug)]
pub(crate) enum Forked {
    /// The launcher: pid of the guard, and the socket to it.
    Launcher { guard: Pid, socket: UnixStream },
    /// The guard, with the socket to its launcher.
    Guard { socket: UnixStream },
}

/// Becomes a subreaper, then forks the guard. To be called while this process has one thread only.
///
/// In this order, because prctl(PR_SET_CHILD_SUBREAPER) marks all descendants in the same word in which
/// they keep their own flag, without a lock: a guard that makes itself a subreaper at that moment may
/// lose it again (seen on Linux 6.18 in 118 of 60,000 tries that met), and with it all its daemons.
///
/// # Errors
/// More than one thread runs, or the system refuses a socket, a process or the rank of a subreaper.
pub(crate) fn fork_guard() -> io::Result<Forked> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads != 1 {
        return Err(io::Error::other(format!("cannot fork: {threads} threads run")));
    }
    nix::sys::prctl::set_child_subreaper(true)?;
    let (launcher, guard) = UnixStream::pair()?;
    // SAFETY: one thread runs (checked above), so the child is a whole copy of this process: no lock is
    // held by a thread that does not exist there, and the child may allocate and do anything else.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Forked::Launcher { guard: child, socket: launcher }),
        ForkResult::Child => Ok(Forked::Guard { socket: guard }),
    }
}

/// A program with everything that its start needs, made ready before the fork.
#[derive(Debug)]
pub(crate) struct Prepared {
    argv: Vec<CString>,
    environment: Vec<CString>,
    cpus: Option<CpuSet>,
    own_session: bool,
}

/// A process that has been forked and is on its way to its program.
#[derive(Debug)]
pub(crate) struct Starting {
    pub(crate) pid: i32,
    /// Closes when the program runs; before that it carries a [`StartError`] if it does not come to that.
    pub(crate) status: OwnedFd,
}

/// Why a process that was forked did not come to its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StartError {
    /// At its CPUs, not at the program.
    binding: bool,
    errno: Errno,
}

impl StartError {
    pub(crate) const BYTES: usize = 5;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = (self.errno as i32).to_le_bytes();
        [u8::from(self.binding), a, b, c, d]
    }

    pub(crate) fn from_bytes([binding, errno @ ..]: [u8; Self::BYTES]) -> Self {
        Self { binding: binding != 0, errno: Errno::from_raw(i32::from_le_bytes(errno)) }
    }
}

impl From<Errno> for StartError {
    fn from(errno: Errno) -> Self {
        Self { binding: false, errno }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = io::Error::from(self.errno);
        if self.binding { write!(f, "{NOT_BOUND}: {why}; may this job still use them?") } else { why.fmt(f) }
    }
}

/// How the message of a worker begins whose CPUs were refused.
pub(crate) const NOT_BOUND: &str = "cannot be bound to its CPUs";

impl Prepared {
    /// With no `cpus` it keeps those of this process. It leads a session, or else only a process group of this
    /// process's session.
    ///
    /// # Errors
    /// A word or variable with a NUL in it, no program, or a CPU above those that the system call can name.
    pub(crate) fn new(
        argv: Vec<OsString>,
        environment: Vec<(OsString, OsString)>,
        cpus: &[usize],
        own_session: bool,
    ) -> io::Result<Self> {
        if argv.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no program"));
        }
        let c = |text: OsString| CString::new(text.into_vec()).map_err(io::Error::from);
        let pair = |(mut name, value): (OsString, OsString)| {
            name.push("=");
            name.push(value);
            c(name)
        };
        let mut set = CpuSet::new();
        for &cpu in cpus {
            set.set(cpu)
                .map_err(|errno| io::Error::other(StartError { binding: true, errno }.to_string()))?;
        }
        Ok(Self {
            cpus: (!cpus.is_empty()).then_some(set),
            own_session,
            argv: argv.into_iter().map(c).collect::<io::Result<_>>()?,
            environment: environment.into_iter().map(pair).collect::<io::Result<_>>()?,
        })
    }
}

/// Forks a worker: own session or process group, own CPUs, killed when this process dies, `channel` inherited under its
/// own number. Does not wait for it to come to its program, so that several start side by side.
///
/// To be called by the only thread of the guard.
///
/// # Errors
/// The system refuses a pipe or a process.
pub(crate) fn start_worker(
    program: &Prepared,
    channel: &OwnedFd,
    stdout: Option<&OwnedFd>,
    stderr: Option<&OwnedFd>,
) -> io::Result<Starting> {
    let guard = Pid::this();
    let (status, report) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: the guard has one thread, so the child is a whole copy of it and may do anything. (A test
    // that makes the guard die later adds a thread that only sleeps and holds no lock.)
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Starting { pid: child.as_raw(), status }),
        ForkResult::Child => {
            let error = become_worker(program, guard, channel, stdout, stderr);
            let _ = nix::unistd::write(&report, &error.to_bytes());
            // SAFETY: always sound; `exit` would run what the guard has registered for its own end.
            unsafe { nix::libc::_exit(127) }
        }
    }
}

/// The child's way to its program; returns only if it cannot get there.
fn become_worker(
    program: &Prepared,
    guard: Pid,
    channel: &OwnedFd,
    stdout: Option<&OwnedFd>,
    stderr: Option<&OwnedFd>,
) -> StartError {
    let result: Result<Infallible, StartError> = (|| {
        // The guard blocks nearly all signals and Rust ignores SIGPIPE; both survive exec. A shell without job control
        // ignores SIGINT and SIGQUIT in what it starts in the background, to keep a Ctrl-C from it that was meant for
        // others. Workers get none but from the launcher, if the user has told it to handle them all the same.
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
            // It died before the line above could see it.
            return Err(Errno::ESRCH.into());
        }
        if let Some(cpus) = &program.cpus {
            sched_setaffinity(Pid::from_raw(0), cpus).map_err(|errno| StartError { binding: true, errno })?;
        }
        stdout.map(nix::unistd::dup2_stdout).transpose()?;
        stderr.map(nix::unistd::dup2_stderr).transpose()?;
        fcntl(channel, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(nix::unistd::execvpe(&program.argv[0], &program.argv, &program.environment)?)
    })();
    match result {
        Err(error) => error,
        Ok(never) => match never {},
    }
}

/// Ends this process by `signal`, as if it had never been caught.
///
/// PID 1 of a container cannot die so: it ends with the code by which shells tell of such a death.
pub(crate) fn die_by(number: i32) -> ! {
    // Those without a name, as real-time signals, become an exit code at once.
    if let Ok(named) = Signal::try_from(number) {
        // SAFETY: SIG_DFL runs no code of ours.
        let _ = unsafe { signal(named, SigHandler::SigDfl) };
        let _ = SigSet::from(named).thread_unblock();
        let _ = raise(named);
    }
    // SAFETY: always sound; nothing is registered for the end of the launcher.
    unsafe { nix::libc::_exit(128 + number) }
}

/// Stops this process until it is continued (SIGCONT).
pub(crate) fn stop_this_process() {
    // It cannot fail: nobody can catch or ignore it.
    let _ = raise(Signal::SIGSTOP);
}

/// Takes ownership of a descriptor that just arrived by SCM_RIGHTS.
pub(crate) fn own_received(fd: std::os::fd::RawFd) -> OwnedFd {
    // SAFETY: the kernel made `fd` for this process with the message that carried it, and nothing else
    // knows the number.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use nix::sched::sched_getaffinity;
    use nix::sys::wait::{WaitStatus, waitpid};

    use super::*;

    /// Starts a program on these CPUs: its exit code, or why it does not come to run. (The child of a test with
    /// several threads needs no more than system calls and malloc, which glibc's fork leaves in order.)
    fn start(argv: &[&str], cpus: &[usize]) -> Result<i32, String> {
        let argv = argv.iter().map(OsString::from).collect();
        let prepared = Prepared::new(argv, Vec::new(), cpus, true).map_err(|error| error.to_string())?;
        let (channel, _other) = UnixStream::pair().expect("a channel");
        let started = start_worker(&prepared, &channel.into(), None, None).expect("a process");
        let mut error = [0; StartError::BYTES];
        let count = nix::unistd::read(&started.status, &mut error).expect("its status");
        match waitpid(Pid::from_raw(started.pid), None).expect("its end") {
            WaitStatus::Exited(_, code) if count == 0 => Ok(code),
            _ => Err(StartError::from_bytes(error).to_string()),
        }
    }

    #[test]
    fn a_worker_runs_on_its_cpus_only() {
        let own = sched_getaffinity(Pid::from_raw(0)).expect("CPUs");
        for cpu in (0..CpuSet::count()).filter(|cpu| own.is_set(*cpu).unwrap_or(false)).take(4) {
            let wanted = format!("^Cpus_allowed_list:.{cpu}$");
            assert_eq!(start(&["grep", "-q", &wanted, "/proc/self/status"], &[cpu]), Ok(0), "CPU {cpu}");
        }
        assert_eq!(start(&["true"], &[]), Ok(0));
    }

    #[test]
    fn refused_cpus_and_a_missing_program_are_told_apart() {
        let refused =
            "cannot be bound to its CPUs: Invalid argument (os error 22); may this job still use them?";
        if let Some(absent) = (0..CpuSet::count()).rev().find(|cpu| !exists(*cpu)) {
            assert_eq!(start(&["true"], &[absent]), Err(refused.to_owned()));
        }
        assert_eq!(start(&["true"], &[CpuSet::count()]), Err(refused.to_owned()), "no such bit");
        assert_eq!(start(&["/no/such"], &[]), Err("No such file or directory (os error 2)".to_owned()));
    }

    fn exists(cpu: usize) -> bool {
        std::path::Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists()
    }
}
