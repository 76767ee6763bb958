//! The parts of messages that are queued: sends, receives, and the frames between two ranks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::BorrowedBuffer;
use crate::collectives::call::{Call, Status};
use crate::collectives::kernels::SourceBytes;
use crate::engine::completion::Completion;
use crate::error::{CommError, PeerMisbehaved};
use crate::transport::frame::HEADER_BYTES;
use crate::transport::links::conn::ConnError;

/// A send or receive that a caller has posted.
#[derive(Debug)]
pub(crate) struct PostedCall {
    pub(crate) call: Call,
    pub(crate) buffer: BorrowedBuffer<'static>,
    pub(crate) completion: Arc<Completion>,
}

/// A message that this rank sends.
#[derive(Debug)]
pub(crate) struct PendingSend {
    pub(crate) seq: u64,
    pub(crate) posted: PostedCall,
    pub(super) stage: Stage,
}

/// The part of a message that this rank has sent to the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing was sent, because too many messages are announced already.
    Held,
    /// Only the announcement was sent or queued (Rts frame).
    Announced,
    /// The elements of the message were sent or queued.
    Sent,
}

/// A receive that waits for its message.
#[derive(Debug)]
pub(crate) struct PendingRecv {
    pub(super) id: u64,
    /// The index of this receive among all receives of the group.
    pub(super) order: u64,
    pub(crate) posted: PostedCall,
    /// The message that this receive was matched with; `None` until there is one.
    pub(super) matched: Option<Match>,
    /// The call of the matched message.
    pub(super) theirs: Call,
    /// Bytes of the message that were received.
    pub(crate) done: usize,
}

impl PendingRecv {
    /// Returns the bytes of the matched message.
    pub(super) fn message_bytes(&self) -> usize {
        self.theirs.bytes() as usize
    }

    /// Stores the next bytes of the message, and discards those for which the buffer has no room.
    pub(super) fn store(&mut self, bytes: &[u8]) {
        let buffer = &mut self.posted.buffer;
        let room = buffer.len().saturating_sub(self.done).min(bytes.len());
        SourceBytes::from(&bytes[..room]).copy_to(&mut buffer.bytes_mut(self.done..self.done + room));
        self.done += bytes.len();
    }

    /// Completes the receive: all bytes of the message were stored or discarded.
    pub(super) fn complete(self, from: usize) {
        let PostedCall { call, completion, .. } = self.posted;
        let (count, room) = (self.theirs.count(), call.count());
        completion.complete(if count > room {
            Err(CommError::Truncated { from, tag: call.root, count, room })
        } else {
            Ok(Some(Status { source: from, call: self.theirs }))
        });
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Match {
    /// A small message that is being read.
    Eager,
    /// A large message with this sequence number, which this rank has requested.
    Large(u64),
    /// A large message with this sequence number, which this rank reads at this address in the memory of the peer.
    Exposed { seq: u64, address: u64 },
}

/// A frame that is being sent.
#[derive(Debug)]
pub(crate) struct OutgoingFrame {
    pub(super) header: [u8; HEADER_BYTES],
    /// The sequence number of the message whose elements follow the header, if any do.
    pub(super) body: Option<u64>,
    pub(super) sent: usize,
}

/// The message to which the next bytes from the peer belong.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReadState {
    Header,
    /// The rest of a small unexpected message, which is the last of `unexpected`.
    Unexpected,
    /// The rest of a message for the receive `id`; `eager` says that the message used credit.
    Posted {
        id: u64,
        eager: bool,
    },
}

/// The reasons why the messages with a peer stop.
#[derive(Debug)]
pub(crate) enum MessageError {
    Broken(ConnError),
    Mismatch { theirs: Call, ours: Call, seq: u64 },
    Protocol(PeerMisbehaved),
}

/// State shared by all peers: receives from any source, and the counters that order them.
#[derive(Debug, Default)]
pub(crate) struct AnySourceQueue {
    pub(crate) recvs: VecDeque<AnySourceRecv>,
    /// Probes that wait for a message.
    pub(crate) probes: Vec<Probe>,
    /// Number of receives of the group so far.
    posted: u64,
    /// Number of unexpected messages of the group so far.
    unexpected_count: u64,
}

/// A probe that waits for a message.
#[derive(Debug)]
pub(crate) struct Probe {
    pub(crate) from: Option<usize>,
    pub(crate) call: Call,
    pub(crate) completion: Arc<Completion>,
}

/// A receive from any source.
#[derive(Debug)]
pub(crate) struct AnySourceRecv {
    pub(super) order: u64,
    pub(crate) posted: PostedCall,
}

impl<E: Into<PeerMisbehaved>> From<E> for MessageError {
    fn from(error: E) -> Self {
        Self::Protocol(error.into())
    }
}

impl AnySourceQueue {
    /// Counts one more receive of the group and returns its index.
    pub(crate) fn order(&mut self) -> u64 {
        self.posted += 1;
        self.posted
    }

    /// Counts one more unexpected message of the group and returns its index.
    pub(super) fn arrival_index(&mut self) -> u64 {
        self.unexpected_count += 1;
        self.unexpected_count
    }

    pub(crate) fn post(&mut self, posted: PostedCall) {
        let order = self.order();
        self.recvs.push_back(AnySourceRecv { order, posted });
    }
}

/// The shortest timeout, and the earliest time to ask other ranks what they wait in, of all sends and
/// receives since last no message was pending. With these bounds, a check of the clock is cheap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeadlineBounds {
    pub(crate) shortest: Duration,
    pub(crate) query_at: Instant,
}

impl DeadlineBounds {
    pub(crate) fn of(completion: &Completion) -> Self {
        Self { shortest: completion.timeout, query_at: completion.query_at() }
    }

    pub(crate) fn min(self, other: Self) -> Self {
        Self { shortest: self.shortest.min(other.shortest), query_at: self.query_at.min(other.query_at) }
    }
}

/// Returns the index in `sends` of the message with sequence number `seq`.
pub(super) fn send_index(sends: &VecDeque<PendingSend>, seq: u64) -> Option<usize> {
    sends.binary_search_by_key(&seq, |send| send.seq).ok()
}

/// Checks that a message has the type that its receive asks for; its length may differ.
pub(super) fn check_type(theirs: Call, ours: Call, seq: u64) -> Result<(), MessageError> {
    if (theirs.kind, theirs.dtype, theirs.root) == (ours.kind, ours.dtype, ours.root) {
        return Ok(());
    }
    Err(MessageError::Mismatch { theirs, ours, seq })
}
