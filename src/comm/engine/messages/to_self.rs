//! Messages of a rank to itself. A message is copied into the buffer of the receive that waits for it, or
//! kept in memory until there is such a receive. So a send to oneself never waits, whatever its length.

use std::io;

use super::{
    AnySourceQueue, MessageError, PeerMessages, PendingSend, PostedCall, Stage, UnexpectedContent,
    UnexpectedMessage, check_type,
};
use crate::buffer::BorrowedBuffer;
use crate::collectives::call::Call;
use crate::error::CommError;

impl PeerMessages {
    /// Sends a message from this rank to itself. `self` holds the messages of this rank with itself.
    pub(crate) fn send_to_self(
        &mut self,
        any_source: &mut AnySourceQueue,
        posted: PostedCall,
    ) -> Result<(), MessageError> {
        let (seq, call, buffer) = (self.next_seq, posted.call, &posted.buffer);
        self.next_seq += 1;
        let Some(index) = self.match_recv(any_source, call.root) else {
            let kept = copy_of_message(call, buffer).map(|bytes| {
                let (arrival_index, content) =
                    (any_source.arrival_index(), UnexpectedContent::Complete(bytes));
                let message = UnexpectedMessage { seq, arrival_index, call, content, claimed_by: None };
                self.unexpected.push(message);
            });
            posted.completion.complete(kept.map(|()| None));
            return Ok(());
        };
        if let Err(error) = check_type(call, self.recvs[index].posted.call, seq) {
            self.update_bounds(&posted.completion);
            self.sends.push_back(PendingSend { seq, posted, stage: Stage::Sent });
            return Err(error);
        }
        let mut recv = self.recvs.remove(index).expect("`match_recv` has found it there");
        recv.theirs = call;
        recv.store(buffer.bytes(0..buffer.len()));
        recv.complete(self.peer);
        posted.completion.complete(Ok(None));
        Ok(())
    }
}

fn copy_of_message(call: Call, buffer: &BorrowedBuffer<'_>) -> Result<Vec<u8>, CommError> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(buffer.len()).map_err(|error| {
        let what =
            format!("cannot allocate memory to keep {call} of this rank to itself until it is received");
        CommError::system(&what, io::Error::other(error))
    })?;
    bytes.extend_from_slice(buffer.bytes(0..buffer.len()));
    Ok(bytes)
}
