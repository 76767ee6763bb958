//! Calls whose ranks read the data in the memory of the rank that has it: one copy instead of two. Pure: it accesses no memory.
//!
//! A rank that exposes its data publishes no rounds, and returns when all readers have told that they are done. In a `scatter` the
//! root decides alone. In an `all_to_all` all ranks must expose theirs: each sees the decisions of all, and if one rank does
//! not, all publish rounds.

use std::ops::Range;

use super::transfers::{Results, Transfer};
use super::{Peers, Schedule, ScheduleStep};
use crate::collectives::call::CallKind;
use crate::shm::layout::Counter;

impl Schedule {
    /// Returns whether ranks may expose their data in this call: then all ranks publish whether they do.
    pub(crate) fn may_copy_once(&self) -> bool {
        matches!(self.kind, CallKind::Scatter | CallKind::AllToAll) && !self.is_small()
    }

    /// Returns the bytes of the buffer that this rank may expose, and the bytes of them that each other rank reads.
    pub(crate) fn exposable(&self) -> Option<(Range<usize>, usize)> {
        (self.may_copy_once() && self.has_data()).then(|| (0..self.ranks * self.bytes, self.bytes))
    }

    /// Emits the step that decides whether this rank reads exposed data.
    pub(super) fn decide_single_copy(&self, emit: &mut impl FnMut(ScheduleStep)) {
        if self.may_copy_once() && (self.exposed || !self.has_data()) {
            emit(ScheduleStep::DecideSingleCopy);
        }
    }

    /// Emits the step for one piece of the data that this rank reads. Of each block the last piece is first, since the program
    /// wrote it last. Returns whether there is another batch.
    pub(super) fn single_copy_steps(&self, piece: usize, emit: &mut impl FnMut(ScheduleStep)) -> bool {
        let most = self.limits.read_bytes;
        let pieces = self.bytes.div_ceil(most);
        if let Results::Fetched(mut blocks) = self.results_part(&(0..self.bytes), self.bytes)
            && let Some(Transfer { rank: from, range, .. }) = blocks.nth(piece / pieces)
        {
            let start = (pieces - 1 - piece % pieces) * most;
            let end = self.bytes.min(start + most);
            let (at, range) = (self.me * self.bytes + start, range.start + start..range.start + end);
            emit(ScheduleStep::ReadExposed { from, at, range });
            return true;
        }
        let last = self.rounds() - 1;
        emit(ScheduleStep::SetCounter(Counter::Done, last));
        if self.has_data() {
            emit(ScheduleStep::AwaitCounter(Counter::Done, last, Peers::All));
        }
        false
    }
}
