//! One job at the place where agents meet: its coordinator, and the connections of its members.

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

/// How often it is looked whether half of a round is heard.
const LOOK: Duration = Duration::from_millis(50);
/// A tick that comes so much too late says that this process was kept from working; most time that this gives to others.
const LATE: Duration = Duration::from_millis(20);
const LATEST: Duration = Duration::from_secs(1);
/// Most connections of members.
const MEMBERS: usize = 50_000;

/// One job and its connections.
pub(super) struct Job {
    coordinator: RefCell<Coordinator>,
    began: Instant,
    desks: RefCell<HashMap<AgentId, Rc<Desk>>>,
    /// The coordinator's time to wake may have changed.
    changed: Notify,
    archive: Option<Archive>,
    /// Whether members could be told that they have been heard, when it was last looked.
    may_answer: Cell<(Instant, bool)>,
}

/// What is to be sent to a member: only the latest counts, so a member that reads slowly costs no memory.
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

    /// Whether all its members have gone.
    pub(super) fn is_deserted(&self) -> bool {
        self.coordinator.borrow().is_deserted() || self.desks.borrow().is_empty()
    }

    /// Whether somebody still needs its coordinator. Who has lost the connection may come again.
    pub(super) fn has_members(&self) -> bool {
        let coordinator = self.coordinator.borrow();
        !(coordinator.is_deserted() || coordinator.is_over() && self.desks.borrow().is_empty())
    }

    /// Whether it has ended, and another one may begin here under its run id.
    pub(super) fn frees_run_id(&self, is_named: bool) -> bool {
        let coordinator = self.coordinator.borrow();
        let frees = coordinator.ending().is_some_and(|ending| ending.frees_run_id(is_named));
        self.archive.is_none() && frees && self.desks.borrow().is_empty()
    }

    /// Whether another coordinator can go on with it from what is written down, also that this process's agent has gone.
    pub(super) fn is_dispensable(&self) -> bool {
        let coordinator = self.coordinator.borrow();
        self.archive.as_ref().is_some_and(|archive| {
            archive.is_complete() && !coordinator.is_over() && !coordinator.knows(archive.agent.get())
        })
    }

    /// This process's node takes part as another agent from now on.
    pub(super) fn comes_anew(&self, agent: AgentId) {
        if let Some(archive) = &self.archive {
            archive.agent.set(agent);
        }
    }

    /// Another coordinator may take over at once.
    pub(super) async fn release(&self) {
        if let Some(archive) = &self.archive {
            archive.claim.release().await;
        }
    }

    /// Another coordinator has taken over.
    pub(super) fn has_resigned(&self) -> bool {
        self.archive.as_ref().is_some_and(|archive| archive.claim.is_lost())
    }

    async fn resigns(&self) {
        match &self.archive {
            Some(archive) => archive.claim.lost().await,
            None => std::future::pending().await,
        }
    }

    /// Writes records down until another coordinator has taken over.
    async fn write(&self) {
        let Some(archive) = &self.archive else { return std::future::pending().await };
        while let Some(is_latest) = archive.write_next().await {
            // If there is a later one by now, that counts.
            if is_latest {
                self.handle(Event::Written);
            }
        }
    }

    /// Keeps the claim. While this coordinator has too few members, those that cannot reach it may have another one.
    async fn keep(&self) {
        match &self.archive {
            Some(archive) => archive.claim.keep(|| self.coordinator.borrow().is_useless()).await,
            None => std::future::pending().await,
        }
    }

    /// Whether members may be told that they have been heard: no other coordinator can have gone on without them.
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

    /// One connection of a member, until it ends.
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
                // Nobody else could go on with it.
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
        // A sign of life does not replace an order that waits to be sent.
        if let Some(waiting) =
            next.take().filter(|waiting| message.order.is_none() && waiting.seq == message.seq)
        {
            message.order = waiting.order;
        }
        *next = Some(message);
        desk.ready.notify_one();
    }

    /// Until it has ended and nobody is left who could be told.
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
                    // Who is late has heard late: what has come by now counts before anybody is given up.
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
