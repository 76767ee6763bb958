//! Wait policy: a rank that has no data to move spins, yields its core, or sleeps. Pure.
//!
//! A rank that sleeps must be woken by the rank that sends to it, and wakes late. A rank that spins or yields
//! takes a core that other threads may need. If each rank has a core, the awaited data nearly always comes
//! within microseconds. If there are more ranks than cores, the awaited rank may need this core, and gets it
//! soonest if this rank yields. But a kernel that schedules sessions before threads (autogroups) ignores such
//! a yield, and then only sleeping helps.

use std::time::Duration;

/// Attempts to move data that only spin, at the start of a wait.
const SPINS: u32 = 20;
/// Attempts to move data that yield the core, after those that spin.
const YIELDS: u32 = 100;
/// Most yields in a row that let no other thread run, if there are more ranks than cores. After so many, as a
/// rule no other thread needs this core, and the awaited data comes from another core.
const OVERSUBSCRIBED_IDLE_YIELDS: u32 = 30;
/// Most yields in a row that let no other thread run, if no other rank gets the core (autogroups).
const SESSIONS_IDLE_YIELDS: u32 = 3;
/// A yield that takes at least this long has let another thread run.
const MIN_SWITCH_TIME: Duration = Duration::from_nanos(900);
/// Most yields that let another thread run, although each rank has a core. After so many, this rank sleeps
/// once or moves to another core.
const MAX_SWITCHES: u32 = 16;
/// Number of waits that yield at once, after a wait whose first yield let another thread run although each rank has a core.
/// The awaited rank is then probably on this core, and a rank that spins keeps it from sending.
const SHARED_CORE_WAITS: u32 = 8;
/// If yields take at least this long, a thread of the core computes without end: it runs until its time slice
/// is over, 3 to 4 ms. A sleeping rank gets the core back as soon as its data comes.
const BUSY_CORE_YIELD_TIME: Duration = Duration::from_millis(1);
/// Yields in a row that must take so long, if there are more ranks than cores. A single one may be due to a
/// rank that computes for a while.
const OVERSUBSCRIBED_BUSY_CORE_YIELDS: u32 = 2;
/// Number of waits without yields after yields that took so long.
const BUSY_CORE_WAITS: u32 = 256;
/// From this size on, ranks copy and add for so long that yields take long without other threads too. Small
/// operations after large ones must not sleep for that.
pub(super) const LARGE_BYTES: u64 = 256 << 10;
/// The shortest yield that shows a busy core during a large operation, and how many in a row must take so long
/// if there are more ranks than cores: a rank seldom copies for a whole time slice, and hardly ever so often.
const LARGE_BUSY_CORE_YIELD_TIME: Duration = Duration::from_micros(2500);
const LARGE_BUSY_CORE_YIELDS: u32 = 4;

/// Most spins of an inline call before it becomes a queued operation, if each rank has a core.
const INLINE_SPINS: u32 = 1000;
/// Most spins of an inline call over a connection, if each rank has a core. Each takes a system call: all take about 60 µs.
const CONNECTION_SPINS: u32 = 200;
/// Most spins of an inline call if there are more ranks than cores.
const OVERSUBSCRIBED_INLINE_SPINS: u32 = 100;
/// Most yields of an inline call if there are more ranks than cores.
const INLINE_YIELDS: u32 = 64;
/// Most yields in a row of an inline call that let no other thread run, if there are more ranks than cores.
const INLINE_IDLE_YIELDS: u32 = 10;

/// The next action of a waiting rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitAction {
    Spin,
    Yield,
    Sleep,
}

/// The medium by which an inline call gets the data that it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitMedium {
    SharedMemory,
    /// Each attempt to read from a connection costs a system call.
    Connection,
}

/// The ratio of ranks and cores on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Oversubscription {
    /// There are at least as many cores as ranks.
    No,
    /// There are more ranks than cores.
    Cores,
    /// There are more ranks than cores, and a yield may not reach the other ranks: the kernel schedules
    /// sessions, and this rank has its own session.
    Sessions,
}

/// Describes how a rank shares the cores of its host with other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CoreSharing {
    pub(crate) oversubscription: Oversubscription,
    /// The place by which this rank chooses its core, if there are more ranks than cores, each rank may use
    /// all cores, and threads may move. Else `None`: no core is assigned.
    pub(crate) place: Option<CorePlace>,
    /// This rank has a core, and leaves it while the rank that it waits for runs there.
    pub(crate) leaves_shared_core: bool,
}

/// The place of a rank among the ranks that share cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CorePlace {
    pub(crate) index: usize,
    pub(crate) ranks: usize,
}

impl CoreSharing {
    /// The sharing of a group of one rank.
    pub(crate) const SINGLE_RANK: Self =
        Self { oversubscription: Oversubscription::No, place: None, leaves_shared_core: false };
}

#[derive(Debug)]
pub(super) struct WaitPolicy {
    oversubscription: Oversubscription,
    limits: Limits,
    spins: u32,
    yields: u32,
    /// Yields in a row that let no other thread run.
    idle_yields: u32,
    /// Yields since the last sleep that let another thread run.
    switches: u32,
    /// Waits that yield at once, because the awaited rank probably runs on this core.
    shared_core_waits: u32,
    /// The first yield of this wait let another thread run.
    switched_at_once: bool,
    /// Yields in a row that took as long as on a busy core.
    long_yields: u32,
    /// Waits that sleep instead of yielding, because this core is busy: of small operations, and of large ones.
    without_yields: [u32; 2],
    /// The operation is large.
    is_large: bool,
    /// A rank that this rank waits for runs on the same core.
    shares_core: bool,
    /// When the policy last required a sleep, the rank moved to another core instead.
    migrated_last: bool,
}

/// Limits of one wait: spins, yields, and yields in a row that let no other thread run.
#[derive(Debug, Clone, Copy)]
struct Limits {
    spins: u32,
    yields: u32,
    idle_yields: u32,
}

impl WaitPolicy {
    pub(super) fn new(oversubscription: Oversubscription) -> Self {
        let (spins, idle_yields) = match oversubscription {
            Oversubscription::No => (SPINS, YIELDS),
            Oversubscription::Cores => (0, OVERSUBSCRIBED_IDLE_YIELDS),
            Oversubscription::Sessions => (0, SESSIONS_IDLE_YIELDS),
        };
        Self {
            oversubscription,
            limits: Limits { spins, yields: YIELDS, idle_yields },
            spins: 0,
            yields: 0,
            idle_yields: 0,
            switches: 0,
            shared_core_waits: 0,
            switched_at_once: false,
            long_yields: 0,
            without_yields: [0; 2],
            is_large: false,
            shares_core: false,
            migrated_last: false,
        }
    }

    /// Returns the policy for an inline call: instead of sleeping, the call becomes a queued operation, for
    /// which this policy holds. If there are more ranks than cores, the call spins only while no awaited rank
    /// [shares this core](Self::set_shares_core). `bytes` is the size of the operation.
    pub(super) fn for_inline(&self, medium: WaitMedium, bytes: u64) -> Self {
        let is_large = bytes >= LARGE_BYTES;
        let busy_core = self.without_yields[usize::from(is_large)] > 0;
        let spins_only = |spins| Limits { spins, yields: 0, idle_yields: 0 };
        let limits = match (self.oversubscription, medium) {
            (Oversubscription::No, _) if self.shared_core_waits > 0 => spins_only(0),
            (Oversubscription::No, WaitMedium::SharedMemory) => spins_only(INLINE_SPINS),
            (Oversubscription::No, WaitMedium::Connection) if busy_core => spins_only(SPINS),
            (Oversubscription::No, WaitMedium::Connection) => spins_only(CONNECTION_SPINS),
            (Oversubscription::Cores, medium) => Limits {
                spins: if medium == WaitMedium::SharedMemory { OVERSUBSCRIBED_INLINE_SPINS } else { 0 },
                yields: INLINE_YIELDS,
                idle_yields: INLINE_IDLE_YIELDS,
            },
            (Oversubscription::Sessions, _) => {
                Limits { spins: 0, yields: SESSIONS_IDLE_YIELDS, idle_yields: SESSIONS_IDLE_YIELDS }
            }
        };
        Self { limits, without_yields: self.without_yields, is_large, ..Self::new(self.oversubscription) }
    }

    /// Notes the size of the operation that this rank waits for.
    pub(super) fn set_bytes(&mut self, bytes: u64) {
        let is_large = bytes >= LARGE_BYTES;
        if is_large != std::mem::replace(&mut self.is_large, is_large) {
            self.long_yields = 0;
        }
    }

    /// Notes whether a rank that this rank waits for runs on the same core, as far as is known.
    pub(super) fn set_shares_core(&mut self, shares_core: bool) {
        (self.shares_core, self.spins) = (shares_core, 0);
    }

    /// Notes that data has moved, so that the next wait starts with spins again.
    pub(super) fn record_progress(&mut self) {
        if !std::mem::take(&mut self.switched_at_once) && self.yields > 0 {
            self.shared_core_waits = self.shared_core_waits.saturating_sub(1);
        }
        (self.spins, self.yields, self.idle_yields) = (0, 0, 0);
    }

    /// Notes that the caller's operation is done. With more ranks than cores, the counts go on, so that a rank sleeps now and
    /// then although each of its waits is short.
    pub(super) fn record_end(&mut self) {
        if self.oversubscription == Oversubscription::No {
            self.record_progress();
        }
    }

    /// Returns the next action after an attempt that moved nothing. `background` says that no caller waits.
    ///
    /// If each rank has a core, the background thread sleeps at once, so that it takes no core from threads that
    /// compute. With more ranks than cores it yields as a caller does. A sleep for each piece of data would cost a
    /// wake-up and two changes of threads, which often takes longer than moving the piece.
    pub(super) fn next_action(&mut self, background: bool) -> WaitAction {
        let Limits { spins, yields, idle_yields } = self.limits;
        let has_core = self.oversubscription == Oversubscription::No;
        let shared = has_core && self.switches >= MAX_SWITCHES;
        let shares_core = self.shares_core || self.shared_core_waits > 0;
        if !background && !shared && !shares_core && self.spins < spins {
            self.spins += 1;
            return WaitAction::Spin;
        }
        let without_yields = &mut self.without_yields[usize::from(self.is_large)];
        let busy_core = *without_yields > 0;
        let at_once = (background && has_core) || shared || busy_core;
        if at_once || self.yields >= yields || self.idle_yields >= idle_yields {
            *without_yields = without_yields.saturating_sub(1);
            self.record_progress();
            self.switches = 0;
            return WaitAction::Sleep;
        }
        self.yields += 1;
        WaitAction::Yield
    }

    /// Returns whether the rank may move to another core instead of sleeping. It may not do so twice in a
    /// row. Only a sleep checks deadlines and lost peers, and on a busy machine a rank could move back and
    /// forth for ever.
    pub(super) fn may_migrate(&self) -> bool {
        !self.migrated_last
    }

    /// Notes that the rank moved to another core and did not sleep.
    pub(super) fn record_migration(&mut self) {
        self.migrated_last = true;
    }

    /// Notes that the rank sleeps, so that it may move to another core the next time.
    pub(super) fn record_sleep(&mut self) {
        self.migrated_last = false;
    }

    /// Notes how long a yield took, which shows whether it let another thread run.
    pub(super) fn record_yield(&mut self, took: Duration) {
        let (long, enough) = match (self.oversubscription, self.is_large) {
            (Oversubscription::No, _) => (BUSY_CORE_YIELD_TIME, 1),
            (_, false) => (BUSY_CORE_YIELD_TIME, OVERSUBSCRIBED_BUSY_CORE_YIELDS),
            (_, true) => (LARGE_BUSY_CORE_YIELD_TIME, LARGE_BUSY_CORE_YIELDS),
        };
        self.long_yields = if took >= long { self.long_yields.saturating_add(1) } else { 0 };
        if self.long_yields >= enough {
            self.without_yields[usize::from(self.is_large)] = BUSY_CORE_WAITS;
        }
        if took >= MIN_SWITCH_TIME {
            self.switches = self.switches.saturating_add(1);
            self.idle_yields = 0;
        } else {
            self.idle_yields += 1;
        }
    }

    /// Returns whether the last action was the first yield of a wait, and [`Self::record_first_yield`] is to be called.
    pub(super) fn is_first_yield(&self) -> bool {
        self.oversubscription == Oversubscription::No && self.yields == 1
    }

    /// Notes whether the kernel switched to another thread in the first yield of a wait. [`Self::record_yield`] comes before.
    pub(super) fn record_first_yield(&mut self, ran_another: bool) {
        // After a long yield, the core has a thread that computes without end.
        if ran_another && self.long_yields == 0 {
            (self.shared_core_waits, self.switched_at_once) = (SHARED_CORE_WAITS, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE_YIELD: Duration = Duration::from_nanos(300);
    const SWITCHED: Duration = Duration::from_micros(2);

    /// Most actions of one wait in a test: a rank whose peer sends nothing must sleep before.
    const BOUND: usize = 10_000;

    /// Returns the actions up to and including the next sleep, if each yield takes `took`.
    fn until_sleep(wait_policy: &mut WaitPolicy, took: Duration) -> Vec<WaitAction> {
        let mut steps = Vec::new();
        while steps.len() < BOUND {
            let step = wait_policy.next_action(false);
            if step == WaitAction::Yield {
                wait_policy.record_yield(took);
            }
            steps.push(step);
            if step == WaitAction::Sleep {
                return steps;
            }
        }
        panic!("it never sleeps: {:?}", phases(&steps))
    }

    #[test]
    fn rank_sharing_every_core_sleeps_on_every_second_attempt() {
        let mut wait_policy = WaitPolicy::new(Oversubscription::No);
        let mut slept = Vec::new();
        for _ in 0..6 {
            until_sleep(&mut wait_policy, SWITCHED);
            slept.push(!wait_policy.may_migrate());
            if wait_policy.may_migrate() {
                wait_policy.record_migration();
            } else {
                wait_policy.record_sleep();
            }
        }
        assert_eq!(slept, [false, true, false, true, false, true]);
    }

    /// Returns `steps` without repetitions of one action in a row.
    fn phases(steps: &[WaitAction]) -> Vec<WaitAction> {
        let mut phases = steps.to_vec();
        phases.dedup();
        phases
    }

    fn count(steps: &[WaitAction], step: WaitAction) -> usize {
        steps.iter().filter(|&&taken| taken == step).count()
    }

    /// Runs one wait that ends after a single yield, which let other threads run. Returns its last action.
    fn short_wait(wait_policy: &mut WaitPolicy) -> WaitAction {
        let mut step = wait_policy.next_action(false);
        for _ in 0..BOUND {
            if step != WaitAction::Spin {
                break;
            }
            step = wait_policy.next_action(false);
        }
        let is_first = wait_policy.is_first_yield();
        wait_policy.record_yield(SWITCHED);
        if is_first {
            wait_policy.record_first_yield(true);
        }
        wait_policy.record_progress();
        step
    }

    #[test]
    fn wait_spins_then_yields_then_sleeps_with_enough_cores() {
        let mut wait_policy = WaitPolicy::new(Oversubscription::No);
        let first = until_sleep(&mut wait_policy, IDLE_YIELD);
        assert_eq!(phases(&first), [WaitAction::Spin, WaitAction::Yield, WaitAction::Sleep]);
        assert_eq!(until_sleep(&mut wait_policy, IDLE_YIELD), first, "the next wait is like the first");
        assert_eq!(wait_policy.next_action(true), WaitAction::Sleep, "nobody waits");
    }

    #[test]
    fn oversubscribed_wait_yields_at_once_without_spinning() {
        for oversubscription in [Oversubscription::Cores, Oversubscription::Sessions] {
            assert_eq!(
                phases(&until_sleep(&mut WaitPolicy::new(oversubscription), IDLE_YIELD)),
                [WaitAction::Yield, WaitAction::Sleep]
            );
        }
    }

    #[test]
    fn progress_restarts_the_wait() {
        let mut wait_policy = WaitPolicy::new(Oversubscription::Cores);
        for _ in 0..BOUND {
            assert_eq!(wait_policy.next_action(false), WaitAction::Yield);
            wait_policy.record_yield(IDLE_YIELD);
            wait_policy.record_progress();
        }
    }

    #[test]
    fn rank_sharing_its_core_sleeps_once_despite_enough_cores() {
        let yields =
            |took| count(&until_sleep(&mut WaitPolicy::new(Oversubscription::No), took), WaitAction::Yield);
        assert!(yields(SWITCHED) < yields(IDLE_YIELD), "{} and {}", yields(SWITCHED), yields(IDLE_YIELD));
        // Yields that let other threads run also count over many short waits.
        let mut wait_policy = WaitPolicy::new(Oversubscription::No);
        let waits = (0..BOUND).take_while(|_| short_wait(&mut wait_policy) == WaitAction::Yield).count();
        assert!((1..BOUND).contains(&waits), "{waits}");
        assert_eq!(short_wait(&mut wait_policy), WaitAction::Yield, "only once");
        assert_eq!(wait_policy.next_action(false), WaitAction::Yield, "it does not spin on a shared core");
    }

    #[test]
    fn rank_whose_first_yield_runs_another_thread_yields_at_once_in_the_next_waits() {
        let mut wait_policy = WaitPolicy::new(Oversubscription::No);
        assert_eq!(short_wait(&mut wait_policy), WaitAction::Yield);
        for medium in [WaitMedium::SharedMemory, WaitMedium::Connection] {
            let inline = until_sleep(&mut wait_policy.for_inline(medium, 0), IDLE_YIELD);
            assert_eq!(inline, [WaitAction::Sleep], "the call is queued at once");
        }
        for wait in 0..SHARED_CORE_WAITS {
            assert_eq!(wait_policy.next_action(false), WaitAction::Yield, "wait {wait}");
            assert!(wait_policy.is_first_yield());
            wait_policy.record_yield(SWITCHED);
            wait_policy.record_first_yield(false);
            assert_eq!(wait_policy.next_action(false), WaitAction::Yield);
            assert!(!wait_policy.is_first_yield(), "only the first yield of a wait counts");
            wait_policy.record_progress();
        }
        assert_eq!(wait_policy.next_action(false), WaitAction::Spin);
        assert!(until_sleep(&mut wait_policy.for_inline(WaitMedium::Connection, 0), IDLE_YIELD).len() > 20);
    }

    #[test]
    fn rank_on_a_core_with_a_busy_thread_sleeps_instead_of_yielding() {
        use Oversubscription::{Cores, No, Sessions};
        let slice = Duration::from_millis(4);
        for (oversubscription, yields) in [(No, 1), (Cores, 2), (Sessions, 2)] {
            let mut wait_policy = WaitPolicy::new(oversubscription);
            let yields_of = |steps: &[WaitAction]| count(steps, WaitAction::Yield);
            assert_eq!(yields_of(&until_sleep(&mut wait_policy, slice)), yields);
            for wait in 1..BUSY_CORE_WAITS {
                assert_eq!(
                    yields_of(&until_sleep(&mut wait_policy.for_inline(WaitMedium::SharedMemory, 0), slice)),
                    0
                );
                let steps = until_sleep(&mut wait_policy, slice);
                assert_eq!(yields_of(&steps), 0, "{oversubscription:?}, wait {wait}");
            }
            // It tries again later, since the other thread may have ended.
            let later = until_sleep(&mut wait_policy, IDLE_YIELD);
            assert_eq!(later, until_sleep(&mut WaitPolicy::new(oversubscription), IDLE_YIELD));
        }
    }

    #[test]
    fn small_operations_yield_although_yields_of_large_ones_took_long() {
        let slice = Duration::from_millis(4);
        let mut wait_policy = WaitPolicy::new(Oversubscription::Cores);
        let undisturbed = until_sleep(&mut wait_policy, SWITCHED);
        wait_policy.set_bytes(LARGE_BYTES);
        until_sleep(&mut wait_policy, slice);
        assert_eq!(until_sleep(&mut wait_policy, slice), [WaitAction::Sleep]);
        wait_policy.set_bytes(LARGE_BYTES - 1);
        assert_eq!(until_sleep(&mut wait_policy, SWITCHED), undisturbed);
        wait_policy.set_bytes(LARGE_BYTES);
        assert_eq!(until_sleep(&mut wait_policy, slice), [WaitAction::Sleep], "large ones still sleep");
    }

    #[test]
    fn one_long_yield_of_an_oversubscribed_rank_changes_nothing() {
        let mut wait_policy = WaitPolicy::new(Oversubscription::Cores);
        let undisturbed = until_sleep(&mut wait_policy, SWITCHED);
        assert_eq!(wait_policy.next_action(false), WaitAction::Yield);
        wait_policy.record_yield(Duration::from_millis(4));
        wait_policy.record_progress();
        assert_eq!(until_sleep(&mut wait_policy, SWITCHED), undisturbed);
    }

    #[test]
    fn yield_counter_does_not_overflow() {
        let mut wait_policy = WaitPolicy { switches: u32::MAX, ..WaitPolicy::new(Oversubscription::Cores) };
        wait_policy.record_yield(SWITCHED);
        assert_eq!(phases(&until_sleep(&mut wait_policy, SWITCHED)), [WaitAction::Yield, WaitAction::Sleep]);
    }

    #[test]
    fn oversubscribed_wait_yields_longer_if_others_then_run() {
        for mut wait_policy in [
            WaitPolicy::new(Oversubscription::Cores),
            WaitPolicy::new(Oversubscription::Cores).for_inline(WaitMedium::SharedMemory, 0),
        ] {
            let useful = count(&until_sleep(&mut wait_policy, SWITCHED), WaitAction::Yield);
            let idle_yields = count(&until_sleep(&mut wait_policy, IDLE_YIELD), WaitAction::Yield);
            assert!(useful > idle_yields, "{useful} and {idle_yields}");
        }
    }

    #[test]
    fn background_thread_never_spins_and_yields_only_with_more_ranks_than_cores() {
        let first = |oversubscription| WaitPolicy::new(oversubscription).next_action(true);
        assert_eq!(first(Oversubscription::No), WaitAction::Sleep);
        let mut wait_policy = WaitPolicy::new(Oversubscription::Cores);
        let mut steps = vec![wait_policy.next_action(true)];
        while steps.last() != Some(&WaitAction::Sleep) {
            wait_policy.record_yield(IDLE_YIELD);
            steps.push(wait_policy.next_action(true));
        }
        assert_eq!(phases(&steps), [WaitAction::Yield, WaitAction::Sleep]);
    }

    #[test]
    fn useless_yields_stop_early() {
        for wait_policy in
            [WaitPolicy::new, |ratio| WaitPolicy::new(ratio).for_inline(WaitMedium::SharedMemory, 0)]
        {
            let yields = |oversubscription| {
                count(&until_sleep(&mut wait_policy(oversubscription), IDLE_YIELD), WaitAction::Yield)
            };
            assert!(yields(Oversubscription::Sessions) < yields(Oversubscription::Cores));
        }
    }

    #[test]
    fn brief_wait_spins_unless_the_peer_shares_the_core() {
        let mut wait_policy =
            WaitPolicy::new(Oversubscription::Cores).for_inline(WaitMedium::SharedMemory, 0);
        assert_eq!(
            phases(&until_sleep(&mut wait_policy, IDLE_YIELD)),
            [WaitAction::Spin, WaitAction::Yield, WaitAction::Sleep]
        );
        wait_policy.set_shares_core(true);
        assert_eq!(
            phases(&until_sleep(&mut wait_policy, IDLE_YIELD)),
            [WaitAction::Yield, WaitAction::Sleep]
        );
        wait_policy.set_shares_core(false);
        assert_eq!(
            phases(&until_sleep(&mut wait_policy, IDLE_YIELD)),
            [WaitAction::Spin, WaitAction::Yield, WaitAction::Sleep]
        );
    }

    #[test]
    fn brief_wait_over_a_connection_spins_only_on_a_core_of_its_own() {
        let spins = |wait_policy: &WaitPolicy| {
            let steps = until_sleep(&mut wait_policy.for_inline(WaitMedium::Connection, 0), IDLE_YIELD);
            count(&steps, WaitAction::Spin)
        };
        let mut wait_policy = WaitPolicy::new(Oversubscription::No);
        assert!(spins(&wait_policy) > SPINS as usize);
        // A yield shows that another thread computes on this core.
        until_sleep(&mut wait_policy, Duration::from_millis(4));
        assert_eq!(spins(&wait_policy), SPINS as usize);
        for oversubscription in [Oversubscription::Cores, Oversubscription::Sessions] {
            assert_eq!(spins(&WaitPolicy::new(oversubscription)), 0);
        }
    }

    #[test]
    fn brief_wait_with_enough_cores_spins_longer() {
        let steps = until_sleep(
            &mut WaitPolicy::new(Oversubscription::No).for_inline(WaitMedium::SharedMemory, 0),
            IDLE_YIELD,
        );
        assert_eq!(phases(&steps), [WaitAction::Spin, WaitAction::Sleep]);
        let long = until_sleep(&mut WaitPolicy::new(Oversubscription::No), IDLE_YIELD);
        assert!(
            count(&steps, WaitAction::Spin) > count(&long, WaitAction::Spin),
            "it hopes that the call is over soon"
        );
    }
}
