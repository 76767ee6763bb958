//! The elastic rendezvous (`c10d`): nodes may join and leave while the job runs. A coordinator on one node,
//! at the endpoint, decides for all.
//!
//! [`crate::membership`] makes all decisions. This module carries its messages between nodes: one thread of
//! each agent carries out the agent's commands ([`node`]) and keeps the connection to the coordinator
//! ([`session`]). If the endpoint is on this host and no process serves it yet, the thread also runs the
//! coordinator ([`server`]).

mod connector;
mod discovery;
mod endpoint;
mod framing;
mod host_addresses;
mod job;
mod leadership;
mod node;
mod registry;
mod server;
mod session;
mod shared_store;
mod view;
mod wire;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use convoke_env::Token;
use convoke_store::StoreServer;
use tokio::sync::mpsc;
use tokio::task::LocalSet;

use super::cluster::EventSender;
use super::{ClusterCommand, ClusterEvent, RendezvousError, munge};
use crate::config::{Config, ElasticSettings, Endpoint};
use crate::host_name::full_host_name;
use crate::membership::{JoinStatus, Profile, Rules};
use connector::Connector;
use discovery::Discovery;
pub(super) use endpoint::listen;
use endpoint::{linger, shut_down};
use node::Node;
use registry::{FileRegistry, Registry};
use server::RendezvousServer;
use session::Session;
pub(super) use shared_store::{SharedStore, share_store};

/// Longest time that giving up the leader lease in the registry may take.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

/// Settings of the elastic rendezvous of one node.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    endpoint: Endpoint,
    rules: Rules,
    profile: Profile,
    run_id: String,
    /// The token that the user has set.
    token: Option<Token>,
    /// True if the coordinator may give this node a token as a MUNGE credential. This needs a scheduler that
    /// describes the job, and a user who has set no token.
    accepts_credential: bool,
    /// The token that the coordinator of this node has drawn, or that another has given to this node.
    given_token: RefCell<Option<Token>>,
    /// Longest time that writing the outcome of the job may take.
    close_timeout: Duration,
    local_addr: Option<String>,
    share_store: bool,
}

impl Settings {
    pub(super) fn new(
        config: &Config,
        endpoint: Endpoint,
        settings: ElasticSettings,
        token: Option<Token>,
    ) -> Self {
        let profile = Profile {
            host: full_host_name(),
            pid: std::process::id(),
            min: config.nodes.min,
            max: config.nodes.max,
            workers: config.nproc_per_node,
            role: config.role.clone(),
        };
        let rules = Rules {
            last_call: settings.last_call,
            join_timeout: settings.join_timeout,
            heartbeat_timeout: settings.heartbeat_timeout,
            job_budget: settings.job_budget.then_some(config.max_restarts),
        };
        Self {
            endpoint,
            rules,
            profile,
            run_id: config.run_id.clone(),
            accepts_credential: config.scheduled.is_some() && token.is_none(),
            token,
            given_token: RefCell::default(),
            close_timeout: settings.close_timeout,
            local_addr: config.local_addr.clone(),
            share_store: config.share_store,
        }
    }
}

/// Body of the rendezvous thread: carries out the agent's commands until the agent ends.
pub(super) fn run(
    settings: Settings,
    mut commands: mpsc::UnboundedReceiver<ClusterCommand>,
    events: EventSender,
) {
    let ended = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => LocalSet::new().block_on(&runtime, take_part(settings, &mut commands, &events)),
        Err(source) => Err(RendezvousError::system("cannot start the event loop")(source)),
    };
    if let Err(error) = ended {
        events.send(ClusterEvent::Joined(Err(error)));
    }
    while let Some(command) = commands.blocking_recv() {
        if matches!(command, ClusterCommand::Leave { .. }) {
            events.send(ClusterEvent::Left { outcome: None, other_jobs: 0 });
        }
    }
}

/// Takes part in the job until this node leaves it or cannot continue in it, and then shuts down the server
/// of this process. Returns only if this node cannot even try to join.
async fn take_part(
    settings: Settings,
    commands: &mut mpsc::UnboundedReceiver<ClusterCommand>,
    events: &EventSender,
) -> Result<(), RendezvousError> {
    let restarts = match commands.recv().await {
        Some(ClusterCommand::Join { restarts }) => restarts,
        None => return Ok(()),
        Some(_) => unreachable!("the first command of the agent is to join"),
    };
    super::check_loopback(true)?;
    let settings = Rc::new(settings);
    let (requests, request_receiver) = mpsc::unbounded_channel();
    let mut node = Node::new(Rc::clone(&settings), requests, events.clone());
    let phase = node.ready(restarts)?;
    let agent = connector::fresh_id().map_err(RendezvousError::system("cannot make an id"))?;
    let listeners = listen(&settings.endpoint)?;
    let is_host = !listeners.is_empty();
    let drawn = if is_host && settings.accepts_credential { draw_token()? } else { None };
    let (drawn, credential) = drawn.unzip();
    node.warn_if_open(is_host && drawn.is_none());
    settings.given_token.replace(drawn.clone());
    let Settings { endpoint, rules, run_id, .. } = &*settings;
    let token = drawn.as_ref().or(settings.token.as_ref());
    let by_registry = |registry| Discovery::with_registry(registry, Rc::clone(&settings), agent);
    let mut discovery = match endpoint {
        Endpoint::Host { host, port, .. } => {
            let picked = listeners.first().and_then(|listener| listener.local_addr().ok());
            let port = picked.map_or(*port, |picked| picked.port());
            Discovery::Endpoint { host: host.clone(), port, token: token.cloned() }
        }
        Endpoint::File(path) => {
            by_registry(Registry::File(FileRegistry::new(path, run_id, rules.heartbeat_timeout)))
        }
        #[cfg(feature = "etcd")]
        Endpoint::Etcd(cluster) => {
            let etcd = registry::EtcdRegistry::new(cluster, run_id, rules.heartbeat_timeout);
            by_registry(Registry::Etcd(etcd.map_err(RendezvousError::Refused)?))
        }
        #[cfg(not(feature = "etcd"))]
        Endpoint::Etcd(_) => {
            return Err(RendezvousError::Refused(crate::config::EtcdCluster::MISSING.to_owned()));
        }
    };
    node.is_host = is_host;
    let node = Rc::new(node);
    // A peer that expects torch's TCPStore at the endpoint finds one, but only if the job has no token.
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let store = (is_host && token.is_none()).then(|| StoreServer::bind(&[loopback]).ok()).flatten();
    let store_at = store.as_ref().and_then(|store| store.addresses().first().copied());
    let open = || {
        RendezvousServer::open(listeners, Rc::clone(&settings), token.cloned(), credential, store_at, None)
    };
    let server = is_host.then(open);
    let connector = Connector { settings: Rc::clone(&settings), agent };
    let session = Session::new(connector, phase, &mut discovery, request_receiver, &node);
    node.start_join(restarts, true);
    {
        let mut session = pin!(session.run());
        tokio::select! {
            () = &mut session => {}
            () = node.serve(commands) => session.await,
        }
    }
    match (server, discovery.own_job()) {
        (Some(server), _) => shut_down(&server, agent, &node, commands).await,
        // Another node can take over a coordinator that is named in a registry.
        (None, Some(job)) => {
            linger(|| job.has_no_members() || job.is_replaceable()).await;
            let _ = tokio::time::timeout(RELEASE_TIMEOUT, job.release()).await;
        }
        (None, None) => {}
    }
    loop {
        if !node.has_left.get() {
            node.serve(commands).await;
        }
        node.tell_left(0);
        node.has_left.set(false);
    }
}

/// Draws the token of a job. Returns it with its MUNGE credential; `None` if this host has no MUNGE.
fn draw_token() -> Result<Option<(Token, String)>, RendezvousError> {
    let token = Token::random().map_err(RendezvousError::system("cannot get random numbers"))?;
    let credential = munge::encode(&token);
    Ok(credential.map(|credential| (token, credential)))
}

fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|error| std::io::Error::other(format!("cannot get random numbers: {error}")))?;
    Ok(bytes)
}

/// Describes, for a line of progress, which nodes have joined and which are missing.
fn describe_join_status(join_status: &JoinStatus) -> String {
    let JoinStatus { joined, min, max, names, stopping, standby, is_replaced, cause, starts_in_ms } =
        join_status;
    if *is_replaced {
        return format!(
            "a round of {max} nodes is running; a spare node has replaced this one, because this host has ended two rounds"
        );
    }
    if *standby {
        return format!("a round of {max} nodes is running; this one waits as a standby node");
    }
    let wanted = if min == max { min.to_string() } else { format!("{min} to {max}") };
    let mut line = format!("{joined} of {wanted} nodes have joined: {}", names.join(", "));
    if joined < min {
        line.push_str(&format!("; at least {} more must join", min - joined));
    }
    if !stopping.is_empty() {
        line.push_str(&format!("; waiting until workers have stopped on {}", stopping.join(", ")));
    }
    if let Some(ms) = starts_in_ms.filter(|_| stopping.is_empty() && joined >= min) {
        line.push_str(&format!(
            "; the job starts in {} s, or as soon as {max} have joined",
            ms.div_ceil(1000)
        ));
    }
    if let Some(cause) = cause {
        line.push_str(&format!(" ({cause})"));
    }
    line
}
