//! The messages of the nodes of a check: addresses and ports, connections, results.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::problem::Problem;

/// A node, and where it listens for the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    pub(super) node: usize,
    pub(super) host: String,
    pub(super) pid: u32,
    /// Random bytes that tell this node from another program at its ports.
    pub(super) id: [u8; 16],
    pub(super) addresses: Vec<PeerAddress>,
    /// TCP ports at which the node answers.
    pub(super) ports: Vec<u16>,
    /// UDP port at which the node answers.
    pub(super) datagram_port: u16,
}

/// An address of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerAddress {
    pub(super) ip: IpAddr,
    pub(super) interface: String,
    pub(super) mtu: u32,
    /// True for the address by which the node reaches node 0. The job uses it.
    pub(super) is_main: bool,
}

impl Peer {
    pub(super) fn main_address(&self) -> Option<&PeerAddress> {
        self.addresses.iter().find(|address| address.is_main)
    }
}

/// One attempt of a node to reach another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) address: SocketAddr,
    pub(super) interface: String,
    pub(super) is_main: bool,
    pub(super) outcome: LinkOutcome,
}

/// The outcome of an attempt to reach another node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum LinkOutcome {
    /// The other node answered. Its clock is ahead of this node's by `ahead_ms`.
    Reached { ahead_ms: i64 },
    /// Nobody answered, for this reason.
    NotReached(String),
    /// Another program or host answered.
    OtherAnswered,
    /// The connection opened, but did not carry `bytes` both ways in time.
    Stalled { bytes: usize, arrived: usize },
    /// Packets of `bytes` do not arrive, and small ones do.
    LargePacketsLost { bytes: u32 },
    /// Throughput of both ways together, in MB/s.
    Throughput { megabytes_per_s: f64 },
}

/// The result of one node.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct NodeResult {
    pub(super) problems: Vec<Problem>,
    /// Facts to compare with those of other nodes, such as `torch` and its version.
    pub(super) facts: BTreeMap<String, String>,
    pub(super) links: Vec<Link>,
    /// Names of the checks that this node could not do, with the reason.
    pub(super) not_checked: Vec<String>,
}
