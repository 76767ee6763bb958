//! Mistakes that the simulation must find; only its tests can switch one on. Pure.

/// One for each thing that must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bug {
    /// A round begins while others still stop the workers of the last one.
    StartsTooEarly,
    /// A rank that a lost node leaves open stays open.
    LeavesHoles,
    /// A node says that its workers have stopped when they have only been told to.
    KeepsOldWorkers,
    /// A node that hears nobody any more lets its workers run.
    RunsOnAlone,
    /// Who is lost while it stops its workers is waited for.
    WaitsForTheDead,
    /// A member that comes back after its connection broke is taken for a new one.
    RestartsForNothing,
    /// A coordinator that hears neither etcd nor half of its round answers all the same.
    AnswersUnheard,
}

/// The mistake that one machine makes: none outside of tests.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Planted {
    #[cfg(test)]
    pub(super) bug: Option<Bug>,
}

impl Planted {
    #[cfg(test)]
    pub(super) fn is(self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    #[cfg(not(test))]
    pub(super) const fn is(self, _: Bug) -> bool {
        false
    }
}
