//! When a coordinator that another one may replace may tell members that they have been heard, and how long whoever
//! replaces it waits. Pure.
//!
//! The place that says who coordinates gives it a lease. Who is cut off from the place loses that, and another one may
//! take over. So a coordinator that is in touch neither with the place nor with half of its round tells nobody that it
//! has heard them: their own leases, which are the right to have workers, end, and that of its own node as well.

use std::time::Duration;

use super::bug::Bug;
use super::coordinator::{Coordinator, Time};
use super::messages::AgentId;

/// How often its lease of `ttl` is kept alive in that time.
pub(crate) const BEATS: u32 = 4;

/// How long the node whose process has the coordinator may have workers after the last status that was answered, where
/// others are lost after this silence: shorter than they, since they wait for it.
pub(crate) fn own_lease(silence: Duration) -> Duration {
    silence * 4 / 15
}

/// How long ago a sign of life may be that still counts.
fn tolerance(ttl: Duration) -> Duration {
    ttl * 3 / 5
}

/// Whether nobody else can have taken over for want of a lease, if the place was last asked so long ago that has said
/// that the lease lives.
pub(crate) fn is_certain(unconfirmed: Duration, ttl: Duration) -> bool {
    unconfirmed < tolerance(ttl)
}

/// Whether members may be told so though that is not certain: at `now`, a coordinator of the agent `own`. O(n).
pub(crate) fn is_in_touch(coordinator: &Coordinator, own: AgentId, now: Time, ttl: Duration) -> bool {
    let heard = || coordinator.is_heard_by_half(own, now.saturating_sub(tolerance(ttl)));
    coordinator.planted.is(Bug::AnswersUnheard) || coordinator.is_idle() || heard()
}

/// How long whoever finds a lease of `ttl` ended, and takes over, waits for the node that had the coordinator of a round
/// with this `silence`: by then that has no workers any more, whatever it hears.
pub(crate) fn patience(silence: Duration, ttl: Duration) -> Duration {
    // When it was cut off it had kept the lease alive at most a beat before. For the tolerance after that it may have
    // answered its own node, whose lease began with the last answer. Clocks differ, and workers take time to die.
    let margin = silence / 10;
    (own_lease(silence) + tolerance(ttl) + margin).saturating_sub(ttl - ttl / BEATS)
}
