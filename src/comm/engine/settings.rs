//! The settings of an engine, and what groups that are made from its group share with it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use convoke_store::Store;

use super::mux::Mux;
use super::wait_policy::CoreSharing;
use crate::flight::GroupRecorder;
use crate::shm::HostShare;
use crate::shm::single_copy::SingleCopyPolicy;
use crate::transport::links::hello::Credentials;

/// The settings of an engine, which do not change.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Name of the group, for error messages.
    pub(crate) name: String,
    pub(crate) me: usize,
    pub(crate) size: usize,
    pub(crate) credentials: Credentials,
    /// The address at which each rank listens.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The store in which the ranks agree on the cause of a failure, under the key `abort_key`.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) abort_key: Vec<u8>,
    /// The rank whose process serves the store; `None` if no rank does.
    pub(crate) store_rank: Option<usize>,
    /// Longest time until a dead host or network path is detected.
    pub(crate) peer_timeout: Duration,
    pub(crate) sharing: CoreSharing,
    pub(crate) single_copy: SingleCopyPolicy,
    /// The flight recorder's entries of this group.
    pub(crate) flight: Arc<GroupRecorder>,
}

/// What groups share with the group from which they are made. The ranks are those of that group.
#[derive(Debug, Clone)]
pub(crate) struct ParentLinks {
    pub(crate) mux: Arc<Mux>,
    /// The process of each rank.
    pub(crate) processes: Vec<usize>,
    /// The address at which the process of each rank listens.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The ranks of this host that share memory, and what they share; `None` without an arena.
    pub(crate) host: Option<(Vec<usize>, HostShare)>,
}
