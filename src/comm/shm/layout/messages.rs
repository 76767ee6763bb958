//! The positions of rings, cells and exchange areas, by which two ranks of a host pass messages. Pure arithmetic.

use std::ops::Range;

use super::{LINE, Layout};
use crate::transport::links::{CELL_BYTES, EAGER_BYTES};

/// The least size of a ring's data in bytes.
const MIN_RING_BYTES: usize = 8 << 10;

/// The offset of the data of a message that does not fit in the first line of a cell.
pub(crate) const CELL_DATA: usize = LINE;
/// The size of a cell.
pub(crate) const CELL_STEP: usize = (CELL_DATA + CELL_BYTES).next_multiple_of(LINE);
/// Most cells of one queue. The number is low, so that the cells stay in the caches of both cores. A C program
/// with this layout passes 4 KiB in 0.72 µs with 8 cells and in 0.85 with 64 (Xeon, Sapphire Rapids).
const MOST_CELLS: usize = 8;
const MIN_CELLS: usize = 2;
/// The approximate size of all exchange areas for messages of one rank.
const MESSAGE_AREAS_BYTES: usize = 1 << 20;
/// The approximate size of all cells of one rank.
const ALL_CELLS_BYTES: usize = 512 << 10;
/// The size of the counters of one ring: a line for each end.
const RING_COUNTERS: usize = 2 * LINE;

/// The position of one ring in shared memory. A ring carries bytes from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingOffsets {
    /// The offsets of the writer's count of bytes written, and of its end-of-stream flag.
    pub(crate) written: usize,
    pub(crate) closed: usize,
    /// The offset of the reader's count of bytes read.
    pub(crate) read: usize,
    pub(crate) data: usize,
    /// The size of the data in bytes, a power of two.
    pub(crate) bytes: usize,
}

/// The position of the cells for the messages from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CellOffsets {
    /// The offset of the flag that the writer sets when the pages of the cells are allocated.
    pub(crate) allocated: usize,
    /// The offset of the reader's count of emptied cells.
    pub(crate) emptied: usize,
    start: usize,
    /// The number of cells, a power of two.
    pub(crate) count: u64,
}

impl CellOffsets {
    /// The offset of the cell for message number `index`, counted from 0 and over all cells.
    #[inline(always)]
    pub(crate) fn cell(self, index: u64) -> usize {
        self.start + (index & (self.count - 1)) as usize * CELL_STEP
    }

    pub(crate) fn range(self) -> Range<usize> {
        self.start..self.start + self.count as usize * CELL_STEP
    }
}

/// The position of an exchange area for messages between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AreaOffsets {
    /// The offset of the count of bytes that were written to the area.
    pub(crate) count: usize,
    pub(crate) data: usize,
    pub(crate) bytes: usize,
}

/// The data that a ring carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingChannel {
    Messages,
    /// Collectives that run as the streams of a plan instead of a shared-memory schedule.
    Collectives,
}

impl RingChannel {
    pub(super) const ALL: [Self; 2] = [Self::Messages, Self::Collectives];

    /// The size of one ring on a host of `ranks` ranks. Rings of messages are large: their bytes are
    /// rewritten only when the reader's core no longer has them in its cache (see [`ROUNDS_BYTES`](super::ROUNDS_BYTES)).
    /// A message of 16 MiB takes 1230 µs with 1 MiB, and 775 with 2 MiB (EPYC, Zen 4): the reader stores it past the caches,
    /// and then loads of lines that have left the writer's L2 cache are faster. Rings of collectives are small, since few
    /// collectives use streams where there is shared memory.
    fn ring_bytes(self, ranks: usize) -> usize {
        // The approximate size of all rings of one rank, and the largest size of one ring.
        let (all, most): (usize, usize) = match self {
            Self::Messages => (8 << 20, 2 << 20),
            Self::Collectives => (512 << 10, 128 << 10),
        };
        (all / ranks.next_power_of_two()).clamp(MIN_RING_BYTES, most)
    }
}

impl Layout {
    /// The size of one exchange area for messages.
    fn message_area_bytes(ranks: usize) -> usize {
        (MESSAGE_AREAS_BYTES / ranks.next_power_of_two()).clamp(MIN_RING_BYTES, EAGER_BYTES)
    }

    /// The size of the data of all rings that one rank writes.
    fn all_rings_bytes(ranks: usize) -> usize {
        RingChannel::ALL.iter().map(|channel| (ranks - 1) * channel.ring_bytes(ranks)).sum()
    }

    /// Returns the sizes of the counters and of the data of all rings that one rank writes, and of its exchange areas for
    /// messages.
    pub(super) fn ring_sizes(ranks: usize) -> (usize, usize) {
        let data = Self::all_rings_bytes(ranks) + (ranks - 1) * Self::message_area_bytes(ranks);
        (RingChannel::ALL.len() * ranks * RING_COUNTERS, data)
    }

    /// Returns the number of cells of one queue, and the bytes of all cells that one rank writes.
    pub(super) fn cell_sizes(ranks: usize) -> (usize, usize) {
        let fit = ALL_CELLS_BYTES / CELL_STEP / ranks.next_power_of_two();
        let cells = (fit.max(1).next_power_of_two()).clamp(MIN_CELLS, MOST_CELLS);
        (cells, (ranks - 1) * cells * CELL_STEP)
    }

    /// The position of the ring from rank `from` to rank `to`.
    pub(crate) fn ring(self, channel: RingChannel, from: usize, to: usize) -> RingOffsets {
        let ranks = self.ranks;
        let before = RingChannel::ALL.iter().take_while(|&&other| other != channel);
        let data_before: usize = before.clone().map(|channel| (ranks - 1) * channel.ring_bytes(ranks)).sum();
        let bytes = channel.ring_bytes(ranks);
        let written = self.ring_counters.of(from) + (before.count() * ranks + to) * RING_COUNTERS;
        RingOffsets {
            written,
            closed: written + size_of::<u64>(),
            read: written + LINE,
            data: self.ring_data.of(from) + data_before + Self::peer_index(from, to) * bytes,
            bytes,
        }
    }

    /// The position of the exchange area for messages between ranks `first` and `other` that `first` writes to first. Its
    /// count is behind those of the ring for messages.
    pub(crate) fn message_area(self, first: usize, other: usize) -> AreaOffsets {
        let (ranks, bytes) = (self.ranks, Self::message_area_bytes(self.ranks));
        let rings = Self::all_rings_bytes(ranks);
        let count = self.ring(RingChannel::Messages, first, other).written + LINE / 2;
        let data = self.ring_data.of(first) + rings + Self::peer_index(first, other) * bytes;
        AreaOffsets { count, data, bytes }
    }

    /// The position of the cells for messages from rank `from` to rank `to`. Their counters are beside those
    /// of the ring for messages.
    pub(crate) fn cells(self, from: usize, to: usize) -> CellOffsets {
        let ring = self.ring(RingChannel::Messages, from, to);
        CellOffsets {
            allocated: ring.closed + size_of::<u64>(),
            emptied: ring.read + size_of::<u64>(),
            start: self.cells.of(from) + Self::peer_index(from, to) * self.cells_in_queue * CELL_STEP,
            count: self.cells_in_queue as u64,
        }
    }
}
