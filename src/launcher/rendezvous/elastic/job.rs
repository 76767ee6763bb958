//! One job of the rendezvous server: its coordinator, and the connections of its members.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};

use super::archive::Archive;
use super::claim::Claim;
use super::link::{self, LinkError};
use super::wire::{MEMBERS_LIMIT, Seal, ToCoordinator, ToMember};
use crate::membership::{Action, AgentId, Coordinator, Event, OrderMessage, Profile, mandate};

/// Interval at which the job checks whether half of a round is heard.
const LOOK: Duration = Duration::from_millis(50);
/// A tick that is later than this shows that the process was not scheduled. [`LATEST`] bounds the extra time
/// that members get for it.
const LATE: Duration = Duration::from_millis(20);
const LATEST: Duration = Duration::from_secs(1);
/// Maximum number of member connections.
const MEMBERS: usize = 50_000;

/// One job and its connections.
pub(super) struct Job {
    coordinator: RefCell<Coordinator>,
    began: Instant,
    desks: RefCell<HashMap<AgentId, Rc<Desk>>>,
    /// Signals that [`Coordinator::wake_at`] may have changed.
    changed: Notify,
    archive: Option<Archive>,
    /// Time of the last check whether members may be answered, and its result.
    may_answer: Cell<(Instant, bool)>,
}

/// Next message to a member. Only the latest counts, so a slow reader costs no memory.
struct Desk {
    connection: u64,
    next: RefCell<Option<OrderMessage>>,
    ready: Notify,
}

impl Job {
    pub(super) fn begin(coordinator: Coordinator, archive: Option<Archive>) -> Rc<Self> {
        let job = Rc::new(Self {
            coordinator: RefCell::new(coordinator),
            began: Instant::now(),
            desks: RefCell::default(),
            changed: Notify::new(),
            archive,
            may_answer: Cell::new((Instant::now(), true)),
        });
        let working = Rc::clone(&job);
        spawn_local(async move {
            tokio::select! {
                () = working.tick() => {}
                () = working.write() => {}
                () = working.keep() => {}
            }
        });
        job
    }

    /// Returns true if all members have left.
    pub(super) fn is_deserted(&self) -> bool {
        self.coordinator.borrow().is_deserted() || self.desks.borrow().is_empty()
    }

    /// Returns true if a node still needs this coordinator. A member that lost its connection may reconnect.
    pub(super) fn has_members(&self) -> bool {
        let coordinator = self.coordinator.borrow();
        !(coordinator.is_deserted() || coordinator.is_over() && self.desks.borrow().is_empty())
    }

    /// Returns true if the job has ended and another one may start here under its run id.
    pub(super) fn frees_run_id(&self, is_named: bool) -> bool {
        let coordinator = self.coordinator.borrow();
        let frees = coordinator.ending().is_some_and(|ending| ending.frees_run_id(is_named));
        self.archive.is_none() && frees && self.desks.borrow().is_empty()
    }

    /// Returns true if another coordinator can continue the job from its record, which includes that the
    /// agent of this process has left.
    pub(super) fn is_dispensable(&self) -> bool {
        let coordinator = self.coordinator.borrow();
        self.archive.as_ref().is_some_and(|archive| {
            archive.is_complete() && !coordinator.is_over() && !coordinator.knows(archive.agent.get())
        })
    }

    /// Notes that the node of this process rejoins as another agent.
    pub(super) fn comes_anew(&self, agent: AgentId) {
        if let Some(archive) = &self.archive {
            archive.agent.set(agent);
        }
    }

    /// Gives up leadership, so that another coordinator may take over at once.
    pub(super) async fn release(&self) {
        if let Some(archive) = &self.archive {
            archive.claim.release().await;
        }
    }

    /// Returns true if another coordinator has taken over.
    pub(super) fn has_resigned(&self) -> bool {
        self.archive.as_ref().is_some_and(|archive| archive.claim.is_lost())
    }

    async fn resigns(&self) {
        match &self.archive {
            Some(archive) => archive.claim.lost().await,
            None => std::future::pending().await,
        }
    }

    /// Writes records until another coordinator has taken over.
    async fn write(&self) {
        let Some(archive) = &self.archive else { return std::future::pending().await };
        while let Some(is_latest) = archive.write_next().await {
            // If a later record has been put meanwhile, only that one counts.
            if is_latest {
                self.handle(Event::Written);
            }
        }
    }

    /// Keeps leadership. While this coordinator has too few members, it lets the lease rest: nodes that
    /// cannot reach it may elect another.
    async fn keep(&self) {
        match &self.archive {
            Some(archive) => archive.claim.keep(|| self.coordinator.borrow().is_useless()).await,
            None => std::future::pending().await,
        }
    }

    /// Returns true if members may be answered: no other coordinator can have continued without them.
    fn may_answer(&self, own: AgentId, claim: &Claim) -> bool {
        if claim.is_certain() {
            return true;
        }
        let (looked, may) = self.may_answer.get();
        if looked.elapsed() < LOOK {
            return may;
        }
        let may = self.is_in_touch(own, claim);
        self.may_answer.set((Instant::now(), may));
        may
    }

    fn is_in_touch(&self, own: AgentId, claim: &Claim) -> bool {
        mandate::is_in_touch(&self.coordinator.borrow(), own, self.began.elapsed(), claim.ttl())
    }

    /// Serves one connection of a member until it ends.
    pub(super) async fn attend(
        self: Rc<Self>,
        connection: u64,
        stream: TcpStream,
        agent: AgentId,
        profile: Profile,
        theirs: Seal,
        mut ours: Seal,
    ) {
        let desk = Rc::new(Desk { connection, next: RefCell::default(), ready: Notify::new() });
        {
            let mut desks = self.desks.borrow_mut();
            if desks.len() >= MEMBERS {
                return;
            }
            desks.insert(agent, Rc::clone(&desk));
        }
        self.handle(Event::Hello { agent, profile });
        let (reading, mut writing) = stream.into_split();
        let listens = self.listen(agent, reading, theirs);
        let tells = async {
            loop {
                desk.ready.notified().await;
                let Some(message) = desk.next.take() else { continue };
                link::write(&mut writing, &mut ours, &ToMember::Order(message)).await?;
            }
        };
        let _: Result<(), LinkError> = tokio::select! {
            ended = listens => ended,
            ended = tells => ended,
            () = self.resigns() => Ok(()),
        };
        let mine = self.desks.borrow().get(&agent).is_some_and(|desk| desk.connection == connection);
        if mine {
            self.desks.borrow_mut().remove(&agent);
            self.handle(Event::Cut { agent });
        }
    }

    async fn listen(
        &self,
        agent: AgentId,
        mut stream: OwnedReadHalf,
        mut seal: Seal,
    ) -> Result<(), LinkError> {
        loop {
            match link::read(&mut stream, &mut seal, MEMBERS_LIMIT).await? {
                ToCoordinator::Status(status) => self.handle(Event::Status { agent, status }),
                ToCoordinator::Profile(_) => return Err(LinkError::Stranger),
            }
        }
    }

    pub(super) fn handle(&self, event: Event) {
        if self.has_resigned() {
            return;
        }
        let mut actions = Vec::new();
        let now = self.began.elapsed();
        self.coordinator.borrow_mut().handle(now, event, &mut actions);
        let mut rest = VecDeque::from(actions);
        while let Some(action) = rest.pop_front() {
            match (action, &self.archive) {
                (Action::Send { agent, message }, _) => self.send(agent, message),
                (Action::Write(record), Some(archive)) => archive.put(record),
                // Without a registry no other coordinator could continue the job.
                (Action::Write(_), None) => {
                    let mut more = Vec::new();
                    self.coordinator.borrow_mut().handle(self.began.elapsed(), Event::Written, &mut more);
                    rest.extend(more);
                }
            }
        }
        self.changed.notify_one();
    }

    fn send(&self, agent: AgentId, mut message: OrderMessage) {
        if let Some(Archive { agent: own, claim, .. }) = &self.archive
            && !self.may_answer(own.get(), claim)
        {
            return;
        }
        let desks = self.desks.borrow();
        let Some(desk) = desks.get(&agent) else { return };
        let mut next = desk.next.borrow_mut();
        // A heartbeat does not replace an order that waits to be sent.
        if let Some(waiting) =
            next.take().filter(|waiting| message.order.is_none() && waiting.seq == message.seq)
        {
            message.order = waiting.order;
        }
        *next = Some(message);
        desk.ready.notify_one();
    }

    /// Runs the timers until the job has ended and no member remains to be told.
    async fn tick(&self) {
        while self.archive.is_some() || !self.coordinator.borrow().is_over() || !self.is_deserted() {
            let wake = self.coordinator.borrow().wake_at().map(|at| self.began + at);
            let sleeps = async {
                match wake {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleeps => {
                    // This process was late and may have received messages late. It handles those that have
                    // arrived before it evicts a member.
                    let late = wake.map_or(Duration::ZERO, |at| at.elapsed());
                    if late > LATE {
                        sleep(late.min(LATEST)).await;
                    }
                    self.handle(Event::Tick);
                }
                () = self.changed.notified() => {}
            }
        }
    }
}
