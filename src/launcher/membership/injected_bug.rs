//! Bugs that the simulation must find. Only its tests can enable one. Pure.

/// One bug for each forbidden behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bug {
    /// A round begins while others still stop the workers of the last one.
    StartsTooEarly,
    /// The rank of a lost node stays unassigned.
    LeavesRankGaps,
    /// A node reports that its workers have stopped when they have only been told to.
    KeepsOldWorkers,
    /// A node that receives no answers lets its workers run.
    RunsWhilePartitioned,
    /// The coordinator waits for a node that is lost while it stops its workers.
    WaitsForLostNode,
    /// The coordinator treats a member that reconnects as a new one.
    RestartsOnReconnect,
    /// A coordinator that reaches neither the registry nor half of its round answers members nevertheless.
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
