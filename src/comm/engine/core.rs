//! The engine and its progress loop: it moves data, polls other events now and then, and sleeps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::buffer::Lent;
use super::door::Door;
use super::failure::Failure;
use super::leave::Finishing;
use super::messages::{MessageError, Open};
use super::patience::{Patience, Step};
use super::poller::{Poller, Source};
use super::probe::Probe;
use super::run::{Run, RunError};
use super::seat::{Drive, Goal};
use super::state::{Collective, Peer, Settings, Wait};
use super::streams::Streams;
use super::ticket::Ticket;
use super::{Mailbox, Operation, Question, Task, Way};
use crate::call::{Call, Envelope};
use crate::cause::{Cause, Report};
use crate::error::CommError;
use crate::fault::moment;
use crate::frame::Kind;
use crate::kernels::Kernel;
use crate::links::hello::Lane;
use crate::links::tcp::Listener;
use crate::plan::Plan;
use crate::shm::{self, Node};

/// Turns between two polls of control connections and clock while data keeps moving.
const TURNS_BETWEEN_LOOKS: u32 = 64;
/// Calls that are remembered for comparison with the calls in which others say they wait.
const HISTORY: usize = 64;

#[derive(Debug)]
pub(crate) struct Engine {
    pub(super) settings: Settings,
    pub(super) peers: Vec<Peer>,
    pub(super) door: Door,
    pub(super) poller: Poller,
    pub(super) mailbox: Arc<Mailbox>,
    /// Collectives in the order of their calls; the first is in progress.
    pub(super) collectives: VecDeque<Collective>,
    pub(super) next_seq: u64,
    /// Receives from any source, and probes that wait.
    pub(super) open: Open,
    pub(super) probes: Vec<Probe>,
    /// The shared memory of this rank with the others of its host, and the numbers of those ranks.
    pub(super) node: Option<Node>,
    pub(super) beside: Vec<usize>,
    pub(super) history: VecDeque<(u64, Call)>,
    pub(super) failure: Option<Failure>,
    /// The time since which nothing moved.
    pub(super) still_since: Option<Instant>,
    /// The wait that this rank last told the others.
    pub(super) told: Option<Wait>,
    /// The time at which the others were last asked what they wait in.
    pub(super) asked: Option<Instant>,
    /// A caller waits for the operations that are being driven.
    pub(super) attended: bool,
    pub(super) agent_registered: bool,
    pub(super) left: bool,
    /// The group is not complete yet.
    pub(super) connecting: bool,
    /// This rank makes no more calls, and leaves as soon as its pending operations are done.
    pub(super) finishing: Option<Finishing>,
    patience: Patience,
    /// A control frame has arrived, or a control connection has ended.
    pub(super) heard: bool,
    /// The time at which this rank last moved to another core.
    pub(super) moved_at: Option<Instant>,
    /// Tickets of callers that wait until nothing is pending and this rank has left.
    leaving: Vec<Arc<Ticket>>,
    /// Turns so far. They are counted across calls, so that polling does not wait for a long call.
    pub(super) turns: u32,
}

impl Engine {
    /// Makes an engine. The others connect to `listener`, if there are any.
    pub(crate) fn new(settings: Settings, listener: Option<Listener>) -> Result<Self, CommError> {
        let system = |what: &'static str| move |error| CommError::system(what, error);
        let poller = Poller::new().map_err(system("cannot make an epoll set"))?;
        let mailbox = Mailbox::new().map_err(system("cannot make an eventfd"))?;
        poller.add(mailbox.bell(), Source::Doorbell, false).map_err(system("cannot watch an eventfd"))?;
        let Settings { me, size, .. } = settings;
        if let Some(listener) = &listener {
            poller
                .add(listener.pollable(), Source::Listener, false)
                .map_err(system("cannot watch the listener"))?;
        }
        let door = Door::new(me, size, settings.credentials.clone(), listener);
        let mut engine = Self {
            peers: (0..size).map(Peer::new).collect(),
            door,
            poller,
            mailbox: Arc::new(mailbox),
            collectives: VecDeque::new(),
            next_seq: 0,
            open: Open::default(),
            probes: Vec::new(),
            node: None,
            beside: Vec::new(),
            history: VecDeque::new(),
            failure: None,
            still_since: None,
            told: None,
            asked: None,
            attended: false,
            agent_registered: false,
            left: false,
            connecting: false,
            finishing: None,
            patience: Patience::new(settings.sharing.crowd),
            moved_at: None,
            heard: false,
            leaving: Vec::new(),
            turns: 0,
            settings,
        };
        engine.register_agent();
        Ok(engine)
    }

    pub(crate) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    pub(super) fn start(&mut self, task: Task) {
        let Task { operation, ticket } = task;
        let operation = match operation {
            Operation::Leave => return self.leaving.push(ticket),
            Operation::Ask(Question(question)) => {
                let answer = question(self);
                return ticket.complete(answer);
            }
            other => other,
        };
        let call = match &operation {
            Operation::Leave | Operation::Ask(_) => return,
            Operation::Collective { call, .. } | Operation::Probe { call, .. } => *call,
            Operation::Send { call, .. } | Operation::Recv { call, .. } => *call,
        };
        if self.left {
            ticket.complete(Err(CommError::Destroyed { group: self.settings.name.clone() }));
            return;
        }
        if matches!(operation, Operation::Collective { way: Way::Memory, .. }) {
            self.hear_of_failure();
        }
        if let Some(failure) = &self.failure {
            ticket.complete(Err(self.error(failure, Some(call), self.next_seq, (0, 0))));
            return;
        }
        self.record_message(&operation, &ticket);
        match operation {
            Operation::Collective { call, way, lent, kernel } => {
                let run = self.run(call, way, lent, kernel);
                let _ = ticket.step.set(self.record_collective(&run, self.settings.flight.ns(ticket.made)));
                self.collectives.push_back(Collective { run, ticket, signed: false });
                self.compare_with_states();
            }
            Operation::Send { to, call, lent } if to == self.settings.me => {
                let sent = self.peers[to].messages.post_own(&mut self.open, call, lent, ticket);
                if let Err(error) = sent {
                    self.message_failed(to, error);
                }
            }
            Operation::Send { to, call, lent } => {
                self.need(to, Lane::Message);
                self.peers[to].messages.post_send(&self.settings.credentials, call, lent, ticket);
            }
            Operation::Recv { from: Some(from), call, lent } => {
                let order = self.open.order();
                self.receive(from, order, call, lent, ticket);
            }
            Operation::Recv { from: None, call, lent } => {
                self.need_all_messages();
                match self.first_early(None, call.root) {
                    Some(Envelope { from, .. }) => {
                        let order = self.open.order();
                        self.receive(from, order, call, lent, ticket);
                    }
                    None => self.open.post(call, lent, ticket),
                }
            }
            Operation::Probe { from, call, wait } => self.probe(from, call, wait, ticket),
            Operation::Ask(_) | Operation::Leave => {}
        }
    }

    /// Starts the next collective: numbers it and opens the connections that it needs.
    pub(super) fn run(&mut self, call: Call, way: Way, lent: Lent<'static>, kernel: Option<Kernel>) -> Run {
        let seq = self.number(call);
        match (way, &mut self.node) {
            (Way::Memory, Some(node)) => Run::Memory(shm::run::Run::new(node, call, seq, lent, kernel)),
            (Way::Memory, None) => Run::Streams(self.streams(call, seq, Arc::default(), lent, kernel)),
            (Way::Streams(plan), _) => Run::Streams(self.streams(call, seq, plan, lent, kernel)),
        }
    }

    /// Returns the number of the next collective.
    pub(super) fn number(&mut self, call: Call) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        moment("calling", seq, 0);
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((seq, call));
        seq
    }

    fn streams(
        &mut self,
        call: Call,
        seq: u64,
        plan: Arc<Plan>,
        lent: Lent<'static>,
        kernel: Option<Kernel>,
    ) -> Streams {
        let (ours, me) = (&self.settings.credentials, self.settings.me);
        let streams = Streams::new(ours, call, seq, plan, lent, kernel, me);
        for peer in streams.peers().collect::<Vec<_>>() {
            self.need(peer, Lane::Collective);
        }
        streams
    }

    pub(super) fn receive(
        &mut self,
        from: usize,
        order: u64,
        call: Call,
        lent: Lent<'static>,
        ticket: Arc<Ticket>,
    ) {
        self.need(from, Lane::Message);
        let ours = &self.settings.credentials;
        if let Err(error) = self.peers[from].messages.post_recv(ours, order, call, lent, ticket) {
            self.message_failed(from, error);
        }
    }

    /// Opens a lane if it is not open: dials the peer or asks it to dial.
    pub(super) fn need(&mut self, peer: usize, lane: Lane) {
        if self.peers[peer].is_open(lane) || peer == self.settings.me {
            return;
        }
        if self.settings.me > peer {
            self.door.dial(peer, lane, self.settings.addresses[peer], Instant::now());
            self.look_at_door(Instant::now());
        } else if lane != Lane::Control && !self.peers[peer].asked[lane as usize] {
            self.peers[peer].asked[lane as usize] = true;
            let open = self.frame(Kind::Open, u64::from(lane.to_wire()));
            self.tell(peer, &open, &[]);
        }
    }

    /// Moves what can be moved now in the first collective and all messages.
    pub(super) fn turn(&mut self) -> bool {
        let mut moved = false;
        if let Some(first) = self.collectives.front_mut() {
            match first.run.turn(&mut self.peers, self.node.as_mut()) {
                Ok(some) => moved = some,
                Err(error) => self.run_failed(error),
            }
            self.sign();
            let (me, peers, failed) = (self.settings.me, &self.peers, self.failure.is_some());
            let is_done =
                |first: &mut Collective| first.run.is_finished() && first.is_attended(me, peers, failed);
            if let Some(done) = self.collectives.pop_front_if(is_done) {
                let Collective { run, ticket, .. } = done;
                moment("moved", run.seq(), 0);
                drop(run);
                ticket.complete(Ok(None));
                self.record_turn();
                moved = true;
            }
        }
        if !self.open.recvs.is_empty() || !self.probes.is_empty() {
            // Only the connections know which peers have sent something.
            self.look_at_ready();
            moved |= self.answer_probes();
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].messages.is_busy() {
                moved |= self.turn_messages(peer);
            }
        }
        if !self.leaving.is_empty() && (self.tickets().next().is_none() || self.gives_up_finishing()) {
            self.leave();
            self.leaving.drain(..).for_each(|ticket| ticket.complete(Ok(None)));
        }
        moved
    }

    pub(super) fn turn_messages(&mut self, peer: usize) -> bool {
        match self.peers[peer].messages.turn(&self.settings.credentials, &mut self.open) {
            Ok(moved) => moved,
            Err(error) => {
                self.message_failed(peer, error);
                false
            }
        }
    }

    pub(super) fn run_failed(&mut self, error: RunError) {
        let Some(first) = self.collectives.front() else { return };
        let (ours, ours_seq) = (first.run.call(), first.run.seq());
        match error {
            RunError::Broken { peer, why } => {
                self.peers[peer].collective = None;
                self.suspect(peer, &why);
            }
            RunError::Mismatch { peer: rank, theirs, seq } => {
                let cause = Cause::Mismatch { rank, theirs, theirs_seq: seq, ours, ours_seq };
                self.fail(Report::new(self.settings.me, cause));
            }
            RunError::Protocol { peer, what } => {
                self.fail(Report::new(self.settings.me, Cause::Protocol { peer, what }));
            }
            RunError::Function(reason) => {
                self.fail(Report::new(self.settings.me, Cause::Aborted { reason }));
            }
        }
    }

    pub(super) fn message_failed(&mut self, peer: usize, error: MessageError) {
        let cause = match error {
            MessageError::Broken(why) => {
                self.close_messages(peer);
                self.suspect(peer, &why);
                return;
            }
            MessageError::Mismatch { theirs, ours, seq } => {
                Cause::Mismatch { rank: peer, theirs, theirs_seq: seq, ours, ours_seq: seq }
            }
            MessageError::Protocol(what) => Cause::Protocol { peer, what },
        };
        self.fail(Report::new(self.settings.me, cause));
    }

    fn close_messages(&mut self, peer: usize) {
        self.peers[peer].messages.conn = None;
    }
}

impl Drive for Engine {
    type Task = Task;
    type Bell = nix::sys::eventfd::EventFd;

    fn drive(&mut self, goal: &Goal<'_>) {
        self.attended = !goal.is_background();
        self.drive_to(goal);
        self.attended = false;
    }

    fn collect(&mut self) {
        let Some((tasks, abort)) = self.mailbox.collect() else { return };
        for task in tasks {
            self.start(task);
        }
        if let Some(reason) = abort {
            self.fail(Report::new(self.settings.me, Cause::Aborted { reason }));
        }
        // Starting one operation may have ended the group before the next was queued.
        self.answer_everybody();
    }

    fn nudge(&mut self) {
        self.collect();
        self.turn();
    }

    fn forget_everything(&mut self) {
        self.forget_all_tasks();
    }
}

impl Engine {
    fn drive_to(&mut self, goal: &Goal<'_>) {
        loop {
            self.collect();
            let moved = self.turn();
            if goal.is_reached() {
                return;
            }
            if let Some(failure) = self.failure.as_ref().filter(|_| !goal.is_background()) {
                // After a failure the engine has no tasks, so nobody else would complete these tickets.
                for ticket in goal.tickets {
                    ticket.complete(Err(self.error(failure, None, 0, (0, 0))));
                }
                return;
            }
            self.turns = self.turns.wrapping_add(1);
            if moved {
                self.patience.moved();
                self.still_since = None;
                if self.turns.is_multiple_of(TURNS_BETWEEN_LOOKS) {
                    let now = Instant::now();
                    self.look_around(now);
                    if goal.until.is_some_and(|until| now >= until) {
                        return;
                    }
                }
                continue;
            }
            match self.patience.step(goal.is_background()) {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => {
                    if self.turns.is_multiple_of(TURNS_BETWEEN_LOOKS) {
                        self.take_place();
                    }
                    let begin = Instant::now();
                    std::thread::yield_now();
                    self.patience.yielded(begin.elapsed());
                }
                Step::Sleep
                    if !goal.is_background() && self.patience.may_move() && self.leave_shared_core() =>
                {
                    self.patience.moved_core();
                }
                Step::Sleep => {
                    self.patience.slept();
                    self.sleep(goal);
                    if goal.until.is_some_and(|until| Instant::now() >= until) {
                        return;
                    }
                }
            }
        }
    }
}
