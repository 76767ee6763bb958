//! Ends everything that descends from this process.
//!
//! Works in a subreaper: whoever's parent dies becomes our child, so killing children and reaping until
//! there are none leaves nothing behind, however often the processes forked or called setsid.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use convoke_env::ExitCause;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::process::WaitOptions;

use super::procfs;
use super::protocol::Leftover;

/// How long SIGKILL may take before a process counts as stuck in the kernel.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often to look for children that were forked while their parent was being killed.
const RESCAN: Duration = Duration::from_millis(5);

/// A sweep in progress; its owner reaps and calls [`Sweep::step`] after every change.
#[derive(Debug)]
pub(crate) struct Sweep {
    term_at: Instant,
    kill_at: Instant,
    /// Everyone who was found, and whether SIGKILL was already sent.
    found: BTreeMap<i32, (Leftover, bool)>,
}

/// The end of a sweep.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Swept {
    /// Processes that had to be stopped.
    pub(crate) stopped: Vec<Leftover>,
    /// Processes that are still there.
    pub(crate) stuck: Vec<Leftover>,
}

impl Sweep {
    /// SIGTERM for who is still there after `patience`, SIGKILL after another `grace` (zero: at once).
    pub(crate) fn new(now: Instant, patience: Duration, grace: Duration) -> Self {
        let term_at = now + patience;
        Self { term_at, kill_at: term_at + grace, found: BTreeMap::new() }
    }

    /// Signals who must be signalled now; `Some` when it is over. Reap before every call.
    pub(crate) fn step(&mut self, now: Instant) -> Option<Swept> {
        let killing = now >= self.kill_at;
        let children = procfs::children();
        if now < self.term_at && !children.is_empty() {
            return None;
        }
        for &pid in &children {
            let known = self.found.contains_key(&pid);
            let (_, killed) = self.found.entry(pid).or_insert_with(|| (procfs::describe(pid), false));
            let signal = match (killing, known, *killed) {
                (true, _, false) => Signal::SIGKILL,
                (false, false, _) => Signal::SIGTERM,
                (true, _, true) | (false, true, _) => continue,
            };
            *killed |= killing;
            // ESRCH cannot be: it is our child and not yet reaped. EPERM (it changed its user) shows as stuck.
            let _ = kill(Pid::from_raw(pid), signal);
            if !killing {
                // A stopped process would sleep through its grace period.
                let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
            }
        }
        let over = children.is_empty() || now >= self.kill_at + KILL_TIMEOUT;
        over.then(|| {
            let found = std::mem::take(&mut self.found);
            let (stuck, stopped) = found
                .into_values()
                .map(|(process, _)| process)
                .partition(|process| children.contains(&process.pid));
            Swept { stopped, stuck }
        })
    }

    /// When to call [`Sweep::step`] again if nothing happens before.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        [self.term_at, self.kill_at].into_iter().find(|&at| now < at).unwrap_or(now + RESCAN)
    }
}

/// Reaps every child that has ended; `on_exit` gets each pid with how it ended.
pub(crate) fn reap(mut on_exit: impl FnMut(i32, ExitCause)) {
    let _ = reap_with_core(|pid, cause, _| on_exit(pid, cause));
}

/// The same; the last value says whether the kernel wrote a core file. Whether no child is left.
pub(super) fn reap_with_core(mut on_exit: impl FnMut(i32, ExitCause, bool)) -> bool {
    /// Of the status that wait(2) gives.
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

/// Kills and reaps all descendants, for a process that has nothing else left to do.
pub(crate) fn kill_all(mut on_exit: impl FnMut(i32, ExitCause)) -> Swept {
    let mut sweep = Sweep::new(Instant::now(), Duration::ZERO, Duration::ZERO);
    loop {
        reap(&mut on_exit);
        if let Some(swept) = sweep.step(Instant::now()) {
            return swept;
        }
        // Nothing else runs in this process, and a child that dies cannot wake it otherwise.
        std::thread::sleep(Duration::from_millis(1));
    }
}
