//! Coordinator session of a node: connects and reconnects to the coordinator, sends the node's statuses, and
//! receives orders.

use std::ops::ControlFlow;
use std::time::Duration;

use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::connector::{self, Connection, Connector};
use super::discovery::{ConnectFailure, Discovery, LastAttempt};
use super::framing::{self, FramingError};
use super::node::{Node, NodeRequest};
use super::view::EndReason;
use super::wire::{FRAME_LIMIT, Seal, ToCoordinator, ToMember};
use crate::config::is_named;
use crate::membership::{Command, IDLE_TIMEOUT_FACTOR, JobResult, Member, OrderMessage, Phase, Refusal};
use crate::rendezvous::until;

/// Number of heartbeats that a node sends within the heartbeat timeout.
const HEARTBEATS_PER_TIMEOUT: u32 = 6;
/// First delay between two attempts to connect to the coordinator. [`MAX_RETRY_DELAY`] is the longest.
const RETRY_DELAY: Duration = Duration::from_millis(20);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Number of consecutive refused connections after which the process of the coordinator counts as dead.
const MAX_REFUSED: u32 = 4;
/// Time after which an attempt to connect also checks whether the registry names another coordinator.
const REGISTRY_CHECK_DELAY: Duration = Duration::from_millis(500);
/// Interval at which a node checks whether the coordinator of an ended job still occupies the endpoint.
const CLOSED_JOB_POLL: Duration = Duration::from_millis(200);
/// Longest time that a leaving node waits for its last message to be sent.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(500);

/// Coordinator session of one node.
pub(super) struct Session<'a> {
    connector: Connector,
    member: Member,
    discovery: &'a mut Discovery,
    requests: mpsc::UnboundedReceiver<NodeRequest>,
    node: &'a Node,
    began: Instant,
    /// Time since which there is no connection, while there is none.
    disconnected_at: Instant,
    /// Delay before the next attempt to connect. It doubles after each attempt.
    retry_delay: Duration,
    /// How the last attempt failed, and the last error.
    last_attempt: LastAttempt,
    last_error: String,
    /// Number of attempts in a row that were refused.
    refused_count: u32,
}

/// Reason for which a connection to the coordinator ended without an error.
enum SessionEnd {
    /// The node leaves the job.
    Left,
    /// The coordinator has evicted this node.
    Evicted,
    /// The job has ended with this outcome, and this node never took part.
    Closed(JobResult),
}

impl<'a> Session<'a> {
    pub(super) fn new(
        connector: Connector,
        phase: Phase,
        discovery: &'a mut Discovery,
        requests: mpsc::UnboundedReceiver<NodeRequest>,
        node: &'a Node,
    ) -> Self {
        let began = Instant::now();
        Self {
            member: Member::new(phase, connector.settings.rules.heartbeat_timeout),
            connector,
            discovery,
            requests,
            node,
            began,
            disconnected_at: began,
            retry_delay: RETRY_DELAY,
            last_attempt: LastAttempt::NoFailure,
            last_error: String::new(),
            refused_count: 0,
        }
    }

    /// Runs until the node leaves the job or cannot continue in it.
    pub(super) async fn run(mut self) {
        while let ControlFlow::Continue(connected) = self.connect().await {
            let next = match connected {
                Ok(connection) => self.stay_connected(connection).await,
                Err(failure) => self.retry(failure).await,
            };
            if next.is_break() {
                return;
            }
        }
    }

    /// Tries once to connect to the coordinator. Breaks if this node leaves, or gives up because it had no
    /// connection for too long.
    async fn connect(&mut self) -> ControlFlow<(), Result<Connection, ConnectFailure>> {
        loop {
            let ends = self.deadline();
            let Self { connector, member, discovery, requests, began, .. } = self;
            let (how, takes_part) = (self.last_attempt, member.answered().is_some());
            let connecting = async {
                let found = discovery.find(how, takes_part).await?;
                tokio::select! {
                    connected = connector.connect(&found) => connected,
                    () = async {
                        // Most attempts to connect succeed before this delay ends, without reading the
                        // registry.
                        sleep(REGISTRY_CHECK_DELAY).await;
                        discovery.changed().await;
                    } => Err(ConnectFailure::Moved),
                }
            };
            tokio::select! {
                connected = connecting => return ControlFlow::Continue(match connected {
                    // The coordinator has answered this node before, so the refusal may be temporary: the
                    // node tries again.
                    Err(ConnectFailure::Unusable(why)) if takes_part => {
                        Err(ConnectFailure::Unreachable { why, how })
                    }
                    connected => connected,
                }),
                () = wait_for_departure(member, requests) => return ControlFlow::Break(()),
                () = until(ends.map(|(at, _)| *began + at)) => {}
            }
            let silence = self.silence();
            if ends.is_none_or(|(_, is_end)| is_end) {
                self.node.change(|view| view.end(EndReason::Partitioned(silence)));
                return ControlFlow::Break(());
            }
            self.member.mark_partitioned();
            self.node.change(|view| view.stop_partitioned(&silence));
        }
    }

    /// Exchanges messages while the connection lasts. Breaks if the session ends with it.
    async fn stay_connected(&mut self, connection: Connection) -> ControlFlow<()> {
        self.retry_delay = RETRY_DELAY;
        (self.last_attempt, self.refused_count) = (LastAttempt::NoFailure, 0);
        self.member.set_coordinator(self.discovery.is_own());
        let route_address = connection.stream.local_addr().ok().map(|address| address.ip());
        self.node.change(|view| (view.connection_error, view.route_address) = (None, route_address));
        match self.exchange(connection).await {
            Ok(SessionEnd::Left) => return ControlFlow::Break(()),
            Ok(SessionEnd::Evicted) => {
                "the other nodes have continued without this node".clone_into(&mut self.last_error);
                if has_workers(&self.member) {
                    let silence = describe_silence(self.member.lease(), &self.last_error);
                    self.node.change(|view| view.stop_partitioned(&silence));
                }
                match connector::fresh_id() {
                    Ok(id) => {
                        self.connector.agent = id;
                        if let Some(job) = self.discovery.own_job() {
                            job.set_agent(id);
                        }
                    }
                    Err(error) => self.last_error = error.to_string(),
                }
                self.member.rejoin();
            }
            Ok(SessionEnd::Closed(result))
                if !result.frees_run_id(is_named(&self.connector.settings.run_id)) =>
            {
                self.node.change(|view| view.end(EndReason::Refused(Refusal::Closed(result))));
                return ControlFlow::Break(());
            }
            Ok(SessionEnd::Closed(_)) => {
                self.member.forget_coordinator();
                let why = "the previous job has ended, and its launcher still serves the endpoint";
                why.clone_into(&mut self.last_error);
                self.node.change(|view| view.connection_error = Some(why.to_owned()));
                self.pause(CLOSED_JOB_POLL).await?;
            }
            Err(error) => {
                self.last_attempt = LastAttempt::Failed;
                self.last_error = error.to_string();
            }
        }
        self.disconnected_at = Instant::now();
        ControlFlow::Continue(())
    }

    /// Waits before the next attempt to connect. Breaks if there is none.
    async fn retry(&mut self, failure: ConnectFailure) -> ControlFlow<()> {
        let takes_part = self.member.answered().is_some();
        let end = match failure {
            ConnectFailure::Moved => {
                self.retry_delay = RETRY_DELAY;
                return ControlFlow::Continue(());
            }
            ConnectFailure::Unreachable { why, how } => {
                self.node.change(|view| view.connection_error = Some(why.clone()));
                self.refused_count = if how == LastAttempt::Refused { self.refused_count + 1 } else { 0 };
                (self.last_attempt, self.last_error) = (how, why);
                // The process of the coordinator is gone, and no other node can become the coordinator.
                let is_gone = self.refused_count >= MAX_REFUSED && self.discovery.is_static();
                if !(is_gone && takes_part) {
                    let delay = self.retry_delay;
                    self.retry_delay = (delay * 2).min(MAX_RETRY_DELAY);
                    return self.pause(delay).await;
                }
                EndReason::Partitioned(self.silence())
            }
            // For a node that took part in the job, this is the outcome of the job.
            ConnectFailure::Closed(result) if takes_part => EndReason::JobEnded(result),
            ConnectFailure::Closed(result) => EndReason::Refused(Refusal::Closed(result)),
            ConnectFailure::Replaced => {
                let why = "the job that this node took part in has ended while this node was partitioned, and \
                           another job has started with the same run id";
                EndReason::Unusable(why.to_owned())
            }
            ConnectFailure::Unusable(why) => EndReason::Unusable(why),
        };
        self.node.change(|view| view.end(end));
        ControlFlow::Break(())
    }

    /// Waits for this time. Breaks if the node leaves the job.
    async fn pause(&mut self, time: Duration) -> ControlFlow<()> {
        tokio::select! {
            () = sleep(time) => ControlFlow::Continue(()),
            () = wait_for_departure(&mut self.member, &mut self.requests) => ControlFlow::Break(()),
        }
    }

    /// Describes for how long the coordinator has answered nothing, and the last error.
    fn silence(&self) -> String {
        let silent = self.began.elapsed().saturating_sub(self.member.answered().unwrap_or_default());
        describe_silence(silent, &self.last_error)
    }

    /// Returns the time at which a node without connection to the coordinator acts. The flag is true if the
    /// node then gives up, false if it only stops its workers. `None` if it waits without limit.
    fn deadline(&self) -> Option<(Duration, bool)> {
        let lease = self.member.lease_end();
        if self.discovery.is_static() {
            return lease.map(|at| (at + self.extra_timeout(), true));
        }
        if has_workers(&self.member) {
            return lease.map(|at| (at, false));
        }
        // A node that the coordinator never answered has no deadline here: its join of a round has one.
        let join_timeout = self.connector.settings.rules.join_timeout;
        lease.map(|_| (self.disconnected_at.duration_since(self.began) + join_timeout, true))
    }

    /// Returns the time beyond the member's lease for which it may receive no answers. It is zero unless the
    /// node only waits for a round.
    fn extra_timeout(&self) -> Duration {
        if matches!(self.member.phase(), Phase::Ready { .. }) {
            self.member.lease() * (IDLE_TIMEOUT_FACTOR - 1)
        } else {
            Duration::ZERO
        }
    }

    /// Exchanges messages with the coordinator until the connection breaks or ends, or the node leaves the
    /// job.
    async fn exchange(&mut self, connection: Connection) -> Result<SessionEnd, FramingError> {
        let Connection { stream, mut ours, mut theirs } = connection;
        let (mut reading, mut writing) = stream.into_split();
        // A separate task reads frames, because a read must not be cancelled halfway.
        let (frames, mut orders) = mpsc::channel(16);
        let reader = tokio::task::spawn_local(async move {
            loop {
                let order: Result<ToMember, FramingError> =
                    framing::read(&mut reading, &mut theirs, FRAME_LIMIT).await;
                let ends = order.is_err();
                if frames.send(order).await.is_err() || ends {
                    return;
                }
            }
        });
        let mut next_heartbeat = Instant::now();
        let start = self.began.elapsed();
        let mut begins = start;
        let exchange = async {
            loop {
                let ends = self.silence_end(begins).map(|at| self.began + at);
                tokio::select! {
                    biased;
                    what = self.requests.recv() => match what {
                        Some(NodeRequest::Enter(phase)) => {
                            // Each phase is sent in a status of its own, even if the next phase follows at
                            // once.
                            self.member.enter(phase);
                            next_heartbeat = self.send_status(&mut writing, &mut ours).await?;
                        }
                        Some(NodeRequest::Leave(departure)) => {
                            self.member.enter(Phase::Left(departure));
                            let _ = timeout(LEAVE_TIMEOUT, self.send_status(&mut writing, &mut ours)).await;
                            return Ok(SessionEnd::Left);
                        }
                        None => return Ok(SessionEnd::Left),
                    },
                    order = orders.recv() => {
                        let ToMember::Order(message) = order.ok_or(FramingError::NotRendezvous)??;
                        match self.obey(message) {
                            ControlFlow::Continue(true) => next_heartbeat = Instant::now(),
                            ControlFlow::Continue(false) => {}
                            ControlFlow::Break(end) => return Ok(end),
                        }
                    }
                    () = sleep_until(next_heartbeat) => {
                        self.discovery.check_in_background();
                        next_heartbeat = self.send_status(&mut writing, &mut ours).await?;
                    }
                    () = until(ends) => {
                        if !self.may_be_busy(start).await {
                            return Err(FramingError::Timeout(self.member.lease()));
                        }
                        begins = self.began.elapsed();
                    }
                }
            }
        };
        let result = exchange.await;
        reader.abort();
        result
    }

    /// Returns the time at which a connection without answers since `begins` ends.
    fn silence_end(&self, begins: Duration) -> Option<Duration> {
        match self.member.lease_end() {
            Some(ends) if has_workers(&self.member) => Some(ends),
            // A node without workers may have had no connection for long, so its time starts with this
            // connection. If the registry may name another coordinator, the node waits no longer than its
            // lease before it looks there.
            ends => {
                let is_static = self.discovery.is_static();
                let more = if is_static { self.extra_timeout() } else { Duration::ZERO };
                ends.max(Some(begins + self.member.lease())).map(|ends| ends + more)
            }
        }
    }

    /// Carries out a message of the coordinator. Returns true if the next status must follow at once. Breaks
    /// if the connection ends.
    fn obey(&mut self, message: OrderMessage) -> ControlFlow<SessionEnd, bool> {
        let (command, reply) = self.member.receive(message);
        match command {
            Some(Command::Refuse(Refusal::Evicted { .. })) if !self.discovery.is_static() => {
                return ControlFlow::Break(SessionEnd::Evicted);
            }
            Some(Command::Refuse(Refusal::Closed(result))) => match self.member.answered() {
                Some(_) => self.node.change(|view| view.end(EndReason::JobEnded(result))),
                None => return ControlFlow::Break(SessionEnd::Closed(result)),
            },
            Some(command) => self.node.change(|view| view.apply(command)),
            None => {}
        }
        ControlFlow::Continue(reply)
    }

    /// Returns true if the coordinator, which has not answered for a time, may be alive but busy: the
    /// registry still names it, and this node has no workers. The connection began at `start`.
    async fn may_be_busy(&self, start: Duration) -> bool {
        let answered = self.member.answered().unwrap_or_default().max(start);
        let silent = self.began.elapsed().saturating_sub(answered);
        !self.discovery.is_static()
            && !has_workers(&self.member)
            && silent < self.member.lease() * IDLE_TIMEOUT_FACTOR
            && self.discovery.is_current().await
    }

    /// Sends this node's status. Returns the time of the next heartbeat.
    async fn send_status(
        &mut self,
        stream: &mut OwnedWriteHalf,
        seal: &mut Seal,
    ) -> Result<Instant, FramingError> {
        let interval = self.connector.settings.rules.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT;
        let next = Instant::now() + self.member.heartbeat_interval(interval);
        let status = ToCoordinator::Status(self.member.status(self.began.elapsed()));
        framing::write(stream, seal, &status).await?;
        Ok(next)
    }
}

/// Describes a time without answers from the coordinator, and the last error of the connection.
fn describe_silence(silent: Duration, last: &str) -> String {
    let last = if last.is_empty() { String::new() } else { format!(" ({last})") };
    format!("{:.1} s{last}", silent.as_secs_f64())
}

/// Returns true if the node has workers or may have some.
fn has_workers(member: &Member) -> bool {
    matches!(member.phase(), Phase::Running { .. } | Phase::Failed { .. } | Phase::Leaving { .. })
}

/// Stores each change of this node's phase (ready, running, failed, ...) in `member` while no coordinator is
/// connected. The next coordinator gets only the latest phase. Callers run this function beside an attempt to
/// connect, or a delay. It returns when the node leaves the job.
async fn wait_for_departure(member: &mut Member, requests: &mut mpsc::UnboundedReceiver<NodeRequest>) {
    while let Some(NodeRequest::Enter(phase)) = requests.recv().await {
        member.enter(phase);
    }
}
