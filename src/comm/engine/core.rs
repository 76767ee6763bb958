//! The engine's state and its loop: move what can be moved; look around now and then; sleep.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use convoke_env::{AgentChannel, Generation};
use convoke_store::Store;
use nix::poll::PollFlags;

use super::door::{Door, DoorEvent};
use super::failure::Failure;
use super::messages::{Mailbox as Messages, MessageError};
use super::poller::{Poller, Source};
use super::run::{Lanes, Run, RunError};
use super::ticket::Ticket;
use super::{Mailbox, Task, Work};
use crate::call::Call;
use crate::cause::{Cause, Report};
use crate::error::CommError;
use crate::frame::Kind;
use crate::links::conn::{Broken, Conn};
use crate::links::hello::{Credentials, Lane};
use crate::links::tcp::Listener;
use crate::plan::Direction;

/// Turns between two looks at control connections and clock while data keeps moving.
const TURNS_BETWEEN_LOOKS: u32 = 64;
/// Turns without progress before sleeping: first some that only spin, then some that yield the core.
/// Yielding costs little where nobody else wants the core, and much is gained where somebody does.
const SPINS: u32 = 20;
const YIELDS: u32 = 100;
/// The same with more ranks than cores: whoever is waited for needs the core.
const CROWDED_YIELDS: u32 = 8;
/// Calls that are remembered to compare with what others say they are waiting in.
const HISTORY: usize = 64;

/// What an engine needs to know from the start.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Name of the group, for messages.
    pub(crate) name: String,
    pub(crate) me: usize,
    pub(crate) size: usize,
    pub(crate) credentials: Credentials,
    /// Where each rank listens.
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) listener: Listener,
    /// Where the ranks agree on the cause of a failure, and under which key.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) abort_key: Vec<u8>,
    /// The rank in whose process the store lives, if it lives in one.
    pub(crate) store_rank: Option<usize>,
    /// The launcher's news of deaths, and the generation it knows this round by.
    pub(crate) agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    /// Bound for noticing a dead host or path.
    pub(crate) peer_timeout: Duration,
    /// More ranks on this host than cores: do not spin.
    pub(crate) crowded: bool,
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(super) settings: Settings,
    pub(super) peers: Vec<Peer>,
    pub(super) door: Door,
    pub(super) poller: Poller,
    pub(super) mailbox: Arc<Mailbox>,
    /// Collectives in the order of their calls; the first is in progress.
    pub(super) collectives: VecDeque<Collective>,
    next_seq: u64,
    pub(super) history: VecDeque<(u64, Call)>,
    pub(super) failure: Option<Failure>,
    /// Since when nothing moved in the first collective.
    pub(super) still_since: Option<Instant>,
    agent_registered: bool,
    pub(super) left: bool,
    /// Turns so far: looking around must not wait for a call that is long enough.
    turns: u32,
}

/// Everything about one other rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) control: Option<Conn>,
    /// Control bytes that the connection has not taken yet.
    pub(super) control_out: Vec<u8>,
    pub(super) collective: Option<Conn>,
    pub(super) messages: Messages,
    /// It said goodbye.
    pub(super) left: bool,
    /// Its control connection has ended: when, and how.
    pub(super) silent: Option<(Instant, Broken)>,
    /// A data connection ended: until when its control connection must say why.
    pub(super) suspect: Option<(Instant, String)>,
    /// What it last said it waits in, and for whom.
    pub(super) state: Option<PeerState>,
    /// Lanes that it was asked to open.
    asked: [bool; 3],
}

#[derive(Debug)]
pub(super) struct PeerState {
    pub(super) seq: u64,
    pub(super) call: Call,
    pub(super) awaits: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Collective {
    pub(super) run: Run,
    pub(super) ticket: Arc<Ticket>,
    /// Ranks it waited for when it last told the others.
    pub(super) told: Option<Vec<usize>>,
}

impl Peer {
    fn new() -> Self {
        Self {
            control: None,
            control_out: Vec::new(),
            collective: None,
            messages: Messages::new(),
            left: false,
            silent: None,
            suspect: None,
            state: None,
            asked: [false; 3],
        }
    }

    fn is_open(&self, lane: Lane) -> bool {
        match lane {
            Lane::Control => self.control.is_some(),
            Lane::Collective => self.collective.is_some(),
            Lane::Message => self.messages.conn.is_some(),
        }
    }
}

struct Collectives<'a>(&'a mut [Peer]);

impl Lanes for Collectives<'_> {
    fn lane(&mut self, peer: usize) -> Option<&mut Conn> {
        self.0.get_mut(peer)?.collective.as_mut()
    }
}

impl Engine {
    pub(crate) fn new(settings: Settings) -> Result<Self, CommError> {
        let system = |what: &'static str| move |error| CommError::system(what, error);
        let poller = Poller::new().map_err(system("cannot make an epoll set"))?;
        let mailbox = Mailbox::new().map_err(system("cannot make an eventfd"))?;
        poller.add(mailbox.bell(), Source::Doorbell, false).map_err(system("cannot watch an eventfd"))?;
        let Settings { me, size, .. } = settings;
        let listener =
            settings.listener.try_clone().map_err(system("cannot duplicate the listening socket"))?;
        poller
            .add(listener.pollable(), Source::Listener, false)
            .map_err(system("cannot watch the listener"))?;
        let door = Door::new(me, size, settings.credentials.clone(), listener);
        let mut engine = Self {
            peers: (0..size).map(|_| Peer::new()).collect(),
            door,
            poller,
            mailbox: Arc::new(mailbox),
            collectives: VecDeque::new(),
            next_seq: 0,
            history: VecDeque::new(),
            failure: None,
            still_since: None,
            agent_registered: false,
            left: false,
            turns: 0,
            settings,
        };
        engine.register_agent();
        Ok(engine)
    }

    fn register_agent(&mut self) {
        if let Some((agent, _)) = &self.settings.agent {
            let agent = agent.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.agent_registered = self.poller.add(agent.as_fd(), Source::Agent, false).is_ok();
        }
    }

    pub(crate) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// Drives all tasks until that of `ticket` is done.
    pub(super) fn drive(&mut self, ticket: &Ticket) {
        let mut idle = 0;
        let (spins, yields) = if self.settings.crowded { (0, CROWDED_YIELDS) } else { (SPINS, YIELDS) };
        loop {
            self.collect();
            let moved = self.turn();
            if ticket.is_done() {
                return;
            }
            if let Some(failure) = &self.failure {
                // Nothing is in the engine after a failure, so nobody else would complete it.
                ticket.complete(Err(self.error(failure, None, 0, (0, 0))));
                return;
            }
            self.turns = self.turns.wrapping_add(1);
            if moved {
                idle = 0;
                self.still_since = None;
                if self.turns.is_multiple_of(TURNS_BETWEEN_LOOKS) {
                    self.look_around(Instant::now());
                }
                continue;
            }
            idle += 1;
            if idle <= spins {
                std::hint::spin_loop();
            } else if idle <= spins + yields {
                std::thread::yield_now();
            } else {
                self.sleep();
                idle = 0;
            }
        }
    }

    /// Takes new tasks out of the mailbox.
    pub(super) fn collect(&mut self) {
        let Some((tasks, abort)) = self.mailbox.collect() else { return };
        for task in tasks {
            self.start(task);
        }
        if let Some(reason) = abort {
            self.fail(Report::new(self.settings.me, Cause::Aborted { reason }));
        }
        // Starting one may have ended the group before the next was in.
        self.answer_everybody();
    }

    pub(super) fn start(&mut self, task: Task) {
        let Task { work, ticket } = task;
        if let Some(failure) = &self.failure {
            let call = work.call();
            ticket.complete(Err(self.error(failure, Some(call), self.next_seq, (0, 0))));
            return;
        }
        match work {
            Work::Collective { call, plan, lent, kernel } => {
                let seq = self.next_seq;
                self.next_seq += 1;
                if self.history.len() == HISTORY {
                    self.history.pop_front();
                }
                self.history.push_back((seq, call));
                let size = self.settings.size;
                let run = Run::new(&self.settings.credentials, call, seq, plan, lent, kernel, size);
                let peers: Vec<_> = run.peers().collect();
                self.collectives.push_back(Collective { run, ticket, told: None });
                for peer in peers {
                    self.need(peer, Lane::Collective);
                }
                self.compare_with_states();
            }
            Work::Send { to, call, lent } => {
                self.need(to, Lane::Message);
                self.peers[to].messages.post_send(&self.settings.credentials, call, lent, ticket);
            }
            Work::Recv { from, call, lent } => {
                self.need(from, Lane::Message);
                let posted =
                    self.peers[from].messages.post_recv(&self.settings.credentials, call, lent, ticket);
                if let Err(error) = posted {
                    self.message_failed(from, error);
                }
            }
        }
    }

    /// Sees to it that a lane is opened if it is not.
    pub(super) fn need(&mut self, peer: usize, lane: Lane) {
        if self.peers[peer].is_open(lane) {
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
            match first.run.turn(&mut Collectives(&mut self.peers)) {
                Ok(some) => moved = some,
                Err(error) => self.run_failed(error),
            }
            if let Some(done) = self.collectives.pop_front_if(|first| first.run.is_finished()) {
                let Collective { run, ticket, .. } = done;
                drop(run);
                ticket.complete(Ok(()));
                moved = true;
            }
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].messages.is_busy() {
                moved |= self.turn_messages(peer);
            }
        }
        moved
    }

    pub(super) fn turn_messages(&mut self, peer: usize) -> bool {
        match self.peers[peer].messages.turn(&self.settings.credentials) {
            Ok(moved) => moved,
            Err(error) => {
                self.message_failed(peer, error);
                false
            }
        }
    }

    fn run_failed(&mut self, error: RunError) {
        let Some(first) = self.collectives.front() else { return };
        let (ours, ours_seq) = (first.run.call, first.run.seq);
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
        }
    }

    fn message_failed(&mut self, peer: usize, error: MessageError) {
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

    /// Looks at everything that is not the data in progress: registered descriptors, door, clock.
    pub(super) fn look_around(&mut self, now: Instant) {
        self.look_at_ready();
        self.look_at_door(now);
        self.look_at_clock(now);
    }

    fn look_at_ready(&mut self) {
        for source in self.poller.ready() {
            match source {
                Source::Doorbell => drop(self.mailbox.bell.read()),
                Source::Listener | Source::Door => {}
                Source::Agent => self.look_at_agent(),
                Source::Control(peer) => self.read_control(peer),
                Source::Message(peer) => drop(self.turn_messages(peer)),
            }
        }
    }

    pub(super) fn look_at_door(&mut self, now: Instant) {
        let mut events = Vec::new();
        self.door.turn(&self.poller, now, &mut events);
        for event in events {
            match event {
                DoorEvent::Opened { peer, lane, conn } => self.opened(peer, lane, conn),
                DoorEvent::Unauthorized { from, what } => {
                    self.fail(Report::new(self.settings.me, Cause::Unauthorized { from, what }));
                }
            }
        }
    }

    fn opened(&mut self, peer: usize, lane: Lane, conn: Conn) {
        if self.peers[peer].is_open(lane) {
            return;
        }
        let source = match lane {
            Lane::Control => Some(Source::Control(peer)),
            Lane::Message => Some(Source::Message(peer)),
            Lane::Collective => None,
        };
        if let Some(fd) = conn.pollable() {
            match source {
                Some(source) => drop(self.poller.change(fd, source, false)),
                None => self.poller.remove(fd),
            }
        }
        match lane {
            Lane::Control => {
                let _ = conn.watch_path(self.settings.peer_timeout);
                self.peers[peer].control = Some(conn);
                self.flush_control(peer);
                // It may have spoken right behind its proof: no event will tell.
                self.read_control(peer);
            }
            Lane::Collective => self.peers[peer].collective = Some(conn),
            Lane::Message => {
                self.peers[peer].messages.conn = Some(conn);
                self.turn_messages(peer);
            }
        }
    }

    /// Sleeps until something can move or time has come, then looks around.
    fn sleep(&mut self) {
        let now = Instant::now();
        self.still_since.get_or_insert(now);
        self.look_for_losses(now);
        if self.failure.is_some() {
            return;
        }
        let timeout = self.wake_at(now).saturating_duration_since(now);
        if self.mailbox.fall_asleep() {
            let mut others = Vec::new();
            if let Some(first) = self.collectives.front() {
                for (peer, direction) in first.run.blocked() {
                    let flags = match direction {
                        Direction::Send => PollFlags::POLLOUT,
                        Direction::Recv => PollFlags::POLLIN,
                    };
                    let lane = self.peers[peer].collective.as_ref();
                    others.extend(lane.and_then(Conn::pollable).map(|fd| (fd, flags)));
                }
            }
            for peer in &self.peers {
                let control = peer.control.as_ref().filter(|_| !peer.control_out.is_empty());
                let messages = peer.messages.conn.as_ref().filter(|_| peer.messages.full);
                let full = control.into_iter().chain(messages).filter_map(Conn::pollable);
                others.extend(full.map(|fd| (fd, PollFlags::POLLOUT)));
            }
            self.poller.sleep(&others, timeout);
        }
        self.mailbox.wake();
        for peer in 0..self.peers.len() {
            self.flush_control(peer);
        }
        self.look_around(Instant::now());
    }

    /// Opens control connections to all ranks and the lanes in `lanes`; whether all are there by
    /// `until`. For the bootstrap, before anybody else uses the engine.
    pub(crate) fn connect(&mut self, lanes: &[(usize, Lane)], until: Instant) -> Result<bool, CommError> {
        loop {
            for &(peer, lane) in lanes {
                if self.settings.me > peer && !self.peers[peer].is_open(lane) {
                    self.door.dial(peer, lane, self.settings.addresses[peer], Instant::now());
                }
            }
            let now = Instant::now();
            self.look_around(now);
            self.look_for_losses(now);
            if let Some(failure) = &self.failure {
                return Err(self.error(failure, None, 0, (0, 0)));
            }
            if self.unconnected(lanes).next().is_none() {
                return Ok(true);
            }
            if now >= until {
                return Ok(false);
            }
            let wake = self.wake_at(now).min(until);
            self.poller.sleep(&[], wake.saturating_duration_since(now));
        }
    }

    /// Ranks to which not all of `lanes` are open.
    pub(crate) fn unconnected(&self, lanes: &[(usize, Lane)]) -> impl Iterator<Item = usize> {
        lanes.iter().filter(|&&(peer, lane)| !self.peers[peer].is_open(lane)).map(|&(peer, _)| peer)
    }

    /// Whether `peer` has proven itself.
    pub(crate) fn is_connected(&self, peer: usize) -> bool {
        self.peers[peer].control.is_some()
    }

    /// Ends the group for what another rank left in the store.
    pub(crate) fn aborted(&mut self, report: &[u8]) -> CommError {
        match Report::decode(report) {
            Ok(report) => self.give_up(report),
            Err(reason) => self.give_up(Report::new(self.settings.me, Cause::Aborted { reason })),
        }
    }

    /// Ends the group before it was whole, and tells those who are there.
    pub(crate) fn give_up(&mut self, report: Report) -> CommError {
        self.fail(report.clone());
        let failure = self.failure.clone().unwrap_or(Failure::new(report));
        self.error(&failure, None, 0, (0, 0))
    }

    pub(crate) fn door(&self) -> &Door {
        &self.door
    }

    pub(crate) fn unregister_agent(&mut self) {
        if let Some((agent, _)) = self.settings.agent.as_ref().filter(|_| self.agent_registered) {
            let agent = agent.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.poller.remove(agent.as_fd());
            self.agent_registered = false;
        }
    }
}

impl Work {
    fn call(&self) -> Call {
        match self {
            Self::Collective { call, .. } | Self::Send { call, .. } | Self::Recv { call, .. } => *call,
        }
    }
}
