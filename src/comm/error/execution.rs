//! The error of a collective while it runs, before it ends the group.

use super::PeerMisbehaved;
use crate::call::Call;
use crate::links::conn::ConnError;

/// The reason why the execution of a collective stops, over connections or in shared memory.
#[derive(Debug)]
pub(crate) enum ExecutionError {
    /// The connection to `peer` is gone. The execution can go on with the others.
    Broken { peer: usize, why: ConnError },
    /// `peer` made another call.
    Mismatch { peer: usize, theirs: Call, seq: u64 },
    /// `peer` sent data that violates the protocol.
    Protocol { peer: usize, what: PeerMisbehaved },
    /// The program's own reduction function failed.
    Function(String),
}
