//! A small collective call, whose data fits in a slot or in one round. In some kinds of calls the round has chunks: a rank
//! fetches one while another rank publishes the next. The caller's thread executes the steps of its
//! schedule directly, without a list of steps, while it waits for the call.

use std::cell::Cell;

use super::copy_reduce::{self, AreaAddress, Buffers, Elements, Location, PlainElements};
use super::layout::{Counter, SLOTS, small_chunks};
use super::numbering::CallNumber;
use super::schedule::{Area, Results, Schedule, Transfer, Transfers};
use super::write::poll_stamp;
use super::{AwaitedRanks, HostMemory};
use crate::collectives::call::Call;
use crate::collectives::kernels::Kernel;
use crate::error::ExecutionError;
use crate::fault::fault_point;

/// A small collective call between [`HostMemory::start_small`] and [`HostMemory::finish_small`].
#[derive(Debug, Clone)]
pub(crate) struct SmallCall {
    pub(crate) schedule: Schedule,
    pub(crate) seq: u64,
    pub(super) call_number: CallNumber,
    pub(super) published: usize,
    area: AreaAddress,
    /// The bytes fetched so far, if its round has chunks.
    fetched: usize,
    /// The number of ranks whose call was found equal to this rank's so far.
    matched: usize,
}

impl HostMemory {
    /// Returns the schedule of a collective call, if its data is in slots, or in one round if `IN_ROUND` is true. The pages
    /// that it uses must be allocated, and no rank may still read the memory to which this rank writes.
    #[inline(always)]
    pub(crate) fn small_schedule<const IN_ROUND: bool>(&mut self, call: &Call) -> Option<Schedule> {
        let schedule = self.schedule(call);
        let has_slots = self.has_slots(self.calls.next());
        let is_small = if IN_ROUND { schedule.has_one_round() } else { schedule.fits_in_slot() };
        let may_start = is_small && has_slots && self.is_next_slot_free();
        let may_publish = !IN_ROUND || !schedule.has_data() || self.has_next_round(&schedule);
        (may_start && may_publish).then_some(schedule)
    }

    /// Assigns a number to a call whose schedule is from [`small_schedule`](Self::small_schedule), writes this rank's
    /// data to its slot, or to a round if `IN_ROUND` is true, and announces the call. The caller must then wake sleeping
    /// ranks.
    #[inline(always)]
    pub(crate) fn start_small<const IN_ROUND: bool>(
        &mut self,
        call: &Call,
        schedule: Schedule,
        seq: u64,
        buffers: &mut impl Buffers,
    ) -> SmallCall {
        let call_number = if IN_ROUND {
            self.calls.start_rounds(call, seq, &schedule)
        } else {
            self.calls.start(call, seq)
        };
        let area = if IN_ROUND { Area::Round(0) } else { Area::Slot };
        let area = AreaAddress::of(&call_number, &schedule, area);
        let mut small = SmallCall { seq, schedule, call_number, published: 0, area, fetched: 0, matched: 0 };
        let elements = PlainElements { buffers, kernel: None };
        if IN_ROUND && small.schedule.has_chunks() && small.schedule.has_data() {
            self.publish_in_chunks(&mut small, &elements);
        } else {
            for Transfer { rank: to, at, range } in small.schedule.published() {
                let location = small.location(self.me, to, at);
                small.published += copy_reduce::publish(self, &elements, range, location);
            }
            self.announce(small.call_number.number, &small.call_number.header, None);
        }
        fault_point("sent", small.seq, small.published);
        elements.buffers.copy_own();
        small
    }

    /// Publishes the data of a call whose round has chunks, and announces the call after the first chunk.
    fn publish_in_chunks(&mut self, small: &mut SmallCall, elements: &impl Elements) {
        let (rounds, bytes) = (small.call_number.rounds, small.schedule.volume().0 as usize);
        let [mut chunk, later] = small_chunks(bytes);
        let mut is_announced = false;
        for Transfer { rank: to, at, range } in small.schedule.published_chunks() {
            let mut rest = range.clone();
            while !rest.is_empty() {
                let end = rest.end.min(rest.start + chunk);
                let location = small.location(self.me, to, at + rest.start - range.start);
                small.published += copy_reduce::publish(self, elements, rest.start..end, location);
                let published = at + end - range.start;
                self.set_published(Counter::Published.after(rounds) + published as u64);
                if !std::mem::replace(&mut is_announced, true) {
                    self.announce(small.call_number.number, &small.call_number.header, None);
                }
                fault_point("sent", small.seq, small.published);
                (rest.start, chunk) = (end, later);
            }
        }
        self.store_counter(Counter::Published, Counter::Published.after(rounds + 1));
    }

    /// Fetches what has arrived of the data of a call whose round has chunks. Returns whether that was the rest.
    fn fetch_chunks(
        &mut self,
        small: &mut SmallCall,
        elements: &mut impl Elements,
        transfers: Transfers,
    ) -> bool {
        let before = Counter::Published.after(small.call_number.rounds);
        let mut skipped = 0;
        for Transfer { rank, at, range } in transfers {
            let total = range.len();
            while small.fetched < skipped + total {
                let done = small.fetched - skipped;
                let counter = self.segment.word(self.layout.counter(rank, Counter::Published));
                let published = Cell::new(0);
                let has_more = |count: u64| {
                    published.set(count.saturating_sub(before + at as u64));
                    published.get() > done as u64
                };
                if !poll_stamp(counter, None, has_more) {
                    return false;
                }
                let end = published.get().min(total as u64) as usize;
                let part = range.start + done..range.start + end;
                let location = small.location(rank, self.me, at + done);
                copy_reduce::fetch(self, elements, part, location, false);
                small.fetched = skipped + end;
                fault_point("received", small.seq, small.fetched);
            }
            skipped += total;
        }
        true
    }

    /// Continues a call with what has arrived. Returns whether the call is done. The caller must then wake sleeping ranks, if
    /// the call had a round.
    #[inline(always)]
    pub(crate) fn progress_small<const IN_ROUND: bool>(
        &mut self,
        small: &mut SmallCall,
        buffers: &mut impl Buffers,
        kernel: Option<&Kernel>,
    ) -> Result<bool, ExecutionError> {
        Ok(self.match_small(small)? && self.finish_small::<IN_ROUND>(small, buffers, kernel)?)
    }

    /// Returns whether every rank whose data this rank needs has made the call, and an error if one of them
    /// made another collective call instead.
    #[inline(always)]
    fn match_small(&mut self, small: &mut SmallCall) -> Result<bool, ExecutionError> {
        let Some(sources) = small.schedule.sources() else { return Ok(true) };
        let these = sources.range(self.ranks.len());
        for rank in these.start + small.matched..these.end {
            let CallNumber { number, ref header, .. } = small.call_number;
            let is_equal = rank == self.me
                || self.poll_call(small, rank) && self.match_call(rank, number, header, small.seq)?;
            if !is_equal {
                return Ok(false);
            }
            small.matched += 1;
        }
        Ok(true)
    }

    /// Looks several times whether `rank` has made the call, and fetches the lines of the data that it publishes.
    #[inline(always)]
    fn poll_call(&self, small: &SmallCall, rank: usize) -> bool {
        let number = small.call_number.number;
        let is_inline = matches!(small.area, AreaAddress::Slot { inline: true, .. });
        let data = (!is_inline).then(|| {
            let (at, bytes) = small.schedule.awaited_bytes();
            small.location(rank, self.me, at).view(self, bytes)
        });
        let stamp = self.segment.word(self.layout.slot(rank, number));
        poll_stamp(stamp, data, |stamp| stamp as u32 == number)
    }

    /// Returns whether this rank should yield its core to another rank that uses the same core. It should if
    /// it waits for that rank, or if that rank is as many calls behind as the core has other ranks. Such a
    /// rank needs the core to catch up, and ranks on other cores may need its data. If a rank is less behind,
    /// a context switch costs more than it gains.
    pub(crate) fn should_yield(&mut self, small: &SmallCall) -> bool {
        self.publish_core();
        let Some(sources) = small.schedule.sources() else { return false };
        let (me, number, awaited) = (self.me, small.call_number.number, sources.range(self.ranks.len()));
        let same_core: AwaitedRanks = (0..self.ranks.len())
            .filter(|&local_rank| local_rank != me && self.shares_core(local_rank))
            .collect();
        // No rank can be further behind than the number of slots.
        let behind = number.wrapping_sub((same_core.len() as u32).saturating_sub(1).min(SLOTS - 2));
        same_core.into_iter().any(|local_rank| {
            !self.has_started(local_rank, if awaited.contains(&local_rank) { number } else { behind })
        })
    }

    /// Fetches or reduces the results into `buffers`, once the call [matches](Self::match_small). Returns false if not all
    /// data has come. The error may be that of the program's reduction function.
    #[inline(always)]
    fn finish_small<const IN_ROUND: bool>(
        &mut self,
        small: &mut SmallCall,
        buffers: &mut impl Buffers,
        kernel: Option<&Kernel>,
    ) -> Result<bool, ExecutionError> {
        let mut elements = PlainElements { buffers, kernel };
        let result = match small.schedule.results() {
            Results::Fetched(transfers) if IN_ROUND && small.has_chunks() => {
                if !self.fetch_chunks(small, &mut elements, transfers) {
                    return Ok(false);
                }
                Ok(())
            }
            Results::Fetched(transfers) => {
                for Transfer { rank, at, range } in transfers {
                    let location = small.location(rank, self.me, at);
                    let bytes = copy_reduce::fetch(self, &mut elements, range, location, false);
                    fault_point("received", small.seq, bytes);
                }
                Ok(())
            }
            Results::Reduced(Transfer { at, range, .. }) => {
                let location = small.location(self.me, self.me, at);
                let added = copy_reduce::reduce_small(self, &mut elements, range, location);
                fault_point("received", small.seq, added.as_ref().map_or(0, |&bytes| bytes));
                added.map(drop).map_err(ExecutionError::Function)
            }
        };
        if small.has_round() && result.is_ok() {
            self.store_counter(Counter::Done, small.call_number.rounds + 1);
        }
        result.map(|()| true)
    }
}

impl SmallCall {
    /// Returns whether the data of the call is in a round, not in slots.
    #[inline(always)]
    pub(crate) fn has_round(&self) -> bool {
        !matches!(self.area, AreaAddress::Slot { .. })
    }

    fn has_chunks(&self) -> bool {
        self.has_round() && self.schedule.has_chunks()
    }

    /// The bytes that were fetched so far, if the call's round has chunks.
    pub(crate) fn fetched(&self) -> usize {
        self.fetched
    }

    /// Returns the bytes of the call's round; 0 if its data is in a slot.
    pub(crate) fn round_bytes(&self) -> u64 {
        self.call_number.round_bytes
    }

    #[inline(always)]
    fn location(&self, rank: usize, reader: usize, at: usize) -> Location {
        Location { rank, reader, at, area: self.area }
    }
}
