//! One node's side: what it says, what it has been told, and whether it still may have workers. Pure.
//!
//! Its right to have workers is a lease. The coordinator takes a member for lost that it has not heard for a while, and
//! begins a round without it; a member that has had no answer for a little less than that ([`lease`]) stops its workers.
//! Both measure with clocks of their own from an event that both know, so they need not agree on the time.

use std::collections::VecDeque;
use std::time::Duration;

use super::bug::{Bug, Planted};
use super::mandate::own_lease;
use super::messages::{Assignment, Cause, Ending, Muster, Order, OrderMessage, Phase, Refusal, Status};

/// How long a member may have workers after the last status that was answered, where it is lost after this silence.
fn lease(silence: Duration) -> Duration {
    silence * 4 / 5
}

/// Statuses whose sending is remembered.
const REMEMBERED: usize = 64;

/// What a node is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    Wait(Muster),
    Run(Assignment),
    Stop(Cause),
    End(Ending),
    Refuse(Refusal),
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Member {
    /// After which it is lost.
    silence: Duration,
    /// Its process has the coordinator, and another one may replace that.
    coordinates: bool,
    phase: Phase,
    seq: u64,
    heard: (u64, u64),
    asked: u64,
    /// The latest round that it was told is over.
    over: u64,
    /// Numbers of the last statuses, and when they were sent.
    sent: VecDeque<(u64, Duration)>,
    /// The latest status that has been answered, and when it was sent.
    answered_seq: u64,
    answered: Option<Duration>,
    /// Its workers are being stopped because it hears nobody.
    alone: bool,
    pub(super) planted: Planted,
}

impl Member {
    /// One that is in `phase`; before a round says otherwise it is lost after `silence`.
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

    /// This node does something else now. To be told at once.
    pub(crate) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        if let Phase::Ready { after, .. } = &mut self.phase {
            // Others may be further than its own last round.
            *after = self.over.max(*after);
        }
        self.alone = false;
    }

    /// Whether its process has the coordinator, and another one may replace that.
    pub(crate) fn coordinates(&mut self, does: bool) {
        self.coordinates = does;
    }

    /// How often it says its status, where others do so each `beat`: whose lease is shorter says more.
    pub(crate) fn beat(&self, beat: Duration) -> Duration {
        if self.coordinates { beat / 2 } else { beat }
    }

    /// A status that is not answered for so long ends its right to have workers.
    pub(crate) fn lease(&self) -> Duration {
        if self.coordinates { own_lease(self.silence) } else { lease(self.silence) }
    }

    /// Its lease has ended: its workers are being stopped.
    pub(crate) fn stop_alone(&mut self) {
        self.alone = true;
    }

    /// It has been given up, and comes again as another agent.
    pub(crate) fn come_anew(&mut self) {
        self.alone = true;
        self.heard.1 = 0;
        self.sent.clear();
    }

    /// The coordinator that it heard was that of another job.
    pub(crate) fn forget_coordinator(&mut self) {
        (self.heard, self.asked) = ((0, 0), 0);
        self.sent.clear();
    }

    /// The status, which is being sent at `now`.
    pub(crate) fn status(&mut self, now: Duration) -> Status {
        self.seq += 1;
        self.sent.push_back((self.seq, now));
        if self.sent.len() > REMEMBERED {
            self.sent.pop_front();
        }
        let (phase, answered) = (self.phase.clone(), self.answered_seq);
        Status { seq: self.seq, phase, heard: self.heard, asked: self.asked, answered }
    }

    /// Takes in what the coordinator says: what is to be done, and whether the status is to be sent at once.
    pub(crate) fn hear(&mut self, message: OrderMessage) -> (Option<News>, bool) {
        if message.term < self.heard.0 {
            // One that has been replaced.
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

    /// When the latest status was sent that has been answered.
    pub(crate) fn answered(&self) -> Option<Duration> {
        self.answered
    }

    /// When it may have no workers any more, unless it is answered before.
    pub(crate) fn lease_ends(&self) -> Option<Duration> {
        (!self.planted.is(Bug::RunsOnAlone) && !self.alone).then_some(self.answered? + self.lease())
    }
}
