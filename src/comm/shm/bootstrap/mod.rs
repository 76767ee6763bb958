//! The bootstrap: the exchange by which the ranks of a host set up shared memory.
//!
//! The first rank of the host, the leader, creates the memory and passes its file descriptor over a unix
//! socket. On the authenticated control connections, the leader sends the socket's name, and a secret that
//! identifies members:
//!
//! ```text
//! member → leader   the secret, its local rank; its doorbell, its process
//! leader → member   the size; the memory, the arena, all doorbells and processes
//! member → leader   accepts: it has read the challenge in the memory and written the response
//! leader → member   accepts: all members have responded
//! ```
//!
//! If any step fails on any rank, all ranks use connections instead and know the reason. No function of this
//! module blocks.

mod follower;
mod leader;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::arena::Arena;
use super::layout::{Layout, Proof};
use super::segment::Segment;
use super::unavailable::Unavailable;
use super::unix_socket::MESSAGE_BYTES;
pub(crate) use follower::Follower;
pub(crate) use leader::Leader;

/// The first byte of a reply. A payload or the reason follows.
const ACCEPT: u8 = 1;
const REFUSE: u8 = 0;

/// The ranks of a host that set up shared memory, and what one of these ranks brings to it.
#[derive(Debug)]
pub(crate) struct LocalGroup {
    /// The numbers in the group of the host's ranks, by local rank.
    pub(crate) ranks: Vec<usize>,
    /// The local rank of this rank: its index in `ranks`.
    pub(crate) me: usize,
    pub(crate) layout: Layout,
    /// The doorbell (eventfd) by which other ranks wake this rank.
    pub(crate) doorbell: OwnedFd,
    /// The descriptor of this process (pidfd); `None` if the kernel has no such descriptors.
    pub(crate) process: Option<OwnedFd>,
}

/// The resources of a rank after the bootstrap: the mapped memory, and the doorbells and processes of all
/// ranks of the host.
#[derive(Debug)]
pub(crate) struct SharedResources {
    pub(crate) segment: Arc<Segment>,
    /// The memory for later groups of these ranks; `None` if there is none.
    pub(crate) arena: Option<Arc<Arena>>,
    /// The eventfds that wake the ranks, by local rank.
    pub(crate) doorbells: Vec<OwnedFd>,
    /// The descriptors of the ranks' processes (pidfd), by local rank; empty if a rank's system has none.
    pub(crate) processes: Vec<OwnedFd>,
}

#[derive(Debug)]
pub(crate) enum HostBootstrap {
    Leader(Leader),
    Follower(Follower),
}

impl HostBootstrap {
    /// Returns the file descriptors whose readability means that [`Self::progress`] can do a step.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Leader(leader) => leader.descriptors(),
            Self::Follower(follower) => follower.conn.iter().map(AsFd::as_fd).collect(),
        }
    }

    /// Returns the ranks from which a message of the bootstrap is still missing.
    pub(crate) fn missing(&self) -> Vec<usize> {
        match self {
            Self::Leader(leader) => leader.missing(),
            Self::Follower(follower) => vec![follower.leader()],
        }
    }

    /// Does all steps that are possible without waiting. Returns the memory when the bootstrap has succeeded,
    /// or the reason why the ranks share none.
    pub(crate) fn progress(&mut self) -> Result<Option<SharedResources>, Unavailable> {
        match self {
            Self::Leader(leader) => leader.progress(),
            Self::Follower(follower) => follower.progress(),
        }
    }
}

fn new_arena(memory: Option<OwnedFd>, ranks: usize) -> Result<Option<Arc<Arena>>, Unavailable> {
    let arena = memory.map(|memory| Arena::new(memory, ranks)).transpose();
    Ok(arena.map_err(|source| Unavailable::Map { source })?.map(Arc::new))
}

fn proof(segment: &Segment, layout: Layout, local_rank: usize, proof: Proof) -> &AtomicU64 {
    segment.word(layout.proof(local_rank, proof))
}

/// Returns a message that refuses shared memory for a reason, truncated to the size of the longest message.
pub(crate) fn refusal(reason: &str) -> Vec<u8> {
    let mut bytes = [&[REFUSE], reason.as_bytes()].concat();
    bytes.truncate(MESSAGE_BYTES);
    bytes
}

/// Returns the payload of a reply of `rank`. It is an error if the rank refused or the reply is empty.
fn parse_reply(bytes: &[u8], rank: usize) -> Result<&[u8], Unavailable> {
    match bytes.split_first() {
        Some((&ACCEPT, rest)) => Ok(rest),
        Some((_, reason)) => {
            Err(Unavailable::PeerReported { rank, what: String::from_utf8_lossy(reason).into_owned() })
        }
        None => Err(Unavailable::InvalidMessage { rank }),
    }
}
