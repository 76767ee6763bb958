//! One node's part of the membership protocol: the statuses that it sends, the orders that it receives, and
//! its right to have workers. Pure.
//!
//! The right to have workers is a lease. The coordinator evicts a member from which no status arrives for the
//! heartbeat timeout, and starts a round without it. The member's lease ([`Member::lease`]) is slightly
//! shorter, so that a member without answers has stopped its workers by then. Each side measures with its own
//! clock from the last answered status: the member from sending it, the coordinator from receiving it. So the
//! clocks need not agree.

use std::collections::VecDeque;
use std::time::Duration;

use super::injected_bug::{Bug, InjectedBug};
use super::leader_lease::leader_node_lease;
use super::messages::{
    Assignment, JobResult, JoinStatus, Order, OrderMessage, Phase, Refusal, RestartCause, Status,
};

/// Maximum number of unanswered statuses whose send times a member remembers.
const MAX_UNANSWERED_STATUSES: usize = 64;

/// Instruction that follows from an order, for the node's agent to carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    Wait(JoinStatus),
    Run(Assignment),
    Stop(RestartCause),
    End(JobResult),
    Refuse(Refusal),
}

/// Membership state of one node.
#[derive(Debug)]
pub(crate) struct Member {
    /// Heartbeat timeout of this member.
    heartbeat_timeout: Duration,
    /// True if this process runs the coordinator and a coordinator on another node may replace it.
    is_coordinator: bool,
    phase: Phase,
    seq: u64,
    last_order: (u64, u64),
    last_probe: u64,
    /// Number of the latest round that the coordinator told the member to stop.
    last_ended_round: u64,
    /// Sequence numbers and send times of the latest unanswered statuses, oldest first.
    sent: VecDeque<(u64, Duration)>,
    /// Sequence number of the latest answered status. `answered` is the time at which that status was sent.
    answered_seq: u64,
    answered: Option<Duration>,
    /// True if the member is stopping its workers because it receives no answers from the coordinator.
    partitioned: bool,
    pub(super) injected_bug: InjectedBug,
}

impl Member {
    /// Returns a member in `phase`. `heartbeat_timeout` applies until an order to run a round sets another
    /// timeout.
    pub(crate) fn new(phase: Phase, heartbeat_timeout: Duration) -> Self {
        Self {
            heartbeat_timeout,
            is_coordinator: false,
            phase,
            seq: 0,
            last_order: (0, 0),
            last_probe: 0,
            last_ended_round: 0,
            sent: VecDeque::new(),
            answered_seq: 0,
            answered: None,
            partitioned: false,
            injected_bug: InjectedBug::default(),
        }
    }

    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Changes the phase of this member. The caller sends the new status at once.
    pub(crate) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        if let Phase::Ready { after, .. } = &mut self.phase {
            // The coordinator may have ended rounds later than the last round of this node.
            *after = self.last_ended_round.max(*after);
        }
        self.partitioned = false;
    }

    /// Sets whether this process runs a coordinator that a coordinator on another node may replace.
    pub(crate) fn set_coordinator(&mut self, is_coordinator: bool) {
        self.is_coordinator = is_coordinator;
    }

    /// Returns the interval at which this member sends its status. Most members send every
    /// `heartbeat_interval`. The node of a replaceable coordinator has a shorter lease and sends twice as
    /// often.
    pub(crate) fn heartbeat_interval(&self, heartbeat_interval: Duration) -> Duration {
        if self.is_coordinator { heartbeat_interval / 2 } else { heartbeat_interval }
    }

    /// Returns the lease: the time after the last answered status was sent at which the right to have workers
    /// ends.
    pub(crate) fn lease(&self) -> Duration {
        let timeout = self.heartbeat_timeout;
        if self.is_coordinator { leader_node_lease(timeout) } else { timeout * 4 / 5 }
    }

    /// Notes that the lease has ended and that the node is stopping its workers.
    pub(crate) fn mark_partitioned(&mut self) {
        self.partitioned = true;
    }

    /// Notes that the coordinator has evicted this node, and that the node rejoins under a new agent id.
    pub(crate) fn rejoin(&mut self) {
        self.partitioned = true;
        self.last_order.1 = 0;
        self.sent.clear();
    }

    /// Forgets the order and the answers of a coordinator that belonged to another job.
    pub(crate) fn forget_coordinator(&mut self) {
        (self.last_order, self.last_probe) = ((0, 0), 0);
        self.sent.clear();
    }

    /// Returns the next status, which the caller sends at `now`.
    pub(crate) fn status(&mut self, now: Duration) -> Status {
        self.seq += 1;
        self.sent.push_back((self.seq, now));
        if self.sent.len() > MAX_UNANSWERED_STATUSES {
            self.sent.pop_front();
        }
        let (phase, answered) = (self.phase.clone(), self.answered_seq);
        Status { seq: self.seq, phase, last_order: self.last_order, last_probe: self.last_probe, answered }
    }

    /// Processes a message of the coordinator. Returns a command for the node, if any, and whether the caller
    /// must send the next status at once.
    pub(crate) fn receive(&mut self, message: OrderMessage) -> (Option<Command>, bool) {
        if message.term < self.last_order.0 {
            // The message is from a coordinator that another coordinator has replaced.
            return (None, false);
        }
        while let Some(&(seq, at)) = self.sent.front()
            && seq <= message.last_status
        {
            self.answered = self.answered.max(Some(at));
            self.answered_seq = self.answered_seq.max(seq);
            self.sent.pop_front();
        }
        let is_probed = message.probe > self.last_probe;
        self.last_probe = self.last_probe.max(message.probe);
        let Some(order) = message.order.filter(|_| (message.term, message.seq) > self.last_order) else {
            return (None, is_probed);
        };
        self.last_order = (message.term, message.seq);
        (self.apply_order(order), true)
    }

    fn apply_order(&mut self, order: Order) -> Option<Command> {
        let keeps_old = self.injected_bug.is(Bug::KeepsOldWorkers);
        if let Order::Stop { round, .. } = &order {
            self.last_ended_round = self.last_ended_round.max(*round);
        }
        match (order, &mut self.phase) {
            (_, Phase::Left(_) | Phase::Leaving { .. }) => None,
            (Order::Wait(join_status), Phase::Ready { .. }) => Some(Command::Wait(join_status)),
            (Order::Run(assignment), Phase::Ready { after, .. }) if assignment.round > *after => {
                self.heartbeat_timeout = assignment.heartbeat_timeout;
                Some(Command::Run(assignment))
            }
            (Order::Stop { round, .. }, Phase::Ready { after, .. }) => {
                *after = round.max(*after);
                None
            }
            (
                Order::Stop { round, cause },
                Phase::Running { round: mine }
                | Phase::Failed { round: mine, .. }
                | Phase::Succeeded { round: mine, .. },
            ) if *mine <= round => {
                if keeps_old {
                    self.phase =
                        Phase::Ready { after: round, restarts: 0, store: Vec::new(), partitioned: false };
                }
                Some(Command::Stop(cause))
            }
            (Order::End(result), _) => Some(Command::End(result)),
            (Order::Refuse(refusal), _) => Some(Command::Refuse(refusal)),
            (Order::Wait(_) | Order::Run(_) | Order::Stop { .. }, _) => None,
        }
    }

    /// Returns the send time of the latest answered status, or `None` if none has been answered.
    pub(crate) fn answered(&self) -> Option<Duration> {
        self.answered
    }

    /// Returns the time at which the member's right to have workers ends unless a status is answered before.
    /// `None` if no status has been answered, or if the lease has already ended.
    pub(crate) fn lease_end(&self) -> Option<Duration> {
        (!self.injected_bug.is(Bug::RunsWhilePartitioned) && !self.partitioned)
            .then_some(self.answered? + self.lease())
    }
}
