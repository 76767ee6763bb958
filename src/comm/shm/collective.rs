//! Executes the schedule of a collective in shared memory. It reads no clock and never blocks:
//! [`ShmCollective::progress`] returns when a step has to wait for other ranks.

use std::ops::Range;

use super::allocations::{Direct, Exposure, PublishedLocation};
use super::copy_reduce::{self, AreaAddress, Location};
use super::layout::{Counter, ROUNDS_IN_MEMORY};
use super::numbering::CallNumber;
use super::schedule::{Area, Peers, Schedule, ScheduleStep};
use super::small_call::SmallCall;
use super::{AwaitedRanks, HostMemory};
use crate::buffer::{BorrowedBuffer, PlanBuffer};
use crate::collectives::call::{Call, CallKind};
use crate::collectives::kernels::{Kernel, is_uncached, store_fence};
use crate::collectives::plan::Plan;
use crate::error::{ExecutionError, PeerMisbehaved};
use crate::fault::fault_point;

#[derive(Debug)]
pub(crate) struct ShmCollective {
    pub(crate) call: Call,
    pub(crate) seq: u64,
    buffer: PlanBuffer<'static>,
    schedule: Schedule,
    call_number: CallNumber,
    batch: u64,
    steps: Vec<ScheduleStep>,
    next_step: usize,
    more: bool,
    /// The number of ranks whose call was found equal to this rank's so far.
    matched: usize,
    pub(crate) finished: bool,
    /// If set, a reduction has failed. Some elements may have been added already and must not be added again.
    broken: bool,
    /// The location of this rank's elements, if other ranks access them.
    location: PublishedLocation,
    /// This rank's elements in a shared allocation, until all ranks have decided whether to reduce in place.
    /// If they do, `direct` has the elements of all ranks.
    exposure: Option<Exposure>,
    direct: Option<Direct>,
    pub(crate) waits: AwaitedRanks,
    published: u64,
    fetched: u64,
    /// Elements were fetched with non-temporal stores, after which there was no fence yet.
    needs_fence: bool,
}

impl ShmCollective {
    pub(crate) fn new(
        memory: &mut HostMemory,
        call: Call,
        seq: u64,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
    ) -> Self {
        let schedule = memory.schedule(&call);
        let call_number = memory.calls.start_rounds(&call, seq, &schedule);
        let mut collective =
            Self::with_schedule(memory, (call, seq), (buffer, kernel), schedule, call_number);
        let range = collective.buffer.single_range().filter(|_| collective.schedule.may_be_direct());
        collective.exposure = range.and_then(|(address, bytes)| memory.allocations.expose(address, bytes));
        let location = collective.exposure.as_ref().map(Exposure::location);
        if let Some(location) = location.or_else(|| collective.location_for_readers(memory)) {
            collective.location = location;
            collective.schedule.expose();
        }
        collective
    }

    /// Returns the location of this rank's data, if other ranks should read it in the memory of this process.
    fn location_for_readers(&self, memory: &HostMemory) -> Option<PublishedLocation> {
        let (range, block) = self.schedule.exposable()?;
        let address =
            self.buffer.address(&range).filter(|_| memory.peer_reader.exposes(self.call.kind, block))?;
        memory.peer_reader.is_readable(address, range.len()).then(|| PublishedLocation::in_process(address))
    }

    /// Continues a call that was started as a small one and has been announced. `broken` is set if a failed
    /// reduction makes its results unusable.
    pub(crate) fn from_small(
        memory: &mut HostMemory,
        call: Call,
        small: &SmallCall,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
        broken: bool,
    ) -> Self {
        let (schedule, number) = (small.schedule.clone(), small.call_number);
        let mut collective =
            Self::with_schedule(memory, (call, small.seq), (buffer, kernel), schedule, number);
        collective.more = collective.schedule.batch(0, &mut collective.steps);
        collective.batch = 1;
        let announced = collective.steps.iter().position(|step| *step == ScheduleStep::Announce);
        collective.next_step = announced.map_or(0, |index| index + 1);
        (collective.published, collective.broken) = (small.published as u64, broken);
        collective
    }

    fn with_schedule(
        memory: &mut HostMemory,
        (call, seq): (Call, u64),
        (buffer, kernel): (BorrowedBuffer<'static>, Option<Kernel>),
        schedule: Schedule,
        call_number: CallNumber,
    ) -> Self {
        Self {
            buffer: PlanBuffer::new(buffer, kernel, call.dtype.size_bytes(), &Plan::default()),
            call,
            seq,
            schedule,
            call_number,
            batch: 0,
            steps: std::mem::take(&mut memory.steps),
            next_step: 0,
            more: true,
            matched: 0,
            finished: false,
            broken: false,
            location: PublishedLocation::default(),
            exposure: None,
            direct: None,
            waits: AwaitedRanks::new(),
            published: 0,
            fetched: 0,
            needs_fence: false,
        }
    }

    /// The bytes fetched or reduced so far, and in total.
    pub(crate) fn received(&self) -> (u64, u64) {
        (self.fetched, self.schedule.volume().1)
    }

    /// Returns whether a fetch uses non-temporal stores. It depends on the bytes of the whole call. If the result replaces the
    /// input, a byte counts a quarter. Such a call uses half the memory, and its result is often the input of the next call.
    fn is_uncached(&self) -> bool {
        let total = self.schedule.volume().1 as usize;
        let is_in_place = matches!(self.call.kind, CallKind::AllReduce | CallKind::Broadcast);
        is_uncached(if is_in_place { total / 4 } else { total })
    }

    /// Bytes published so far, and in total.
    pub(crate) fn sent(&self) -> (u64, u64) {
        (self.published, self.schedule.volume().0)
    }

    /// Does all steps that are possible now, at most one batch. Returns whether it did any step.
    pub(crate) fn progress(&mut self, memory: &mut HostMemory) -> Result<bool, ExecutionError> {
        let any = self.execute_steps(memory);
        if std::mem::take(&mut self.needs_fence) {
            store_fence();
        }
        any
    }

    fn execute_steps(&mut self, memory: &mut HostMemory) -> Result<bool, ExecutionError> {
        if self.batch == 0 {
            memory.allocate(&self.call_number, &self.schedule)?;
        }
        self.buffer.begin();
        let mut any = false;
        while !self.finished && !self.broken {
            if self.next_step == self.steps.len() {
                if !self.more {
                    if let Some(direct) = &mut self.direct {
                        direct.exposure.ended = true;
                    }
                    self.buffer.finish();
                    self.finished = true;
                    self.steps.clear();
                    memory.steps = std::mem::take(&mut self.steps);
                    return Ok(true);
                }
                self.steps.clear();
                self.next_step = 0;
                self.more = self.schedule.batch(self.batch, &mut self.steps);
                self.batch += 1;
                if any && self.batch > 2 {
                    return Ok(true);
                }
            }
            // The step is cloned, since executing it changes the rest of `self`.
            let step = self.steps[self.next_step].clone();
            if !self.execute_step(memory, step)? {
                return Ok(any || self.buffer.copy_some());
            }
            self.waits.clear();
            self.next_step += 1;
            any = true;
        }
        Ok(any)
    }

    /// Does one step. Returns false if the step has to wait.
    fn execute_step(&mut self, memory: &mut HostMemory, step: ScheduleStep) -> Result<bool, ExecutionError> {
        match step {
            ScheduleStep::AwaitSlot => {
                self.waits = memory.slot_readers(self.call_number.number);
                return Ok(self.waits.is_empty());
            }
            ScheduleStep::Announce => {
                let is_read = self.schedule.may_be_direct() || self.schedule.may_copy_once();
                let location = is_read.then_some(self.location);
                memory.announce(self.call_number.number, &self.call_number.header, location);
                memory.doorbells.wake_all();
                fault_point("sent", self.seq, self.published as usize);
            }
            ScheduleStep::MatchCall(peers) => return self.match_calls(memory, peers),
            ScheduleStep::DecideDirect => self.decide_direct(memory)?,
            ScheduleStep::DecideSingleCopy => self.decide_single_copy(memory),
            ScheduleStep::ReadExposed { from, at, range } => {
                return self.read_exposed(memory, from, at, range);
            }
            ScheduleStep::AwaitRound(round) => {
                let count = (self.call_number.rounds + round + 1).saturating_sub(ROUNDS_IN_MEMORY);
                return Ok(self.check_counter(memory, Peers::All, Counter::Done, count));
            }
            ScheduleStep::AwaitCounter(counter, round, peers) => {
                let count = counter.after(self.call_number.rounds + round + 1);
                return Ok(self.check_counter(memory, peers, counter, count));
            }
            ScheduleStep::AwaitPublished { round, end, from } => {
                let count = Counter::Published.after(self.call_number.rounds + round) + end as u64;
                return Ok(self.check_counter(memory, Peers::One(from), Counter::Published, count));
            }
            ScheduleStep::SetPublished { round, end } => {
                let count = Counter::Published.after(self.call_number.rounds + round) + end as u64;
                memory.set_published(count);
                fault_point("sent", self.seq, self.published as usize);
            }
            ScheduleStep::SetCounter(counter, round) => {
                memory.set_counter(counter, counter.after(self.call_number.rounds + round + 1));
                if counter == Counter::Published {
                    fault_point("sent", self.seq, self.published as usize);
                }
            }
            ScheduleStep::Publish { range, area, at, to } => {
                let location = self.location(memory.me, to, area, at);
                let bytes = copy_reduce::publish(memory, &self.buffer, range, location);
                self.published += bytes as u64;
                if self.schedule.copies_own_block_with_rounds() {
                    self.buffer.copy_bytes(bytes);
                }
            }
            ScheduleStep::Fetch { from, area, at, range } => {
                let location = self.location(from, memory.me, area, at);
                let uncached = self.is_uncached();
                self.needs_fence |= uncached;
                self.fetched +=
                    copy_reduce::fetch(memory, &mut self.buffer, range, location, uncached) as u64;
                fault_point("received", self.seq, self.fetched as usize);
            }
            ScheduleStep::ReduceDirect { range } => {
                let Some(direct) = &self.direct else { return Ok(true) };
                let added = copy_reduce::reduce_direct(memory, &mut self.buffer, range, direct);
                self.published += added.as_ref().map_or(0, |&bytes| bytes as u64);
                fault_point("sent", self.seq, self.published as usize);
                self.record_reduced(added)?;
            }
            ScheduleStep::Reduce { area, at, range, sums } => {
                let location = self.location(memory.me, memory.me, area, at);
                let sums = sums.map(|area| self.location(memory.me, memory.me, area, 0));
                let added = copy_reduce::reduce(memory, &mut self.buffer, range, location, sums);
                self.record_reduced(added)?;
            }
        }
        Ok(true)
    }

    fn record_reduced(&mut self, added: Result<usize, String>) -> Result<(), ExecutionError> {
        match added {
            Ok(bytes) => self.fetched += bytes as u64,
            Err(what) => {
                self.broken = true;
                return Err(ExecutionError::Function(what));
            }
        }
        fault_point("received", self.seq, self.fetched as usize);
        Ok(())
    }

    /// Checks whether all ranks have their elements in one allocation, and then reduces in place. All ranks
    /// read the same locations, so they decide alike.
    fn decide_direct(&mut self, memory: &HostMemory) -> Result<(), ExecutionError> {
        let exposure = self.exposure.take().expect("only a rank that exposes its elements decides");
        let locations: Vec<_> = (0..memory.ranks.len())
            .map(|local_rank| memory.published_location(local_rank, self.call_number.number))
            .collect();
        self.direct = exposure.into_direct(&locations).map_err(|local_rank| ExecutionError::Protocol {
            peer: memory.ranks[local_rank],
            what: PeerMisbehaved::ForeignMemory,
        })?;
        if self.direct.is_some() {
            self.schedule.make_direct();
        }
        Ok(())
    }

    /// Checks whether all ranks whose data this rank needs expose it, and then reads it.
    fn decide_single_copy(&mut self, memory: &HostMemory) {
        let number = self.call_number.number;
        let sources = self.schedule.sources().map_or(0..0, |peers| peers.range(memory.ranks.len()));
        let exposes = |rank| memory.published_location(rank, number).address().is_some();
        if sources.filter(|&rank| rank != memory.me).all(exposes) {
            self.schedule.make_direct();
        }
    }

    /// Copies the data that rank `from` exposes, from offset `at` on, to `range` of the buffer. Returns false if the rank has
    /// ended or the group has failed. Then this call fails as soon as this rank is told why.
    fn read_exposed(
        &mut self,
        memory: &HostMemory,
        from: usize,
        at: usize,
        mut range: Range<usize>,
    ) -> Result<bool, ExecutionError> {
        let (peer, bytes) = (memory.ranks[from], range.len() as u64);
        let location = memory.published_location(from, self.call_number.number);
        let Some(start) = location.address() else { unreachable!("the rank was found to expose its data") };
        let end = start.wrapping_add(at as u64).wrapping_add(bytes);
        while !range.is_empty() {
            let (mut into, _) = self.buffer.operands(range.clone());
            let len = into.len();
            if len == 0 {
                break;
            }
            let address = end.wrapping_sub(range.len() as u64);
            let read = memory.peer_reader.read(from, address, &mut into);
            if !read.map_err(|source| ExecutionError::Unreadable { peer, source })? {
                self.waits = AwaitedRanks::from_slice(&[peer]);
                return Ok(false);
            }
            range.start += len;
        }
        self.fetched += bytes;
        fault_point("received", self.seq, self.fetched as usize);
        Ok(true)
    }

    /// Returns whether the counters of `peers` have reached `count`. If not, `waits` becomes the first rank
    /// whose counter has not.
    fn check_counter(&mut self, memory: &mut HostMemory, peers: Peers, counter: Counter, count: u64) -> bool {
        let behind = memory.first_behind(peers, counter, count);
        self.waits.clear();
        self.waits.extend(behind.map(|local_rank| memory.ranks[local_rank]));
        behind.is_none()
    }

    /// Compares this rank's call with those of `peers` that have announced theirs. Returns whether all have;
    /// if not, `waits` becomes the missing ranks.
    fn match_calls(&mut self, memory: &mut HostMemory, peers: Peers) -> Result<bool, ExecutionError> {
        self.waits.clear();
        let (me, all) = (memory.me, peers.range(memory.ranks.len()));
        let CallNumber { number, ref header, .. } = self.call_number;
        // Ranks whose calls were found equal already are not checked again.
        for local_rank in all.start + self.matched..all.end {
            if local_rank == me || memory.match_call(local_rank, number, header, self.seq)? {
                self.matched += usize::from(self.waits.is_empty());
            } else {
                self.waits.push(memory.ranks[local_rank]);
            }
        }
        Ok(self.waits.is_empty())
    }

    /// The location at which `rank` publishes the byte `at` of an area for `reader`.
    fn location(&self, rank: usize, reader: usize, area: Area, at: usize) -> Location {
        Location { rank, reader, at, area: AreaAddress::of(&self.call_number, &self.schedule, area) }
    }
}
