//! The record of a job, written before anybody acts on it, so that another coordinator can continue. Pure.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::messages::{AgentId, Ending, Profile};

/// State of the latest round, and the outcome of the job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Version of this format.
    pub(crate) version: u32,
    /// Number of the latest round; 0 before the first.
    pub(crate) round: u64,
    pub(crate) generation: [u8; 16],
    /// Nodes of the round, by group rank.
    pub(crate) seats: Vec<Seat>,
    /// Group ranks of nodes that a signal has stopped and that have no workers any more, and the signal.
    pub(crate) left: Vec<(usize, i32)>,
    /// Addresses of the store of the workers.
    pub(crate) store: Vec<String>,
    /// Restarts used up by failures, if they are counted for the whole job.
    pub(crate) failures: u32,
    /// Outcome of the job, if it has ended.
    pub(crate) ending: Option<Ending>,
}

/// A node of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seat {
    pub(crate) agent: AgentId,
    pub(crate) profile: Profile,
}

impl Record {
    /// Returns the largest number of nodes of the round on one host. O(n).
    pub(crate) fn crowd(&self) -> usize {
        let mut hosts = HashMap::<&str, usize>::new();
        for seat in &self.seats {
            *hosts.entry(&seat.profile.host).or_default() += 1;
        }
        hosts.into_values().max().unwrap_or_default()
    }

    /// Current version of the format.
    pub(crate) const VERSION: u32 = 1;

    /// Returns the record of a job that has had no round.
    pub(crate) fn of_nothing() -> Self {
        Self { version: Self::VERSION, ..Self::default() }
    }
}
