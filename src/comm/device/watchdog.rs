//! The thread that looks after a group's operations on a device: what is done, what takes too long, whether the group goes on.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::driver::bind;
use super::side::Core;
use super::watch::LOOK;

/// How often it is looked whether the group goes on while nothing is under way: a rank whose group has ended must have NCCL
/// let go, which the other ranks of its host wait for.
const IDLE: Duration = Duration::from_secs(1);
/// How long what a rank has left behind may take: its own part was done when it left.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl Core {
    /// What the watchdog does until the side is closed.
    pub(super) fn watch_over(self: &Arc<Self>) {
        // Without it events cannot be asked, and say so.
        let _ = bind(&self.context);
        let (mut looked, mut absent) = (Instant::now(), BTreeMap::new());
        loop {
            let closing = self.wait_for_something();
            // First what needs no driver, which may keep who asks it.
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
            // Callbacks, wakers, memory that nobody waits for: code that is not ours. One that panics ends the group.
            if !self.chores.run() {
                self.group.abort("a callback panicked");
            }
            if closing {
                return;
            }
        }
    }

    /// Sleeps until something is to be looked at; whether the side is being closed.
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
            // It has ended and all is answered: nothing comes any more but the end.
            None => drop(self.bell.wait(watch).unwrap_or_else(PoisonError::into_inner)),
        }
        closing()
    }
}
