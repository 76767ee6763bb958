//! The signals that the head passes on to the launchers.

use std::sync::mpsc::Sender;

use nix::sys::signal::{SigSet, Signal};

use super::connection::Event;

/// Starts a thread that reports the signals to pass on.
pub(super) fn watch_signals(events: &Sender<Event>) -> Result<(), String> {
    use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    let set = SigSet::from_iter([SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2]);
    // Threads that start later inherit the mask.
    set.thread_block().map_err(|error| format!("cannot handle signals: {error}"))?;
    let events = events.clone();
    let watch = move || {
        while let Ok(signal) = set.wait() {
            if events.send(Event::Signal(signal as i32)).is_err() {
                return;
            }
        }
    };
    let started = std::thread::Builder::new().name("convoke-signals".into()).spawn(watch);
    started.map(drop).map_err(|error| format!("cannot start a thread: {error}"))
}
