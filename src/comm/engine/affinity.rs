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

use super::wait_policy::{CorePlace, CoreSharing, LARGE_BYTES, WaitMedium};
use crate::collectives::call::{Call, CallKind};

/// Least time between two moves of a thread to another core. If data still has not come, it sleeps instead.
const MOVE_INTERVAL: Duration = Duration::from_millis(1);
/// Least time between two moves of a thread to another core, if there are more ranks than cores.
const OVERSUBSCRIBED_MOVE_INTERVAL: Duration = Duration::from_millis(10);
/// Least time between two moves of a thread to another core, if there are more ranks than cores and the
/// [`Placement`] has changed.
const CHANGED_PLACEMENT_MOVE_INTERVAL: Duration = Duration::from_millis(1);
/// The calling thread, as system calls name it.
const THIS_THREAD: Pid = Pid::from_raw(0);

/// The distribution of ranks that outnumber their cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Placement {
    /// Successive ranks are on different cores, so that they can exchange short data without a context switch.
    #[default]
    Spread,
    /// Successive ranks are on one core, so that a rank finds the long message of the rank beside it in the
    /// caches of this core. On two cores of a Xeon (Emerald Rapids), messages of 256 KiB between 4 ranks
    /// take 24 instead of 36 µs.
    Packed,
}

impl Placement {
    /// The placement for calls like this one, whose data comes by `medium`.
    #[inline(always)]
    pub(super) fn of(call: Call, medium: WaitMedium) -> Self {
        let is_message = call.kind == CallKind::PointToPoint && medium == WaitMedium::SharedMemory;
        if is_message && call.bytes() >= LARGE_BYTES { Self::Packed } else { Self::Spread }
    }

    /// Returns which of `cores` cores a rank takes.
    fn core(self, CorePlace { index, ranks }: CorePlace, cores: usize) -> usize {
        match self {
            Self::Spread => index % cores,
            Self::Packed => index * cores / ranks,
        }
    }
}

/// The choice of the core on which the thread that drives an engine runs.
#[derive(Debug)]
pub(super) struct Affinity {
    sharing: CoreSharing,
    /// The placement for the current calls, and that of the last move.
    placement: Placement,
    placed: Placement,
    /// The time at which the driving thread was last moved to another core.
    moved_at: Option<Instant>,
}

impl Affinity {
    pub(super) fn new(sharing: CoreSharing) -> Self {
        let placement = Placement::default();
        Self { sharing, placement, placed: placement, moved_at: None }
    }

    /// Chooses the placement for the next calls.
    pub(super) fn set_placement(&mut self, placement: Placement) {
        self.placement = placement;
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

    /// Moves this thread to the core that the placement gives to [`CoreSharing::place`], if this rank has a
    /// place and has not moved just before.
    pub(super) fn move_to_assigned_core(&mut self) {
        let is_placed = self.placed == self.placement;
        let interval = if is_placed { OVERSUBSCRIBED_MOVE_INTERVAL } else { CHANGED_PLACEMENT_MOVE_INTERVAL };
        if let Some(place) = self.sharing.place.filter(|_| self.may_move(interval)) {
            (self.moved_at, self.placed) = (Some(Instant::now()), self.placement);
            move_to(place, self.placement);
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

/// Moves this thread to one of the cores that it may use, as `placement` says.
fn move_to(place: CorePlace, placement: Placement) {
    let Ok(allowed) = sched_getaffinity(THIS_THREAD) else { return };
    let mut cores = (0..CpuSet::count()).filter(|&core| allowed.is_set(core) == Ok(true));
    let count = cores.clone().count();
    let Some(core) = cores.nth(placement.core(place, count.max(1))) else { return };
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

    use crate::collectives::dtype::Dtype;

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
        let ranks = 3 * allowed.len();
        for index in 0..ranks {
            for placement in [Placement::Spread, Placement::Packed] {
                move_to(CorePlace { index, ranks }, placement);
            }
        }
        assert_eq!(allowed_cpus(), allowed);
    }

    #[test]
    fn each_placement_gives_every_core_about_as_many_ranks() {
        for (ranks, cores) in (1..20).flat_map(|cores| (cores..40).map(move |ranks| (ranks, cores))) {
            for placement in [Placement::Spread, Placement::Packed] {
                let mut counts = vec![0; cores];
                (0..ranks).for_each(|index| counts[placement.core(CorePlace { index, ranks }, cores)] += 1);
                let [least, most] = [counts.iter().min(), counts.iter().max()].map(Option::unwrap);
                assert!(most - least <= 1, "{ranks} ranks on {cores} cores: {counts:?}");
            }
        }
    }

    #[test]
    fn neighbours_are_on_one_core_for_long_messages_in_memory_alone() {
        let message = |bytes| Call::new(CallKind::PointToPoint, Dtype::U8, None, 7, bytes);
        let broadcast = Call::new(CallKind::Broadcast, Dtype::U8, None, 0, LARGE_BYTES);
        let cores = |call, medium| {
            [0, 1, 2, 3].map(|index| Placement::of(call, medium).core(CorePlace { index, ranks: 4 }, 2))
        };
        assert_eq!(cores(message(LARGE_BYTES), WaitMedium::SharedMemory), [0, 0, 1, 1]);
        assert_eq!(cores(message(LARGE_BYTES - 1), WaitMedium::SharedMemory), [0, 1, 0, 1]);
        assert_eq!(cores(message(LARGE_BYTES), WaitMedium::Connection), [0, 1, 0, 1]);
        assert_eq!(cores(broadcast, WaitMedium::SharedMemory), [0, 1, 0, 1]);
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
