//! An agent of the simulation: a member, and workers that run, end and take time to stop.

use std::time::Duration;

use super::super::*;

/// Workers of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Workers {
    pub(super) round: u64,
    /// True while they are being stopped.
    pub(super) stopping: bool,
}

#[derive(Debug)]
pub(super) struct Agent {
    pub(super) id: AgentId,
    pub(super) profile: Profile,
    pub(super) member: Member,
    pub(super) workers: Option<Workers>,
    pub(super) restarts: u32,
    pub(super) max_restarts: u32,
    /// True if its process exists.
    pub(super) alive: bool,
    /// Result of the agent, if it has ended by itself.
    pub(super) ended: Option<Command>,
    pub(super) paused: bool,
    /// True if its host has no power.
    pub(super) powered_off: bool,
    /// True if it cannot reach etcd.
    pub(super) is_cut_from_etcd: bool,
    /// Term of the coordinator that it is connected to.
    /// `last_message_at` is the time of the last message from that.
    pub(super) term: u64,
    pub(super) last_message_at: Duration,
    /// True if no message from it arrives. `inbound_cut` is true if no message to it arrives.
    pub(super) outbound_cut: bool,
    pub(super) inbound_cut: bool,
    /// Offset of its clock from the simulation's. `drift_ppm` is the clock's rate error in millionths.
    pub(super) offset: Duration,
    pub(super) drift_ppm: i64,
    /// Round in which a worker of this agent failed by itself.
    pub(super) failed_round: Option<u64>,
    /// True if it was cut off, paused or killed at some time, so that others may consider it lost.
    pub(super) was_disturbed: bool,
    /// Last round that it was in.
    pub(super) last_round: u64,
    /// True if it has been told to stop the workers of that round.
    pub(super) stop_ordered: bool,
}

impl Agent {
    pub(super) fn new(id: AgentId, profile: Profile, max_restarts: u32, heartbeat_timeout: Duration) -> Self {
        Self {
            id,
            profile,
            member: Member::new(ready(id, 0, 0), heartbeat_timeout),
            workers: None,
            restarts: 0,
            max_restarts,
            alive: true,
            ended: None,
            paused: false,
            powered_off: false,
            is_cut_from_etcd: false,
            term: 0,
            last_message_at: Duration::ZERO,
            outbound_cut: false,
            inbound_cut: false,
            offset: Duration::ZERO,
            drift_ppm: 0,
            failed_round: None,
            was_disturbed: false,
            last_round: 0,
            stop_ordered: false,
        }
    }

    /// Returns the time of its clock.
    pub(super) fn local(&self, now: Duration) -> Duration {
        let micros = i128::try_from(now.as_micros()).unwrap();
        let drifted = micros + micros * i128::from(self.drift_ppm) / 1_000_000;
        self.offset + Duration::from_micros(u64::try_from(drifted).unwrap())
    }

    /// Stops its workers, because no answer came within its lease.
    pub(super) fn mark_partitioned(&mut self) {
        let after = self.last_round;
        let store = vec![format!("{:x}:1", self.id.0)];
        self.member.enter(Phase::Ready { after, restarts: self.restarts, store, partitioned: true });
        self.workers = None;
        self.was_disturbed = true;
    }

    /// Rejoins as a new agent, because the others have continued without it.
    pub(super) fn rejoin_as(&mut self, id: AgentId, heartbeat_timeout: Duration) {
        self.id = id;
        let mut member = Member::new(ready(id, 0, self.restarts), heartbeat_timeout);
        member.injected_bug = self.member.injected_bug;
        self.member = member;
        self.workers = None;
        self.stop_ordered = false;
    }

    pub(super) fn status(&mut self, now: Duration) -> Status {
        let local = self.local(now);
        self.member.status(local)
    }

    pub(super) fn is_active(&self) -> bool {
        self.alive && self.ended.is_none()
    }
}

pub(super) fn ready(id: AgentId, after: u64, restarts: u32) -> Phase {
    Phase::Ready { after, restarts, store: vec![format!("{:x}:1", id.0)], partitioned: false }
}
