//! Rendezvous: the nodes of a job find each other and agree on ranks.

mod check_store;
mod cluster;
mod connect;
mod elastic;
mod interfaces;
mod munge;
mod node_0_search;
mod outcome;
mod port_owner;
mod ranks;
mod standalone;
mod static_rendezvous;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};

use convoke_env::{Generation, Token};
use convoke_store::{ServeError, StoreError, StoreServer};

use crate::config::Config;
use crate::messages::print_message;

pub(crate) use check_store::{CheckStore, open_check_store};
pub(crate) use cluster::start_thread;
pub(crate) use cluster::{Cluster, ClusterCommand, ClusterEvent, FailureProtocol, ProposedOutcome};
pub(crate) use interfaces::own_addresses;
use interfaces::{ANY, LOOPBACK, local};
pub(crate) use outcome::{JobOutcome, OutcomeKind};
use port_owner::port_owner;
use standalone::StandaloneRendezvous;
use static_rendezvous::StaticRendezvous;

/// Values that an agent needs to start the workers of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// Number of the round; only elastic jobs have more than one.
    pub(crate) round: u64,
    /// Group rank of this node.
    pub(crate) group_rank: usize,
    /// Number of nodes.
    pub(crate) group_world_size: usize,
    /// Rank of this node's first worker. `world_size` is the number of workers of all nodes.
    pub(crate) base_rank: usize,
    pub(crate) world_size: usize,
    /// Rank of this node's first worker among the workers of the node's role. `role_world_size` is the number
    /// of workers of that role on all nodes.
    pub(crate) base_role_rank: usize,
    pub(crate) role_world_size: usize,
    /// Address and port of the workers' key-value store (MASTER_ADDR, MASTER_PORT).
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    /// True if an agent serves the workers' key-value store, false if worker rank 0 serves it.
    pub(crate) use_agent_store: bool,
    /// Unique id of the round. `None` if node 0 runs another launcher, which has no generations.
    pub(crate) generation: Option<Generation>,
    /// Number of restarts that the job has used up. `None` if each node counts its own restarts.
    pub(crate) restarts: Option<u32>,
    pub(crate) protocol: FailureProtocol,
    /// The job's token, if the nodes have agreed on one.
    pub(crate) token: Option<Token>,
}

impl Assignment {
    /// Returns the assignment of the node with group rank `node` if each node has as many workers as this
    /// one, without a generation.
    pub(crate) fn of_equal_nodes(config: &Config, node: usize, host: String, port: u16) -> Self {
        let (base, world) = (node * config.nproc_per_node, config.nodes.max * config.nproc_per_node);
        Self {
            round: 0,
            group_rank: node,
            group_world_size: config.nodes.max,
            base_rank: base,
            world_size: world,
            base_role_rank: base,
            role_world_size: world,
            master_addr: host,
            master_port: port,
            use_agent_store: config.share_store,
            generation: None,
            restarts: None,
            protocol: FailureProtocol::None,
            token: None,
        }
    }
}

/// Reason for which the rendezvous failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RendezvousError {
    #[error(
        "{} of {expected} nodes did not join within {after_s} s\n  waiting at: {endpoint}\n  try: {}; is the port open between \
         the hosts?",
        missing.len(), missing_nodes_advice(missing, *by_scheduler)
    )]
    MissingNodes {
        missing: Vec<usize>,
        expected: usize,
        after_s: u64,
        endpoint: String,
        /// True if the scheduler starts the nodes.
        by_scheduler: bool,
    },
    #[error(
        "node rank {node_rank} is out of range: --nnodes={expected} allows 0 to {}",
        expected.saturating_sub(1)
    )]
    NodeRankOutOfRange { node_rank: usize, expected: usize },
    #[error(
        "node 0 ({endpoint}) assigned no ranks within {after_s} s\n  try: is node 0 running, with the same --nnodes and --rdzv-id?"
    )]
    NotAssigned { endpoint: String, after_s: u64 },
    #[error("node 0 cannot be reached at {address} within {after_s} s: {last}\n  try: {advice}")]
    Unreachable { address: String, after_s: u64, last: String, advice: String },
    #[error("node {node} published an invalid {key}: {what}")]
    Malformed { node: usize, key: String, what: String },
    #[error(
        "node rank {node} is taken: {other} joined with it before\n  try: {}", rank_taken_advice(*nodes, *in_slurm)
    )]
    RankTaken { node: usize, nodes: usize, other: String, in_slurm: bool },
    #[error(
        "--nnodes is {mine} here (node {node}) and {theirs} on node 0 ({host})\n  try: the same --nnodes on all nodes"
    )]
    NodeCountMismatch { node: usize, mine: usize, theirs: usize, host: String },
    #[error(
        "node 0 ({host}) gives the job's token as a MUNGE credential, which this node cannot decode: {why}\n  try: start munged \
         here, or set CONVOKE_TOKEN to one secret on all nodes"
    )]
    Munge { host: String, why: String },
    #[error("{0}; so this node ends as well")]
    JobEnded(JobOutcome),
    #[error("{NO_LOOPBACK}\n  try: {RAISE_LOOPBACK}")]
    NoLoopback,
    #[error(
        "this host does not reach its own address {address}, where it serves the store: {last}\n  try: ip addr and ip route \
         get show why; is the interface up, and is there a route?"
    )]
    OwnAddressUnreachable { address: String, last: String },
    /// No failure: the other nodes have already completed the job.
    #[error("the job has succeeded")]
    AlreadySucceeded,
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    JoinTimeout(String),
    #[error(
        "is_host=true, but {host} is no address of this host\n  try: remove is_host, or name this host in --rdzv-endpoint"
    )]
    NotLocalHost { host: String },
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error(
        "{address} is in use{}\n  try: another --master-port, or 0 on one node; or end what listens there",
        owner.as_ref().map(|owner| format!(" by {owner}")).unwrap_or_default()
    )]
    InUse { address: SocketAddr, owner: Option<String> },
    #[error("{source}{}", serve_advice(source))]
    Serve { source: ServeError },
    #[error("{what}: {source}")]
    System { what: String, source: std::io::Error },
}

const NO_LOOPBACK: &str = "the loopback interface is down, so processes of this host do not reach each other";
const RAISE_LOOPBACK: &str =
    "ip link set lo up, as root; in a container or network namespace, whoever made that should";

/// Prints a warning if the workers of a single node cannot reach `host`, the address of their key-value
/// store. It is no error because the workers may not use the store.
fn warn_if_own_address_unreachable(host: &str) {
    if let Err(error) = connect::route_to_self(host) {
        print_message(&format!(
            "warning: this host does not reach its own address {host}, where workers find the store: {error}; ip addr and \
             ip route get show why"
        ));
    }
}

/// Checks that processes of this host can reach each other by the loopback interface. If they cannot, it
/// returns an error if `is_needed`, and otherwise prints a warning: workers of a single node may not need the
/// interface.
fn check_loopback(is_needed: bool) -> Result<(), RendezvousError> {
    let is_down = interfaces::loopback_is_down();
    if is_down && is_needed {
        return Err(RendezvousError::NoLoopback);
    }
    if is_down {
        print_message(&format!("warning: {NO_LOOPBACK}; {RAISE_LOOPBACK}"));
    }
    Ok(())
}

impl RendezvousError {
    /// Returns a function that adds to an error of the system what failed.
    fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::System { what: what.into(), source }
    }

    /// Returns true if the error is that other nodes did not join in time. Returns false for any other error.
    pub(crate) fn is_join_timeout(&self) -> bool {
        matches!(
            self,
            Self::MissingNodes { .. }
                | Self::NotAssigned { .. }
                | Self::Unreachable { .. }
                | Self::JoinTimeout(_)
        )
    }
}

impl From<ServeError> for RendezvousError {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::InUse { address } => Self::InUse { address, owner: port_owner(address.port()) },
            source => Self::Serve { source },
        }
    }
}

/// Completes at the time `at`, or never if `at` is `None`.
pub(crate) async fn until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Returns advice for the user if this host cannot listen for a known reason, and otherwise an empty string.
fn serve_advice(error: &ServeError) -> &'static str {
    let ServeError::Listen { source, .. } = error else { return "" };
    match source.kind() {
        std::io::ErrorKind::AddrNotAvailable => {
            "\n  try: an address of this host; `ip addr` shows them, and a name of it works on all nodes"
        }
        std::io::ErrorKind::PermissionDenied => "\n  try: a port from 1024 on; those below need root",
        _ => "",
    }
}

fn missing_nodes_advice(missing: &[usize], by_scheduler: bool) -> String {
    let missing = nodes(missing);
    if by_scheduler {
        format!("see what the launchers on {missing} print, if the scheduler has started them")
    } else {
        format!(
            "start convoke on {missing} with the same --nnodes, --master-addr, --master-port and --rdzv-id"
        )
    }
}

fn rank_taken_advice(nodes: usize, in_slurm: bool) -> String {
    let last = nodes.saturating_sub(1);
    let each = format!("give each node its own --node-rank, 0 to {last}");
    if in_slurm {
        format!(
            "srun convoke ... without flags for the nodes; a batch script replaces $SLURM_NODEID by its own node's rank, 0, \
             before srun starts; or {each}"
        )
    } else {
        each
    }
}

fn nodes(ranks: &[usize]) -> String {
    let list: Vec<_> = ranks.iter().take(16).map(ToString::to_string).collect();
    let more = if ranks.len() > 16 { ", ..." } else { "" };
    format!("node{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// Serves a key-value store at `host`, the address that the workers of this job use, and at no other address
/// if that is possible.
///
/// If `host` is an IP address of this host, the server listens at that address only; for `localhost` it
/// listens at the loopback addresses. Any other name may resolve differently on other hosts, so the server
/// then listens at all addresses.
fn serve(host: &str, port: u16) -> Result<StoreServer, RendezvousError> {
    let ip = host.trim_matches(['[', ']']).parse::<IpAddr>();
    let wanted = match &ip {
        Ok(ip) => std::slice::from_ref(ip),
        Err(_) if host == "localhost" => &LOOPBACK,
        Err(_) => &[],
    };
    let mut addresses: Vec<_> = local(wanted, port).collect();
    // There is none if `host` is an address of another host (of a port forwarder, for example), or an IPv6
    // address on a host without IPv6. The server then listens at all addresses.
    if addresses.is_empty() {
        addresses.extend(local(&ANY, port).take(1));
    }
    Ok(StoreServer::bind(&addresses)?)
}
