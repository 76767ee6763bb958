//! The records of calls. Pure.

use serde::Serialize;

use super::words::{byte, halves, high, low, pair, whole};
use super::{ENTRY_LEN, LISTED_PEERS, lock};

/// The states and operations, by their numbers in a call record.
const STATES: [State; 4] = [State::Queued, State::Running, State::Done, State::Failed];
const OPERATIONS: [Operation; 4] =
    [Operation::Collective, Operation::Send, Operation::Recv, Operation::Probe];

/// One call of the recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Number of the call in this recording, from 1.
    pub number: u64,
    /// Number of the call's group in this recording.
    pub group: u32,
    /// State of the call.
    pub state: State,
    /// Kind of the call.
    pub operation: Operation,
    /// Index of the call's algorithm in the writer's names, plus 1; 0 if there is only one algorithm.
    pub algorithm: u8,
    /// Sequence number, from 0. Collectives are counted per group, sent messages per receiver.
    pub seq: u64,
    /// The call itself: operation, element type, reduction, 0, root or tag (4 bytes), count (8 bytes).
    pub call: [u8; 16],
    /// Time at which the call was queued, see [`Header::started_ns`](super::Header::started_ns).
    pub enqueued_ns: u64,
    /// Time at which the call started; 0 before that.
    pub started_ns: u64,
    /// Time at which the call ended; 0 before that.
    pub ended_ns: u64,
    /// Bytes received so far.
    pub received_bytes: u64,
    /// Bytes sent so far.
    pub sent_bytes: u64,
    /// Total bytes to receive.
    pub to_receive_bytes: u64,
    /// Total bytes to send.
    pub to_send_bytes: u64,
    /// Kernel id of the thread that made the call.
    pub thread: u32,
    /// Number of ranks for which the call waits; 0 if it has not had to wait.
    pub waits_for: u32,
    /// The first [`LISTED_PEERS`] of the ranks for which the call waits, as ranks of the group. For a
    /// message: the other rank.
    pub peers: [u32; LISTED_PEERS],
}

/// The state of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The call waits until earlier calls have ended.
    Queued,
    /// The call is running.
    Running,
    /// The call has succeeded.
    Done,
    /// The call has failed.
    Failed,
}

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// A call that all ranks of the group make.
    Collective,
    /// Sends a message to a rank.
    Send,
    /// Receives a message from a rank, or from any rank.
    Recv,
    /// Waits for a message without receiving it. Only the tag of the call has a meaning.
    Probe,
}

/// Returns the word of a call record with its group, state, operation and algorithm.
#[inline]
#[must_use]
pub fn tags(group: u32, state: State, operation: Operation, algorithm: u8) -> u64 {
    u64::from(group) | (state as u64) << 32 | (operation as u64) << 40 | u64::from(algorithm) << 48
}

impl Entry {
    /// Encodes the call record, with its lock word.
    #[inline]
    #[must_use]
    pub fn encode(&self) -> [u64; ENTRY_LEN] {
        let [call_low, call_high] = halves(u128::from_le_bytes(self.call));
        let peers = self.peers;
        [
            lock(self.number),
            tags(self.group, self.state, self.operation, self.algorithm),
            self.seq,
            call_low,
            call_high,
            self.enqueued_ns,
            self.started_ns,
            self.ended_ns,
            self.received_bytes,
            self.sent_bytes,
            self.to_receive_bytes,
            self.to_send_bytes,
            pair(self.thread, self.waits_for),
            pair(peers[0], peers[1]),
            pair(peers[2], peers[3]),
            pair(peers[4], peers[5]),
        ]
    }

    /// Decodes a call record; `None` if the record is empty, incomplete or malformed.
    #[must_use]
    pub fn decode(words: &[u64; ENTRY_LEN]) -> Option<Self> {
        let number = Some(words[0] >> 1).filter(|&number| number > 0 && words[0] & 1 == 0)?;
        let (a, b, c) = (words[13], words[14], words[15]);
        Some(Self {
            number,
            group: low(words[1]),
            state: *STATES.get(usize::from(byte(words[1], 4)))?,
            operation: *OPERATIONS.get(usize::from(byte(words[1], 5)))?,
            algorithm: byte(words[1], 6),
            seq: words[2],
            call: whole(words[3], words[4]).to_le_bytes(),
            enqueued_ns: words[5],
            started_ns: words[6],
            ended_ns: words[7],
            received_bytes: words[8],
            sent_bytes: words[9],
            to_receive_bytes: words[10],
            to_send_bytes: words[11],
            thread: low(words[12]),
            waits_for: high(words[12]),
            peers: [low(a), high(a), low(b), high(b), low(c), high(c)],
        })
    }

    /// Returns the ranks of the group for which the call waits, as far as they are recorded.
    #[must_use]
    pub fn listed_peers(&self) -> &[u32] {
        &self.peers[..(self.waits_for as usize).min(LISTED_PEERS)]
    }
}
