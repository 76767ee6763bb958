//! Messages of a rank to itself. A message is copied into the buffer of the receive that waits for it, or
//! kept in memory until there is such a receive. So a send to oneself never waits, whatever its length.

use std::io;
use std::sync::Arc;

use super::{
    AnySourceQueue, MessageError, PeerMessages, PendingSend, Stage, UnexpectedContent, UnexpectedMessage,
    check_type,
};
use crate::buffer::BorrowedBuffer;
use crate::collectives::call::Call;
use crate::engine::completion::Completion;
use crate::error::CommError;

impl PeerMessages {
    /// Sends a message from this rank to itself. `self` holds the messages of this rank with itself.
    pub(crate) fn send_to_self(
        &mut self,
        any_source: &mut AnySourceQueue,
        call: Call,
        buffer: BorrowedBuffer<'static>,
        completion: Arc<Completion>,
    ) -> Result<(), MessageError> {
        let seq = self.next_seq;
        self.next_seq += 1;
        let Some(index) = self.match_recv(any_source, call.root) else {
            completion.complete(self.keep_message_to_self(any_source, call, seq, &buffer).map(|()| None));
            return Ok(());
        };
        if let Err(error) = check_type(call, self.recvs[index].call, seq) {
            self.update_bounds(&completion);
            self.sends.push_back(PendingSend { seq, call, completion, buffer, stage: Stage::Sent });
            return Err(error);
        }
        let mut recv = self.recvs.remove(index).expect("`match_recv` has found it there");
        recv.theirs = call;
        recv.store(buffer.bytes(0..buffer.len()));
        recv.complete(self.peer);
        completion.complete(Ok(None));
        Ok(())
    }

    fn keep_message_to_self(
        &mut self,
        any_source: &mut AnySourceQueue,
        call: Call,
        seq: u64,
        buffer: &BorrowedBuffer<'_>,
    ) -> Result<(), CommError> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(buffer.len()).map_err(|error| {
            let what =
                format!("cannot allocate memory to keep {call} of this rank to itself until it is received");
            CommError::system(&what, io::Error::other(error))
        })?;
        bytes.extend_from_slice(buffer.bytes(0..buffer.len()));
        let (id, arrival_index) = (self.next_id, any_source.unexpected_count);
        (self.next_id, any_source.unexpected_count) = (id + 1, arrival_index + 1);
        let (content, claimed_by) = (UnexpectedContent::Complete(bytes), None);
        self.unexpected.push(UnexpectedMessage { id, seq, arrival_index, call, content, claimed_by });
        Ok(())
    }
}
