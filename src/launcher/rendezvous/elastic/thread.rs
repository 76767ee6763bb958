//! The rendezvous thread of an agent: keeps the connection to the coordinator and, on the host of the
//! endpoint, runs the rendezvous server.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use convoke_env::Token;
use convoke_store::{ServeError, StoreServer};
use nix::sys::signal::Signal;
use tokio::sync::mpsc;
use tokio::task::LocalSet;

use super::connector::{self, Connector};
use super::discovery::Discovery;
use super::host_addresses;
use super::membership_view::{EndReason, MembershipView, SharedView, StoppedRound};
use super::registry::{EtcdRegistry, FileRegistry, Registry};
use super::server::RendezvousServer;
use super::session::{NodeRequest, Session, SessionEvent};
use crate::config::Endpoint;
use crate::membership::{AgentId, Command, Departure, Member, Phase, Profile, Rules};
use crate::messages::print_message;
use crate::rendezvous::RendezvousError;

/// Number of heartbeats that a node sends within the heartbeat timeout.
const HEARTBEATS_PER_TIMEOUT: u32 = 6;
/// Longest time that the coordinator keeps running after its node leaves, so that all members learn how the
/// job ended.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Interval at which the thread checks whether other jobs have ended.
const OTHER_JOBS_POLL: Duration = Duration::from_millis(50);
/// Longest time that giving up the leader lease in the registry may take.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

/// Settings of the rendezvous thread.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) endpoint: Endpoint,
    pub(super) rules: Rules,
    pub(super) profile: Profile,
    pub(super) run_id: String,
    pub(super) token: Option<Token>,
    /// Longest time that writing the outcome of the job may take.
    pub(super) close_timeout: Duration,
}

/// Handle of the rendezvous thread, by which other threads use it.
#[derive(Debug)]
pub(super) struct RendezvousThread {
    pub(super) view: Arc<SharedView>,
    requests: mpsc::UnboundedSender<NodeRequest>,
    shared: SharedState,
    /// True if the thread serves the coordinator at the endpoint, which no other node can take over.
    pub(super) is_host: bool,
}

impl RendezvousThread {
    /// Starts the rendezvous thread. `phase` is the state of this node at the start.
    ///
    /// # Errors
    /// This host is to serve the endpoint (`is_host=true`) and cannot.
    pub(super) fn start(mut settings: Settings, phase: Phase) -> Result<Self, RendezvousError> {
        let system = |what: &str| {
            let what = what.to_owned();
            move |source| RendezvousError::System { what, source }
        };
        let agent = connector::fresh_id().map_err(system("cannot make an id"))?;
        let listeners = listen(&settings)?;
        let picked = listeners.first().and_then(|listener| listener.local_addr().ok());
        if let (Endpoint::Host { port, .. }, Some(picked)) = (&mut settings.endpoint, picked) {
            *port = picked.port();
        }
        let (requests, request_receiver) = mpsc::unbounded_channel();
        let shared = SharedState::default();
        let thread = Self {
            view: Arc::clone(&shared.view),
            requests,
            shared: shared.clone(),
            is_host: !listeners.is_empty(),
        };
        let body = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            match runtime {
                Ok(runtime) => {
                    let run = run_thread(settings, agent, phase, listeners, request_receiver, shared.clone());
                    LocalSet::new().block_on(&runtime, run);
                }
                Err(error) => print_message(&format!("error: cannot start the event loop: {error}")),
            }
            shared.view.change(|state| state.closed = true);
        };
        let started = std::thread::Builder::new().name("convoke-rendezvous".to_owned()).spawn(body);
        started.map_err(system("cannot start the rendezvous thread"))?;
        Ok(thread)
    }

    pub(super) fn enter(&self, phase: Phase) {
        // Sending fails only if the thread has ended. The view then holds the reason.
        let _ = self.requests.send(NodeRequest::Enter(phase));
    }

    /// Returns this host's address on the route to the coordinator, or `None` before the first connection.
    pub(super) fn route_address(&self) -> Option<IpAddr> {
        *lock(&self.shared.route_address)
    }

    /// Leaves the job, and waits until the thread has reported this and has ended or only serves other jobs.
    pub(super) fn leave(&self, departure: Departure) {
        *lock(&self.shared.departure) = Some(departure.clone());
        let _ = self.requests.send(NodeRequest::Leave(departure));
        self.view.wait(None, |_| None::<()>);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns listeners at the endpoint if this process is to serve it. The list is empty if another host or
/// another process of this host serves the endpoint, or if the endpoint is a registry.
fn listen(settings: &Settings) -> Result<Vec<std::net::TcpListener>, RendezvousError> {
    let Endpoint::Host { host, port, is_host } = &settings.endpoint else { return Ok(Vec::new()) };
    if *is_host == Some(false) {
        return Ok(Vec::new());
    }
    let Some(addresses) = host_addresses::listening_addresses(host, *port, &resolve(host, *port)) else {
        return match is_host {
            Some(_) => Err(RendezvousError::NotLocalHost { host: host.clone() }),
            None => Ok(Vec::new()),
        };
    };
    match convoke_store::listen(&addresses) {
        Ok(listeners) => Ok(listeners),
        // Another agent of this host serves the endpoint already.
        Err(ServeError::InUse { .. }) if is_host.is_none() => Ok(Vec::new()),
        Err(ServeError::InUse { address }) => Err(RendezvousError::InUse {
            address,
            owner: super::super::port_owner::port_owner(address.port()),
        }),
        Err(source) => Err(RendezvousError::Serve { source }),
    }
}

fn resolve(host: &str, port: u16) -> Vec<IpAddr> {
    (host, port)
        .to_socket_addrs()
        .map(|found| found.map(|address| address.ip()).collect())
        .unwrap_or_default()
}

/// State that the rendezvous thread shares with the threads that use it.
#[derive(Debug, Clone, Default)]
struct SharedState {
    view: Arc<SharedView>,
    /// Address of this host on the route to the coordinator.
    route_address: Arc<Mutex<Option<IpAddr>>>,
    /// Reason for which this node leaves the job, once it does.
    departure: Arc<Mutex<Option<Departure>>>,
}

/// Body of the rendezvous thread. Runs until the node leaves the job or cannot continue in it, and then shuts
/// down the server of this process.
async fn run_thread(
    settings: Settings,
    agent: AgentId,
    phase: Phase,
    listeners: Vec<std::net::TcpListener>,
    mut requests: mpsc::UnboundedReceiver<NodeRequest>,
    shared: SharedState,
) {
    let Settings { endpoint, rules, profile, run_id, token, close_timeout } = settings;
    let serves = !listeners.is_empty();
    // A peer that expects torch's TCPStore at the endpoint finds one, but only if the job has no token.
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let store = (serves && token.is_none()).then(|| StoreServer::bind(&[loopback]).ok()).flatten();
    let store_at = store.as_ref().and_then(|store| store.addresses().first().copied());
    let server =
        serves.then(|| RendezvousServer::open(listeners, token.clone(), rules, store_at, &run_id, None));

    let by_registry = |registry| {
        Discovery::with_registry(registry, run_id.clone(), agent, token.clone(), rules, close_timeout)
    };
    let mut discovery = match endpoint {
        Endpoint::Host { host, port, .. } => Discovery::Endpoint { host, port, token },
        Endpoint::File(path) => {
            by_registry(Registry::File(FileRegistry::new(path, &run_id, rules.heartbeat_timeout)))
        }
        Endpoint::Etcd(config) => match EtcdRegistry::new(&config, &run_id, rules.heartbeat_timeout) {
            Ok(registry) => by_registry(Registry::Etcd(registry)),
            Err(why) => return apply_event(&shared.view, SessionEvent::Unusable { why }),
        },
    };
    let (event_sender, mut events) = mpsc::unbounded_channel();
    let mut member = Member::new(phase, rules.heartbeat_timeout);
    let join_timeout = rules.join_timeout;
    let host = profile.host.clone();
    let connector = Connector { run_id: run_id.clone(), profile, agent };
    let session = Session {
        connector,
        heartbeat_interval: rules.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT,
        join_timeout,
    };
    let keeps = session.run(&mut member, &mut discovery, &mut requests, &event_sender, &shared.route_address);
    let writes = async {
        while let Some(event) = events.recv().await {
            apply_event(&shared.view, event);
        }
    };
    tokio::select! {
        () = keeps => {}
        () = writes => {}
    }
    while let Ok(event) = events.try_recv() {
        apply_event(&shared.view, event);
    }
    match (server, discovery.server()) {
        (Some(server), _) => {
            let endpoint_server = EndpointServer { server, agent, host };
            endpoint_server.shut_down(requests, &shared).await;
        }
        // Another node can take over a coordinator that is named in a registry.
        (None, Some(server)) => {
            linger(|| server.has_no_own_members() || server.is_replaceable()).await;
            let _ = tokio::time::timeout(RELEASE_TIMEOUT, server.release()).await;
        }
        (None, None) => {}
    }
}

/// Rendezvous server at a fixed endpoint, which no other node can take over.
struct EndpointServer {
    server: Rc<RendezvousServer>,
    agent: AgentId,
    host: String,
}

impl EndpointServer {
    /// Ends the server after this node has left its job. Members that thereby lose their coordinator are told
    /// why. Other jobs may use the server until they have ended, unless a signal stops this launcher.
    async fn shut_down(&self, mut requests: mpsc::UnboundedReceiver<NodeRequest>, shared: &SharedState) {
        if self.notify_shutdown(shared) {
            return linger(|| self.server.has_no_members()).await;
        }
        linger(|| self.server.has_no_own_members()).await;
        self.server.close();
        loop {
            let other_jobs = self.server.other_jobs();
            if other_jobs == 0 {
                return;
            }
            shared.view.change(|state| state.other_jobs = other_jobs);
            tokio::select! {
                () = tokio::time::sleep(OTHER_JOBS_POLL) => {}
                Some(NodeRequest::Leave(_)) = requests.recv() => {
                    if self.notify_shutdown(shared) {
                        return linger(|| self.server.has_no_members()).await;
                    }
                }
            }
        }
    }

    /// Tells the members that lose their coordinator why this node leaves. Returns true if these are the
    /// members of all jobs, because a signal stops this launcher.
    fn notify_shutdown(&self, shared: &SharedState) -> bool {
        let (why, all) = match lock(&shared.departure).take() {
            Some(Departure::Stopped { signal }) => {
                let name = Signal::try_from(signal).map_or("a signal", Signal::as_str);
                (format!("it was stopped by {name}"), true)
            }
            Some(Departure::Error(why)) => (why, false),
            Some(Departure::Ended) | None => return false,
        };
        self.server.notify_shutdown(all, self.agent, &self.host, &why);
        all
    }
}

/// Waits until `is_done` returns true (all members have left), for [`LINGER`] at most.
async fn linger(is_done: impl Fn() -> bool) {
    let until = Instant::now() + LINGER;
    while !is_done() && Instant::now() < until {
        tokio::time::sleep(LINGER_POLL).await;
    }
}

fn apply_event(view: &SharedView, event: SessionEvent) {
    view.change(|state: &mut MembershipView| match event {
        SessionEvent::Connected => state.connection_error = None,
        SessionEvent::Waiting { why } => state.connection_error = Some(why),
        SessionEvent::Partitioned { silent, last } => end(state, EndReason::Partitioned { silent, last }),
        SessionEvent::Command(Command::Wait(join_status)) => state.join_status = Some(join_status),
        SessionEvent::Command(Command::Run(assignment)) => {
            state.assignment = Some(assignment);
            state.join_status = None;
        }
        SessionEvent::Command(Command::Stop(cause)) => stop(state, cause.to_string(), false),
        SessionEvent::Stop { silent, last } => {
            let last = if last.is_empty() { String::new() } else { format!(" ({last})") };
            stop(
                state,
                format!("the rendezvous answered no heartbeat for {:.1} s{last}", silent.as_secs_f64()),
                true,
            );
        }
        SessionEvent::Unusable { why } => end(state, EndReason::Unusable(why)),
        SessionEvent::Command(Command::End(result)) => end(state, EndReason::JobEnded(result)),
        SessionEvent::Command(Command::Refuse(refusal)) => end(state, EndReason::Refused(refusal)),
    });
}

/// Records why this node no longer takes part in the job. If a reason is recorded already, that reason stays.
fn end(state: &mut MembershipView, reason: EndReason) {
    let _ = state.end_reason.get_or_insert(reason);
}

fn stop(state: &mut MembershipView, cause: String, partitioned: bool) {
    let round = state.assignment.as_ref().map_or(0, |run| run.round);
    state.stopped = Some(StoppedRound { round, cause, partitioned });
}
