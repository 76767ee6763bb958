//! The phases of a rank's membership in a group: it connects, works, finishes its operations, and leaves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::completion::Completion;

/// Interval at which a leaving rank asks the other ranks which calls they wait in. A reported wait for a
/// message counts only if it comes this long after the last bytes were on the way: they have then arrived.
pub(super) const SETTLE: Duration = Duration::from_millis(250);

/// The state of a rank that leaves the group as soon as its operations are done.
#[derive(Debug)]
pub(super) struct Finishing {
    pub(super) since: Instant,
    /// The time at which this rank last asked the other ranks which calls they wait in.
    pub(super) queried_at: Instant,
    /// For each peer, the time at which bytes that this rank sent were last seen on the way to the peer.
    pub(super) last_in_flight: Vec<Instant>,
}

impl Finishing {
    /// Returns when to ask the other ranks again which calls they wait in.
    pub(super) fn wake_at(&self) -> Instant {
        self.queried_at + SETTLE
    }
}

#[derive(Debug, Default)]
pub(super) struct Lifecycle {
    /// True while the group forms: other ranks may still connect.
    pub(super) connecting: bool,
    /// Set when this rank makes no more calls: it leaves as soon as its pending operations are done.
    pub(super) finishing: Option<Finishing>,
    /// Completions of callers that wait until nothing is pending and this rank has left the group.
    pub(super) leaving: Vec<Arc<Completion>>,
    pub(super) left: bool,
}
