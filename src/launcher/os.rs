//! The fence: every system call of the launcher that Rust cannot prove safe.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
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

/// Forks the guard. To be called while this process has one thread only.
///
/// # Errors
/// More than one thread runs, or the system refuses a socket or a process.
pub(crate) fn fork_guard() -> io::Result<Forked> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads != 1 {
        return Err(io::Error::other(format!("cannot fork: {threads} threads run")));
    }
    let (launcher, guard) = UnixStream::pair()?;
    // SAFETY: one thread runs (checked above), so the child is a whole copy of this process: no lock is
    // held by a thread that does not exist there, and the child may allocate and do anything else.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Forked::Launcher { guard: child, socket: launcher }),
        ForkResult::Child => Ok(Forked::Guard { socket: guard }),
    }
}

/// Starts `command` as a worker: own session, killed when the calling thread's process dies, `channel`
/// inherited under its own number.
///
/// # Errors
/// The program cannot be executed, or the system refuses a process.
pub(crate) fn spawn_worker(command: &mut Command, channel: &OwnedFd) -> io::Result<Child> {
    let parent = Pid::this();
    let channel = channel.as_raw_fd();
    let prepare = move || {
        // The guard blocks nearly all signals, and a mask survives exec.
        SigSet::empty().thread_set_mask()?;
        nix::unistd::setsid()?;
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        if Pid::parent() != parent {
            // The guard died before the line above could see it.
            return Err(nix::errno::Errno::ESRCH.into());
        }
        // SAFETY: `channel` is open: the caller's borrow of it lasts until the child has executed.
        let channel = unsafe { std::os::fd::BorrowedFd::borrow_raw(channel) };
        fcntl(channel, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(())
    };
    // SAFETY: `prepare` only makes system calls that are async-signal-safe (sigprocmask, setsid,
    // prctl, getppid, fcntl) and converts an errno into an `io::Error`, which does not allocate.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
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
