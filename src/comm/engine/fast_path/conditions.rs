//! The conditions under which a call runs inline.

use std::time::Instant;

use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::ReduceOp;
use crate::engine::affinity::Placement;
use crate::engine::settings::Settings;
use crate::engine::state::Engine;
use crate::engine::wait_policy::{Oversubscription, WaitMedium};
use crate::shm::HostMemory;

/// Inline calls between two polls for goodbyes and unexpected messages. Failures need no poll: shared memory has
/// a flag for them. A poll takes about 2 µs. One in 256 calls determined the 99th percentile of short messages.
const CALLS_BETWEEN_POLLS: u32 = 1024;
/// Inline calls over connections between two polls for failures and other events.
const CONNECTION_CALLS_BETWEEN_POLLS: u32 = 64;
/// Inline collectives between two checks whether this thread is on its assigned core, if there are more ranks
/// than cores.
const COLLECTIVES_BETWEEN_CORE_CHECKS: u32 = 16;
/// Inline messages between two such checks. Messages for which ranks are [packed](Placement::Packed) are long, and each is checked.
const MESSAGES_BETWEEN_CORE_CHECKS: u32 = 256;

/// Attempts of a short call to find its data before it makes its flight recorder entry, if each rank has a core. They
/// take 0.3 to 0.5 µs. The data of a rank that makes its call now arrives in this time. A call that ends before needs
/// one change of the flight recorder instead of two.
const FIRST_ATTEMPTS: u32 = 8;

/// Attempts to find that the receiver of a large message is ready, if each rank has a core. Over TCP they take about
/// 20 µs. An announcement and its answer take about as long, and delay the data behind them.
const READY_ATTEMPTS: u32 = 64;

impl Engine {
    /// Counts an inline call. Returns whether the call may run inline: nothing is queued, and the group works.
    #[inline(always)]
    pub(super) fn may_run_inline(&mut self, medium: WaitMedium, call: Call) -> bool {
        let calls_between_polls = match medium {
            WaitMedium::SharedMemory => CALLS_BETWEEN_POLLS,
            WaitMedium::Connection => CONNECTION_CALLS_BETWEEN_POLLS,
        };
        self.driver.rounds = self.driver.rounds.wrapping_add(1);
        if self.driver.rounds.is_multiple_of(calls_between_polls) {
            self.poll_events(Instant::now());
        }
        let placement = Placement::of(call, medium);
        let calls_between_core_checks = match (call.kind, placement) {
            (_, Placement::Packed) => 1,
            (CallKind::PointToPoint, Placement::Spread) => MESSAGES_BETWEEN_CORE_CHECKS,
            (_, Placement::Spread) => COLLECTIVES_BETWEEN_CORE_CHECKS,
        };
        if self.driver.rounds.is_multiple_of(calls_between_core_checks) {
            self.driver.affinity.set_placement(placement);
            // Linux would not move a thread that yields and never sleeps to another core.
            self.driver.affinity.move_to_assigned_core();
        }
        self.failure.is_none()
            && !self.lifecycle.left
            && self.collectives.queue.is_empty()
            && self.host.memory.as_ref().is_none_or(|node| !node.has_failed())
            && !self.submissions.has_submissions()
    }
}

/// Returns how often a short call looks for its data before it makes its flight recorder entry and wakes sleeping
/// ranks.
#[inline(always)]
pub(super) fn first_attempts(settings: &Settings) -> u32 {
    if settings.sharing.oversubscription == Oversubscription::No { FIRST_ATTEMPTS } else { 1 }
}

/// Returns how often the sender of a large message looks whether the receiver is ready, before it announces the message.
pub(super) fn ready_attempts(settings: &Settings) -> u32 {
    if settings.sharing.oversubscription == Oversubscription::No { READY_ATTEMPTS } else { 1 }
}

/// Returns whether a call reduces with a function of the program. The function may take any time, so the
/// call's flight recorder entry is made before it runs.
pub(super) fn runs_function(call: Call) -> bool {
    call.op == Some(ReduceOp::Custom)
}

/// Returns whether one of `ranks` runs on the core of this rank.
pub(super) fn shares_core(node: &mut Option<HostMemory>, ranks: impl IntoIterator<Item = usize>) -> bool {
    node.as_mut().is_some_and(|node| node.shares_core_with_any(ranks))
}
