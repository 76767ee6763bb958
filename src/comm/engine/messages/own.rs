//! Messages of a rank to itself. A message is copied into the receive that waits for it, or kept until there
//! is one. So such a send never waits, whatever its length.

use std::io;
use std::sync::Arc;

use super::{Early, Mailbox, MessageError, Open, Sending, Stage, check};
use crate::call::Call;
use crate::engine::buffer::Lent;
use crate::engine::ticket::Ticket;
use crate::error::CommError;
use crate::frame::HEADER_BYTES;
use crate::kernels::Source;

impl Mailbox {
    /// Sends a message to this rank itself, the owner of the mailbox.
    pub(crate) fn post_own(
        &mut self,
        open: &mut Open,
        call: Call,
        lent: Lent<'static>,
        ticket: Arc<Ticket>,
    ) -> Result<(), MessageError> {
        let seq = self.next_seq;
        self.next_seq += 1;
        let Some(index) = self.taker(open, call.root) else {
            ticket.complete(self.keep_own(open, call, seq, &lent).map(|()| None));
            return Ok(());
        };
        if let Err(error) = check(call, self.recvs[index].call, seq) {
            self.hurry(&ticket);
            self.sends.push_back(Sending { seq, call, ticket, lent, stage: Stage::Sent });
            return Err(error);
        }
        if let Some(mut recv) = self.recvs.remove(index) {
            Source::from(lent.bytes(0..lent.len())).copy_to(&mut recv.lent.bytes_mut(0..lent.len()));
            recv.ticket.complete(Ok(Some(self.envelope_of(call))));
        }
        ticket.complete(Ok(None));
        Ok(())
    }

    fn keep_own(&mut self, open: &mut Open, call: Call, seq: u64, lent: &Lent<'_>) -> Result<(), CommError> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(lent.len()).map_err(|error| {
            let what = format!("no memory to keep {call} of this rank to itself until it is received");
            CommError::system(&what, io::Error::other(error))
        })?;
        bytes.extend_from_slice(lent.bytes(0..lent.len()));
        let (id, came) = (self.next_id, open.came);
        (self.next_id, open.came) = (id + 1, came + 1);
        self.kept += bytes.len() + HEADER_BYTES;
        let (bytes, complete, claimed) = (Some(bytes), true, None);
        self.early.push_back(Early { id, seq, came, call, bytes, complete, claimed });
        Ok(())
    }
}
