//! The members of a job, and the nodes that wait for a round. Pure.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::super::messages::{AgentId, Order, Phase, Profile};
use super::{Rules, Time};

/// Maximum number of former members whose ids the coordinator remembers, to refuse them if they reconnect.
const MAX_FORMER_MEMBERS: usize = 100_000;

/// The state of one member, as far as the coordinator knows it.
#[derive(Debug)]
pub(super) struct MemberState {
    pub(super) profile: Profile,
    /// Sequence number of the latest status of this member.
    pub(super) seq: u64,
    pub(super) phase: Option<Phase>,
    /// Sequence numbers and receive times of statuses whose answers the member has not acknowledged.
    /// `last_acked` is the receive time of the latest status whose answer it has acknowledged.
    pub(super) unacked: VecDeque<(u64, Time)>,
    pub(super) last_acked: Time,
    /// Time at which the member is lost unless a status of it arrives before.
    pub(super) due: Time,
    pub(super) order: Option<Order>,
    pub(super) order_seq: u64,
    pub(super) last_probe: u64,
}

/// The members of a job.
#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) known: BTreeMap<AgentId, MemberState>,
    /// Number of members on each host. `max_on_host` is the largest number that any host ever had.
    hosts: HashMap<String, usize>,
    pub(super) max_on_host: usize,
    /// All members, ordered by the time at which they are lost unless a status arrives before.
    pub(super) due: BTreeSet<(Time, AgentId)>,
    /// Members that are ready but not in a running round, and the time since which they have been ready.
    pub(super) candidates: BTreeMap<AgentId, Time>,
    /// The members of `candidates`, ordered by that time, longest waiting first.
    pub(super) waiting: BTreeSet<(Time, AgentId)>,
    /// Number of candidates that were in the latest round.
    pub(super) returning_candidates: usize,
    /// Agents that the coordinator has removed: they were lost, left, or could not take part.
    pub(super) former: BTreeSet<AgentId>,
    /// Group rank of each node in the latest round.
    pub(super) ranks: BTreeMap<AgentId, usize>,
}

impl Members {
    pub(super) fn get(&self, agent: AgentId) -> Option<&MemberState> {
        self.known.get(&agent)
    }

    /// Returns the group rank of the agent in the latest round, or `None` if it took no part.
    pub(super) fn rank(&self, agent: AgentId) -> Option<usize> {
        self.ranks.get(&agent).copied()
    }

    pub(super) fn contains(&self, agent: AgentId) -> bool {
        self.known.contains_key(&agent)
    }

    pub(super) fn add(&mut self, rules: &Rules, now: Time, agent: AgentId, profile: Profile) {
        let nodes_on_host = self.hosts.entry(profile.host.clone()).or_default();
        *nodes_on_host += 1;
        self.max_on_host = self.max_on_host.max(*nodes_on_host);
        let due = now + rules.heartbeat_timeout_for(self.max_on_host);
        self.due.insert((due, agent));
        let known = MemberState {
            profile,
            seq: 0,
            phase: None,
            unacked: VecDeque::new(),
            last_acked: now,
            due,
            order: None,
            order_seq: 0,
            last_probe: 0,
        };
        self.known.insert(agent, known);
    }

    /// Sets the time at which the member is lost unless a status of it arrives before.
    pub(super) fn set_due(&mut self, agent: AgentId, due: Time) {
        let Some(known) = self.known.get_mut(&agent) else { return };
        self.due.remove(&(known.due, agent));
        known.due = due;
        self.due.insert((due, agent));
    }

    /// Removes a member and remembers its id, so that the coordinator refuses it if it reconnects.
    pub(super) fn remove(&mut self, agent: AgentId) {
        if let Some(known) = self.known.remove(&agent) {
            self.due.remove(&(known.due, agent));
            if let Some(nodes_on_host) = self.hosts.get_mut(&known.profile.host) {
                *nodes_on_host -= 1;
                if *nodes_on_host == 0 {
                    self.hosts.remove(&known.profile.host);
                }
            }
        }
        self.drop_candidate(agent);
        self.former.insert(agent);
        if self.former.len() > MAX_FORMER_MEMBERS {
            self.former.pop_first();
        }
    }

    pub(super) fn drop_candidate(&mut self, agent: AgentId) {
        if let Some(since) = self.candidates.remove(&agent) {
            self.waiting.remove(&(since, agent));
            self.returning_candidates -= usize::from(self.ranks.contains_key(&agent));
        }
    }

    pub(super) fn add_candidate(&mut self, now: Time, agent: AgentId) {
        if let Entry::Vacant(entry) = self.candidates.entry(agent) {
            entry.insert(now);
            self.waiting.insert((now, agent));
            self.returning_candidates += usize::from(self.ranks.contains_key(&agent));
        }
    }

    /// Returns true if at least half of the nodes of the latest round, not counting the agent `own`, are
    /// reachable. A node counts as reachable if it has acknowledged an answer to a status received at or
    /// after `since`. This proves that messages arrive in both directions, which a received status alone does
    /// not. O(n).
    pub(super) fn is_acked_by_half(&self, own: AgentId, since: Time) -> bool {
        let others = self.ranks.keys().filter(|agent| **agent != own);
        let (mut count, mut acked) = (0, 0);
        for agent in others {
            count += 1;
            acked += usize::from(self.known.get(agent).is_some_and(|known| known.last_acked >= since));
        }
        2 * acked >= count
    }
}
