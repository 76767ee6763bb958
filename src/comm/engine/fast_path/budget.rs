//! The limit of the attempts to run an operation inline.

use std::time::Instant;

use crate::engine::settings::Settings;
use crate::engine::state::Driver;
use crate::engine::wait_policy::{Oversubscription, WaitAction, WaitMedium, WaitPolicy};
use crate::flight;

/// Attempts between two `pause` instructions, each of which takes about as long as the awaited data.
const SPINS_PER_PAUSE: u32 = 8;
/// Most times that one inline call moves data. Then it is queued, so that other events are polled too. Each chunk of a
/// collective counts: 1 MiB has 32.
const MAX_ROUNDS: u32 = 128;
/// Most times that one inline call moves data over a connection: each may take as long as 4 MiB.
const MAX_CONNECTION_ROUNDS: u32 = 32;

/// Limits for how long an operation is tried inline.
pub(super) struct RetryBudget {
    wait_policy: WaitPolicy,
    /// The number of times that the call may still move data.
    rounds_left: u32,
    failed_spins: u32,
    /// There are more ranks than cores.
    oversubscribed: bool,
    /// Find out before the next pause whether an awaited rank runs on this core; each yield can change that.
    check_core: bool,
    /// So far the operation has only spun: no retry moved data, and it has not yielded.
    only_spun: bool,
}

impl RetryBudget {
    pub(super) fn new(settings: &Settings, driver: &Driver, medium: WaitMedium, bytes: u64) -> Self {
        let oversubscribed = settings.sharing.oversubscription == Oversubscription::Cores;
        Self {
            wait_policy: driver.wait_policy.for_inline(medium, bytes),
            rounds_left: match medium {
                WaitMedium::SharedMemory => MAX_ROUNDS,
                WaitMedium::Connection => MAX_CONNECTION_ROUNDS,
            },
            failed_spins: 0,
            oversubscribed,
            check_core: oversubscribed,
            only_spun: true,
        }
    }

    /// Pauses if the last attempt has not `moved` data. Returns whether to try again. `on_this_core` says
    /// whether an awaited rank runs on the core of this rank.
    #[inline]
    pub(super) fn may_retry(&mut self, moved: bool, on_this_core: impl FnOnce() -> bool) -> bool {
        if moved {
            self.rounds_left -= 1;
            self.only_spun = false;
            self.wait_policy.record_progress();
            return self.rounds_left > 0;
        }
        if std::mem::take(&mut self.check_core) {
            self.wait_policy.set_shares_core(on_this_core());
        }
        match self.wait_policy.next_action(false) {
            WaitAction::Spin => {
                self.failed_spins += 1;
                if self.failed_spins.is_multiple_of(SPINS_PER_PAUSE) {
                    std::hint::spin_loop();
                }
            }
            WaitAction::Yield => {
                self.only_spun = false;
                let begin = Instant::now();
                std::thread::yield_now();
                self.wait_policy.record_yield(begin.elapsed());
                self.check_core = self.oversubscribed;
            }
            WaitAction::Sleep => return false,
        }
        true
    }

    /// Records in the flight recorder that the operation is done, and whether it ended without a real wait.
    #[inline]
    pub(super) fn end(&self, step: &flight::CallRecord) {
        if self.only_spun { step.end_immediately() } else { step.end(true) }
    }
}
