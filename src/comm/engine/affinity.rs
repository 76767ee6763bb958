//! Ranks that the system has put on the wrong cores: two on one though there is another, or three on one and one on
//! another. They go elsewhere, once; what they are allowed stays as it is. (Linux 6.2 and later remember it as asked for: a
//! cpuset that grows gives such a thread no more.)
//!
//! Linux wakes who sleeps in a receive on the core of who sends, and so brings two ranks together that wait for each
//! other; where all cores share a cache it may leave them there. A message then takes 3 to 5 times as long. And it does
//! not move who has run just now, so that ranks which never run for long stay where they began.

use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use super::core::Engine;
use super::patience::Crowd;
use crate::links::conn::Conn;

/// Time between two moves: who has not been helped by one sleeps.
const BETWEEN: Duration = Duration::from_millis(1);
/// The same with more ranks than cores.
const BETWEEN_CROWDED: Duration = Duration::from_millis(10);

/// How a rank shares the cores of its host with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sharing {
    pub(crate) crowd: Crowd,
    /// Its place among ranks that share cores, of which there are fewer, evenly.
    pub(crate) place: Option<usize>,
}

impl Engine {
    /// Groups that come from this one share cores not only with their own ranks, but as this one does.
    pub(crate) fn sharing(&self) -> Sharing {
        self.settings.sharing
    }

    /// Leaves this core if a rank that is waited for was last seen sending on it; whether it did.
    pub(super) fn leave_shared_core(&mut self) -> bool {
        let core = sched_getcpu()
            .ok()
            .filter(|_| self.settings.sharing.crowd == Crowd::No && self.may_move(BETWEEN));
        let shared = core.filter(|&core| self.awaits_one_on(core));
        let left = shared.is_some_and(leave);
        if left {
            self.moved_at = Some(Instant::now());
        }
        left
    }

    /// Takes this rank's place among cores that it shares evenly with others, if it does: with more ranks than cores, which
    /// all may use.
    pub(super) fn take_place(&mut self) {
        if let Some(index) = self.settings.sharing.place.filter(|_| self.may_move(BETWEEN_CROWDED)) {
            self.moved_at = Some(Instant::now());
            place(index);
        }
    }

    fn may_move(&self, between: Duration) -> bool {
        self.moved_at.is_none_or(|at| at.elapsed() >= between)
    }

    fn awaits_one_on(&self, core: usize) -> bool {
        let collective = self.collectives.front().into_iter().flat_map(|first| first.run.blocked());
        let collective = collective.filter_map(|(peer, _)| self.peers[peer].collective.as_ref());
        let messages = self.peers.iter().filter(|peer| peer.messages.is_busy());
        let messages = messages.filter_map(|peer| peer.messages.conn.as_ref());
        collective.chain(messages).filter_map(Conn::sender_cpu).any(|sender| sender == core)
    }
}

/// Has this thread go on at another core; whether there is one.
fn leave(core: usize) -> bool {
    let Ok(allowed) = sched_getaffinity(Pid::from_raw(0)) else { return false };
    let mut others = allowed;
    others.unset(core).is_ok() && go(others, &allowed)
}

/// Has this thread go on at that one of the cores it may use which comes to `place` if they are dealt out.
fn place(place: usize) {
    let Ok(allowed) = sched_getaffinity(Pid::from_raw(0)) else { return };
    let cores = cores(&allowed);
    let Some(&home) = cores.get(place % cores.len().max(1)) else { return };
    let mut only = CpuSet::new();
    if sched_getcpu() != Ok(home) && only.set(home).is_ok() {
        go(only, &allowed);
    }
}

/// The cores that this thread may use; none if the system does not tell.
pub(crate) fn allowed_cores() -> Vec<usize> {
    sched_getaffinity(Pid::from_raw(0)).as_ref().map_or_else(|_| Vec::new(), cores)
}

fn cores(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::count()).filter(|&core| set.is_set(core) == Ok(true)).collect()
}

/// Whether there is a core to go to.
fn go(there: CpuSet, allowed: &CpuSet) -> bool {
    let this = Pid::from_raw(0);
    sched_setaffinity(this, &there).is_ok() && sched_setaffinity(this, allowed).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_goes_elsewhere_keeps_the_right_to_come_back() {
        let allowed = allowed_cores();
        assert!(!allowed.is_empty());
        let core = sched_getcpu().unwrap();
        assert_eq!(leave(core), allowed.len() > 1);
        for index in 0..3 * allowed.len() {
            place(index);
        }
        assert_eq!(allowed_cores(), allowed);
    }
}
