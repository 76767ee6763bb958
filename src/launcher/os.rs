//! The fence: every system call of the launcher that Rust cannot prove safe.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
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
}

/// A process that has been forked and is on its way to its program.
#[derive(Debug)]
pub(crate) struct Starting {
    pub(crate) pid: i32,
    /// Closes when the program runs; before that it carries the errno if it cannot be executed.
    pub(crate) status: OwnedFd,
}

impl Prepared {
    /// # Errors
    /// A word or variable with a NUL in it, or no program.
    pub(crate) fn new(argv: Vec<OsString>, environment: Vec<(OsString, OsString)>) -> io::Result<Self> {
        if argv.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no program"));
        }
        let c = |text: OsString| CString::new(text.into_vec()).map_err(io::Error::from);
        let pair = |(mut name, value): (OsString, OsString)| {
            name.push("=");
            name.push(value);
            c(name)
        };
        Ok(Self {
            argv: argv.into_iter().map(c).collect::<io::Result<_>>()?,
            environment: environment.into_iter().map(pair).collect::<io::Result<_>>()?,
        })
    }
}

/// Forks a worker: own session, killed when this process dies, `channel` inherited under its own
/// number. Does not wait for it to come to its program, so that several start side by side.
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
            let _ = nix::unistd::write(&report, &(error as i32).to_le_bytes());
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
) -> Errno {
    let result = (|| {
        // The guard blocks nearly all signals and Rust ignores SIGPIPE; both survive exec.
        SigSet::empty().thread_set_mask()?;
        // SAFETY: SIG_DFL runs no code of ours.
        unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
        nix::unistd::setsid()?;
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        if Pid::parent() != guard {
            // It died before the line above could see it.
            return Err(Errno::ESRCH);
        }
        stdout.map(nix::unistd::dup2_stdout).transpose()?;
        stderr.map(nix::unistd::dup2_stderr).transpose()?;
        fcntl(channel, FcntlArg::F_SETFD(FdFlag::empty()))?;
        nix::unistd::execvpe(&program.argv[0], &program.argv, &program.environment)
    })();
    result.err().unwrap_or(Errno::UnknownErrno)
}

/// Ends this process by `signal`, as if it had never been caught; returns only if that fails.
pub(crate) fn die_by(signal_number: Signal) {
    // SAFETY: SIG_DFL runs no code of ours.
    let _ = unsafe { signal(signal_number, SigHandler::SigDfl) };
    let _ = SigSet::from(signal_number).thread_unblock();
    let _ = raise(signal_number);
}

/// Takes ownership of a descriptor that just arrived by SCM_RIGHTS.
pub(crate) fn own_received(fd: std::os::fd::RawFd) -> OwnedFd {
    // SAFETY: the kernel made `fd` for this process with the message that carried it, and nothing else
    // knows the number.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}
