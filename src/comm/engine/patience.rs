//! What a rank does that waits and finds nothing to move: spin, yield its core, or sleep. Pure.
//!
//! A sleeper costs its sender a wake-up, and wakes late; who spins or yields burns what somebody else may need. Where
//! there is a core for each rank, what is waited for is nearly always there within microseconds. Where there is not,
//! whoever is waited for needs this core, and has it soonest if this rank yields; but a system that schedules sessions
//! before threads (autogroups) takes no notice of a yield, and then only sleeping helps.

use std::time::Duration;

/// Attempts that only spin, and those after it that yield.
const SPINS: u32 = 20;
const YIELDS: u32 = 100;
/// With more ranks than cores: yields in a row that let nobody else run. As a rule nobody else needs the core then, and
/// what is waited for comes from another one.
const CROWDED_VAIN_YIELDS: u32 = 30;
/// The same where a yield does not reach the other ranks.
const APART_VAIN_YIELDS: u32 = 3;
/// A yield that takes as long as this let somebody else run.
const SWITCH: Duration = Duration::from_nanos(900);
/// Yields that let somebody else run, though there are cores for all, until this rank sleeps for once, or goes to
/// another core.
const SHARED: u32 = 16;

/// Of an attempt to be through with a call before it becomes an operation: attempts that only look again, and yields.
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
    /// The same, and a yield may not reach them: the system schedules sessions, and this rank has one of its own.
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

    /// For one call that is hoped to be over soon: in place of sleeping it becomes an operation. With more ranks than cores
    /// it spins as long as those that it waits for are not [near](Self::is_near).
    pub(super) fn brief(crowd: Crowd) -> Self {
        let limits = match crowd {
            Crowd::No => Limits { spins: BRIEF_SPINS, yields: 0, vain: 0 },
            Crowd::Cores => Limits { spins: CROWDED_SPINS, yields: BRIEF_YIELDS, vain: BRIEF_VAIN_YIELDS },
            Crowd::Apart => Limits { spins: 0, yields: APART_VAIN_YIELDS, vain: APART_VAIN_YIELDS },
        };
        Self::of(crowd, limits)
    }

    fn of(crowd: Crowd, limits: Limits) -> Self {
        Self { crowd, limits, spins: 0, yields: 0, vain: 0, shared: 0, near: false }
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

    /// What it does until it sleeps, if all yields take so long.
    fn until_sleep(patience: &mut Patience, took: Duration) -> (u32, u32) {
        let (mut spins, mut yields) = (0, 0);
        loop {
            match patience.step(false) {
                Step::Spin => spins += 1,
                Step::Yield => {
                    yields += 1;
                    patience.yielded(took);
                }
                Step::Sleep => return (spins, yields),
            }
        }
    }

    #[test]
    fn with_a_core_for_each_rank_it_spins_then_yields_then_sleeps() {
        let mut patience = Patience::new(Crowd::No);
        for _ in 0..3 {
            assert_eq!(until_sleep(&mut patience, VAIN), (SPINS, YIELDS));
        }
        assert_eq!(patience.step(true), Step::Sleep, "nobody waits");
    }

    #[test]
    fn who_moves_begins_anew() {
        let mut patience = Patience::new(Crowd::Cores);
        for _ in 0..10 * YIELDS {
            assert_eq!(patience.step(false), Step::Yield);
            patience.yielded(VAIN);
            patience.moved();
        }
    }

    #[test]
    fn a_rank_that_shares_its_core_though_there_are_enough_sleeps_for_once() {
        let mut patience = Patience::new(Crowd::No);
        for _ in 0..3 {
            assert_eq!(until_sleep(&mut patience, SWITCHED), (SPINS, SHARED));
        }
        // Also if each wait is short.
        for wait in 1.. {
            while patience.step(false) == Step::Spin {}
            patience.yielded(SWITCHED);
            patience.moved();
            if wait == SHARED {
                break;
            }
        }
        assert_eq!(patience.step(false), Step::Sleep);
        assert_eq!(patience.step(false), Step::Spin);
    }

    #[test]
    fn it_counts_as_long_as_a_job_goes_on() {
        let mut patience = Patience { shared: u32::MAX, ..Patience::new(Crowd::Cores) };
        patience.yielded(SWITCHED);
        assert_eq!(until_sleep(&mut patience, SWITCHED), (0, YIELDS));
    }

    #[test]
    fn with_more_ranks_than_cores_it_yields_as_long_as_that_lets_others_run() {
        let mut patience = Patience::new(Crowd::Cores);
        assert_eq!(until_sleep(&mut patience, SWITCHED), (0, YIELDS));
        assert_eq!(until_sleep(&mut patience, VAIN), (0, CROWDED_VAIN_YIELDS));
        let mut brief = Patience::brief(Crowd::Cores);
        assert_eq!(until_sleep(&mut brief, SWITCHED), (CROWDED_SPINS, BRIEF_YIELDS));
        assert_eq!(until_sleep(&mut brief, VAIN), (CROWDED_SPINS, BRIEF_VAIN_YIELDS));
        brief.is_near(true);
        assert_eq!(until_sleep(&mut brief, SWITCHED), (0, BRIEF_YIELDS), "who is waited for needs this core");
        assert_eq!(until_sleep(&mut Patience::brief(Crowd::No), VAIN), (BRIEF_SPINS, 0));
        assert_eq!(until_sleep(&mut Patience::new(Crowd::Apart), VAIN), (0, APART_VAIN_YIELDS));
    }
}
