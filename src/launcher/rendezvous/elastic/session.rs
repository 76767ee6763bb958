//! Coordinator session of a node: connects and reconnects to the coordinator, sends the node's statuses, and
//! receives orders.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::backoff::Backoff;
use super::connector::{self, Connection, Connector};
use super::discovery::{Discovery, DiscoveryError, LastAttempt};
use super::framing::{self, FramingError};
use super::registry::RegistryError;
use super::wire::{FRAME_LIMIT, ToCoordinator, ToMember};
use crate::config::is_named;
use crate::membership::{Command, Departure, IDLE_TIMEOUT_FACTOR, JobResult, Member, Phase, Refusal};

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

/// Request of this node's agent to the session.
#[derive(Debug)]
pub(super) enum NodeRequest {
    Enter(Phase),
    /// The node leaves the job.
    Leave(Departure),
}

/// Event that the session reports to this node's agent.
#[derive(Debug)]
pub(super) enum SessionEvent {
    Command(Command),
    /// The coordinator answered nothing for the time `silent`, so the other nodes have continued without this
    /// node. `last` is the last error of the connection.
    Partitioned {
        silent: Duration,
        last: String,
    },
    /// The coordinator answered nothing for the time `silent`, so the workers must stop. This node will
    /// rejoin the job.
    Stop {
        silent: Duration,
        last: String,
    },
    /// There is no connection to the coordinator at present. `why` is the reason.
    Waiting {
        why: String,
    },
    /// A connection to the coordinator is impossible, and the session ends. `why` is the reason.
    Unusable {
        why: String,
    },
    Connected,
}

/// Coordinator session of one node.
pub(super) struct Session {
    pub(super) connector: Connector,
    /// Heartbeat interval of all nodes except that of a replaceable coordinator.
    pub(super) heartbeat_interval: Duration,
    /// Time for which a node without workers tries to reach a replaceable coordinator.
    pub(super) join_timeout: Duration,
}

/// Reason for which an attempt to connect to the coordinator failed.
enum ConnectFailure {
    Unreachable {
        why: String,
        how: LastAttempt,
    },
    /// The registry names another coordinator, or the current one has lost its lease.
    Moved,
    Unusable(String),
    /// The job has ended with this outcome.
    Closed(JobResult),
    /// The job has ended, and another job has started under the same run id.
    Replaced,
}

impl From<DiscoveryError> for ConnectFailure {
    fn from(error: DiscoveryError) -> Self {
        match error {
            DiscoveryError::Registry(RegistryError::Transient(why)) => {
                Self::Unreachable { why, how: LastAttempt::NoFailure }
            }
            DiscoveryError::Registry(RegistryError::Permanent(why)) => Self::Unusable(why),
            DiscoveryError::Closed(result) => Self::Closed(result),
            DiscoveryError::Replaced => Self::Replaced,
        }
    }
}

/// Reason for which a connection to the coordinator ended.
enum SessionEnd {
    /// The node leaves the job.
    Left,
    /// The coordinator has evicted this node.
    Evicted,
    /// The job has ended with this outcome, and this node never took part.
    Closed(JobResult),
    Broken(FramingError),
}

impl Session {
    /// Runs until the node leaves the job or cannot continue in it. Stores in `route_address` this host's
    /// address on the route to the coordinator.
    pub(super) async fn run(
        mut self,
        member: &mut Member,
        discovery: &mut Discovery,
        requests: &mut mpsc::UnboundedReceiver<NodeRequest>,
        events: &mpsc::UnboundedSender<SessionEvent>,
        route_address: &Mutex<Option<IpAddr>>,
    ) {
        let began = Instant::now();
        let mut retry = Backoff::new(RETRY_DELAY, MAX_RETRY_DELAY);
        let (mut last, mut how, mut refused_count) = (String::new(), LastAttempt::NoFailure, 0);
        let mut since = began;
        loop {
            let is_static = discovery.is_static();
            let ends = self.deadline(member, is_static, began, since);
            let takes_part = member.answered().is_some();
            let connecting = async {
                let found = discovery.find(how, takes_part).await?;
                tokio::select! {
                    connected = self.connector.connect(&found) => connected.map_err(|(why, how)| match how {
                        LastAttempt::Rejected => ConnectFailure::Unusable(why),
                        LastAttempt::NoFailure | LastAttempt::Refused | LastAttempt::Failed => ConnectFailure::Unreachable { why, how },
                    }),
                    () = async {
                        // Most attempts to connect succeed before this delay ends, without reading the
                        // registry.
                        sleep(REGISTRY_CHECK_DELAY).await;
                        discovery.changed().await;
                    } => Err(ConnectFailure::Moved),
                }
            };
            let connected = tokio::select! {
                connected = connecting => connected,
                () = wait_for_departure(member, requests) => return,
                () = until(ends.map(|(at, _)| at), began) => {
                    let silent = began.elapsed().saturating_sub(member.answered().unwrap_or_default());
                    let is_end = ends.is_none_or(|(_, end)| end);
                    let last = last.clone();
                    if is_end {
                        let _ = events.send(SessionEvent::Partitioned { silent, last });
                        return;
                    }
                    member.mark_partitioned();
                    let _ = events.send(SessionEvent::Stop { silent, last });
                    continue;
                }
            };
            let connected = match connected {
                // The coordinator has answered this node before, so the refusal may be temporary: the node
                // tries again.
                Err(ConnectFailure::Unusable(why)) if member.answered().is_some() => {
                    Err(ConnectFailure::Unreachable { why, how })
                }
                connected => connected,
            };
            match connected {
                Ok(connection) => {
                    retry.reset();
                    (how, refused_count) = (LastAttempt::NoFailure, 0);
                    member.set_coordinator(discovery.is_own());
                    let own = connection.stream.local_addr().ok().map(|address| address.ip());
                    *route_address.lock().unwrap_or_else(PoisonError::into_inner) = own;
                    let _ = events.send(SessionEvent::Connected);
                    match self.exchange(connection, member, discovery, began, requests, events).await {
                        SessionEnd::Left => return,
                        SessionEnd::Evicted => {
                            last = "the other nodes have continued without this node".to_owned();
                            if has_workers(member) {
                                let silent = member.lease();
                                let _ = events.send(SessionEvent::Stop { silent, last: last.clone() });
                            }
                            match connector::fresh_id() {
                                Ok(id) => {
                                    self.connector.agent = id;
                                    discovery.set_agent(id);
                                }
                                Err(error) => last = error.to_string(),
                            }
                            member.rejoin();
                        }
                        SessionEnd::Closed(result)
                            if !result.frees_run_id(is_named(&self.connector.run_id)) =>
                        {
                            let _ =
                                events.send(SessionEvent::Command(Command::Refuse(Refusal::Closed(result))));
                            return;
                        }
                        SessionEnd::Closed(_) => {
                            member.forget_coordinator();
                            last = "the previous job has ended, and its launcher still serves the endpoint"
                                .to_owned();
                            let _ = events.send(SessionEvent::Waiting { why: last.clone() });
                            tokio::select! {
                                () = sleep(CLOSED_JOB_POLL) => {}
                                () = wait_for_departure(member, requests) => return,
                            }
                        }
                        SessionEnd::Broken(error) => {
                            how = LastAttempt::Failed;
                            last = error.to_string();
                        }
                    }
                    since = Instant::now();
                }
                Err(ConnectFailure::Closed(result)) => {
                    // For a node that took part in the job, this is the outcome of the job.
                    let command = if takes_part {
                        Command::End(result)
                    } else {
                        Command::Refuse(Refusal::Closed(result))
                    };
                    let _ = events.send(SessionEvent::Command(command));
                    return;
                }
                Err(ConnectFailure::Replaced) => {
                    let why = "the job that this node took part in has ended while this node was partitioned, \
                               and another job has started with the same run id";
                    let _ = events.send(SessionEvent::Unusable { why: why.to_owned() });
                    return;
                }
                Err(ConnectFailure::Moved) => retry.reset(),
                Err(ConnectFailure::Unusable(why)) => {
                    let _ = events.send(SessionEvent::Unusable { why });
                    return;
                }
                Err(ConnectFailure::Unreachable { why, how: now }) => {
                    how = now;
                    let _ = events.send(SessionEvent::Waiting { why: why.clone() });
                    refused_count = if how == LastAttempt::Refused { refused_count + 1 } else { 0 };
                    last = why;
                    // The process of the coordinator is gone, and no other node can become the coordinator.
                    if let Some(answered) =
                        member.answered().filter(|_| refused_count >= MAX_REFUSED && is_static)
                    {
                        let silent = began.elapsed().saturating_sub(answered);
                        let _ = events.send(SessionEvent::Partitioned { silent, last });
                        return;
                    }
                    tokio::select! {
                        () = sleep(retry.next()) => {}
                        () = wait_for_departure(member, requests) => return,
                    }
                }
            }
        }
    }

    /// Returns the time at which a node acts that has had no connection to the coordinator since `since`. The
    /// flag is true if the node then gives up, false if it only stops its workers. `None` if it waits without
    /// limit.
    fn deadline(
        &self,
        member: &Member,
        is_static: bool,
        began: Instant,
        since: Instant,
    ) -> Option<(Duration, bool)> {
        let lease = member.lease_end();
        if is_static {
            return lease.map(|at| (at + self.extra_timeout(member), true));
        }
        match member.phase() {
            Phase::Running { .. } | Phase::Failed { .. } | Phase::Leaving { .. } => {
                lease.map(|at| (at, false))
            }
            Phase::Ready { .. } | Phase::Succeeded { .. } | Phase::Left(_) => {
                // A node that the coordinator never answered has no deadline here: the thread that waits for
                // a round has one.
                lease.map(|_| (since.duration_since(began) + self.join_timeout, true))
            }
        }
    }

    /// Returns the time beyond the member's lease for which it may receive no answers. It is zero unless the
    /// node only waits for a round.
    fn extra_timeout(&self, member: &Member) -> Duration {
        match member.phase() {
            Phase::Ready { .. } => member.lease() * (IDLE_TIMEOUT_FACTOR - 1),
            Phase::Running { .. }
            | Phase::Failed { .. }
            | Phase::Succeeded { .. }
            | Phase::Leaving { .. }
            | Phase::Left(_) => Duration::ZERO,
        }
    }

    /// Exchanges messages with the coordinator until the connection ends or the node leaves the job.
    async fn exchange(
        &self,
        connection: Connection,
        member: &mut Member,
        discovery: &Discovery,
        began: Instant,
        requests: &mut mpsc::UnboundedReceiver<NodeRequest>,
        events: &mpsc::UnboundedSender<SessionEvent>,
    ) -> SessionEnd {
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
        let is_static = discovery.is_static();
        let start = began.elapsed();
        let mut begins = start;
        let result = loop {
            // A node without workers may have had no connection for long, so its time starts with this
            // connection.
            let ends = match member.lease_end() {
                Some(ends) if has_workers(member) => Some(ends),
                ends => {
                    // If the registry may name another coordinator, the node waits no longer than its lease
                    // before it looks there.
                    let more = if is_static { self.extra_timeout(member) } else { Duration::ZERO };
                    ends.max(Some(begins + member.lease())).map(|ends| ends + more)
                }
            };
            tokio::select! {
                biased;
                what = requests.recv() => match what {
                    Some(NodeRequest::Enter(phase)) => {
                        // Each phase is sent in a status of its own, even if the next phase follows at once.
                        member.enter(phase);
                        let status = ToCoordinator::Status(member.status(began.elapsed()));
                        if let Err(error) = framing::write(&mut writing, &mut ours, &status).await {
                            break SessionEnd::Broken(error);
                        }
                        next_heartbeat = Instant::now() + member.heartbeat_interval(self.heartbeat_interval);
                    }
                    Some(NodeRequest::Leave(departure)) => {
                        member.enter(Phase::Left(departure));
                        let status = ToCoordinator::Status(member.status(began.elapsed()));
                        let _ = timeout(LEAVE_TIMEOUT, framing::write(&mut writing, &mut ours, &status)).await;
                        break SessionEnd::Left;
                    }
                    None => break SessionEnd::Left,
                },
                order = orders.recv() => match order {
                    Some(Ok(ToMember::Order(message))) => {
                        let (command, reply) = member.receive(message);
                        match command {
                            Some(Command::Refuse(Refusal::Evicted { .. })) if !is_static => break SessionEnd::Evicted,
                            Some(Command::Refuse(Refusal::Closed(result))) => match member.answered() {
                                Some(_) => drop(events.send(SessionEvent::Command(Command::End(result)))),
                                None => break SessionEnd::Closed(result),
                            },
                            Some(command) => drop(events.send(SessionEvent::Command(command))),
                            None => {}
                        }
                        if reply {
                            next_heartbeat = Instant::now();
                        }
                    }
                    Some(Err(error)) => break SessionEnd::Broken(error),
                    None => break SessionEnd::Broken(FramingError::NotRendezvous),
                },
                () = sleep_until(next_heartbeat) => {
                    discovery.check_in_background();
                    next_heartbeat = Instant::now() + member.heartbeat_interval(self.heartbeat_interval);
                    let status = ToCoordinator::Status(member.status(began.elapsed()));
                    if let Err(error) = framing::write(&mut writing, &mut ours, &status).await {
                        break SessionEnd::Broken(error);
                    }
                }
                () = until(ends, began) => {
                    let silent = began.elapsed().saturating_sub(member.answered().unwrap_or_default().max(start));
                    let may_wait = !is_static && !has_workers(member) && silent < member.lease() * IDLE_TIMEOUT_FACTOR;
                    if !may_wait || !discovery.is_current().await {
                        break SessionEnd::Broken(FramingError::Timeout(member.lease()));
                    }
                    // The registry still names this coordinator, so the coordinator is alive but busy.
                    begins = began.elapsed();
                }
            }
        };
        reader.abort();
        result
    }
}

/// Returns true if the node has workers or may have some.
fn has_workers(member: &Member) -> bool {
    matches!(member.phase(), Phase::Running { .. } | Phase::Failed { .. } | Phase::Leaving { .. })
}

/// Completes at the time `began + at`, or never if `at` is `None`.
async fn until(at: Option<Duration>, began: Instant) {
    match at {
        Some(at) => sleep_until(began + at).await,
        None => std::future::pending().await,
    }
}

/// Stores each change of this node's phase (ready, running, failed, ...) in `member` while no coordinator is
/// connected. The next coordinator gets only the latest phase. Callers run this function beside an attempt to
/// connect, or a delay. It returns when the node leaves the job.
async fn wait_for_departure(member: &mut Member, requests: &mut mpsc::UnboundedReceiver<NodeRequest>) {
    while let Some(NodeRequest::Enter(phase)) = requests.recv().await {
        member.enter(phase);
    }
}
