//! One node of an elastic job: carries out its agent's commands, and tells the agent what the coordinator
//! decides.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::rc::Rc;
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::{ServeError, StoreServer};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::{timeout, timeout_at};

use super::view::{EndReason, StoppedRound, View, describe_end};
use super::{Settings, describe_join_status, host_addresses};
use crate::config::{Endpoint, is_loopback};
use crate::membership::{self, Departure, Failure, JobResult, Phase, Refusal};
use crate::messages::{Progress, print_message};
use crate::rendezvous::cluster::EventSender;
use crate::rendezvous::connect::strip_address;
use crate::rendezvous::{
    Assignment, ClusterCommand, ClusterEvent, FailureProtocol, JobOutcome, OutcomeKind, ProposedOutcome,
    RendezvousError,
};

/// Request of this node's agent to the session.
#[derive(Debug)]
pub(super) enum NodeRequest {
    Enter(Phase),
    /// The node leaves the job.
    Leave(Departure),
}

/// The node, as the tasks of the rendezvous thread share it.
pub(super) struct Node {
    settings: Rc<Settings>,
    /// True if this process serves the coordinator at the endpoint, which no other node can take over.
    pub(super) is_host: bool,
    requests: mpsc::UnboundedSender<NodeRequest>,
    events: EventSender,
    view: watch::Sender<View>,
    /// Listener for the key-value store of the next round's workers, in case this node has to serve that
    /// store.
    listener: RefCell<Option<TcpListener>>,
    /// Server of the key-value store for the current round's workers, if this node serves that store.
    server: RefCell<Option<StoreServer>>,
    /// Group rank of this node in the last round that it entered, and the number of that round (0: none).
    position: Cell<(usize, u64)>,
    /// True if the agent knows of a round that this node has joined.
    has_joined: Cell<bool>,
    /// What the agent has been told: the latest end of a round (its number, and whether this node was
    /// partitioned), and that the job has ended.
    reported: Cell<((u64, bool), bool)>,
    /// Reason for which this node leaves the job, once it does.
    pub(super) departure: RefCell<Option<Departure>>,
    /// True if the agent has asked to leave and has no answer yet.
    pub(super) has_left: Cell<bool>,
}

impl Node {
    pub(super) fn new(
        settings: Rc<Settings>,
        requests: mpsc::UnboundedSender<NodeRequest>,
        events: EventSender,
    ) -> Self {
        Self {
            settings,
            is_host: false,
            requests,
            events,
            view: watch::Sender::default(),
            listener: RefCell::default(),
            server: RefCell::default(),
            position: Cell::default(),
            has_joined: Cell::default(),
            reported: Cell::default(),
            departure: RefCell::default(),
            has_left: Cell::default(),
        }
    }

    /// Carries out commands until the agent leaves the job. If the agent has ended, this waits for the end of
    /// the process: other nodes must not take its death for a departure.
    pub(super) async fn serve(self: &Rc<Self>, commands: &mut mpsc::UnboundedReceiver<ClusterCommand>) {
        loop {
            let Some(command) = commands.recv().await else { return std::future::pending().await };
            match command {
                ClusterCommand::Join { restarts } => self.start_join(restarts, false),
                ClusterCommand::Barrier { drained } => {
                    let node = Rc::clone(self);
                    spawn_local(async move { node.barrier(drained).await });
                }
                ClusterCommand::Close => drop(self.server.take()),
                ClusterCommand::ReportFailure { summary, report, restarts, defer_until } => {
                    let failure = Failure { summary, report, can_restart: restarts };
                    self.report_failure(failure, defer_until.filter(|_| !restarts));
                }
                ClusterCommand::ReportSignal(signal) => self.report_signal(signal),
                ClusterCommand::Leave { proposed } => {
                    self.has_left.set(true);
                    return self.leave(departure_of(proposed));
                }
            }
        }
    }

    /// Changes what this node knows, and tells the agent what follows from it.
    pub(super) fn change(&self, change: impl FnOnce(&mut View)) {
        self.view.send_modify(change);
        self.tell_changes();
    }

    /// Tells the agent that the round or the job is over, if it does not know that yet. For the same round,
    /// the agent is told of a partition even after an order to stop: a node that is cut off from the
    /// coordinator has less time to stop its workers than a node with such an order.
    fn tell_changes(&self) {
        let (last_stopped, has_ended) = self.reported.get();
        if !self.has_joined.get() || has_ended {
            return;
        }
        let view = self.view.borrow();
        let stopped = view.stopped.as_ref().filter(|now| (now.round, now.partitioned) > last_stopped);
        if let Some(stopped) = stopped.cloned() {
            self.reported.set(((stopped.round, stopped.partitioned), false));
            let StoppedRound { round, cause, partitioned } = stopped;
            self.events.send(ClusterEvent::NewRound { round, cause, partitioned });
        }
        if let Some(reason) = &view.end_reason {
            self.reported.set((self.reported.get().0, true));
            if let EndReason::Partitioned(silence) = reason {
                print_message(&format!("no heartbeat of this node was answered for {silence}"));
            }
            if !is_success(reason) {
                self.events.send(ClusterEvent::JobEnded(self.outcome(reason)));
            }
        }
    }

    fn outcome(&self, reason: &EndReason) -> JobOutcome {
        match reason {
            EndReason::JobEnded(JobResult::Failed { node, host, summary, report }) => JobOutcome::new(
                *node,
                host,
                OutcomeKind::Failed { summary: summary.clone(), report: report.clone() },
            ),
            EndReason::JobEnded(JobResult::CoordinatorExited { node: Some(node), host, why }) => {
                JobOutcome::new(*node, host, OutcomeKind::Error { text: why.clone() })
            }
            reason => {
                let kind = OutcomeKind::Partitioned { text: describe_end(reason, &self.settings) };
                JobOutcome::new(self.position.get().0, &self.settings.profile.host, kind)
            }
        }
    }

    /// Waits until `condition` returns a value.
    async fn wait<T>(&self, mut condition: impl FnMut(&View) -> Option<T>) -> T {
        let mut view = self.view.subscribe();
        loop {
            if let Some(found) = condition(&view.borrow_and_update()) {
                return found;
            }
            view.changed().await.expect("the node holds the sender");
        }
    }

    /// Sends a change of this node's phase to the coordinator.
    fn enter(&self, phase: Phase) {
        // Sending fails only if the session has ended. The view then holds the reason.
        let _ = self.requests.send(NodeRequest::Enter(phase));
    }

    /// Leaves the job: the session reports this to the coordinator and ends.
    fn leave(&self, departure: Departure) {
        self.departure.replace(Some(departure.clone()));
        let _ = self.requests.send(NodeRequest::Leave(departure));
    }

    pub(super) fn tell_left(&self, other_jobs: usize) {
        self.events.send(ClusterEvent::Left { outcome: None, other_jobs });
    }

    async fn barrier(&self, drained: bool) {
        let (_, round) = self.position.get();
        self.enter(Phase::Succeeded { round, drained });
        let passed = self.wait(|view| match &view.end_reason {
            Some(reason) => Some(is_success(reason)),
            None => view.is_stopped(round).then_some(false),
        });
        if passed.await {
            self.events.send(ClusterEvent::Barrier { warning: None });
        }
    }

    /// Reports a failure, after `defer_until` unless the round is over before. A node with a restart left
    /// reports at once, because it enters the next round.
    fn report_failure(self: &Rc<Self>, failure: Failure, defer_until: Option<Instant>) {
        let (_, round) = self.position.get();
        let phase = Phase::Failed { round, failure };
        let Some(until) = defer_until else { return self.enter(phase) };
        let node = Rc::clone(self);
        spawn_local(async move {
            let is_over = |view: &View| (view.is_stopped(round) || view.end_reason.is_some()).then_some(());
            if timeout_at(until.into(), node.wait(is_over)).await.is_err() {
                node.enter(phase);
            }
        });
    }

    fn report_signal(&self, signal: i32) {
        if !self.has_joined.get() {
            return;
        }
        if self.is_host {
            // No other node can take over the coordinator of this process, so the job ends at once.
            self.leave(Departure::Stopped { signal });
        } else {
            self.enter(Phase::Leaving { round: self.position.get().1, signal });
        }
    }

    /// Starts to join the next round. The session starts with the phase of the first join.
    pub(super) fn start_join(self: &Rc<Self>, restarts: u32, is_first: bool) {
        let node = Rc::clone(self);
        spawn_local(async move {
            let joined = node.join(restarts, is_first).await;
            match &joined {
                Ok(_) => node.has_joined.set(true),
                Err(RendezvousError::AlreadySucceeded) => node.leave(Departure::Ended),
                Err(error) => node.leave(Departure::Error(error.to_string())),
            }
            node.events.send(ClusterEvent::Joined(joined));
            node.tell_changes();
        });
    }

    async fn join(&self, restarts: u32, mut is_first: bool) -> Result<Assignment, RendezvousError> {
        self.server.take();
        loop {
            if !std::mem::take(&mut is_first) {
                self.enter(self.ready(restarts)?);
            }
            let run = self.wait_for_round().await?;
            let round = run.round;
            match self.enter_round(run).await {
                // The coordinator ended the round before this node had entered it.
                Err(_) if self.view.borrow().is_round_over(round) => {}
                entered => return entered,
            }
        }
    }

    /// Listens for the workers' key-value store of the next round. Returns the phase in which this node is
    /// ready for that round.
    pub(super) fn ready(&self, restarts: u32) -> Result<Phase, RendezvousError> {
        let own = self.own_address();
        let listener = listen_for_workers(own.as_deref())?.into_iter().next();
        let address = listener.as_ref().and_then(|listener| listener.local_addr().ok());
        let port = address.map_or(0, |address| address.port());
        self.listener.replace(listener);
        let view = self.view.borrow();
        let store = host_addresses::store_addresses(own.as_deref(), view.route_address, port);
        let (_, after) = self.position.get();
        let partitioned = view.stopped.as_ref().is_some_and(|last| last.round == after && last.partitioned);
        Ok(Phase::Ready { after, restarts, store, partitioned })
    }

    /// Waits until the coordinator assigns this node to a rendezvous round.
    async fn wait_for_round(&self) -> Result<membership::Assignment, RendezvousError> {
        let deadline = Instant::now() + self.settings.rules.join_timeout;
        let (_, after) = self.position.get();
        let mut progress = Progress::new(deadline);
        loop {
            let update = self.wait(|view| match (&view.end_reason, &view.assignment) {
                (Some(reason), _) => Some(Err(reason.clone())),
                (None, Some(run)) if run.round > after => Some(Ok(run.clone())),
                (None, _) => None,
            });
            match timeout(Progress::INTERVAL, update).await {
                Ok(Ok(assignment)) => return Ok(assignment),
                Ok(Err(reason)) if is_success(&reason) => {
                    return Err(RendezvousError::AlreadySucceeded);
                }
                Ok(Err(reason)) => {
                    let text = describe_end(&reason, &self.settings);
                    return Err(match reason {
                        EndReason::Refused(Refusal::Timeout { .. }) => RendezvousError::JoinTimeout(text),
                        _ => RendezvousError::Refused(text),
                    });
                }
                Err(_) => {}
            }
            let view = self.view.borrow();
            match (&view.connection_error, &view.join_status) {
                (Some(error), _) => {
                    let endpoint = self.settings.endpoint.to_string();
                    let what = format!("the rendezvous at {endpoint}: {}", strip_address(&endpoint, error));
                    progress.show(&format!("waiting for {what}"));
                    // The coordinator enforces the join timeout of a connected node, so only a node without
                    // connection checks it here.
                    if Instant::now() >= deadline {
                        let after_s = self.settings.rules.join_timeout.as_secs();
                        return Err(RendezvousError::JoinTimeout(format!(
                            "no answer within {after_s} s from {what}\n  try: is convoke running on the endpoint's host, \
                             with the same --rdzv-endpoint? may this host reach its port?"
                        )));
                    }
                }
                (None, Some(join_status)) if join_status.standby => {
                    progress.show_endless(&describe_join_status(join_status));
                }
                (None, Some(join_status)) => progress.show(&describe_join_status(join_status)),
                (None, None) => {}
            }
        }
    }

    /// Enters the rendezvous round `run`: serves the workers' key-value store if this node has group rank 0,
    /// and finds an address at which the store answers.
    async fn enter_round(&self, run: membership::Assignment) -> Result<Assignment, RendezvousError> {
        let (generation, share_store) = (Generation::from_bytes(run.generation), self.settings.share_store);
        self.enter(Phase::Running { round: run.round });
        self.position.set((run.group_rank, run.round));
        let listener = self.listener.take();
        if run.group_rank == 0 && share_store {
            let server = StoreServer::serve(listener.into_iter().collect())?;
            let (value, deadline) = (generation.to_string(), Instant::now() + Duration::from_secs(10));
            server.store().set(host_addresses::GENERATION_KEY, value.as_bytes(), deadline)?;
            self.server.replace(Some(server));
        }
        let found = if share_store {
            tokio::select! {
                found = host_addresses::find_store(&run.store, generation) => found,
                () = self.wait(|view| view.is_round_over(run.round).then_some(())) => {
                    Err("the round has ended".to_owned())
                }
            }
        } else {
            // Worker rank 0 will listen at the first address. No process listens there yet.
            host_addresses::split(run.store.first().map_or("", String::as_str))
        };
        let (master_addr, master_port) = found.map_err(RendezvousError::Refused)?;
        Ok(Assignment {
            round: run.round,
            group_rank: run.group_rank,
            group_world_size: run.group_world_size,
            base_rank: run.base_rank,
            world_size: run.world_size,
            base_role_rank: run.base_role_rank,
            role_world_size: run.role_world_size,
            master_addr,
            master_port,
            use_agent_store: share_store,
            generation: Some(generation),
            restarts: run.restarts,
            protocol: FailureProtocol::Confirmed,
            token: self.settings.given_token.borrow().clone(),
        })
    }

    /// Prints a warning if no token or registry protects the job, so that any process that can reach the
    /// endpoint can take part. `lacks_munge` is true if this node serves the endpoint and cannot draw a token: other
    /// nodes of a scheduler's job do not know.
    pub(super) fn warn_if_open(&self, lacks_munge: bool) {
        let is_open = match &self.settings.endpoint {
            Endpoint::Host { host, .. } => !is_loopback(host),
            // The file or etcd holds a key, and only nodes that can read the key can take part.
            Endpoint::File(_) => false,
            Endpoint::Etcd(cluster) => {
                cluster.is_open() && !cluster.endpoints.iter().all(|(host, _)| is_loopback(host))
            }
        };
        let is_protected = self.settings.accepts_credential && !lacks_munge;
        if is_open && self.settings.token.is_none() && !is_protected {
            let endpoint = &self.settings.endpoint;
            print_message(&format!(
                "warning: whoever can reach {endpoint} can join or stop this job; set CONVOKE_TOKEN, the same on all nodes"
            ));
        }
    }

    /// Returns the address at which other nodes reach this node: the one that the user gave, or a loopback
    /// address if all nodes are on this host.
    fn own_address(&self) -> Option<String> {
        let is_local = matches!(&self.settings.endpoint, Endpoint::Host { host, .. } if is_loopback(host));
        self.settings.local_addr.clone().or_else(|| is_local.then(|| "127.0.0.1".to_owned()))
    }
}

/// Listens at a free port for the workers' key-value store: at the address `own` if that belongs to this
/// host, else at all addresses.
fn listen_for_workers(own: Option<&str>) -> Result<Vec<TcpListener>, ServeError> {
    let own = own.and_then(|own| own.parse::<IpAddr>().ok());
    match own.map(|ip| convoke_store::listen(&[SocketAddr::new(ip, 0)])) {
        Some(Ok(listeners)) => Ok(listeners),
        // Other hosts may still reach this host by an address that does not belong to it.
        Some(Err(_)) | None => host_addresses::listen_anywhere(),
    }
}

fn is_success(reason: &EndReason) -> bool {
    matches!(reason, EndReason::JobEnded(JobResult::Succeeded { .. }))
}

/// Returns the reason for which a node leaves the job if it proposes this outcome.
pub(super) fn departure_of(proposed: Option<ProposedOutcome>) -> Departure {
    match proposed.map(|proposed| proposed.kind) {
        Some(OutcomeKind::Stopped { signal }) => Departure::Stopped { signal },
        Some(OutcomeKind::Error { text } | OutcomeKind::Partitioned { text }) => Departure::Error(text),
        // The coordinator has already told the other nodes of such an outcome.
        Some(OutcomeKind::Failed { .. } | OutcomeKind::Lost | OutcomeKind::Succeeded) | None => {
            Departure::Ended
        }
    }
}
