//! The errors that stop a collective or the messages with a peer, and the group's failures due to them.

use std::io;

use super::collectives::Collective;
use super::messages::MessageError;
use super::state::Engine;
use crate::error::ExecutionError;
use crate::error::cause::Cause;
use crate::transport::links::conn::ConnError;

impl Engine {
    pub(super) fn execution_failed(&mut self, error: ExecutionError) {
        let Some(&Collective { call: ours, seq: ours_seq, .. }) = self.collectives.queue.front() else {
            return;
        };
        let cause = match error {
            ExecutionError::OutOfMemory(error) => out_of_memory(&error),
            ExecutionError::Broken { why: ConnError::Failed(error), .. } if is_out_of_memory(&error) => {
                out_of_memory(&error)
            }
            ExecutionError::Broken { peer, why } => {
                self.peers[peer].collective = None;
                return self.on_data_closed(peer, &why);
            }
            ExecutionError::Mismatch { peer: rank, theirs, seq: theirs_seq } => {
                Cause::Mismatch { rank, theirs, theirs_seq, ours, ours_seq }
            }
            ExecutionError::Protocol { peer, what } => Cause::Protocol { peer, what: what.to_string() },
            ExecutionError::Unreadable { peer, source } => {
                Cause::Aborted { reason: unreadable(peer, &source) }
            }
            ExecutionError::Function(reason) => Cause::Aborted { reason },
        };
        self.fail_for(cause);
    }

    pub(super) fn message_failed(&mut self, peer: usize, error: MessageError) {
        let cause = match error {
            MessageError::Broken(ConnError::Failed(error)) if is_out_of_memory(&error) => {
                out_of_memory(&error)
            }
            MessageError::Broken(why) => {
                self.peers[peer].messages.conn = None;
                return self.on_data_closed(peer, &why);
            }
            MessageError::Mismatch { theirs, ours, seq } => {
                Cause::Mismatch { rank: peer, theirs, theirs_seq: seq, ours, ours_seq: seq }
            }
            MessageError::Protocol(what) => Cause::Protocol { peer, what: what.to_string() },
        };
        self.fail_for(cause);
    }
}

/// Returns the cause that this rank cannot allocate pages of the shared memory before their first use.
fn out_of_memory(error: &io::Error) -> Cause {
    let what = format!(
        "memory: cannot allocate more of the memory that the ranks of this host share: {error} (the machine or the \
         control group has no more)"
    );
    Cause::Exhausted { what }
}

/// Returns the reason of a failure because this rank cannot read the data of `peer`.
fn unreadable(peer: usize, error: &io::Error) -> String {
    format!(
        "the kernel does not let this rank read the data of rank {peer} in its memory: {error}. Set \
         CONVOKE_SINGLE_COPY=never on all ranks, then ranks copy their data into shared memory instead"
    )
}

fn is_out_of_memory(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull)
}
