//! One node's side of the membership: its status, its orders, and its right to have workers. Pure.
//!
//! Its right to have workers is a lease. The coordinator evicts a member that it has not heard for the
//! heartbeat timeout, and starts a round without it. A member that gets no answer for slightly less than that
//! ([`lease`]) has stopped its workers before. Each side measures with its own clock from an event that both
//! know, so the clocks need not agree.

use std::collections::VecDeque;
use std::time::Duration;

use super::bug::{Bug, Planted};
use super::mandate::own_lease;
use super::messages::{Assignment, Cause, Ending, Muster, Order, OrderMessage, Phase, Refusal, Status};

/// Returns how long a member may have workers after its last answered status, given its heartbeat timeout.
fn lease(silence: Duration) -> Duration {
    silence * 4 / 5
}

/// Number of statuses whose send times are remembered.
const REMEMBERED: usize = 64;

/// Command to the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    Wait(Muster),
    Run(Assignment),
    Stop(Cause),
    End(Ending),
    Refuse(Refusal),
}

/// Membership state of one node.
#[derive(Debug)]
pub(crate) struct Member {
    /// Heartbeat timeout of this member.
    silence: Duration,
    /// True if this process runs the coordinator and another one may replace that coordinator.
    coordinates: bool,
    phase: Phase,
    seq: u64,
    heard: (u64, u64),
    asked: u64,
    /// Number of the latest round that the member was told is over.
    over: u64,
    /// Sequence numbers and send times of the last statuses.
    sent: VecDeque<(u64, Duration)>,
    /// Latest answered status. `answered` is the time at which it was sent.
    answered_seq: u64,
    answered: Option<Duration>,
    /// True if the member is stopping its workers because it receives no answers.
    alone: bool,
    pub(super) planted: Planted,
}

impl Member {
    /// Returns a member in `phase`. Its heartbeat timeout is `silence` until a round sets another one.
    pub(crate) fn new(phase: Phase, silence: Duration) -> Self {
        Self {
            silence,
            coordinates: false,
            phase,
            seq: 0,
            heard: (0, 0),
            asked: 0,
            over: 0,
            sent: VecDeque::new(),
            answered_seq: 0,
            answered: None,
            alone: false,
            planted: Planted::default(),
        }
    }

    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Changes the state of this node. The caller sends the new status at once.
    pub(crate) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        if let Phase::Ready { after, .. } = &mut self.phase {
            // Other nodes may have been in later rounds than this node.
            *after = self.over.max(*after);
        }
        self.alone = false;
    }

    /// Sets whether this process runs a coordinator that another one may replace.
    pub(crate) fn coordinates(&mut self, does: bool) {
        self.coordinates = does;
    }

    /// Returns the interval of its statuses if most nodes use `beat`: a member with a shorter lease sends
    /// more often.
    pub(crate) fn beat(&self, beat: Duration) -> Duration {
        if self.coordinates { beat / 2 } else { beat }
    }

    /// Returns the lease: the time after the last answered status at which the right to have workers ends.
    pub(crate) fn lease(&self) -> Duration {
        if self.coordinates { own_lease(self.silence) } else { lease(self.silence) }
    }

    /// Notes that the lease has ended and that the node is stopping its workers.
    pub(crate) fn stop_alone(&mut self) {
        self.alone = true;
    }

    /// Notes that the coordinator has evicted this node, and that it rejoins as another agent.
    pub(crate) fn come_anew(&mut self) {
        self.alone = true;
        self.heard.1 = 0;
        self.sent.clear();
    }

    /// Forgets the coordinator, which belonged to another job.
    pub(crate) fn forget_coordinator(&mut self) {
        (self.heard, self.asked) = ((0, 0), 0);
        self.sent.clear();
    }

    /// Returns the next status, which the caller sends at `now`.
    pub(crate) fn status(&mut self, now: Duration) -> Status {
        self.seq += 1;
        self.sent.push_back((self.seq, now));
        if self.sent.len() > REMEMBERED {
            self.sent.pop_front();
        }
        let (phase, answered) = (self.phase.clone(), self.answered_seq);
        Status { seq: self.seq, phase, heard: self.heard, asked: self.asked, answered }
    }

    /// Processes a message of the coordinator. Returns a command, if any, and whether the caller must send
    /// the status at once.
    pub(crate) fn hear(&mut self, message: OrderMessage) -> (Option<News>, bool) {
        if message.term < self.heard.0 {
            // The sender is a coordinator that has been replaced.
            return (None, false);
        }
        while let Some(&(seq, at)) = self.sent.front()
            && seq <= message.heard
        {
            self.answered = self.answered.max(Some(at));
            self.answered_seq = self.answered_seq.max(seq);
            self.sent.pop_front();
        }
        let asked = message.ask > self.asked;
        self.asked = self.asked.max(message.ask);
        let Some(order) = message.order.filter(|_| (message.term, message.seq) > self.heard) else {
            return (None, asked);
        };
        self.heard = (message.term, message.seq);
        (self.obey(order), true)
    }

    fn obey(&mut self, order: Order) -> Option<News> {
        let keeps_old = self.planted.is(Bug::KeepsOldWorkers);
        if let Order::Stop { round, .. } = &order {
            self.over = self.over.max(*round);
        }
        match (order, &mut self.phase) {
            (_, Phase::Left(_) | Phase::Leaving { .. }) => None,
            (Order::Wait(muster), Phase::Ready { .. }) => Some(News::Wait(muster)),
            (Order::Run(assignment), Phase::Ready { after, .. }) if assignment.round > *after => {
                self.silence = assignment.silence;
                Some(News::Run(assignment))
            }
            (Order::Stop { round, .. }, Phase::Ready { after, .. }) => {
                *after = round.max(*after);
                None
            }
            (
                Order::Stop { round, cause },
                Phase::Running { round: mine }
                | Phase::Failed { round: mine, .. }
                | Phase::Succeeded { round: mine },
            ) if *mine <= round => {
                if keeps_old {
                    self.phase = Phase::Ready { after: round, restarts: 0, store: Vec::new(), alone: false };
                }
                Some(News::Stop(cause))
            }
            (Order::End(ending), _) => Some(News::End(ending)),
            (Order::Refuse(refusal), _) => Some(News::Refuse(refusal)),
            (Order::Wait(_) | Order::Run(_) | Order::Stop { .. }, _) => None,
        }
    }

    /// Returns the send time of the latest answered status.
    pub(crate) fn answered(&self) -> Option<Duration> {
        self.answered
    }

    /// Returns the time at which its right to have workers ends unless a status is answered before.
    pub(crate) fn lease_ends(&self) -> Option<Duration> {
        (!self.planted.is(Bug::RunsOnAlone) && !self.alone).then_some(self.answered? + self.lease())
    }
}
