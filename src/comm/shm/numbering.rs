//! The numbers of collective calls and of their rounds. All ranks make their calls in the same order, so
//! these numbers agree. Pure.

use super::exchange::{CallAreas, ExchangeAreas};
use super::schedule::Schedule;
use crate::collectives::call::Call;

/// The description of a call that a rank publishes in its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) call: [u8; 16],
    /// The sequence number among the group's collectives.
    pub(super) seq: u32,
    /// A digest of the rank's earlier calls. It shows later that an earlier call of the rank differed, if the
    /// rank has published or left without waiting for others.
    pub(super) history: u64,
}

/// The number of a collective call among those in this shared memory, and the position of its rounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallNumber {
    pub(super) number: u32,
    /// The number of rounds of all earlier calls, and the total bytes of those in the memory for rounds.
    pub(super) rounds: u64,
    pub(super) position: u64,
    /// The distance in bytes from each round of this call to the next.
    pub(super) round_bytes: u64,
    /// The exchange areas in which the ranks of each pair publish the data of all rounds.
    pub(super) exchange: Option<CallAreas>,
    pub(super) header: Header,
}

/// The collective calls that this rank has started.
#[derive(Debug, Default)]
pub(super) struct StartedCalls {
    calls: u32,
    /// The number of their rounds, and the total bytes of those in the memory for rounds.
    rounds: u64,
    round_bytes: u64,
    exchange: ExchangeAreas,
    /// A digest of the calls.
    history: u64,
}

impl StartedCalls {
    /// Returns the number of the next call.
    #[inline]
    pub(super) fn next(&self) -> u32 {
        self.calls.wrapping_add(1)
    }

    /// The number of rounds of all calls so far, and the total bytes of those in the memory for rounds.
    #[inline]
    pub(super) fn rounds(&self) -> (u64, u64) {
        (self.rounds, self.round_bytes)
    }

    /// Numbers a call that has no rounds.
    #[inline(always)]
    pub(super) fn start(&mut self, call: &Call, seq: u64) -> CallNumber {
        self.calls = self.next();
        let header = Header { call: call.encode(), seq: seq as u32, history: self.history };
        self.history = header.digest();
        let (number, position) = (self.calls, self.round_bytes);
        CallNumber { number, rounds: self.rounds, position, round_bytes: 0, exchange: None, header }
    }

    /// Numbers a call and its rounds.
    #[inline]
    pub(super) fn start_rounds(&mut self, call: &Call, seq: u64, schedule: &Schedule) -> CallNumber {
        let (rounds, round_bytes) = (schedule.rounds(), schedule.round_bytes() as u64);
        let exchange = schedule
            .exchanging_ranks()
            .and_then(|publishes| self.exchange.next_call(publishes, rounds, round_bytes));
        let call_number = CallNumber { round_bytes, exchange, ..self.start(call, seq) };
        self.rounds += rounds;
        if exchange.is_none() || schedule.has_owners() {
            self.round_bytes += rounds * round_bytes;
        }
        call_number
    }
}

impl Header {
    /// Returns the digest of this call and all earlier calls of the rank.
    fn digest(&self) -> u64 {
        let words = self.call.as_chunks().0.iter().copied().map(u64::from_le_bytes);
        // Odd multipliers are invertible, so every call affects the digest; the rotation makes the order
        // count.
        let mix = |hash: u64, word: u64| (hash.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        words.chain([u64::from(self.seq)]).fold(self.history, mix)
    }
}

/// Returns whether call number `number` is `to` or later. Numbers wrap around.
#[inline]
pub(super) fn reaches(number: u32, to: u32) -> bool {
    number.wrapping_sub(to).cast_signed() >= 0
}
