//! The engine and its progress loop, which moves data, polls for other events now and then, and sleeps if
//! nothing moves.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::completion::Completion;
use super::execution::Execution;
use super::failure::Failure;
use super::messages::AnySourceQueue;
use super::mux::{self, Membership, Mux};
use super::poller::Poller;
use super::probe::Probe;
use super::progress_lock::{Drive, Goal};
use super::state::{Collective, Peer, Settings, Wait};
use super::streams::Streams;
use super::teardown::Finishing;
use super::wait_policy::{WaitAction, WaitPolicy};
use super::{EngineFn, Operation, SubmissionQueue, Task, Transport};
use crate::buffer::BorrowedBuffer;
use crate::collectives::call::{Call, Status};
use crate::collectives::kernels::Kernel;
use crate::collectives::plan::Plan;
use crate::error::CommError;
use crate::error::cause::{Cause, Report};
use crate::fault::fault_point;
use crate::shm::{self, HostMemory};
use crate::transport::frame::Kind;
use crate::transport::links::hello::ConnectionKind;
use crate::transport::links::tcp::Listener;

/// Passes of the progress loop between two polls of control connections and clock while data keeps moving.
const ROUNDS_BETWEEN_POLLS: u32 = 64;
/// Number of past collectives that are kept, to compare them with the calls that other ranks report to wait
/// in.
const HISTORY: usize = 64;

#[derive(Debug)]
pub(crate) struct Engine {
    pub(super) settings: Settings,
    pub(super) peers: Vec<Peer>,
    /// This group's part of what the groups of this process share.
    pub(super) links: Membership,
    /// The connections for messages; `None` while the group has none.
    pub(super) poller: Option<Poller>,
    pub(super) submissions: Arc<SubmissionQueue>,
    /// Collectives in the order of their calls; the first is in progress.
    pub(super) collectives: VecDeque<Collective>,
    pub(super) next_seq: u64,
    /// Receives from any source that no message has matched.
    pub(super) any_source: AnySourceQueue,
    /// Probes that wait for a message.
    pub(super) probes: Vec<Probe>,
    /// The memory that this rank shares with other ranks of its host; `None` if they share none.
    pub(super) node: Option<HostMemory>,
    /// The other ranks that share the memory in `node`.
    pub(super) local_peers: Vec<usize>,
    pub(super) history: VecDeque<(u64, Call)>,
    pub(super) failure: Option<Failure>,
    /// The time since which no data has moved; `None` while data moves.
    pub(super) stalled_since: Option<Instant>,
    /// The call that this rank last reported to the other ranks as the one that it waits in.
    pub(super) reported_wait: Option<Wait>,
    /// The time at which this rank last asked the other ranks which calls they wait in.
    pub(super) queried_at: Option<Instant>,
    /// True while a caller runs the engine and waits for an operation; false while the background thread runs
    /// the engine.
    pub(super) has_waiter: bool,
    pub(super) left: bool,
    /// True while the group forms: other ranks may still connect.
    pub(super) connecting: bool,
    /// Set when this rank makes no more calls: it leaves the group as soon as its pending operations are
    /// done.
    pub(super) finishing: Option<Finishing>,
    pub(super) wait_policy: WaitPolicy,
    /// A control frame has arrived, or a control connection has ended, since this flag was last cleared.
    pub(super) control_activity: bool,
    /// The time at which the driving thread was last moved to another core.
    pub(super) migrated_at: Option<Instant>,
    /// Completions of callers that wait until nothing is pending and this rank has left the group.
    leaving: Vec<Arc<Completion>>,
    /// Passes of the progress loop, and inline calls, so far. The count goes on from call to call, so that
    /// many short calls also lead to polls.
    pub(super) rounds: u32,
}

impl Engine {
    /// Makes the engine of the first group of a process; the launcher reports to it through `agent`. Other
    /// ranks connect to `listener`; it is `None` if no other rank is to connect.
    pub(crate) fn new(
        settings: Settings,
        agent: Option<mux::Agent>,
        listener: Option<Listener>,
    ) -> Result<Self, CommError> {
        let Settings { me, size, ref credentials, peer_timeout, .. } = settings;
        let mux = Mux::new(credentials, size, agent, peer_timeout, listener)?;
        let links = mux.join(credentials.group, me, (0..size).collect());
        let mut engine = Self::with_links(settings, links);
        let events = engine.links.poll_agent();
        engine.handle_events(events);
        Ok(engine)
    }

    /// Makes the engine of a group whose ranks are connected already.
    pub(crate) fn joined(settings: Settings, links: Membership) -> Self {
        let mut engine = Self::with_links(settings, links);
        for rank in (0..engine.settings.size).filter(|&rank| rank != engine.settings.me) {
            let peer = &mut engine.peers[rank];
            peer.control = Some(engine.links.channel(rank));
            peer.collective = Some(engine.links.data_link(rank, ConnectionKind::Collective));
            peer.messages.conn = Some(engine.links.data_link(rank, ConnectionKind::Message));
        }
        engine
    }

    fn with_links(settings: Settings, links: Membership) -> Self {
        Self {
            peers: (0..settings.size).map(Peer::new).collect(),
            submissions: Arc::new(SubmissionQueue::with_doorbell(Arc::clone(links.slot()))),
            links,
            poller: None,
            collectives: VecDeque::new(),
            next_seq: 0,
            any_source: AnySourceQueue::default(),
            probes: Vec::new(),
            node: None,
            local_peers: Vec::new(),
            history: VecDeque::new(),
            failure: None,
            stalled_since: None,
            reported_wait: None,
            queried_at: None,
            has_waiter: false,
            left: false,
            connecting: false,
            finishing: None,
            wait_policy: WaitPolicy::new(settings.sharing.oversubscription),
            migrated_at: None,
            control_activity: false,
            leaving: Vec::new(),
            rounds: 0,
            settings,
        }
    }

    pub(crate) fn submissions(&self) -> &Arc<SubmissionQueue> {
        &self.submissions
    }

    pub(super) fn start(&mut self, task: Task) {
        let Task { operation, completion } = task;
        let operation = match operation {
            Operation::Leave => return self.leaving.push(completion),
            Operation::OnEngine(EngineFn(function)) => {
                let outcome = function(self);
                return completion.complete(outcome);
            }
            other => other,
        };
        let call = match &operation {
            Operation::Leave | Operation::OnEngine(_) => return,
            Operation::Collective { call, .. } | Operation::Probe { call, .. } => *call,
            Operation::Send { call, .. } | Operation::Recv { call, .. } => *call,
        };
        if self.left {
            completion.complete(Err(CommError::Destroyed { group: self.settings.name.clone() }));
            return;
        }
        if matches!(operation, Operation::Collective { transport: Transport::SharedMemory, .. }) {
            self.wait_for_failure_report();
        }
        if let Some(failure) = &self.failure {
            completion.complete(Err(self.error(failure, Some(call), self.next_seq, (0, 0))));
            return;
        }
        self.record_message(&operation, &completion);
        match operation {
            Operation::Collective { call, transport, buffer, kernel } => {
                let run = self.start_collective(call, transport, buffer, kernel);
                let _ = completion
                    .step
                    .set(self.record_collective(&run, self.settings.flight.ns(completion.started_at)));
                self.collectives.push_back(Collective {
                    execution: run,
                    completion,
                    arrival_announced: false,
                });
                self.compare_with_reports();
            }
            Operation::Send { to, call, buffer } if to == self.settings.me => {
                let sent =
                    self.peers[to].messages.send_to_self(&mut self.any_source, call, buffer, completion);
                if let Err(error) = sent {
                    self.message_failed(to, error);
                }
            }
            Operation::Send { to, call, buffer } => {
                self.ensure_connected(to, ConnectionKind::Message);
                self.peers[to].messages.post_send(&self.settings.credentials, call, buffer, completion);
            }
            Operation::Recv { from: Some(from), call, buffer } => {
                let order = self.any_source.order();
                self.receive(from, order, call, buffer, completion);
            }
            Operation::Recv { from: None, call, buffer } => {
                self.ensure_message_connections();
                match self.first_unexpected(None, call.root) {
                    Some(Status { source: from, .. }) => {
                        let order = self.any_source.order();
                        self.receive(from, order, call, buffer, completion);
                    }
                    None => self.any_source.post(call, buffer, completion),
                }
            }
            Operation::Probe { from, call, wait } => self.probe(from, call, wait, completion),
            Operation::OnEngine(_) | Operation::Leave => {}
        }
    }

    /// Starts the next collective: gives it a sequence number and opens the connections that it needs.
    pub(super) fn start_collective(
        &mut self,
        call: Call,
        transport: Transport,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> Execution {
        let seq = self.next_number(call);
        match (transport, &mut self.node) {
            (Transport::SharedMemory, Some(node)) => {
                Execution::Memory(shm::collective::ShmCollective::new(node, call, seq, buffer, kernel))
            }
            (Transport::SharedMemory, None) => {
                Execution::Streams(self.start_streams(call, seq, Arc::default(), buffer, kernel))
            }
            (Transport::Connections(plan), _) => {
                Execution::Streams(self.start_streams(call, seq, plan, buffer, kernel))
            }
        }
    }

    /// Returns the sequence number of the next collective, `call`, and keeps both in `history`.
    pub(super) fn next_number(&mut self, call: Call) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        fault_point("calling", seq, 0);
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((seq, call));
        seq
    }

    fn start_streams(
        &mut self,
        call: Call,
        seq: u64,
        plan: Arc<Plan>,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> Streams {
        let (ours, me) = (&self.settings.credentials, self.settings.me);
        let streams = Streams::new(ours, call, seq, plan, buffer, kernel, me);
        for peer in streams.peers().collect::<Vec<_>>() {
            self.ensure_connected(peer, ConnectionKind::Collective);
        }
        streams
    }

    pub(super) fn receive(
        &mut self,
        from: usize,
        order: u64,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
    ) {
        self.ensure_connected(from, ConnectionKind::Message);
        let ours = &self.settings.credentials;
        if let Err(error) = self.peers[from].messages.post_recv(ours, order, call, buffer, completion) {
            self.message_failed(from, error);
        }
    }

    /// Opens a connection to `peer` unless there is a link of this kind.
    pub(super) fn ensure_connected(&mut self, peer: usize, conn_kind: ConnectionKind) {
        if !self.peers[peer].is_linked(conn_kind) {
            self.open_connection(peer, conn_kind);
        }
    }

    /// Opens a connection to `peer` if it is not open. The higher rank of a pair connects, so a lower rank
    /// asks the peer to connect.
    pub(super) fn open_connection(&mut self, peer: usize, conn_kind: ConnectionKind) {
        if self.peers[peer].is_open(conn_kind) || peer == self.settings.me {
            return;
        }
        let open = self.frame(Kind::Open, u64::from(conn_kind.to_wire()));
        if self.settings.me > peer {
            if self.peers[peer].awaits_connection(conn_kind) {
                // The peer learns that a connection is needed even if it cannot accept it.
                self.send_control(peer, &open, &[]);
            }
            self.links.connect(peer, conn_kind, self.settings.addresses[peer], false);
            self.poll_handshakes(Instant::now());
        } else if conn_kind != ConnectionKind::Control && !self.peers[peer].requested[conn_kind as usize] {
            self.peers[peer].requested[conn_kind as usize] = true;
            self.send_control(peer, &open, &[]);
        }
    }

    /// Moves data of the first collective and of all messages, as far as possible without waiting. Returns
    /// whether anything moved.
    pub(super) fn progress(&mut self) -> bool {
        let mut moved = false;
        if let Some(first) = self.collectives.front_mut() {
            match first.execution.progress(&mut self.peers, self.node.as_mut()) {
                Ok(some) => moved = some,
                Err(error) => self.execution_failed(error),
            }
            self.announce_arrival();
            let (me, peers, failed) = (self.settings.me, &self.peers, self.failure.is_some());
            let is_done = |first: &mut Collective| {
                first.execution.is_finished() && first.is_barrier_complete(me, peers, failed)
            };
            if let Some(done) = self.collectives.pop_front_if(is_done) {
                let Collective { execution: run, completion, .. } = done;
                fault_point("moved", run.seq(), 0);
                drop(run);
                completion.complete(Ok(None));
                self.record_start();
                moved = true;
            }
        }
        if !self.any_source.recvs.is_empty() || !self.probes.is_empty() {
            // The awaited message may come from any peer, so all connections that have data are read.
            self.poll_ready();
            moved |= self.complete_probes();
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].messages.is_busy() {
                moved |= self.progress_messages(peer);
            }
        }
        if !self.leaving.is_empty() && (self.completions().next().is_none() || self.abandons_pending()) {
            self.leave();
            self.leaving.drain(..).for_each(|completion| completion.complete(Ok(None)));
        }
        moved
    }

    pub(super) fn progress_messages(&mut self, peer: usize) -> bool {
        match self.peers[peer].messages.progress(&self.settings.credentials, &mut self.any_source) {
            Ok(moved) => moved,
            Err(error) => {
                self.message_failed(peer, error);
                false
            }
        }
    }
}

impl Drive for Engine {
    type Task = Task;
    type Doorbell = Arc<mux::Slot>;

    fn drive(&mut self, goal: &Goal<'_>) {
        self.has_waiter = !goal.is_background();
        self.drive_to(goal);
        self.has_waiter = false;
    }

    fn collect(&mut self) {
        let Some((tasks, abort)) = self.submissions.collect() else { return };
        for task in tasks {
            self.start(task);
        }
        if let Some(reason) = abort {
            self.fail(Report::new(self.settings.me, Cause::Aborted { reason }));
        }
        // Starting a task may fail the group before the task is in its queue. Then the failure has not ended
        // the task.
        self.fail_pending();
    }

    fn poll_once(&mut self) {
        self.collect();
        self.progress();
    }

    fn on_panic(&mut self) {
        self.fail_after_panic();
    }
}

impl Engine {
    fn drive_to(&mut self, goal: &Goal<'_>) {
        loop {
            self.collect();
            let moved = self.progress();
            if goal.is_reached() {
                return;
            }
            if let Some(failure) = self.failure.as_ref().filter(|_| !goal.is_background()) {
                // After a failure the engine has no tasks, so no other code would complete these.
                for completion in goal.completions {
                    completion.complete(Err(self.error(failure, None, 0, (0, 0))));
                }
                return;
            }
            self.rounds = self.rounds.wrapping_add(1);
            if moved {
                self.wait_policy.record_progress();
                self.stalled_since = None;
                if self.rounds.is_multiple_of(ROUNDS_BETWEEN_POLLS) {
                    let now = Instant::now();
                    self.poll_events(now);
                    if goal.until.is_some_and(|until| now >= until) {
                        return;
                    }
                }
                continue;
            }
            match self.wait_policy.next_action(goal.is_background()) {
                WaitAction::Spin => std::hint::spin_loop(),
                WaitAction::Yield => {
                    if self.rounds.is_multiple_of(ROUNDS_BETWEEN_POLLS) {
                        self.move_to_assigned_core();
                    }
                    let begin = Instant::now();
                    std::thread::yield_now();
                    self.wait_policy.record_yield(begin.elapsed());
                }
                WaitAction::Sleep
                    if !goal.is_background()
                        && self.wait_policy.may_migrate()
                        && self.leave_shared_core() =>
                {
                    self.wait_policy.record_migration();
                }
                WaitAction::Sleep => {
                    self.wait_policy.record_sleep();
                    self.sleep(goal);
                    if goal.until.is_some_and(|until| Instant::now() >= until) {
                        return;
                    }
                }
            }
        }
    }
}
