//! The signals that the launcher receives: what it does on each, and what it knows of those that came.

use std::io;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::forwarded_signals::ForwardedSignals;
use crate::config::Config;
use crate::messages::print_message;
use crate::os::is_ignored;

/// What the launcher does when it receives a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignalAction {
    /// The workers get the signal and must end within the shutdown timeout. The job ends.
    Stop,
    /// The job is drained: the workers get time to stop at one step.
    Drain,
    /// The workers that have a handler for the signal get it. The job continues.
    Forward,
    /// The workers get SIGTERM and the shutdown timeout. The launcher then kills itself by the signal that it
    /// received.
    Die,
    /// Ctrl-Z: the workers are stopped, then the launcher, until SIGCONT continues it.
    Suspend,
    /// The size of the terminal has changed.
    Resize,
    /// A child has ended.
    Child,
}

/// User settings for signals.
#[derive(Debug, Clone, Copy)]
pub(super) struct SignalSettings<'a> {
    /// Signals of `--signals-to-handle`. `is_given` is true if the user set this flag.
    pub(super) stop: &'a [Signal],
    pub(super) is_given: bool,
    /// Signals of `--drain-signal`.
    pub(super) drain: &'a [Signal],
    /// Signals of `--forward-signals`.
    pub(super) forward: &'a [Signal],
}

/// Returns the signals to watch, each with the launcher's action. A signal that was ignored when the launcher
/// started, as under `nohup`, is left out and stays ignored. Only a user's own `--signals-to-handle` makes
/// the launcher watch such a signal.
pub(super) fn signal_actions(
    settings: SignalSettings<'_>,
    is_ignored: impl Fn(i32) -> bool,
) -> Vec<(i32, SignalAction)> {
    let is_in = |list: &[Signal], number: i32| list.iter().any(|&signal| signal as i32 == number);
    let mut all = Vec::new();
    // Real-time signals start at 34 here: the C library reserves two.
    for number in (1..32).chain(34..65) {
        let handled = is_in(settings.stop, number);
        let action = match Signal::try_from(number) {
            Ok(Signal::SIGCHLD) => SignalAction::Child,
            _ if is_ignored(number) && !(handled && settings.is_given) => continue,
            _ if is_in(settings.drain, number) => SignalAction::Drain,
            _ if handled => SignalAction::Stop,
            _ if is_in(settings.forward, number) => SignalAction::Forward,
            Ok(Signal::SIGTSTP) => SignalAction::Suspend,
            Ok(Signal::SIGWINCH) => SignalAction::Resize,
            // SIGKILL and SIGSTOP cannot be caught. The other signals indicate a fault in this program, which
            // cannot continue after them.
            Ok(
                Signal::SIGKILL
                | Signal::SIGSTOP
                | Signal::SIGSEGV
                | Signal::SIGBUS
                | Signal::SIGILL
                | Signal::SIGFPE
                | Signal::SIGTRAP
                | Signal::SIGSYS,
            ) => continue,
            // These signals do nothing (Rust ignores SIGPIPE), or stop and continue only this process.
            Ok(Signal::SIGPIPE | Signal::SIGURG | Signal::SIGCONT | Signal::SIGTTIN | Signal::SIGTTOU) => {
                continue;
            }
            Ok(_) | Err(_) => SignalAction::Die,
        };
        all.push((number, action));
    }
    all
}

/// Blocks the signals that stop a job. They stay pending until the event loop reads them. PID 1 of a
/// container would otherwise ignore them.
pub(crate) fn block_signals() {
    // Users and schedulers end a launcher by these signals. If blocking fails, they keep their default
    // actions.
    let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];
    let _ = SigSet::from_iter(signals).thread_block();
}

/// The signals of this launcher.
pub(super) struct Signals {
    actions: Vec<(i32, SignalAction)>,
    /// The source of the signals; `None` once reading it has failed.
    source: Option<AsyncFd<SignalFd>>,
    /// A signal that ends the launcher because no reaction to it is defined. The launcher first stops its
    /// workers, then kills itself by the same signal.
    pub(super) fatal: Option<i32>,
    /// Number of SIGINT received (Ctrl-C).
    pub(super) interrupts: u32,
    pub(super) forwarded: ForwardedSignals,
}

impl Signals {
    /// Blocks the signals that have an action and delivers them to the event loop. Threads that start later
    /// inherit the mask. One signalfd costs two system calls; a handler for each signal would cost two each.
    pub(super) fn watch(config: &Config) -> Result<Self, String> {
        let settings = SignalSettings {
            stop: &config.signals,
            is_given: config.signals_given,
            drain: &config.drain.signals,
            forward: &config.forward_signals,
        };
        let actions = signal_actions(settings, is_ignored);
        // The set contains every real-time signal. Those without an action are dropped when they arrive.
        let mut watched = SigSet::all();
        let has_action = |signal: &Signal| actions.iter().any(|(number, _)| *number == *signal as i32);
        Signal::iterator().filter(|signal| !has_action(signal)).for_each(|signal| watched.remove(signal));
        let source = watched
            .thread_set_mask()
            .and_then(|()| SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK));
        let source = source.map_err(io::Error::from).and_then(crate::os::readable);
        let source = Some(source.map_err(|error| format!("cannot handle signals: {error}"))?);
        Ok(Self { actions, source, fatal: None, interrupts: 0, forwarded: ForwardedSignals::default() })
    }

    /// Waits for the next signal. Returns its number and the action. Cancel safe.
    pub(super) async fn next(&mut self) -> (i32, SignalAction) {
        while let Some(source) = &self.source {
            let nothing = || io::Error::from(io::ErrorKind::WouldBlock);
            let read =
                source.async_io(Interest::READABLE, |source| source.read_signal()?.ok_or_else(nothing));
            match read.await {
                Ok(signal) => {
                    let mut actions = self.actions.iter().copied();
                    if let Some(found) = actions.find(|(number, _)| *number as u32 == signal.ssi_signo) {
                        return found;
                    }
                }
                Err(error) => {
                    print_message(&format!("warning: signals are not handled any more: {error}"));
                    self.source = None;
                }
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];
    const FORWARD: [Signal; 2] = [Signal::SIGUSR1, Signal::SIGUSR2];

    fn action(settings: SignalSettings<'_>, ignored: &[Signal], of: i32) -> Option<SignalAction> {
        let all = signal_actions(settings, |number| ignored.iter().any(|&signal| signal as i32 == number));
        all.iter().find(|(number, _)| *number == of).map(|(_, action)| *action)
    }

    #[test]
    fn every_catchable_signal_has_an_action() {
        let settings = SignalSettings { stop: &STOP, is_given: false, drain: &[], forward: &FORWARD };
        let of = |signal: Signal| action(settings, &[], signal as i32);
        assert_eq!(of(Signal::SIGTERM), Some(SignalAction::Stop));
        assert_eq!(of(Signal::SIGUSR1), Some(SignalAction::Forward));
        assert_eq!(of(Signal::SIGTSTP), Some(SignalAction::Suspend));
        for signal in [Signal::SIGALRM, Signal::SIGVTALRM, Signal::SIGPROF, Signal::SIGIO, Signal::SIGABRT] {
            assert_eq!(of(signal), Some(SignalAction::Die), "{signal}");
        }
        assert_eq!(action(settings, &[], 40), Some(SignalAction::Die), "real-time signals");
        assert_eq!(of(Signal::SIGKILL), None);
        assert_eq!(of(Signal::SIGSEGV), None);
    }

    #[test]
    fn inherited_ignored_signal_stays_ignored_unless_the_user_lists_it() {
        let ignored = [Signal::SIGHUP, Signal::SIGUSR2, Signal::SIGALRM, Signal::SIGTSTP];
        let settings = SignalSettings { stop: &STOP, is_given: false, drain: &[], forward: &FORWARD };
        for signal in ignored {
            assert_eq!(action(settings, &ignored, signal as i32), None, "{signal}");
        }
        assert_eq!(action(settings, &ignored, Signal::SIGTERM as i32), Some(SignalAction::Stop));
        let given = SignalSettings { is_given: true, ..settings };
        assert_eq!(action(given, &ignored, Signal::SIGHUP as i32), Some(SignalAction::Stop));
        assert_eq!(action(given, &ignored, Signal::SIGUSR2 as i32), None);
    }

    #[test]
    fn unhandled_signal_ends_the_launcher_in_order() {
        let settings =
            SignalSettings { stop: &[Signal::SIGUSR1], is_given: true, drain: &[], forward: &FORWARD };
        assert_eq!(action(settings, &[], Signal::SIGTERM as i32), Some(SignalAction::Die));
        assert_eq!(action(settings, &[], Signal::SIGUSR1 as i32), Some(SignalAction::Stop));
    }
}
