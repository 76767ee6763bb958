//! The layout of the memory that the ranks of a host share. Pure arithmetic.
//!
//! ```text
//! dense:  page: sleep bits, flags │ of rank 0: control │ ring counters │ slots │ rounds │ rings, cells │
//! of rank 1: ...
//! sparse: page: sleep bits, flags │ control of all ranks │ ring counters │ slots of call 1, of call 2, ... │
//! rounds │ rings, cells
//! ```
//!
//! The first group of a host has the dense layout, whose pages are all allocated when the group forms. Other
//! groups have the sparse layout: only its first pages are allocated then, and the others before their first
//! use. So it puts together what a first short call needs of all ranks.
//!
//! Only the rank that owns a part of the memory writes to it. Exceptions: the sleep bits, the challenge of
//! the bootstrap, the read counter of a ring, which the rank that reads the ring writes, and exchange areas,
//! which two ranks own in turn.

mod messages;

use std::ops::Range;

use super::exchange::rounds_in_area;
pub(crate) use messages::{AreaOffsets, CELL_DATA, CellOffsets, RingChannel, RingOffsets};

/// The alignment of words that one rank writes and other ranks poll. It is two cache lines, since processors
/// fetch lines in pairs.
pub(crate) const LINE: usize = 128;
const PAGE: usize = 4096;
/// The size of a huge page on x86-64, and on aarch64 with base pages of 4 KiB.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The number of a rank's slots for small collective calls. So a rank can be that many calls ahead of
/// another. Together they make 1 MiB: a slot is reused only when other cores no longer have it in their
/// caches, which makes writing faster (see [`ROUNDS_BYTES`]). With slots of 8 KiB, a gather of 16 KiB by two ranks
/// takes 1.82 µs with 8 slots, 1.60 with 32, 1.19 with 128.
pub(crate) const SLOTS: u32 = 64;
/// Maximum number of bytes of data that a rank publishes in a slot. A call in slots has one synchronisation, and the
/// calling thread runs it without a list of steps. On two cores of an EPYC (Zen 5), 4 ranks reduce 16 KiB in 12 µs
/// in rounds and in 3 µs in slots.
pub(crate) const SLOT_BYTES: usize = 16 << 10;
/// Maximum number of bytes of data that a rank publishes in a slot, if pairs of ranks could swap exchange areas instead. On two
/// cores of an EPYC (Zen 4), an `all_gather` of 4 KiB for each rank takes 0.73 µs in slots and 0.45 in areas. With 1 KiB it takes
/// 0.37 and 0.41.
pub(crate) const SWAPPING_SLOT_BYTES: usize = 1 << 10;
/// Maximum number of bytes of data that one of two ranks publishes in a slot, if only one rank publishes. Two cores of an EPYC
/// (Zen 4) broadcast 4 KiB in 0.65 µs through slots, and in 0.50 through exchange areas and rounds. A `gather` of 2 KiB from
/// each rank takes 0.39 and 0.44.
pub(crate) const ONE_WAY_SLOT_BYTES: usize = 2 << 10;
/// The size of a slot's header, which precedes the data. It has the stamp, which tells other ranks that the
/// slot is complete, and the description of the call.
pub(crate) const SLOT_HEADER: usize = 64;
/// Offsets in a slot: of the description of the rank's call, and of a digest of all its earlier calls.
pub(crate) const CALL_OFFSET: usize = 8;
pub(crate) const HISTORY_OFFSET: usize = 24;
/// Maximum number of bytes of data that fit in the header of a slot, in the cache line of the stamp.
pub(crate) const INLINE_BYTES: usize = SLOT_HEADER - INLINE_OFFSET;
pub(crate) const INLINE_OFFSET: usize = 32;
/// Maximum number of bytes of a rank's data that it publishes in one round, if other ranks only fetch or reduce, and the
/// round has no chunks. The calling thread runs such a call without a list of steps. On two cores of an EPYC (Zen 5), an
/// all-gather of 64 KiB by two ranks takes 1.50 µs with a list of steps, and 1.21 µs without.
pub(crate) const WHOLE_BYTES: usize = 64 << 10;
/// The number of rounds whose data is in memory at a time. A round handles one piece of a large collective
/// call.
pub(crate) const ROUNDS_IN_MEMORY: u64 = 6;
/// The bytes of a rank's rounds, and of an exchange area, that a sparse layout allocates first.
pub(crate) const FIRST_BYTES: usize = 16 << 10;
/// Maximum number of bytes that a rank publishes in a round.
pub(crate) const PIECE_BYTES: usize = 128 << 10;
/// Maximum number of bytes that a rank publishes in a round in chunks, or in the exchange areas of several pairs. On two cores
/// of an EPYC (Zen 4) without a common cache, an `all_to_all` of 256 KiB by 4 ranks takes 48 µs in two rounds, and 37 in one.
pub(crate) const ROUND_BYTES: usize = 256 << 10;
/// The bytes of a round that a rank publishes at a time, where one rank copies while another still publishes. The steps of a
/// call of several rounds take more time, so its chunks are longer.
pub(crate) const CHUNK_BYTES: usize = 32 << 10;
/// Returns the bytes of the first and of each later chunk of `bytes` bytes, which another rank reads while this rank writes
/// them. The reader begins the earlier, the shorter a chunk is, and each chunk costs two ways between the cores. On two cores
/// of an EPYC (Zen 3), a message of 4 KiB takes 0.39 µs in two chunks, and 0.43 in one.
#[inline]
pub(crate) fn small_chunks(bytes: usize) -> [usize; 2] {
    [(bytes / 2).clamp(2 << 10, 4 << 10), (bytes / 8).clamp(8 << 10, 16 << 10)]
}
/// The size of the memory for the data of successive rounds, which wraps around. A core takes far longer to
/// write a line that another core has read lately and still has in its cache. On two cores of an EPYC (Zen 4,
/// 1 MiB of cache each) an all-reduce of 64 KiB takes 14.0 µs with 512 KiB here. It takes 7.2 µs with 1 MiB,
/// 5.7 with 2 MiB, and 7.6 with 8 MiB, where large calls take twice as long.
pub(crate) const ROUNDS_BYTES: usize = (ROUNDS_IN_MEMORY as usize + 2) * ROUND_BYTES;
/// The size of an [exchange](super::exchange) area of a host with two ranks. A call in which one rank publishes uses an area
/// if all its rounds fit. On cores of an EPYC (Zen 5) without a common cache, a `gather` of 512 KiB from each rank takes 17.9 µs with
/// areas of 256 KiB, and 16.3 µs with longer ones.
pub(crate) const EXCHANGE_BYTES: usize = 4 * ROUND_BYTES;
/// Maximum number of bytes that one step of a collective reads in the memory of another rank. Other work waits for so long.
pub(crate) const READ_BYTES: usize = 256 << 10;
/// Maximum number of ranks of a host that can share memory: one message on a unix socket carries two file
/// descriptors of each rank, besides those of the memory and the arena.
pub(crate) const MAX_RANKS: usize = 125;
/// The counters that a rank publishes for the other ranks of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counter {
    /// The number of bytes that this rank has published. A round counts as [`ROUND_BYTES`] when all of its data is
    /// published.
    Published,
    /// The number of rounds for which this rank has published the sum of the part that it owns.
    Reduced,
    /// The number of rounds whose data this rank no longer reads, so that their memory can be reused.
    Done,
}

impl Counter {
    pub(crate) const COUNT: usize = 3;

    /// Returns the value of this counter after `rounds` rounds.
    #[inline(always)]
    pub(crate) fn after(self, rounds: u64) -> u64 {
        if self == Self::Published { rounds * ROUND_BYTES as u64 } else { rounds }
    }
}

/// The words by which the bootstrap checks that two processes have mapped the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    /// A random number, written by the rank that created the memory.
    Challenge,
    Response,
}

/// The words of a process by which others [read its memory](super::peer_memory::PeerMemory).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identity {
    /// The number of the process.
    Process,
    /// A random number.
    Nonce,
    /// The address of the nonce in the memory of this process.
    NonceAddress,
    /// 1 if the process can read the memory of all others, 2 if it cannot, and 0 until it has tried.
    CanRead,
}

/// The parts of one kind that the ranks have: the offset of that of the first rank, and the distance from
/// each rank's part to that of the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parts {
    start: usize,
    step: usize,
}

impl Parts {
    #[inline(always)]
    fn of(self, rank: usize) -> usize {
        self.start + rank * self.step
    }
}

/// The layout of the shared memory for a number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    control: Parts,
    slots: Parts,
    /// The distance from a rank's slot of one call to its slot of the next call.
    slot_step: usize,
    rounds: Parts,
    /// The exchange areas that each rank writes to first, one for each other rank.
    exchange: Parts,
    exchange_bytes: usize,
    ring_counters: Parts,
    ring_data: Parts,
    cells: Parts,
    cells_in_queue: usize,
    /// The total size of the shared memory in bytes.
    pub(crate) bytes: usize,
    /// Set if only [`Layout::first_pages`] are allocated when the group forms.
    pub(crate) is_sparse: bool,
}

/// The offset of the core numbers in the first page: a word for each rank.
const CORES: usize = PAGE / 4;
const CONTROL: usize = PAGE;
/// The line of a rank's control part that has its [`Identity`], behind the counters and proofs.
const IDENTITY_LINE: usize = Counter::COUNT + 2;
/// The size of the control part of a rank in the sparse layout.
const SPARSE_CONTROL: usize = 8 * LINE;
const SLOT: usize = (SLOT_HEADER + SLOT_BYTES).next_multiple_of(LINE);
const ALL_SLOTS: usize = (SLOTS as usize * SLOT).next_multiple_of(PAGE);
// A round may begin just before the wrap-around, so its data ends behind it. Two rounds that share bytes are
// nearly `ROUNDS_BYTES` apart, so they are never in memory at the same time.
const ALL_ROUNDS: usize = ROUNDS_BYTES + ROUND_BYTES;

impl Layout {
    /// The offset of the word that is set when the group has failed, behind the sleep bits of the first page.
    pub(crate) const FAILURE_FLAG: usize = 2 * LINE;
    /// The offset of the word that counts the ranks that have closed the memory.
    pub(crate) const CLOSED_COUNT: usize = 3 * LINE;

    /// Returns the layout in which the memory of each rank is contiguous.
    pub(crate) fn dense(ranks: usize) -> Self {
        let (counters, data) = Self::ring_sizes(ranks);
        let (cells_in_queue, cells_bytes) = Self::cell_sizes(ranks);
        let slots = PAGE + CONTROL;
        let rounds = slots + ALL_SLOTS;
        let exchange = rounds + ALL_ROUNDS;
        let ring_counters = exchange + (ranks - 1) * Self::exchange_bytes_of(ranks);
        let ring_data = ring_counters + counters;
        let cells = ring_data + data;
        let step = (cells + cells_bytes - PAGE).next_multiple_of(PAGE);
        let parts = |start| Parts { start, step };
        Self {
            ranks,
            control: parts(PAGE),
            slots: parts(slots),
            slot_step: SLOT,
            rounds: parts(rounds),
            exchange: parts(exchange),
            exchange_bytes: Self::exchange_bytes_of(ranks),
            ring_counters: parts(ring_counters),
            ring_data: parts(ring_data),
            cells: parts(cells),
            cells_in_queue,
            bytes: PAGE + ranks * step,
            is_sparse: false,
        }
    }

    /// Returns the layout in which the parts of one kind of all ranks are together.
    pub(crate) fn sparse(ranks: usize) -> Self {
        let (counters, data) = Self::ring_sizes(ranks);
        let control = Parts { start: PAGE, step: SPARSE_CONTROL };
        let ring_counters = Parts { start: control.of(ranks), step: counters };
        let slots = Parts { start: ring_counters.of(ranks).next_multiple_of(PAGE), step: SLOT };
        let slot_step = ranks * SLOT;
        let rounds = (slots.start + SLOTS as usize * slot_step).next_multiple_of(HUGE_PAGE_BYTES);
        let rounds = Parts { start: rounds, step: ALL_ROUNDS.next_multiple_of(HUGE_PAGE_BYTES) };
        // The rounds of a rank end long before those of the next rank begin.
        let exchange = Parts { start: rounds.start + ALL_ROUNDS, step: rounds.step };
        let exchange_bytes = Self::exchange_bytes_of(ranks);
        assert!(
            ALL_ROUNDS + (ranks - 1) * exchange_bytes <= rounds.step,
            "areas end before the next rank's rounds"
        );
        let ring_data = Parts { start: rounds.of(ranks), step: data.next_multiple_of(PAGE) };
        let (cells_in_queue, cells_bytes) = Self::cell_sizes(ranks);
        let cells = Parts { start: ring_data.of(ranks), step: cells_bytes.next_multiple_of(PAGE) };
        let bytes = cells.of(ranks).next_multiple_of(HUGE_PAGE_BYTES);
        Self {
            ranks,
            control,
            slots,
            slot_step,
            rounds,
            exchange,
            exchange_bytes,
            ring_counters,
            ring_data,
            cells,
            cells_in_queue,
            bytes,
            is_sparse: true,
        }
    }

    /// The byte range of the part of `rank` in the dense layout.
    pub(crate) fn rank_range(self, rank: usize) -> Range<usize> {
        debug_assert!(!self.is_sparse);
        self.control.of(rank)..self.control.of(rank + 1)
    }

    /// The pages of the sparse layout that ranks use without a further check: all but slots, rounds and the
    /// data of rings.
    pub(crate) fn first_pages(self) -> Range<usize> {
        0..self.slots.start
    }

    /// The range of the slots of all ranks for the calls in `rows`, counted from the first call, in the
    /// sparse layout.
    pub(crate) fn slot_rows(self, rows: Range<u32>) -> Range<usize> {
        let row = |row: u32| self.slots.start + row as usize * self.slot_step;
        row(rows.start)..row(rows.end)
    }

    /// Returns the size of the start of a rank's memory for rounds that is to be allocated for rounds that end at `end`,
    /// counted from the first round of all calls.
    pub(crate) fn rounds_until(end: u64) -> usize {
        let fits = usize::try_from(end).ok().filter(|&end| end <= ROUNDS_BYTES);
        fits.map_or(ALL_ROUNDS, |end| end.max(FIRST_BYTES).next_power_of_two())
    }

    /// The range of the memory for rounds of `rank`.
    pub(crate) fn all_rounds(self, rank: usize) -> Range<usize> {
        self.rounds.of(rank)..self.rounds.of(rank) + ALL_ROUNDS
    }

    /// Returns the offset of the word that has the sleep bit of `rank`, and the bit. It is set while the rank
    /// sleeps.
    pub(crate) fn sleep_bit(rank: usize) -> (usize, u64) {
        (rank / 64 * size_of::<u64>(), 1 << (rank % 64))
    }

    /// The offset of the word in which `rank` publishes the core on which it waits, plus 1. The word is 0
    /// until the rank has done so.
    pub(crate) fn core(rank: usize) -> usize {
        CORES + rank * size_of::<u64>()
    }

    /// The offsets of the words with the sleep bits of all ranks.
    pub(crate) fn sleep_masks(self) -> impl Iterator<Item = usize> {
        (0..self.ranks.div_ceil(64)).map(|word| word * size_of::<u64>())
    }

    #[inline(always)]
    pub(crate) fn counter(self, rank: usize, counter: Counter) -> usize {
        self.control.of(rank) + LINE * counter as usize
    }

    #[inline(always)]
    pub(crate) fn proof(self, rank: usize, proof: Proof) -> usize {
        self.control.of(rank) + LINE * (Counter::COUNT + proof as usize)
    }

    pub(crate) fn identity(self, rank: usize, word: Identity) -> usize {
        self.control.of(rank) + LINE * IDENTITY_LINE + size_of::<u64>() * word as usize
    }

    /// The range whose pages `rank` allocates: its own part; the first rank also allocates the common page.
    pub(crate) fn committed_by(self, rank: usize) -> Range<usize> {
        let own = self.rank_range(rank);
        if rank == 0 { 0..own.end } else { own }
    }

    /// The place of the slot of call number `number` among the slots of a rank. The first call has number 1.
    #[inline(always)]
    pub(crate) fn slot_row(number: u32) -> u32 {
        number.wrapping_sub(1) % SLOTS
    }

    /// The offset of the slot of `rank` for call number `number`.
    #[inline(always)]
    pub(crate) fn slot(self, rank: usize, number: u32) -> usize {
        self.slots.of(rank) + Self::slot_row(number) as usize * self.slot_step
    }

    /// The offset of the data of `rank` in a round that begins `position` bytes after the first round of all
    /// calls.
    #[inline(always)]
    pub(crate) fn round(self, rank: usize, position: u64) -> usize {
        self.rounds.of(rank) + (position % ROUNDS_BYTES as u64) as usize
    }

    /// The offset of an exchange area of a pair of ranks. The lower one writes to area 0 first, the higher one to area 1.
    #[inline(always)]
    pub(crate) fn exchange(self, lower: usize, higher: usize, area: usize) -> usize {
        debug_assert!(lower < higher && area < 2);
        let (first, other) = if area == 0 { (lower, higher) } else { (higher, lower) };
        self.exchange.of(first) + Self::peer_index(first, other) * self.exchange_bytes
    }

    /// The place of `peer` among the ranks other than `rank`.
    #[inline(always)]
    fn peer_index(rank: usize, peer: usize) -> usize {
        debug_assert!(rank != peer, "a rank shares no memory with itself");
        peer - usize::from(peer > rank)
    }

    /// The size of each exchange area.
    #[inline(always)]
    pub(crate) fn exchange_bytes(self) -> usize {
        self.exchange_bytes
    }

    /// The size of each exchange area for a number of ranks. Of more than two ranks, each publishes only one block of a round
    /// in an area.
    fn exchange_bytes_of(ranks: usize) -> usize {
        let piece = (ROUND_BYTES / ranks).next_multiple_of(LINE);
        if ranks == 2 { EXCHANGE_BYTES } else { rounds_in_area(u64::MAX) as usize * piece }
    }
}

#[cfg(test)]
mod tests {
    use super::messages::CELL_STEP;
    use super::*;

    /// The ranges of all fields.
    fn ranges(layout: Layout) -> Vec<Range<usize>> {
        let mut ranges: Vec<_> = layout.sleep_masks().map(|word| word..word + 8).collect();
        ranges.push(Layout::FAILURE_FLAG..Layout::FAILURE_FLAG + LINE);
        for rank in 0..layout.ranks {
            if rank == 0 {
                ranges.push(Layout::CLOSED_COUNT..Layout::CLOSED_COUNT + LINE);
            }
            ranges.push(Layout::core(rank)..Layout::core(rank) + 8);
            for counter in [Counter::Published, Counter::Reduced, Counter::Done] {
                let at = layout.counter(rank, counter);
                ranges.push(at..at + LINE);
            }
            for proof in [Proof::Challenge, Proof::Response] {
                let at = layout.proof(rank, proof);
                ranges.push(at..at + LINE);
            }
            let identity = [Identity::Process, Identity::Nonce, Identity::NonceAddress, Identity::CanRead];
            ranges.extend(identity.map(|word| layout.identity(rank, word)).map(|at| at..at + 8));
            ranges.extend((0..SLOTS).map(|number| {
                let at = layout.slot(rank, number);
                at..at + SLOT_HEADER + SLOT_BYTES
            }));
            for higher in rank + 1..layout.ranks {
                let starts = [0, 1].map(|area| layout.exchange(rank, higher, area));
                ranges.extend(starts.map(|at| at..at + layout.exchange_bytes()));
            }
            ranges.push(layout.round(rank, 0)..layout.round(rank, ROUNDS_BYTES as u64 - 1) + ROUND_BYTES);
            for (channel, to) in RingChannel::ALL
                .into_iter()
                .flat_map(|channel| (0..layout.ranks).map(move |to| (channel, to)))
                .filter(|&(_, to)| to != rank)
            {
                let ring = layout.ring(channel, rank, to);
                if channel == RingChannel::Messages {
                    let cells = layout.cells(rank, to);
                    let area = layout.message_area(rank, to);
                    ranges.extend([area.count..area.count + 8, area.data..area.data + area.bytes]);
                    assert!((ring.closed + 8..ring.written + LINE).contains(&cells.allocated));
                    assert!((ring.read + 8..ring.read + LINE).contains(&cells.emptied));
                    assert!(cells.cell(0) == cells.range().start && cells.count.is_power_of_two());
                    assert!(cells.cell(2 * cells.count - 1) + CELL_STEP == cells.range().end);
                    ranges.push(cells.range());
                    assert!(layout.is_sparse || layout.rank_range(rank).end >= cells.range().end);
                }
                ranges.push(ring.written..ring.written + LINE / 2);
                ranges.push(ring.read..ring.read + LINE);
                ranges.push(ring.data..ring.data + ring.bytes);
                assert!(ring.bytes.is_power_of_two());
                let own = |layout: Layout| layout.rank_range(rank);
                assert!(
                    layout.is_sparse
                        || own(layout).contains(&ring.written) && own(layout).end >= ring.data + ring.bytes
                );
            }
        }
        ranges
    }

    #[test]
    fn slots_are_disjoint_and_inside_the_memory() {
        for ranks in [2, 3, 64, 65, MAX_RANKS] {
            for layout in [Layout::dense(ranks), Layout::sparse(ranks)] {
                let mut ranges = ranges(layout);
                ranges.sort_by_key(|range| range.start);
                assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranks} ranks");
                assert!(ranges.last().unwrap().end <= layout.bytes);
            }
            let layout = Layout::dense(ranks);
            assert_eq!(layout.rank_range(0).start % PAGE + layout.bytes % PAGE, 0);
            let committed: Vec<_> = (0..ranks).map(|rank| layout.committed_by(rank)).collect();
            assert!(committed.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranks} ranks");
            assert_eq!((committed[0].start, committed[ranks - 1].end), (0, layout.bytes));
        }
    }

    #[test]
    fn sparse_memory_has_all_words_that_are_used_unchecked_in_its_first_pages() {
        for ranks in [2, 4, 16, MAX_RANKS] {
            let layout = Layout::sparse(ranks);
            let first = layout.first_pages();
            for rank in 0..ranks {
                assert!(first.contains(&(layout.counter(rank, Counter::Done) + LINE - 1)));
                let ring = layout.ring(RingChannel::Collectives, rank, (rank + 1) % ranks);
                assert!(first.contains(&(ring.read + LINE - 1)) && !first.contains(&ring.data));
                assert!(layout.slot_rows(0..1).contains(&layout.slot(rank, 1)));
                assert!(layout.slot_rows(1..3).contains(&layout.slot(rank, SLOTS + 3)));
            }
        }
        // What 4 ranks need for a first short call.
        assert_eq!(Layout::sparse(4).slot_rows(0..1).end.next_multiple_of(PAGE), 84 << 10);
    }

    #[test]
    fn each_rank_has_its_own_sleeper_bit() {
        let bits: std::collections::HashSet<_> = (0..MAX_RANKS).map(Layout::sleep_bit).collect();
        assert_eq!(bits.len(), MAX_RANKS);
        let words: Vec<_> = Layout::dense(MAX_RANKS).sleep_masks().collect();
        assert!(bits.iter().all(|(word, _)| words.contains(word)));
    }
}
