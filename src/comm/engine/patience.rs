//! What a rank does that waits and finds nothing to move: spin, yield its core, or sleep. Pure.
//!
//! A sleeper costs its sender a wake-up, and wakes late; who spins or yields burns what somebody else may
//! need. Where there is a core for each rank, what is waited for is nearly always there within microseconds.
//! Where there is not, whoever is waited for needs this core, and has it soonest if this rank yields; but a
//! system that schedules sessions before threads (autogroups) takes no notice of a yield, and then only
//! sleeping helps.

use std::time::Duration;

/// Attempts that only spin, and those after it that yield.
const SPINS: u32 = 20;
const YIELDS: u32 = 100;
/// With more ranks than cores: yields in a row that let nobody else run. As a rule nobody else needs the core
/// then, and what is waited for comes from another one.
const CROWDED_VAIN_YIELDS: u32 = 30;
/// The same where a yield does not reach the other ranks.
const APART_VAIN_YIELDS: u32 = 3;
/// A yield that takes as long as this let somebody else run.
const SWITCH: Duration = Duration::from_nanos(900);
/// Yields that let somebody else run, though there are cores for all, until this rank sleeps for once, or
/// goes to another core.
const SHARED: u32 = 16;

/// Of an attempt to be through with a call before it becomes an operation: attempts that only look again, and
/// yields.
const BRIEF_SPINS: u32 = 1000;
const CROWDED_SPINS: u32 = 100;
const BRIEF_YIELDS: u32 = 64;
const BRIEF_VAIN_YIELDS: u32 = 10;

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Spin,
    Yield,
    Sleep,
}

/// How the ranks of a host share its cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Crowd {
    /// There is a core for each.
    No,
    /// There are more ranks than cores.
    Cores,
    /// The same, and a yield may not reach them: the system schedules sessions, and this rank has one of its
    /// own.
    Apart,
}

#[derive(Debug)]
pub(super) struct Patience {
    crowd: Crowd,
    limits: Limits,
    spins: u32,
    yields: u32,
    /// Yields in a row that let nobody else run.
    vain: u32,
    /// Yields since the last sleep that did.
    shared: u32,
    /// One that is waited for needs this core.
    near: bool,
    /// It went to another core in place of its last sleep.
    moved_core: bool,
}

/// Attempts that spin, yields, and yields in a row that let nobody else run.
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

    /// For one call that is hoped to be over soon: in place of sleeping it becomes an operation. With more
    /// ranks than cores it spins as long as those that it waits for are not [near](Self::is_near).
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

    /// Whether a rank that is waited for shares this one's core, as far as anybody knows.
    pub(super) fn is_near(&mut self, near: bool) {
        (self.near, self.spins) = (near, 0);
    }

    /// Something has moved.
    pub(super) fn moved(&mut self) {
        (self.spins, self.yields, self.vain) = (0, 0, 0);
    }

    /// Nothing could be moved. `background`: no caller waits for it.
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

    /// Whether the rank may go to another core in place of a sleep: not twice in a row. Deadlines and lost
    /// peers are looked at when it sleeps, and on a busy machine it could go back and forth for ever.
    pub(super) fn may_move(&self) -> bool {
        !self.moved_core
    }

    /// It went to another core and did not sleep.
    pub(super) fn moved_core(&mut self) {
        self.moved_core = true;
    }

    /// It sleeps.
    pub(super) fn slept(&mut self) {
        self.moved_core = false;
    }

    /// How long the yield took.
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

    /// Longest wait in steps: a rank whose peer is away must sleep in the end.
    const BOUND: usize = 10_000;

    /// What it does, up to and with its next sleep, if each yield takes so long.
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
    fn a_rank_that_shares_every_core_still_sleeps_every_other_time() {
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

    /// The steps without repetitions.
    fn phases(steps: &[Step]) -> Vec<Step> {
        let mut phases = steps.to_vec();
        phases.dedup();
        phases
    }

    fn count(steps: &[Step], step: Step) -> usize {
        steps.iter().filter(|&&taken| taken == step).count()
    }

    /// One wait that ends after a single yield, which let others run.
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
    fn with_a_core_for_each_rank_it_spins_then_yields_then_sleeps() {
        let mut patience = Patience::new(Crowd::No);
        let first = until_sleep(&mut patience, VAIN);
        assert_eq!(phases(&first), [Step::Spin, Step::Yield, Step::Sleep]);
        assert_eq!(until_sleep(&mut patience, VAIN), first, "the next wait is like the first");
        assert_eq!(patience.step(true), Step::Sleep, "nobody waits");
    }

    #[test]
    fn with_more_ranks_than_cores_it_leaves_the_core_to_them_at_once() {
        for crowd in [Crowd::Cores, Crowd::Apart] {
            assert_eq!(phases(&until_sleep(&mut Patience::new(crowd), VAIN)), [Step::Yield, Step::Sleep]);
        }
    }

    #[test]
    fn who_moves_begins_anew() {
        let mut patience = Patience::new(Crowd::Cores);
        for _ in 0..BOUND {
            assert_eq!(patience.step(false), Step::Yield);
            patience.yielded(VAIN);
            patience.moved();
        }
    }

    #[test]
    fn a_rank_that_shares_its_core_though_there_are_enough_sleeps_for_once() {
        let yields = |took| count(&until_sleep(&mut Patience::new(Crowd::No), took), Step::Yield);
        assert!(yields(SWITCHED) < yields(VAIN), "{} and {}", yields(SWITCHED), yields(VAIN));
        // Also if each wait is short.
        let mut patience = Patience::new(Crowd::No);
        let waits = (0..BOUND).take_while(|_| short_wait(&mut patience) == Step::Yield).count();
        assert!((1..BOUND).contains(&waits), "{waits}");
        assert_eq!(short_wait(&mut patience), Step::Yield, "only once");
        assert_eq!(patience.step(false), Step::Spin);
    }

    #[test]
    fn it_counts_as_long_as_a_job_goes_on() {
        let mut patience = Patience { shared: u32::MAX, ..Patience::new(Crowd::Cores) };
        patience.yielded(SWITCHED);
        assert_eq!(phases(&until_sleep(&mut patience, SWITCHED)), [Step::Yield, Step::Sleep]);
    }

    #[test]
    fn with_more_ranks_than_cores_it_yields_longer_if_that_lets_others_run() {
        for mut patience in [Patience::new(Crowd::Cores), Patience::brief(Crowd::Cores)] {
            let useful = count(&until_sleep(&mut patience, SWITCHED), Step::Yield);
            let vain = count(&until_sleep(&mut patience, VAIN), Step::Yield);
            assert!(useful > vain, "{useful} and {vain}");
        }
    }

    #[test]
    fn a_yield_that_reaches_nobody_is_soon_given_up() {
        for patience in [Patience::new, Patience::brief] {
            let yields = |crowd| count(&until_sleep(&mut patience(crowd), VAIN), Step::Yield);
            assert!(yields(Crowd::Apart) < yields(Crowd::Cores));
        }
    }

    #[test]
    fn a_brief_wait_spins_but_for_a_rank_on_its_own_core() {
        let mut brief = Patience::brief(Crowd::Cores);
        assert_eq!(phases(&until_sleep(&mut brief, VAIN)), [Step::Spin, Step::Yield, Step::Sleep]);
        brief.is_near(true);
        assert_eq!(phases(&until_sleep(&mut brief, VAIN)), [Step::Yield, Step::Sleep]);
        brief.is_near(false);
        assert_eq!(phases(&until_sleep(&mut brief, VAIN)), [Step::Spin, Step::Yield, Step::Sleep]);
    }

    #[test]
    fn a_brief_wait_with_a_core_for_each_rank_keeps_it() {
        let steps = until_sleep(&mut Patience::brief(Crowd::No), VAIN);
        assert_eq!(phases(&steps), [Step::Spin, Step::Sleep]);
        let long = until_sleep(&mut Patience::new(Crowd::No), VAIN);
        assert!(count(&steps, Step::Spin) > count(&long, Step::Spin), "it hopes that the call is over soon");
    }
}
