//! The leader lease of a replaceable coordinator: the coordinator answers members only while no other can
//! have replaced it. Pure.
//!
//! The registry (etcd or a shared file) grants the coordinator a lease. A coordinator that is cut off from
//! the registry loses the lease, and another one may take over. A coordinator that reaches neither the
//! registry nor half of its round therefore answers no statuses. Its members, and its own node as well, then
//! lose their own leases, which are the right to have workers.

use std::time::Duration;

use super::bug::Bug;
use super::coordinator::{Coordinator, Time};
use super::messages::AgentId;

/// Number of renewals of a leader lease within its `ttl`.
pub(crate) const BEATS: u32 = 4;

/// Returns how long the coordinator's own node may have workers after its last answered status.
/// `silence` is the heartbeat timeout of the other nodes. The own lease is shorter because a successor waits
/// for it to end.
pub(crate) fn own_lease(silence: Duration) -> Duration {
    silence * 4 / 15
}

/// Returns the maximum age of a sign of life that still counts.
fn tolerance(ttl: Duration) -> Duration {
    ttl * 3 / 5
}

/// Returns true if no other coordinator can have taken over because our lease expired.
/// `unconfirmed` is the time since we sent the last request by which the registry confirmed the lease.
pub(crate) fn is_certain(unconfirmed: Duration, ttl: Duration) -> bool {
    unconfirmed < tolerance(ttl)
}

/// Returns true if the coordinator of the agent `own` may answer members at `now` although [`is_certain`] is
/// false. O(n).
pub(crate) fn is_in_touch(coordinator: &Coordinator, own: AgentId, now: Time, ttl: Duration) -> bool {
    let heard = || coordinator.is_heard_by_half(own, now.saturating_sub(tolerance(ttl)));
    coordinator.planted.is(Bug::AnswersUnheard) || coordinator.is_idle() || heard()
}

/// Returns how long a successor waits for the former coordinator's node once that coordinator's lease of
/// `ttl` has expired. That node has no workers after this time, whatever it hears. `silence` is the
/// heartbeat timeout of the round.
pub(crate) fn patience(silence: Duration, ttl: Duration) -> Duration {
    // The former coordinator renewed its lease at most one renewal interval before it was cut off. It may
    // have answered its own node for the tolerance after that, and that node's lease began with the last
    // answer. The margin allows for clock drift and for the time that workers take to die.
    let margin = silence / 10;
    (own_lease(silence) + tolerance(ttl) + margin).saturating_sub(ttl - ttl / BEATS)
}
