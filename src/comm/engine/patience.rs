//! Wait policy: a rank that finds nothing to move spins, yields its core, or sleeps. Pure.
//!
//! A sleeping rank costs its sender a wake-up, and wakes late. A rank that spins or yields takes a core that
//! others may need. If each rank has a core, the awaited data nearly always comes within microseconds. If
//! not, the awaited rank needs this core, and gets it soonest if this rank yields. But a kernel that
//! schedules sessions before threads (autogroups) ignores such a yield, and then only sleeping helps.

use std::time::Duration;

/// Attempts that only spin, and the following attempts that yield.
const SPINS: u32 = 20;
const YIELDS: u32 = 100;
/// Yields in a row that let no other thread run, if there are more ranks than cores. After so many, as a rule
/// no other thread needs this core, and the awaited data comes from another core.
const CROWDED_VAIN_YIELDS: u32 = 30;
/// Limit for yields that let no other thread run, if a yield does not reach the other ranks (autogroups).
const APART_VAIN_YIELDS: u32 = 3;
/// Least time of a yield that let another thread run.
const SWITCH: Duration = Duration::from_nanos(900);
/// Yields that let another thread run, although each rank has a core. After so many, this rank sleeps once or
/// moves to another core.
const SHARED: u32 = 16;

/// Limits for an inline call before it becomes a queued operation: spins and yields.
const BRIEF_SPINS: u32 = 1000;
const CROWDED_SPINS: u32 = 100;
const BRIEF_YIELDS: u32 = 64;
const BRIEF_VAIN_YIELDS: u32 = 10;

/// The next action of a waiting rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Spin,
    Yield,
    Sleep,
}

/// The ratio of ranks and cores on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Crowd {
    /// There is a core for each rank.
    No,
    /// There are more ranks than cores.
    Cores,
    /// There are more ranks than cores, and a yield may not reach the other ranks: the kernel schedules
    /// sessions, and this rank has its own session.
    Apart,
}

#[derive(Debug)]
pub(super) struct Patience {
    crowd: Crowd,
    limits: Limits,
    spins: u32,
    yields: u32,
    /// Yields in a row that let no other thread run.
    vain: u32,
    /// Yields since the last sleep that let another thread run.
    shared: u32,
    /// An awaited rank needs this core.
    near: bool,
    /// The rank moved to another core instead of its last sleep.
    moved_core: bool,
}

/// Limits of one wait: spins, yields, and yields in a row that let no other thread run.
#[derive(Debug, Clone, Copy)]
struct Limits {
    spins: u32,
    yields: u32,
    vain: u32,
}

impl Patience {
    pub(super) fn new(crowd: Crowd) -> Self {
        let (spins, vain) = match crowd {
            Crowd::No => (SPINS, YIELDS),
            Crowd::Cores => (0, CROWDED_VAIN_YIELDS),
            Crowd::Apart => (0, APART_VAIN_YIELDS),
        };
        Self::of(crowd, Limits { spins, yields: YIELDS, vain })
    }

    /// Returns the policy for an inline call: instead of sleeping, the call becomes a queued operation. If
    /// there are more ranks than cores, it spins only while no awaited rank is [near](Self::is_near).
    pub(super) fn brief(crowd: Crowd) -> Self {
        let limits = match crowd {
            Crowd::No => Limits { spins: BRIEF_SPINS, yields: 0, vain: 0 },
            Crowd::Cores => Limits { spins: CROWDED_SPINS, yields: BRIEF_YIELDS, vain: BRIEF_VAIN_YIELDS },
            Crowd::Apart => Limits { spins: 0, yields: APART_VAIN_YIELDS, vain: APART_VAIN_YIELDS },
        };
        Self::of(crowd, limits)
    }

    fn of(crowd: Crowd, limits: Limits) -> Self {
        Self { crowd, limits, spins: 0, yields: 0, vain: 0, shared: 0, near: false, moved_core: false }
    }

    /// Notes whether an awaited rank shares this rank's core, as far as is known.
    pub(super) fn is_near(&mut self, near: bool) {
        (self.near, self.spins) = (near, 0);
    }

    /// Notes that data has moved.
    pub(super) fn moved(&mut self) {
        (self.spins, self.yields, self.vain) = (0, 0, 0);
    }

    /// Returns the next action after an attempt that moved nothing. `background` says that no caller waits.
    pub(super) fn step(&mut self, background: bool) -> Step {
        let Limits { spins, yields, vain } = self.limits;
        let shared = self.crowd == Crowd::No && self.shared >= SHARED;
        if !background && !shared && !self.near && self.spins < spins {
            self.spins += 1;
            return Step::Spin;
        }
        if background || shared || self.yields >= yields || self.vain >= vain {
            self.moved();
            self.shared = 0;
            return Step::Sleep;
        }
        self.yields += 1;
        Step::Yield
    }

    /// Returns whether the rank may move to another core instead of sleeping: not twice in a row. Only a
    /// sleep checks deadlines and lost peers, and on a busy machine a rank could move back and forth for
    /// ever.
    pub(super) fn may_move(&self) -> bool {
        !self.moved_core
    }

    /// Notes that the rank moved to another core and did not sleep.
    pub(super) fn moved_core(&mut self) {
        self.moved_core = true;
    }

    /// Notes that the rank sleeps.
    pub(super) fn slept(&mut self) {
        self.moved_core = false;
    }

    /// Notes how long a yield took.
    pub(super) fn yielded(&mut self, took: Duration) {
        if took >= SWITCH {
            self.shared = self.shared.saturating_add(1);
            self.vain = 0;
        } else {
            self.vain += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VAIN: Duration = Duration::from_nanos(300);
    const SWITCHED: Duration = Duration::from_micros(2);

    /// Most steps of a wait in a test: a rank whose peer is away must sleep in the end.
    const BOUND: usize = 10_000;

    /// Returns the steps up to the next sleep, and that sleep, if each yield takes `took`.
    fn until_sleep(patience: &mut Patience, took: Duration) -> Vec<Step> {
        let mut steps = Vec::new();
        while steps.len() < BOUND {
            let step = patience.step(false);
            if step == Step::Yield {
                patience.yielded(took);
            }
            steps.push(step);
            if step == Step::Sleep {
                return steps;
            }
        }
        panic!("it never sleeps: {:?}", phases(&steps))
    }

    #[test]
    fn rank_sharing_every_core_sleeps_on_every_second_attempt() {
        let mut patience = Patience::new(Crowd::No);
        let mut slept = Vec::new();
        for _ in 0..6 {
            until_sleep(&mut patience, SWITCHED);
            slept.push(!patience.may_move());
            if patience.may_move() {
                patience.moved_core();
            } else {
                patience.slept();
            }
        }
        assert_eq!(slept, [false, true, false, true, false, true]);
    }

    /// Returns the steps without repetitions.
    fn phases(steps: &[Step]) -> Vec<Step> {
        let mut phases = steps.to_vec();
        phases.dedup();
        phases
    }

    fn count(steps: &[Step], step: Step) -> usize {
        steps.iter().filter(|&&taken| taken == step).count()
    }

    /// Runs one wait that ends after a single yield, which let others run. Returns its last step.
    fn short_wait(patience: &mut Patience) -> Step {
        let mut step = patience.step(false);
        for _ in 0..BOUND {
            if step != Step::Spin {
                break;
            }
            step = patience.step(false);
        }
        patience.yielded(SWITCHED);
        patience.moved();
        step
    }

    #[test]
    fn wait_spins_then_yields_then_sleeps_with_enough_cores() {
        let mut patience = Patience::new(Crowd::No);
        let first = until_sleep(&mut patience, VAIN);
        assert_eq!(phases(&first), [Step::Spin, Step::Yield, Step::Sleep]);
        assert_eq!(until_sleep(&mut patience, VAIN), first, "the next wait is like the first");
        assert_eq!(patience.step(true), Step::Sleep, "nobody waits");
    }

    #[test]
    fn oversubscribed_wait_yields_at_once_without_spinning() {
        for crowd in [Crowd::Cores, Crowd::Apart] {
            assert_eq!(phases(&until_sleep(&mut Patience::new(crowd), VAIN)), [Step::Yield, Step::Sleep]);
        }
    }

    #[test]
    fn progress_restarts_the_wait() {
        let mut patience = Patience::new(Crowd::Cores);
        for _ in 0..BOUND {
            assert_eq!(patience.step(false), Step::Yield);
            patience.yielded(VAIN);
            patience.moved();
        }
    }

    #[test]
    fn rank_sharing_its_core_sleeps_once_despite_enough_cores() {
        let yields = |took| count(&until_sleep(&mut Patience::new(Crowd::No), took), Step::Yield);
        assert!(yields(SWITCHED) < yields(VAIN), "{} and {}", yields(SWITCHED), yields(VAIN));
        // Short waits count too.
        let mut patience = Patience::new(Crowd::No);
        let waits = (0..BOUND).take_while(|_| short_wait(&mut patience) == Step::Yield).count();
        assert!((1..BOUND).contains(&waits), "{waits}");
        assert_eq!(short_wait(&mut patience), Step::Yield, "only once");
        assert_eq!(patience.step(false), Step::Spin);
    }

    #[test]
    fn yield_counter_does_not_overflow() {
        let mut patience = Patience { shared: u32::MAX, ..Patience::new(Crowd::Cores) };
        patience.yielded(SWITCHED);
        assert_eq!(phases(&until_sleep(&mut patience, SWITCHED)), [Step::Yield, Step::Sleep]);
    }

    #[test]
    fn oversubscribed_wait_yields_longer_if_others_then_run() {
        for mut patience in [Patience::new(Crowd::Cores), Patience::brief(Crowd::Cores)] {
            let useful = count(&until_sleep(&mut patience, SWITCHED), Step::Yield);
            let vain = count(&until_sleep(&mut patience, VAIN), Step::Yield);
            assert!(useful > vain, "{useful} and {vain}");
        }
    }

    #[test]
    fn useless_yields_stop_early() {
        for patience in [Patience::new, Patience::brief] {
            let yields = |crowd| count(&until_sleep(&mut patience(crowd), VAIN), Step::Yield);
            assert!(yields(Crowd::Apart) < yields(Crowd::Cores));
        }
    }

    #[test]
    fn brief_wait_spins_unless_the_peer_shares_the_core() {
        let mut brief = Patience::brief(Crowd::Cores);
        assert_eq!(phases(&until_sleep(&mut brief, VAIN)), [Step::Spin, Step::Yield, Step::Sleep]);
        brief.is_near(true);
        assert_eq!(phases(&until_sleep(&mut brief, VAIN)), [Step::Yield, Step::Sleep]);
        brief.is_near(false);
        assert_eq!(phases(&until_sleep(&mut brief, VAIN)), [Step::Spin, Step::Yield, Step::Sleep]);
    }

    #[test]
    fn brief_wait_with_enough_cores_spins_longer() {
        let steps = until_sleep(&mut Patience::brief(Crowd::No), VAIN);
        assert_eq!(phases(&steps), [Step::Spin, Step::Sleep]);
        let long = until_sleep(&mut Patience::new(Crowd::No), VAIN);
        assert!(count(&steps, Step::Spin) > count(&long, Step::Spin), "it hopes that the call is over soon");
    }
}
