//! A collective in progress: by streams over connections, or through shared memory.

use super::state::{CollectiveConnections, Peer};
use super::streams::Streams;
use crate::collectives::call::Call;
use crate::collectives::plan::{Algorithm, Direction};
use crate::error::ExecutionError;
use crate::shm::{self, HostMemory};

#[derive(Debug)]
pub(super) enum Execution {
    Streams(Streams),
    Memory(shm::collective::ShmCollective),
}

impl Execution {
    /// Sends and receives what can move without waiting. Returns whether anything moved.
    pub(super) fn progress(
        &mut self,
        peers: &mut [Peer],
        node: Option<&mut HostMemory>,
    ) -> Result<bool, ExecutionError> {
        match (self, node) {
            (Self::Streams(streams), _) => streams.progress(&mut CollectiveConnections(peers)),
            (Self::Memory(run), Some(node)) => run.progress(node),
            (Self::Memory(_), None) => Ok(false),
        }
    }

    pub(super) fn call(&self) -> Call {
        match self {
            Self::Streams(streams) => streams.call,
            Self::Memory(run) => run.call,
        }
    }

    /// Returns the number of this collective in its group.
    pub(super) fn seq(&self) -> u64 {
        match self {
            Self::Streams(streams) => streams.seq,
            Self::Memory(run) => run.seq,
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        match self {
            Self::Streams(streams) => streams.is_finished(),
            Self::Memory(run) => run.is_finished(),
        }
    }

    /// Returns the bytes that this rank has received in this collective, and the bytes to receive in total.
    pub(super) fn received(&self) -> (u64, u64) {
        match self {
            Self::Streams(streams) => streams.received(),
            Self::Memory(run) => run.received(),
        }
    }

    /// Returns the bytes that this rank has sent in this collective, and the bytes to send in total.
    pub(super) fn sent(&self) -> (u64, u64) {
        match self {
            Self::Streams(streams) => streams.sent(),
            Self::Memory(run) => run.sent(),
        }
    }

    /// Returns the algorithm; `None` if there is only one for this collective.
    pub(super) fn algorithm(&self) -> Option<Algorithm> {
        match self {
            Self::Streams(streams) => streams.algorithm(),
            Self::Memory(_) => Some(Algorithm::Memory),
        }
    }

    /// Returns the peers that the collective waits for.
    pub(super) fn awaited(&self) -> Vec<usize> {
        match self {
            Self::Streams(streams) => streams.awaited().collect(),
            Self::Memory(run) => run.awaited().collect(),
        }
    }

    /// Returns the peers whose connection blocks the collective, and whether it blocks sending or receiving.
    /// There are none in shared memory.
    pub(super) fn blocked(&self) -> impl Iterator<Item = (usize, Direction)> + '_ {
        let streams = match self {
            Self::Streams(streams) => Some(streams),
            Self::Memory(_) => None,
        };
        streams.into_iter().flat_map(Streams::blocked)
    }

    pub(super) fn is_in_memory(&self) -> bool {
        matches!(self, Self::Memory(_))
    }
}
