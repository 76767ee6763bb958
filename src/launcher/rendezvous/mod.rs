//! How the nodes of a job find each other and agree on ranks.

mod court;
mod elastic;
mod fixed;
mod holder;
mod interfaces;
mod local;
mod ranks;
mod reach;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;

use convoke_env::{Generation, Token};
use convoke_store::{ServeError, StoreError, StoreServer};

use crate::config::{Config, Rendezvous as Choice};
use crate::say::say;

pub(crate) use court::{Court, FromOthers, Verdict, What};
pub(crate) use elastic::{Elastic, Guests};
pub(crate) use fixed::Fixed;
pub(crate) use local::Local;

/// What an agent needs to know to start the workers of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// Number of the round, where nodes come and go.
    pub(crate) round: u64,
    /// Rank of this node.
    pub(crate) group_rank: usize,
    /// Number of nodes.
    pub(crate) group_world_size: usize,
    /// Rank of this node's first worker, and number of workers of all nodes.
    pub(crate) base_rank: usize,
    pub(crate) world_size: usize,
    /// The same among the workers of this node's role.
    pub(crate) base_role_rank: usize,
    pub(crate) role_world_size: usize,
    /// The worker store.
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    /// An agent serves it.
    pub(crate) use_agent_store: bool,
    /// `None` if node 0 is another launcher, which knows no generations.
    pub(crate) generation: Option<Generation>,
    /// Restarts used up, where they are counted for all nodes together.
    pub(crate) restarts: Option<u32>,
}

/// Why the nodes did not come together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RendezvousError {
    #[error(
        "{} of {expected} nodes did not join within {after_s} s\n  waiting at: {endpoint}\n  try: start convoke \
         on {} with the same --nnodes, --master-addr, --master-port and --rdzv-id; is the port open between the hosts?",
        missing.len(), nodes(missing)
    )]
    Missing { missing: Vec<usize>, expected: usize, after_s: u64, endpoint: String },
    #[error(
        "node rank {node_rank} is out of range: --nnodes={expected} allows 0 to {}",
        expected.saturating_sub(1)
    )]
    NodeRank { node_rank: usize, expected: usize },
    #[error(
        "node 0 ({endpoint}) assigned no ranks within {after_s} s\n  try: is node 0 running, with the same --nnodes and --rdzv-id?"
    )]
    NotAssigned { endpoint: String, after_s: u64 },
    #[error("node 0 cannot be reached at {address} within {after_s} s: {last}\n  try: {advice}")]
    Unreachable { address: String, after_s: u64, last: String, advice: String },
    #[error("node {node} published {key} that makes no sense: {what}")]
    Malformed { node: usize, key: String, what: String },
    #[error(
        "node rank {node} is taken: {other} joined with it before\n  try: give each node its own --node-rank, 0 to {}",
        nodes.saturating_sub(1)
    )]
    Taken { node: usize, nodes: usize, other: String },
    #[error(
        "--nnodes is {mine} here (node {node}) and {theirs} on node 0 ({host})\n  try: the same --nnodes on all nodes"
    )]
    Nodes { node: usize, mine: usize, theirs: usize, host: String },
    #[error("{0}; so this node ends as well")]
    Over(Verdict),
    #[error("{NO_LOOPBACK}\n  try: {RAISE_LOOPBACK}")]
    NoLoopback,
    #[error(
        "this host does not reach its own address {address}, where it serves the store: {last}\n  try: ip addr and ip route \
         get show why; is the interface up, and is there a route?"
    )]
    OwnAddress { address: String, last: String },
    /// No failure: the others have brought the job to a good end.
    #[error("the job has ended well")]
    NotNeeded,
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    NotMet(String),
    #[error(
        "is_host=true, but {host} is no address of this host\n  try: remove is_host, or name this host in --rdzv-endpoint"
    )]
    NotHere { host: String },
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error(
        "{address} is in use{}\n  try: another --master-port, or 0 on one node; or end what listens there",
        holder.as_ref().map(|holder| format!(" by {holder}")).unwrap_or_default()
    )]
    InUse { address: SocketAddr, holder: Option<String> },
    #[error("{source}{}", serve_advice(source))]
    Serve { source: ServeError },
    #[error("{what}: {source}")]
    System { what: String, source: std::io::Error },
}

const NO_LOOPBACK: &str = "the loopback interface is down, so processes of this host do not reach each other";
const RAISE_LOOPBACK: &str =
    "ip link set lo up, as root; in a container or network namespace, whoever made that should";

/// Says so if workers of a single node, who find their store at `host`, cannot reach it. They may not need it.
fn warn_of_own_address(host: &str) {
    if let Err(error) = reach::route_to_self(host) {
        say(&format!(
            "warning: this host does not reach its own address {host}, where workers find the store: {error}; ip addr and \
             ip route get show why"
        ));
    }
}

/// Says so, or refuses, if no process of this host can reach another one. Workers of a single node may not need that.
fn check_loopback(is_needed: bool) -> Result<(), RendezvousError> {
    match (interfaces::loopback_is_down(), is_needed) {
        (true, true) => Err(RendezvousError::NoLoopback),
        (true, false) => {
            say(&format!("warning: {NO_LOOPBACK}; {RAISE_LOOPBACK}"));
            Ok(())
        }
        (false, _) => Ok(()),
    }
}

impl RendezvousError {
    /// Whether the others were waited for in vain, rather than met and something found wrong.
    pub(crate) fn is_absence(&self) -> bool {
        match self {
            Self::Missing { .. } | Self::NotAssigned { .. } | Self::Unreachable { .. } | Self::NotMet(_) => {
                true
            }
            Self::NodeRank { .. }
            | Self::Malformed { .. }
            | Self::Taken { .. }
            | Self::Nodes { .. }
            | Self::Over(_)
            | Self::Refused(_)
            | Self::NotHere { .. }
            | Self::NotNeeded
            | Self::NoLoopback
            | Self::OwnAddress { .. }
            | Self::Store(_)
            | Self::InUse { .. }
            | Self::Serve { .. }
            | Self::System { .. } => false,
        }
    }
}

/// What to try where this host cannot listen, as far as that is clear.
fn serve_advice(error: &ServeError) -> &'static str {
    match error {
        ServeError::Listen { source, .. } => match source.kind() {
            std::io::ErrorKind::AddrNotAvailable => {
                "\n  try: an address of this host; `ip addr` shows them, and a name of it works on all nodes"
            }
            std::io::ErrorKind::PermissionDenied => "\n  try: a port from 1024 on; those below need root",
            _ => "",
        },
        _ => "",
    }
}

fn nodes(ranks: &[usize]) -> String {
    let list: Vec<_> = ranks.iter().take(16).map(ToString::to_string).collect();
    let more = if ranks.len() > 16 { ", ..." } else { "" };
    format!("node{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// What became of the wait for the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Barrier {
    /// All have succeeded.
    Passed,
    /// Whether they have is not known: a warning.
    Unknown(String),
    /// The court has something to say instead.
    Interrupted,
}

/// One way to meet; calls may block, and end by their own deadlines.
pub(crate) trait Rendezvous: Send + std::fmt::Debug {
    /// Meets the other nodes for a round.
    fn join(&mut self, restarts: u32) -> Result<Assignment, RendezvousError>;

    /// Waits until all nodes have succeeded, or it is no use to wait any longer.
    fn barrier(&mut self) -> Barrier;

    /// The workers have ended and none will be started again.
    fn close(&mut self) {}

    /// Whether it may have to wait for other nodes. If not, its calls take less time than a thread.
    fn waits(&self) -> bool {
        true
    }

    /// Other jobs that need what this launcher serves.
    fn guests(&self) -> Guests {
        Guests::default()
    }

    /// Where nodes that have joined learn of each other's end, if they can.
    fn court(&self) -> Option<Arc<dyn Court>> {
        None
    }
}

/// The way that `config` asks for.
pub(crate) fn choose(config: &Config) -> Box<dyn Rendezvous> {
    match &config.rendezvous {
        Choice::Standalone => Box::new(Local::new(config)),
        Choice::Elastic { endpoint, terms } => {
            // Not the secret of this node's workers, which is made here if nobody gave one.
            let token = Token::from_process().ok().flatten();
            Box::new(Elastic::new(config, endpoint.clone(), *terms, token))
        }
        Choice::Static { host, port, node_rank, timeout } => {
            Box::new(Fixed::new(config, host, *port, *node_rank, *timeout))
        }
    }
}

/// `host:port` as one word.
pub(crate) fn address(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Serves a store where workers of this job will look for `host`, and nowhere else if that is known.
///
/// An address of this host is bound itself, `localhost` means loopback; a name may mean something else
/// on other hosts, so it binds all addresses.
fn serve(host: &str, port: u16) -> Result<StoreServer, RendezvousError> {
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let wanted: Vec<IpAddr> = match host.trim_matches(['[', ']']).parse() {
        Ok(ip) => vec![ip],
        Err(_) if host == "localhost" => loopback.to_vec(),
        Err(_) => Vec::new(),
    };
    // An address of another host (behind a forwarder, say), or IPv6 on a host without it.
    let local = |ip: &IpAddr| TcpListener::bind((*ip, 0)).is_ok();
    let mut addresses: Vec<_> =
        wanted.into_iter().filter(local).map(|ip| SocketAddr::new(ip, port)).collect();
    if addresses.is_empty() {
        let any: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        addresses.extend(any.into_iter().find(local).map(|ip| SocketAddr::new(ip, port)));
    }
    StoreServer::bind(&addresses).map_err(|error| match error {
        ServeError::InUse { address } => {
            RendezvousError::InUse { address, holder: holder::holder(address.port()) }
        }
        source => RendezvousError::Serve { source },
    })
}
