//! The watchdog thread of a group's device side: it reaps finished operations, enforces timeouts, and checks
//! the group.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::driver::bind;
use super::side::Core;
use super::watch::LOOK;

/// The interval of checks while nothing is under way. A rank whose group has ended must abort NCCL, since the
/// other ranks of its host wait for that.
const IDLE: Duration = Duration::from_secs(1);
/// The time for operations with a rank that has left: its own part was done when it left.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl Core {
    /// The loop of the watchdog until the side is closed.
    pub(super) fn watch_over(self: &Arc<Self>) {
        // If it fails, queries of events fail too and report the error.
        let _ = bind(&self.context);
        let (mut looked, mut absent) = (Instant::now(), BTreeMap::new());
        loop {
            let closing = self.wait_for_something();
            // First the checks without the driver, whose calls may block.
            if looked.elapsed() >= LOOK && !closing {
                self.look_around();
                looked = Instant::now();
                for rank in self.group.absent() {
                    let since = *absent.entry(rank).or_insert(looked);
                    if looked - since >= LAST_WORDS && self.watched().any(|begun| begun.needs(rank)) {
                        self.left(rank);
                    }
                }
            }
            if !self.has_failed() {
                self.reap();
                self.end_overdue();
            }
            if self.has_failed() {
                self.end_everything();
            }
            // Callbacks, wakers and memory that nobody waits for are the program's code. If it panics, the
            // group ends.
            if !self.chores.run() {
                self.group.abort("a callback panicked");
            }
            if closing {
                return;
            }
        }
    }

    /// Sleeps until there is something to check. Returns whether the side is being closed.
    fn wait_for_something(&self) -> bool {
        let watch = self.watched();
        let closing = || self.closing.load(Ordering::SeqCst);
        let let_go = self.let_go.load(Ordering::SeqCst);
        if closing() || self.chores.any() || (self.has_failed() && !let_go) {
            return closing();
        }
        let time = watch.look_in(Instant::now()).or_else(|| (!let_go).then_some(IDLE));
        match time {
            Some(time) => drop(self.bell.wait_timeout(watch, time).unwrap_or_else(PoisonError::into_inner)),
            // The side has ended and all operations are completed: wait for the close.
            None => drop(self.bell.wait(watch).unwrap_or_else(PoisonError::into_inner)),
        }
        closing()
    }
}
