//! Messages of a peer that no receive has matched yet, and the credit that bounds them.

use std::collections::VecDeque;

use crate::collectives::call::Call;
use crate::error::PeerMisbehaved;
use crate::transport::frame::{CREDIT_UNIT_BYTES, HEADER_BYTES};

/// Bytes of unexpected messages that a receiver keeps for each peer, headers included.
pub(crate) const CREDIT_BYTES: usize = 1 << 20;
/// Most announced messages from one peer that no receive has matched. The sender holds further messages back,
/// in order, until a receive matches one of those. The limit is low in tests of this module.
pub(crate) const MAX_ANNOUNCEMENTS: usize = if cfg!(test) { 50 } else { 1 << 20 };

/// An unexpected message: it came before a receive matched it.
#[derive(Debug)]
pub(super) struct UnexpectedMessage {
    pub(super) seq: u64,
    /// The index of this message among all unexpected messages of the group.
    pub(super) arrival_index: u64,
    pub(super) call: Call,
    pub(super) content: UnexpectedContent,
    /// The `id` of the receive that takes the message when all of its bytes have arrived.
    pub(super) claimed_by: Option<u64>,
}

/// The part of an unexpected message that has arrived so far.
#[derive(Debug)]
pub(super) enum UnexpectedContent {
    /// The announcement of a large message, whose elements the sender keeps until this rank requests them. If `address` is not
    /// 0, this rank reads them there.
    Announcement { address: u64 },
    /// The first bytes of a small message that is being read.
    Partial(Vec<u8>),
    /// All bytes of a small message.
    Complete(Vec<u8>),
}

/// The unexpected messages of a peer, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct UnexpectedQueue {
    messages: VecDeque<UnexpectedMessage>,
    /// Bytes that are kept, headers included, and announcements.
    pub(super) bytes: usize,
    pub(super) announcements: usize,
}

/// The credit for small messages, in bytes. Each takes the credit that [`credit_for`] returns.
#[derive(Debug)]
pub(super) struct Credit {
    /// Bytes that this rank may send before the peer returns credit.
    pub(super) left: usize,
    /// Bytes that receives have taken and for which no credit was returned to the peer.
    pub(super) owed: usize,
}

/// Returns the credit that a small message of `bytes` bytes takes: header and elements, in whole units.
pub(super) const fn credit_for(bytes: usize) -> usize {
    (HEADER_BYTES + bytes).next_multiple_of(CREDIT_UNIT_BYTES)
}

impl UnexpectedMessage {
    /// Returns the bytes that are kept for the message when it is complete; `None` for an announcement.
    fn kept_bytes(&self) -> Option<usize> {
        let is_kept = !matches!(self.content, UnexpectedContent::Announcement { .. });
        is_kept.then(|| self.call.bytes() as usize + HEADER_BYTES)
    }
}

impl UnexpectedQueue {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Returns the first message with this tag that no receive has claimed.
    pub(super) fn first(&self, tag: u32) -> Option<&UnexpectedMessage> {
        self.messages.get(self.index(tag)?)
    }

    pub(super) fn index(&self, tag: u32) -> Option<usize> {
        self.messages.iter().position(|message| message.call.root == tag && message.claimed_by.is_none())
    }

    pub(super) fn get_mut(&mut self, index: usize) -> &mut UnexpectedMessage {
        &mut self.messages[index]
    }

    /// Returns the index of the message that came last. A message stays queued while it is read.
    pub(super) fn last_index(&self) -> usize {
        self.messages.len() - 1
    }

    pub(super) fn push(&mut self, message: UnexpectedMessage) {
        match message.kept_bytes() {
            Some(bytes) => self.bytes += bytes,
            None => self.announcements += 1,
        }
        self.messages.push_back(message);
    }

    /// Returns whether these are more messages than a peer may send.
    pub(super) fn is_over_limit(&self) -> bool {
        self.bytes > CREDIT_BYTES || self.announcements > MAX_ANNOUNCEMENTS
    }

    pub(super) fn remove(&mut self, index: usize) -> UnexpectedMessage {
        let message = self.messages.remove(index).expect("the index is that of a message");
        match message.kept_bytes() {
            Some(bytes) => self.bytes -= bytes,
            None => self.announcements -= 1,
        }
        message
    }
}

impl Credit {
    /// Adds credit that the peer has returned, in units.
    pub(super) fn restore(&mut self, units: u16) -> Result<(), PeerMisbehaved> {
        let bytes = usize::from(units) * CREDIT_UNIT_BYTES;
        if self.left + bytes > CREDIT_BYTES {
            return Err(PeerMisbehaved::CreditTooLarge { bytes: bytes as u64 });
        }
        self.left += bytes;
        Ok(())
    }

    /// Notes that a receive took a message of `bytes` bytes. Returns whether the credit owed is worth a frame.
    pub(super) fn owe(&mut self, bytes: usize) -> bool {
        self.owed += credit_for(bytes);
        self.owed >= CREDIT_BYTES / 2
    }

    /// Returns the credit to return with the next frame, in units.
    pub(super) fn owed_units(&self) -> u16 {
        u16::try_from(self.owed / CREDIT_UNIT_BYTES).unwrap_or(u16::MAX)
    }

    /// Notes that a frame returns so many units.
    pub(super) fn returned(&mut self, units: u16) {
        self.owed -= usize::from(units) * CREDIT_UNIT_BYTES;
    }
}
