//! What is written down of a job before anybody acts on it, so that another coordinator can go on. Pure.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::messages::{AgentId, Ending, Profile};

/// Of the latest round, and of the end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Of this form.
    pub(crate) version: u32,
    /// The latest round; 0 before the first.
    pub(crate) round: u64,
    pub(crate) generation: [u8; 16],
    /// Its nodes, by group rank.
    pub(crate) seats: Vec<Seat>,
    /// Those of them that a signal has stopped, which have no workers any more, and the signal.
    pub(crate) left: Vec<(usize, i32)>,
    /// Where the store of its workers is served.
    pub(crate) store: Vec<String>,
    /// Restarts that failures have used up, where they are counted for the whole job.
    pub(crate) failures: u32,
    /// How the job ended.
    pub(crate) ending: Option<Ending>,
}

/// A node of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seat {
    pub(crate) agent: AgentId,
    pub(crate) profile: Profile,
}

impl Record {
    /// The most of its nodes that are on one host. O(n).
    pub(crate) fn crowd(&self) -> usize {
        let mut hosts = HashMap::<&str, usize>::new();
        for seat in &self.seats {
            *hosts.entry(&seat.profile.host).or_default() += 1;
        }
        hosts.into_values().max().unwrap_or_default()
    }

    /// The present form.
    pub(crate) const VERSION: u32 = 1;

    /// Of a job that has had no round.
    pub(crate) fn of_nothing() -> Self {
        Self { version: Self::VERSION, ..Self::default() }
    }
}
