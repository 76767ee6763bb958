//! One job of the rendezvous server: its coordinator, and the connections of its members.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use super::framing::{self, FramingError};
use super::leadership::Leadership;
use super::wire::{FRAME_LIMIT, Seal, ToCoordinator, ToMember};
use crate::membership::{Action, AgentId, Coordinator, Event, OrderMessage, Profile, leader_lease};
use crate::rendezvous::until;

/// Minimum time between two checks whether half of the nodes of a round are reachable.
const QUORUM_POLL: Duration = Duration::from_millis(50);
/// A timer that fires later than this shows that the process was not scheduled. [`MAX_CATCH_UP`] bounds the
/// extra time that members then get before they count as lost.
const MAX_TICK_DELAY: Duration = Duration::from_millis(20);
const MAX_CATCH_UP: Duration = Duration::from_secs(1);
/// Maximum number of member connections of one job.
const MAX_CONNECTIONS: usize = 50_000;

/// One job and its connections.
pub(super) struct Job {
    coordinator: RefCell<Coordinator>,
    began: Instant,
    outboxes: RefCell<HashMap<AgentId, Rc<Outbox>>>,
    /// Signals that [`Coordinator::wake_at`] may have changed.
    changed: Notify,
    /// Set if a coordinator on another node can continue the job. That needs a registry.
    leadership: Option<Leadership>,
    /// Time of the last check whether the coordinator may answer members, and its result.
    may_answer: Cell<(Instant, bool)>,
}

/// Next message to a member. Only the latest message is kept, so a member that reads slowly occupies no more
/// memory.
#[derive(Default)]
struct Outbox {
    next: RefCell<Option<OrderMessage>>,
    ready: Notify,
}

impl Job {
    pub(super) fn start(coordinator: Coordinator, leadership: Option<Leadership>) -> Rc<Self> {
        let job = Rc::new(Self {
            coordinator: RefCell::new(coordinator),
            began: Instant::now(),
            outboxes: RefCell::default(),
            changed: Notify::new(),
            leadership,
            may_answer: Cell::new((Instant::now(), true)),
        });
        let working = Rc::clone(&job);
        spawn_local(async move {
            tokio::select! {
                () = working.tick() => {}
                () = working.lead() => {}
            }
        });
        job
    }

    /// Returns true if all members have left or disconnected.
    pub(super) fn has_no_members(&self) -> bool {
        self.coordinator.borrow().has_no_members() || self.outboxes.borrow().is_empty()
    }

    /// Returns true if a node still needs this coordinator. A member that lost its connection may reconnect.
    pub(super) fn has_members(&self) -> bool {
        let coordinator = self.coordinator.borrow();
        !(coordinator.has_no_members() || coordinator.is_finished() && self.outboxes.borrow().is_empty())
    }

    /// Returns true if the job has ended and another job may start on this server under its run id.
    pub(super) fn frees_run_id(&self, is_named: bool) -> bool {
        let coordinator = self.coordinator.borrow();
        let frees = coordinator.result().is_some_and(|result| result.frees_run_id(is_named));
        self.leadership.is_none() && frees && self.outboxes.borrow().is_empty()
    }

    /// Returns true if another coordinator can continue the job from its record, because the record is
    /// written and the agent of this process has left.
    pub(super) fn is_replaceable(&self) -> bool {
        let coordinator = self.coordinator.borrow();
        self.leadership.as_ref().is_some_and(|leadership| {
            leadership.has_written_all()
                && !coordinator.is_finished()
                && !coordinator.is_member(leadership.agent.get())
        })
    }

    /// Notes that the node of this process rejoins the job under a new agent id.
    pub(super) fn set_agent(&self, agent: AgentId) {
        if let Some(leadership) = &self.leadership {
            leadership.agent.set(agent);
        }
    }

    /// Gives up leadership, so that a coordinator on another node may take over at once.
    pub(super) async fn release(&self) {
        if let Some(leadership) = &self.leadership {
            leadership.release().await;
        }
    }

    /// Returns true if another coordinator has taken over.
    pub(super) fn has_lost_leadership(&self) -> bool {
        self.leadership.as_ref().is_some_and(|leadership| leadership.is_lost.get())
    }

    async fn leadership_lost(&self) {
        match &self.leadership {
            Some(leadership) => leadership.lost().await,
            None => std::future::pending().await,
        }
    }

    /// Writes queued records and renews the leader lease until another coordinator has taken over. While this
    /// coordinator has too few members, it does not renew the lease, so that nodes that cannot reach it may
    /// make another node the coordinator.
    async fn lead(&self) {
        let Some(leadership) = &self.leadership else { return std::future::pending().await };
        let write = async {
            while let Some(is_latest) = leadership.write_next().await {
                // If a later record was queued during the write, the coordinator waits for that record.
                if is_latest {
                    self.handle(Event::Written);
                }
            }
        };
        tokio::select! {
            () = write => {}
            () = leadership.keep(|| self.coordinator.borrow().is_unneeded()) => {}
        }
    }

    /// Returns true if the coordinator may answer members, because no other coordinator can have continued
    /// without them.
    fn may_answer(&self, leadership: &Leadership) -> bool {
        if leadership.is_confirmed() {
            return true;
        }
        let (checked_at, may) = self.may_answer.get();
        if checked_at.elapsed() < QUORUM_POLL {
            return may;
        }
        let (coordinator, now) = (self.coordinator.borrow(), self.began.elapsed());
        let may = leader_lease::has_quorum(&coordinator, leadership.agent.get(), now, leadership.ttl.get());
        self.may_answer.set((Instant::now(), may));
        may
    }

    /// Serves one connection of a member until it ends.
    pub(super) async fn serve_member(
        self: Rc<Self>,
        stream: TcpStream,
        agent: AgentId,
        profile: Profile,
        theirs: Seal,
        mut ours: Seal,
    ) {
        let outbox = Rc::<Outbox>::default();
        {
            let mut outboxes = self.outboxes.borrow_mut();
            if outboxes.len() >= MAX_CONNECTIONS {
                return;
            }
            outboxes.insert(agent, Rc::clone(&outbox));
        }
        self.handle(Event::Hello { agent, profile });
        let (reading, mut writing) = stream.into_split();
        let receiving = self.receive(agent, reading, theirs);
        let sending = async {
            loop {
                outbox.ready.notified().await;
                let Some(message) = outbox.next.take() else { continue };
                framing::write(&mut writing, &mut ours, &ToMember::Order(message)).await?;
            }
        };
        let _: Result<(), FramingError> = tokio::select! {
            ended = receiving => ended,
            ended = sending => ended,
            () = self.leadership_lost() => Ok(()),
        };
        let is_latest = self.outboxes.borrow().get(&agent).is_some_and(|latest| Rc::ptr_eq(latest, &outbox));
        if is_latest {
            self.outboxes.borrow_mut().remove(&agent);
            self.handle(Event::Disconnected { agent });
        }
    }

    async fn receive(
        &self,
        agent: AgentId,
        mut stream: OwnedReadHalf,
        mut seal: Seal,
    ) -> Result<(), FramingError> {
        loop {
            match framing::read(&mut stream, &mut seal, FRAME_LIMIT).await? {
                ToCoordinator::Status(status) => self.handle(Event::Status { agent, status }),
                ToCoordinator::Profile(_) => return Err(FramingError::NotRendezvous),
            }
        }
    }

    pub(super) fn handle(&self, event: Event) {
        if self.has_lost_leadership() {
            return;
        }
        let mut actions = Vec::new();
        let handle = |event, actions: &mut Vec<Action>| {
            self.coordinator.borrow_mut().handle(self.began.elapsed(), event, actions);
        };
        handle(event, &mut actions);
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                match (action, &self.leadership) {
                    (Action::Send { agent, message }, _) => self.send(agent, message),
                    (Action::Write(record), Some(leadership)) => leadership.enqueue(record),
                    // Without a registry no other coordinator could continue the job, so the record need not
                    // be written.
                    (Action::Write(_), None) => handle(Event::Written, &mut actions),
                }
            }
        }
        self.changed.notify_one();
    }

    fn send(&self, agent: AgentId, mut message: OrderMessage) {
        if self.leadership.as_ref().is_some_and(|leadership| !self.may_answer(leadership)) {
            return;
        }
        let outboxes = self.outboxes.borrow();
        let Some(outbox) = outboxes.get(&agent) else { return };
        let mut next = outbox.next.borrow_mut();
        // A heartbeat, which has no order, does not replace an order that waits to be sent.
        if let Some(waiting) =
            next.take().filter(|waiting| message.order.is_none() && waiting.seq == message.seq)
        {
            message.order = waiting.order;
        }
        *next = Some(message);
        outbox.ready.notify_one();
    }

    /// Runs the coordinator's timers until the job has ended and all members have learned the outcome.
    async fn tick(&self) {
        while self.leadership.is_some() || !self.coordinator.borrow().is_finished() || !self.has_no_members()
        {
            let wake = self.coordinator.borrow().wake_at().map(|at| self.began + at);
            tokio::select! {
                () = until(wake) => {
                    // If this timer is late, the process was not scheduled and has not read all statuses. It
                    // reads those that have arrived before it treats a member as lost.
                    let late = wake.map_or(Duration::ZERO, |at| at.elapsed());
                    if late > MAX_TICK_DELAY {
                        sleep(late.min(MAX_CATCH_UP)).await;
                    }
                    self.handle(Event::Tick);
                }
                () = self.changed.notified() => {}
            }
        }
    }
}
