//! The steps of rounds that have chunks: one rank fetches a chunk while another rank publishes the next. Pure: it
//! accesses no memory.

use std::ops::Range;

use super::transfers::{Results, Transfer, Transfers};
use super::{Area, Peers, Schedule, ScheduleStep};
use crate::shm::layout::{Counter, ROUNDS_IN_MEMORY};

impl Schedule {
    /// Returns what this rank publishes in its area in a small call whose round [has chunks](Self::has_chunks).
    pub(crate) fn published_chunks(&self) -> impl Iterator<Item = Transfer> + Clone + use<> {
        self.published_in_order(0, 0..self.bytes, self.bytes)
    }

    /// Returns what [`Self::published_part`] returns, in the order of the positions in this rank's area; nothing if other
    /// ranks need no data of this rank. If the ranks [have turns](Self::has_turns), it is the data of one of them.
    fn published_in_order(
        &self,
        round: u64,
        part: Range<usize>,
        stride: usize,
    ) -> impl Iterator<Item = Transfer> + Clone + use<> {
        let all = if !self.has_data() {
            Transfers::NONE
        } else if self.has_turns() {
            let to = self.reader(self.turn(round));
            Transfers::one(to, 0, to * self.bytes + part.start, part.len())
        } else {
            self.published_part(part, stride)
        };
        // These begin with the next rank, and rank 0 comes after the last one.
        let before = if all.left > 1 { self.me } else { 0 };
        Transfers { next: 0, left: before, ..all.clone() }.chain(Transfers { left: all.left - before, ..all })
    }

    /// Emits the steps that publish the data of a round that [has chunks](Self::has_chunks), and also announce the call,
    /// if `announces` is set, after the first chunk.
    pub(super) fn publish_chunks(
        &self,
        round: u64,
        mut announces: bool,
        emit: &mut impl FnMut(ScheduleStep),
    ) {
        let transfers = self.published_in_order(round, self.round_range(round), self.stride());
        let last = transfers.clone().last().map(|Transfer { at, range, .. }| at + range.len());
        if last.is_some() {
            self.await_round(round, emit);
        }
        for Transfer { rank: to, at, range } in transfers {
            for (range, at) in self.chunks(range, at) {
                let end = at + range.len();
                emit(ScheduleStep::Publish { range, area: Area::Round(round), at, to });
                emit(if Some(end) == last {
                    ScheduleStep::SetCounter(Counter::Published, round)
                } else {
                    ScheduleStep::SetPublished { round, end }
                });
                if std::mem::take(&mut announces) {
                    self.match_calls(emit);
                }
            }
        }
        if announces {
            self.match_calls(emit);
        }
    }

    /// Emits the steps that wait until the memory of a round can be reused.
    fn await_round(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        let Some(read) = round.checked_sub(ROUNDS_IN_MEMORY).filter(|_| self.has_turns()) else {
            return emit(ScheduleStep::AwaitRound(round));
        };
        // A rank whose turn is later has read no round of this call. It may not even have made the call.
        for turn in 0..=self.turn(read) {
            emit(ScheduleStep::AwaitCounter(Counter::Done, read, Peers::One(self.reader(turn))));
        }
    }

    /// Emits the steps that fetch the data of a round that [has chunks](Self::has_chunks).
    pub(super) fn fetch_chunks(&self, round: u64, emit: &mut impl FnMut(ScheduleStep)) {
        let is_mine = !self.has_turns() || self.reader(self.turn(round)) == self.me;
        if is_mine
            && let Results::Fetched(transfers) = self.results_part(&self.round_range(round), self.stride())
        {
            for Transfer { rank: from, at, range } in transfers {
                for (range, at) in self.chunks(range, at) {
                    emit(ScheduleStep::AwaitPublished { round, end: at + range.len(), from });
                    emit(ScheduleStep::Fetch { from, area: Area::Round(round), at, range });
                }
            }
        }
        emit(ScheduleStep::SetCounter(Counter::Done, round));
    }

    /// Returns the chunks of the bytes `range` of the buffer, which are at offset `at` of an area: their bytes and offsets.
    fn chunks(&self, range: Range<usize>, at: usize) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let (start, end, chunk) = (range.start, range.end, self.limits.chunk_bytes);
        range.step_by(chunk).map(move |first| (first..end.min(first + chunk), at + first - start))
    }
}
