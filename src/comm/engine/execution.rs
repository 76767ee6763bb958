//! A collective in progress, whatever carries it out.
//!
//! [`Streams`](super::streams::Streams) carries out a plan over connections,
//! [`ShmCollective`](crate::shm::collective::ShmCollective) a schedule in shared memory. The engine starts a
//! collective, polls it until it is finished, and otherwise only asks it for its progress.

use std::fmt::Debug;

use crate::collectives::plan::{Algorithm, Direction};
use crate::error::ExecutionError;
use crate::shm::HostMemory;
use crate::transport::links::conn::Conn;

/// Gives a collective its connections to the peers.
pub(crate) trait PeerConnections {
    /// Returns the connection to `peer`, or `None` as long as there is none.
    fn connection(&mut self, peer: usize) -> Option<&mut Conn>;
}

/// The connections and the memory through which a collective moves its data.
pub(super) struct Paths<'a> {
    pub(super) connections: &'a mut dyn PeerConnections,
    /// The memory that this rank shares with other ranks of its host.
    pub(super) memory: Option<&'a mut HostMemory>,
}

pub(super) trait Execution: Debug + Send {
    /// Moves what can move without waiting. Returns whether anything moved.
    fn poll(&mut self, paths: Paths<'_>) -> Result<bool, ExecutionError>;

    fn is_finished(&self) -> bool;

    /// Returns the bytes that this rank has sent or received so far, and those to send or receive in total.
    fn bytes(&self, direction: Direction) -> (u64, u64);

    /// Returns the algorithm; `None` if there is only one for this collective.
    fn algorithm(&self) -> Option<Algorithm>;

    /// Returns the peers that the collective waits for.
    fn awaited(&self) -> Vec<usize>;

    /// Returns the peers whose connection blocks the collective, and whether it blocks sending or receiving.
    /// There are none in shared memory.
    fn blocked(&self) -> Vec<(usize, Direction)> {
        Vec::new()
    }
}
