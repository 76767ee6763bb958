//! Runs a function in a forked child, for libraries that leave threads behind or may never return.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::WaitStatus;
use nix::unistd::ForkResult;

/// Checks that a forked child of this process would be a whole copy of it.
///
/// # Errors
/// More than one thread runs.
pub(crate) fn check_single_thread() -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads != 1 {
        return Err(io::Error::other(format!("cannot fork: {threads} threads run")));
    }
    Ok(())
}

/// Runs `function` in a forked child and returns the bytes that the function returned there. Threads, files
/// and memory of libraries that the function loads end with the child. To be called while this process has
/// only one thread.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] if the child takes longer than `timeout`. [`io::ErrorKind::Interrupted`] if
/// one of the blocked signals `interrupts` is pending before. In both cases the child is killed. Other errors
/// if more than one thread runs, the child dies, or the system refuses a pipe or a process.
pub(crate) fn run_in_child(
    timeout: Duration,
    interrupts: &SigSet,
    function: impl FnOnce() -> Vec<u8>,
) -> io::Result<Vec<u8>> {
    check_single_thread()?;
    let (result, child_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: one thread runs (checked above), so the child is a whole copy of this process and may call any
    // function.
    let child = match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            drop(result);
            let run = || -> io::Result<()> {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                File::from(child_end).write_all(&function())
            };
            // A panic must not unwind into the child's copy of the launcher.
            let is_done = catch_unwind(AssertUnwindSafe(run)).is_ok_and(|done| done.is_ok());
            // SAFETY: always sound. `exit` would also run functions that libraries have registered.
            unsafe { nix::libc::_exit(i32::from(!is_done)) }
        }
    };
    drop(child_end);
    let bytes = read_to_end(&result, Instant::now() + timeout, interrupts);
    if bytes.is_err() {
        // The child may be stuck in the driver, and SIGKILL cannot end it there. So nobody waits for it.
        let _ = nix::sys::signal::kill(child, Signal::SIGKILL);
        return bytes;
    }
    match nix::sys::wait::waitpid(child, None)? {
        WaitStatus::Exited(_, 0) => bytes,
        status => Err(io::Error::other(format!("the child ended: {status:?}"))),
    }
}

/// Signals that end a wait before the job starts. They stay pending, and then stop the launcher.
pub(crate) fn interrupts() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT].into_iter().collect()
}

/// Reads from a pipe until its other end is closed, for at most the time until `deadline`.
///
/// # Errors
/// Those of [`run_in_child`] about the wait.
pub(crate) fn read_to_end(pipe: &OwnedFd, deadline: Instant, interrupts: &SigSet) -> io::Result<Vec<u8>> {
    let signals = SignalFd::with_flags(interrupts, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut ready =
            [PollFd::new(pipe.as_fd(), PollFlags::POLLIN), PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        let time = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match nix::poll::poll(&mut ready, time) {
            Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let [has_bytes, has_signal] = ready.map(|ready| ready.any() == Some(true));
        if has_bytes {
            match nix::unistd::read(pipe, &mut part)? {
                0 => return Ok(bytes),
                count => bytes.extend_from_slice(&part[..count]),
            }
        } else if has_signal {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
}
