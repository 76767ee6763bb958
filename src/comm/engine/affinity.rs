//! Moves a thread away from a core that the system gave to too many ranks while another core has fewer, where
//! the option [`ThreadMigration`](crate::ThreadMigration) allows it. The affinity mask of the thread is
//! restored afterwards. (Linux 6.2 and later remember a mask that was set: a thread does not get the new
//! cores of a cpuset that grows.)
//!
//! Linux wakes a thread that sleeps in a receive on the core of the sender. This puts two ranks that wait for
//! each other on one core, and Linux may leave them there if all cores share a cache. A message then takes 3
//! to 5 times as long. Linux does not migrate a thread that has just run, so ranks with short run times stay
//! on the core on which they began.

use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use super::wait_policy::CoreSharing;

/// Least time between two moves of a thread to another core. If data still has not come, it sleeps instead.
const MOVE_INTERVAL: Duration = Duration::from_millis(1);
/// Least time between two moves of a thread to another core, if there are more ranks than cores.
const OVERSUBSCRIBED_MOVE_INTERVAL: Duration = Duration::from_millis(10);
/// The calling thread, as system calls name it.
const THIS_THREAD: Pid = Pid::from_raw(0);

/// The choice of the core on which the thread that drives an engine runs.
#[derive(Debug)]
pub(super) struct Affinity {
    sharing: CoreSharing,
    /// The time at which the driving thread was last moved to another core.
    moved_at: Option<Instant>,
}

impl Affinity {
    pub(super) fn new(sharing: CoreSharing) -> Self {
        Self { sharing, moved_at: None }
    }

    /// Moves this thread to another core if it awaits data that was last sent from this core, as
    /// `awaits_from` says. Returns whether the thread moved.
    pub(super) fn leave_shared_core(&mut self, awaits_from: impl FnOnce(usize) -> bool) -> bool {
        let may_leave = self.sharing.leaves_shared_core && self.may_move(MOVE_INTERVAL);
        let left = may_leave && sched_getcpu().is_ok_and(|core| awaits_from(core) && move_off(core));
        if left {
            self.moved_at = Some(Instant::now());
        }
        left
    }

    /// Moves this thread to the core of [`CoreSharing::core_index`], if this rank has one and has not moved
    /// just before.
    pub(super) fn move_to_assigned_core(&mut self) {
        if let Some(index) = self.sharing.core_index.filter(|_| self.may_move(OVERSUBSCRIBED_MOVE_INTERVAL)) {
            self.moved_at = Some(Instant::now());
            move_to(index);
        }
    }

    fn may_move(&self, between: Duration) -> bool {
        self.moved_at.is_none_or(|at| at.elapsed() >= between)
    }
}

/// Moves this thread to a core other than `core`. Returns whether that was possible.
fn move_off(core: usize) -> bool {
    let Ok(allowed) = sched_getaffinity(THIS_THREAD) else { return false };
    let mut others = allowed;
    others.unset(core).is_ok() && migrate(&others, &allowed)
}

/// Moves this thread to core number `index` (modulo their count) of the cores that it may use.
fn move_to(index: usize) {
    let Ok(allowed) = sched_getaffinity(THIS_THREAD) else { return };
    let mut cores = (0..CpuSet::count()).filter(|&core| allowed.is_set(core) == Ok(true));
    let count = cores.clone().count();
    let Some(core) = cores.nth(index % count.max(1)) else { return };
    let mut only = CpuSet::new();
    if sched_getcpu() != Ok(core) && only.set(core).is_ok() {
        migrate(&only, &allowed);
    }
}

/// Moves this thread to a core of `target`, then restores its mask, `allowed`. Returns whether it moved.
fn migrate(target: &CpuSet, allowed: &CpuSet) -> bool {
    sched_setaffinity(THIS_THREAD, target).map(|()| restore(target, allowed)).is_ok()
}

/// Restores the affinity mask of this thread, `allowed`, after this thread has set `target`. A mask other
/// than `target` was set by another thread of the program meanwhile, and stays.
fn restore(target: &CpuSet, allowed: &CpuSet) {
    if sched_getaffinity(THIS_THREAD).is_ok_and(|now| now != *target) {
        return;
    }
    let Err(error) = sched_setaffinity(THIS_THREAD, allowed) else { return };
    // The kernel refuses a mask without a CPU of the cpuset, which may have changed meanwhile. Of all CPUs it
    // takes those of the cpuset.
    match sched_setaffinity(THIS_THREAD, &all_cpus()) {
        Ok(()) => log::warn!(
            "the CPU affinity of a thread cannot be restored ({error}); it may use all CPUs of its cpuset now"
        ),
        Err(refused) => log::error!(
            "the CPU affinity of a thread cannot be restored ({error}), nor set to all CPUs ({refused}); it \
             may use too few CPUs now"
        ),
    }
}

fn all_cpus() -> CpuSet {
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        // The CPU is within the set, so this cannot fail.
        let _ = all.set(cpu);
    }
    all
}

#[cfg(test)]
mod tests {
    use convoke_env::host::allowed_cpus;

    use super::*;

    fn set_of(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu).unwrap());
        set
    }

    #[test]
    fn moved_thread_may_return_to_its_former_cores() {
        let allowed = allowed_cpus();
        assert!(!allowed.is_empty());
        let core = sched_getcpu().unwrap();
        assert_eq!(move_off(core), allowed.len() > 1);
        for index in 0..3 * allowed.len() {
            move_to(index);
        }
        assert_eq!(allowed_cpus(), allowed);
    }

    #[test]
    fn affinity_that_another_thread_has_set_meanwhile_is_kept() {
        let allowed = allowed_cpus();
        let [first, second, ..] = allowed[..] else { return };
        // This thread has set `first` to move, and another thread has set `second` since then.
        sched_setaffinity(THIS_THREAD, &set_of(&[second])).unwrap();
        restore(&set_of(&[first]), &set_of(&allowed));
        assert_eq!(allowed_cpus(), [second]);
    }

    #[test]
    fn thread_whose_affinity_cannot_be_restored_gets_all_cpus_of_its_cpuset() {
        let allowed = allowed_cpus();
        let only = set_of(&allowed[..1]);
        sched_setaffinity(THIS_THREAD, &only).unwrap();
        // A former mask without a CPU of the cpuset.
        restore(&only, &CpuSet::new());
        assert_eq!(allowed_cpus(), allowed);
    }
}
