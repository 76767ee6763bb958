//! Ends all descendants of this process.
//!
//! This works in a subreaper: a process whose parent dies becomes our child. The sweep kills and reaps
//! children until there are none. So no process is left, however often processes forked or called setsid.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use convoke_env::ExitCause;
use convoke_env::host::kernel_file::process_name;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::process::WaitOptions;

use super::procfs;
use super::protocol::{FromGuard, Orphan};

/// Longest time that SIGKILL may take before a process counts as stuck in the kernel.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of the search for children that were forked while their parent was being killed.
const RESCAN: Duration = Duration::from_millis(5);

/// A sweep in progress: it signals all descendants of this process until none is left. Its owner reaps
/// children and calls [`Sweep::step`] after every change.
#[derive(Debug)]
pub(crate) struct Sweep {
    term_at: Instant,
    kill_at: Instant,
    /// All processes that were found, by pid, and whether SIGKILL was already sent to them.
    found: BTreeMap<i32, (Orphan, bool)>,
}

impl Sweep {
    /// Starts a sweep. It sends SIGTERM to processes that still exist after `delay`, and SIGKILL after
    /// another `grace` (zero: at once).
    pub(crate) fn new(now: Instant, delay: Duration, grace: Duration) -> Self {
        let term_at = now + delay;
        Self { term_at, kill_at: term_at + grace, found: BTreeMap::new() }
    }

    /// Sends the signals that are due at `now`. Returns the result ([`FromGuard::Swept`]) when the sweep is
    /// over. The caller must reap children before every call.
    pub(crate) fn step(&mut self, now: Instant) -> Option<FromGuard> {
        let killing = now >= self.kill_at;
        let children = procfs::children();
        if now < self.term_at && !children.is_empty() {
            return None;
        }
        for &pid in &children {
            let known = self.found.contains_key(&pid);
            let describe = || (Orphan { pid, name: process_name(pid) }, false);
            let (_, killed) = self.found.entry(pid).or_insert_with(describe);
            let signal = match (killing, known, *killed) {
                (true, _, false) => Signal::SIGKILL,
                (false, false, _) => Signal::SIGTERM,
                (true, _, true) | (false, true, _) => continue,
            };
            *killed |= killing;
            // The kill cannot fail with ESRCH: the process is our unreaped child. If it fails with EPERM (the
            // process changed its user), the process is reported as stuck.
            let _ = kill(Pid::from_raw(pid), signal);
            if !killing {
                // A stopped process could not handle SIGTERM in its grace period.
                let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
            }
        }
        let over = children.is_empty() || now >= self.kill_at + KILL_TIMEOUT;
        over.then(|| {
            let found = std::mem::take(&mut self.found).into_values().map(|(process, _)| process);
            let (stuck, stopped) = found.partition(|process| children.contains(&process.pid));
            FromGuard::Swept { stopped, stuck }
        })
    }

    /// Returns the time at which to call [`Sweep::step`] next if no child ends before.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        [self.term_at, self.kill_at].into_iter().find(|&at| now < at).unwrap_or(now + RESCAN)
    }
}

/// Reaps every child that has ended. `on_exit` gets each pid, how the process ended, and whether the kernel
/// wrote a core file. Returns true if no child is left.
pub(crate) fn reap(mut on_exit: impl FnMut(i32, ExitCause, bool)) -> bool {
    /// Flag of wait(2)'s status: the kernel wrote a core file.
    const CORE_DUMPED: i32 = 0x80;
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => {
                let pid = pid.as_raw_nonzero().get();
                if let Some(code) = status.exit_status() {
                    on_exit(pid, ExitCause::Code(code), false);
                } else if let Some(signal) = status.terminating_signal() {
                    on_exit(pid, ExitCause::Signal(signal), status.as_raw() & CORE_DUMPED != 0);
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Ok(None) => return false,
            Err(error) => return error == rustix::io::Errno::CHILD,
        }
    }
}

/// Kills and reaps all descendants, and returns the pid of each and how it ended. Blocks, so it is for a
/// process that has no other work left.
pub(crate) fn kill_all() -> Vec<(i32, ExitCause)> {
    let mut sweep = Sweep::new(Instant::now(), Duration::ZERO, Duration::ZERO);
    let mut reaped = Vec::new();
    loop {
        reap(|pid, cause, _| reaped.push((pid, cause)));
        if sweep.step(Instant::now()).is_some() {
            return reaped;
        }
        // A sleep is needed, since the end of a child does not wake this loop. No other code runs in this
        // process.
        std::thread::sleep(Duration::from_millis(1));
    }
}
