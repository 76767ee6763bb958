//! The errors that stop a collective or the messages with a peer, and the failures of the group that they
//! cause.

use std::io;

use super::messages::MessageError;
use super::state::Engine;
use crate::error::ExecutionError;
use crate::error::cause::{Cause, Report};
use crate::transport::links::conn::ConnError;

impl Engine {
    pub(super) fn execution_failed(&mut self, error: ExecutionError) {
        let Some(first) = self.collectives.first() else { return };
        let (ours, ours_seq) = (first.execution.call(), first.execution.seq());
        match error {
            ExecutionError::OutOfMemory(error) => self.out_of_memory(&error),
            ExecutionError::Broken { why: ConnError::Failed(error), .. } if is_out_of_memory(&error) => {
                self.out_of_memory(&error);
            }
            ExecutionError::Broken { peer, why } => {
                self.peers[peer].collective = None;
                self.suspect(peer, &why);
            }
            ExecutionError::Mismatch { peer: rank, theirs, seq } => {
                let cause = Cause::Mismatch { rank, theirs, theirs_seq: seq, ours, ours_seq };
                self.fail(Report::new(self.settings.me, cause));
            }
            ExecutionError::Protocol { peer, what } => {
                let cause = Cause::Protocol { peer, what: what.to_string() };
                self.fail(Report::new(self.settings.me, cause));
            }
            ExecutionError::Function(reason) => {
                self.fail(Report::new(self.settings.me, Cause::Aborted { reason }));
            }
        }
    }

    pub(super) fn message_failed(&mut self, peer: usize, error: MessageError) {
        let cause = match error {
            MessageError::Broken(ConnError::Failed(error)) if is_out_of_memory(&error) => {
                return self.out_of_memory(&error);
            }
            MessageError::Broken(why) => {
                self.close_messages(peer);
                self.suspect(peer, &why);
                return;
            }
            MessageError::Mismatch { theirs, ours, seq } => {
                Cause::Mismatch { rank: peer, theirs, theirs_seq: seq, ours, ours_seq: seq }
            }
            MessageError::Protocol(what) => Cause::Protocol { peer, what: what.to_string() },
        };
        self.fail(Report::new(self.settings.me, cause));
    }

    /// Fails the group because this rank cannot allocate pages of the shared memory before their first use.
    fn out_of_memory(&mut self, error: &io::Error) {
        let what = format!(
            "memory: cannot allocate more of the memory that the ranks of this host share: {error} (the machine or the \
             control group has no more)"
        );
        self.fail(Report::new(self.settings.me, Cause::Exhausted { what }));
    }

    fn close_messages(&mut self, peer: usize) {
        self.peers[peer].messages.conn = None;
    }
}

fn is_out_of_memory(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull)
}
