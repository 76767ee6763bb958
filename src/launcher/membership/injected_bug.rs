//! Deliberate bugs of the membership protocol, which the simulation test must detect. Only tests can enable
//! one. Pure.

/// A deliberate bug: one for each behaviour that the simulation test must detect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bug {
    /// A round starts while some nodes are still stopping their workers of the previous round.
    StartsTooEarly,
    /// The rank of a lost node stays unassigned in the next round.
    LeavesRankGaps,
    /// A node reports that its workers have stopped although it has only asked them to stop.
    KeepsOldWorkers,
    /// A node that receives no answers from the coordinator lets its workers continue.
    RunsWhilePartitioned,
    /// The coordinator waits for the workers of a node that was lost while it was stopping them.
    WaitsForLostNode,
    /// The coordinator treats a member that reconnects as a new member.
    RestartsOnReconnect,
    /// A coordinator that reaches neither the registry nor half of the nodes of its round answers members
    /// nevertheless.
    AnswersWithoutQuorum,
}

/// The bug that is enabled: none outside of tests.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct InjectedBug {
    #[cfg(test)]
    pub(super) bug: Option<Bug>,
}

impl InjectedBug {
    #[cfg(test)]
    pub(super) fn is(self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    #[cfg(not(test))]
    pub(super) const fn is(self, _: Bug) -> bool {
        false
    }
}
