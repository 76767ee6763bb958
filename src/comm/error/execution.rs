//! The errors that stop a collective; the engine turns them into the failure of the group.

use std::io;

use super::PeerMisbehaved;
use crate::collectives::call::Call;
use crate::transport::links::conn::ConnError;

/// The reason why the execution of a collective stops, over connections or in shared memory.
#[derive(Debug)]
pub(crate) enum ExecutionError {
    /// The connection to `peer` has ended. The collective can still exchange data with the other peers.
    Broken { peer: usize, why: ConnError },
    /// The call of `peer` differs from the call of this rank.
    Mismatch { peer: usize, theirs: Call, seq: u64 },
    /// `peer` sent data that violates the protocol.
    Protocol { peer: usize, what: PeerMisbehaved },
    /// This rank cannot allocate the shared memory that the call needs.
    OutOfMemory(io::Error),
    /// The kernel does not let this rank read the data that `peer` exposes.
    Unreadable { peer: usize, source: io::Error },
    /// The program's own reduction function failed.
    Function(String),
}
