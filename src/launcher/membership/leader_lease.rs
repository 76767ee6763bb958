//! The leader lease of a replaceable coordinator: the coordinator answers members only while no other
//! coordinator can have replaced it. Pure.
//!
//! The registry (etcd or a shared file) grants the coordinator a lease. A coordinator that is cut off from
//! the registry loses the lease, and a coordinator on another node may take over. A coordinator that reaches
//! neither the registry nor half of the nodes of its round therefore answers no statuses. Without answers its
//! members, its own node included, lose their own leases and must stop their workers.

use std::time::Duration;

use super::coordinator::{Coordinator, Time};
use super::injected_bug::Bug;
use super::messages::AgentId;

/// Number of times that a coordinator renews its leader lease within `ttl`, the time to live of that lease.
pub(crate) const RENEWALS_PER_TTL: u32 = 4;

/// Returns how long the coordinator's own node may have workers after its last answered status.
/// `heartbeat_timeout` is the heartbeat timeout of the round. This lease is shorter than that of other nodes,
/// because a successor of the coordinator waits until it has ended.
pub(crate) fn leader_node_lease(heartbeat_timeout: Duration) -> Duration {
    heartbeat_timeout * 4 / 15
}

/// Returns the maximum age of a confirmation, by the registry or by a member, with which the coordinator
/// still answers members. `ttl` is the time to live of the leader lease.
fn max_unconfirmed_time(ttl: Duration) -> Duration {
    ttl * 3 / 5
}

/// Returns true if the leader lease cannot have expired, so that no other coordinator can have taken over for
/// that reason. `unconfirmed` is the time since the coordinator sent the last request by which the registry
/// confirmed the lease. `ttl` is the time to live of the lease.
pub(crate) fn is_confirmed(unconfirmed: Duration, ttl: Duration) -> bool {
    unconfirmed < max_unconfirmed_time(ttl)
}

/// Returns true if the coordinator of the agent `own` may answer members at `now` although [`is_confirmed`]
/// is false. It may if half of the other nodes of the latest round are reachable, or if no member may have
/// workers. O(n).
pub(crate) fn has_quorum(coordinator: &Coordinator, own: AgentId, now: Time, ttl: Duration) -> bool {
    let acked = || coordinator.is_acked_by_half(own, now.saturating_sub(max_unconfirmed_time(ttl)));
    coordinator.injected_bug.is(Bug::AnswersWithoutQuorum) || coordinator.is_idle() || acked()
}

/// Returns how long a successor waits for the former coordinator's node once that coordinator's lease of
/// `ttl` has expired. After this time that node has no workers, even if it receives no further message.
/// `heartbeat_timeout` is the heartbeat timeout of the round.
pub(crate) fn takeover_delay(heartbeat_timeout: Duration, ttl: Duration) -> Duration {
    // The former coordinator renewed its lease at most one renewal interval before it was cut off. It may
    // have answered its own node for `max_unconfirmed_time` after it was cut off, and that node's lease began
    // with the last answer. The margin allows for clock drift and for the time that workers take to die.
    let margin = heartbeat_timeout / 10;
    (leader_node_lease(heartbeat_timeout) + max_unconfirmed_time(ttl) + margin)
        .saturating_sub(ttl - ttl / RENEWALS_PER_TTL)
}
