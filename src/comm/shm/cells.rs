//! Short messages from one rank to another of a host: queues of cells in shared memory.
//!
//! A cell holds one message. Its first cache line has the stamp that announces the message, the message's
//! header, and up to [`INLINE_BYTES`] of data. So a short message costs the transfer of one cache line. In a
//! ring it costs three, two of them one after the other: the writer's count, then header and data.
//!
//! The caller numbers the messages and stamps each with its number. The receiver asks for the next number, so
//! it never takes an older message in the same cell for the new one. A message whose queue is full goes
//! through the ring; its number tells the receiver where it belongs in the order.
//!
//! A cell can also announce a message whose data is too long for it. The data is in an exchange area or in the ring, and
//! the cell tells where.
//! So the receiver finds the first bytes of the data as soon as it has the cache line of the cell. It needs neither the
//! writer's count nor a header in the ring.

use std::io;
use std::sync::atomic::Ordering;

use super::layout::{CELL_DATA, CellOffsets};
use super::ring::validated;
use super::segment::Segment;
use super::write::poll_stamp;
use crate::transport::links::{CELL_BYTES, CellHeader, CellMessage};

/// The offsets in the first line of a cell: of the header, of the number of cells that the sender has emptied in
/// the opposite queue, and of short data.
const HEADER_OFFSET: usize = 8;
const EMPTIED_OFFSET: usize = HEADER_OFFSET + size_of::<CellHeader>();
const INLINE_OFFSET: usize = EMPTIED_OFFSET + size_of::<u64>();
const LINE_BYTES: usize = 64;
/// Most bytes of data in the first cache line of a cell.
const INLINE_BYTES: usize = LINE_BYTES - INLINE_OFFSET;
/// The offsets of [`Announced`] in the first line of a cell whose data is elsewhere.
const DATA_AT_OFFSET: usize = INLINE_OFFSET;
const FIRST_BYTES_OFFSET: usize = DATA_AT_OFFSET + size_of::<u64>();
const BYTES_OFFSET: usize = FIRST_BYTES_OFFSET + size_of::<u64>();
/// The bits of a stamp that tell that the data is in the ring, or in exchange area 0 or 1.
const IN_RING: u64 = 1 << 63;
const IN_AREA: [u64; 2] = [1 << 62, 1 << 61];
const IS_ELSEWHERE: u64 = IN_RING | IN_AREA[0] | IN_AREA[1];

/// Data that a cell announces: its position in the byte stream, and the number of its first bytes, which are there
/// already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) at: u64,
    pub(super) first_bytes: u64,
    pub(super) place: Place,
}

/// The place of data that a cell announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Ring,
    /// All of the data, `bytes` bytes, in an exchange area.
    Area {
        area: usize,
        bytes: u64,
    },
}

/// One rank's end of the two queues of cells between two ranks.
#[derive(Debug)]
pub(super) struct Cells {
    outgoing: CellOffsets,
    /// The pages of the outgoing cells are allocated, and the peer knows.
    is_allocated: bool,
    incoming: CellOffsets,
    /// The peer has allocated the pages of the incoming cells.
    is_readable: bool,
    /// The number of cells that this end has filled, and the peer's count of emptied ones when this end last
    /// read it.
    filled: u64,
    peer_emptied: u64,
    emptied: u64,
    /// The count of emptied cells that this end last told the peer.
    reported: u64,
}

impl Cells {
    /// Makes the end that sends by `outgoing` and receives by `incoming`. The pages of both are allocated if
    /// `are_allocated` is set.
    pub(super) fn new(outgoing: CellOffsets, incoming: CellOffsets, are_allocated: bool) -> Self {
        Self {
            outgoing,
            is_allocated: are_allocated,
            incoming,
            is_readable: are_allocated,
            filled: 0,
            peer_emptied: 0,
            emptied: 0,
            reported: 0,
        }
    }

    /// Puts a message into the next cell. Returns whether it is there: the data may be too long for a cell, or
    /// the queue full. Fails if the pages of the queue cannot be allocated.
    #[inline]
    pub(super) fn send(
        &mut self,
        segment: &Segment,
        stamp: u64,
        header: CellHeader,
        data: &[u8],
    ) -> io::Result<bool> {
        if data.len() > CELL_BYTES || !self.has_room(segment)? {
            return Ok(false);
        }
        let at = self.outgoing.cell(self.filled);
        let view = segment.view(at + data_offset(data.len()), data.len());
        // The receiver polls the first line and takes it away between two writes to it that are far apart. So the lines of
        // short data, which the receiver polls too, are written before the first line. Longer data is written after the
        // header, since the processor then fetches the first line at the same time as those of the data.
        if view.is_polled() {
            view.write(data);
            self.write_header(segment, at, header);
        } else {
            self.write_header(segment, at, header);
            view.write(data);
        }
        segment.word(at).store(stamp, Ordering::Release);
        self.filled += 1;
        Ok(true)
    }

    /// Announces a message whose data is elsewhere. [`Self::has_room`] must have returned true.
    pub(super) fn announce(&mut self, segment: &Segment, stamp: u64, header: CellHeader, data: Announced) {
        let at = self.outgoing.cell(self.filled);
        self.write_header(segment, at, header);
        let place = match data.place {
            Place::Ring => IN_RING,
            Place::Area { area, bytes } => {
                segment.word(at + BYTES_OFFSET).store(bytes, Ordering::Relaxed);
                IN_AREA[area]
            }
        };
        segment.word(at + DATA_AT_OFFSET).store(data.at, Ordering::Relaxed);
        segment.word(at + FIRST_BYTES_OFFSET).store(data.first_bytes, Ordering::Relaxed);
        segment.word(at).store(stamp | place, Ordering::Release);
        self.filled += 1;
    }

    /// Writes all of the first line of the cell at offset `at` but stamp and data.
    #[inline]
    fn write_header(&mut self, segment: &Segment, at: usize, header: CellHeader) {
        for (index, bytes) in header.as_chunks().0.iter().enumerate() {
            let word = segment.word(at + HEADER_OFFSET + index * size_of::<u64>());
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        segment.word(at + EMPTIED_OFFSET).store(self.emptied, Ordering::Relaxed);
        self.reported = self.emptied;
    }

    /// Fetches the cache lines that the next send needs if it sends as many bytes as the last one, `bytes`. The
    /// caller does so after a send, because the receiver reads the message at that time.
    #[inline]
    pub(super) fn prepare_next(&self, segment: &Segment, bytes: usize) {
        if bytes > LINE_BYTES {
            segment.view(self.outgoing.cell(self.filled) + CELL_DATA, bytes).prefetch_for_write();
        }
    }

    /// Returns whether a cell is free. Its pages are allocated then.
    #[inline]
    pub(super) fn has_room(&mut self, segment: &Segment) -> io::Result<bool> {
        let most = self.outgoing.count;
        if self.filled - self.peer_emptied == most {
            let emptied = segment.word(self.outgoing.emptied).load(Ordering::Acquire);
            self.update_peer_emptied(emptied)?;
        }
        let has_room = self.filled - self.peer_emptied < most;
        if has_room && !self.is_allocated {
            self.allocate(segment)?;
        }
        Ok(has_room)
    }

    /// Stores the peer's count of emptied cells. The peer reports it in two places, so an older count may be read
    /// later.
    #[inline]
    fn update_peer_emptied(&mut self, emptied: u64) -> io::Result<()> {
        self.peer_emptied = validated(emptied, 0, self.filled)?.max(self.peer_emptied);
        Ok(())
    }

    #[cold]
    fn allocate(&mut self, segment: &Segment) -> io::Result<()> {
        segment.commit(self.outgoing.range())?;
        segment.word(self.outgoing.allocated).store(1, Ordering::Release);
        self.is_allocated = true;
        Ok(())
    }

    /// Returns the message with this stamp, if it is in the next cell. For a caller that waits for it and expects
    /// `awaited` bytes of data, looks several times and fetches the lines of the data.
    #[inline]
    pub(super) fn next(
        &mut self,
        segment: &Segment,
        stamp: u64,
        awaited: Option<usize>,
    ) -> Option<CellMessage> {
        if !self.is_readable {
            self.is_readable = segment.word(self.incoming.allocated).load(Ordering::Acquire) != 0;
        }
        let at = self.incoming.cell(self.emptied);
        if !self.is_readable {
            return None;
        }
        let word = segment.word(at);
        let is_there = match awaited {
            None => word.load(Ordering::Acquire) & !IS_ELSEWHERE == stamp,
            Some(bytes) => {
                let data = (bytes > INLINE_BYTES && bytes <= CELL_BYTES)
                    .then(|| segment.view(at + data_offset(bytes), bytes));
                poll_stamp(word, data, |found| found & !IS_ELSEWHERE == stamp)
            }
        };
        if !is_there {
            return None;
        }
        let mut header = [0; size_of::<CellHeader>()];
        for (index, bytes) in header.as_chunks_mut().0.iter_mut().enumerate() {
            let word = segment.word(at + HEADER_OFFSET + index * size_of::<u64>());
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        Some(CellMessage { header, data_at: self.announced(segment).map(|data| data.at) })
    }

    /// Returns where the data of the message is that [`Self::next`] has returned, if it is not in the cell.
    #[inline]
    pub(super) fn announced(&self, segment: &Segment) -> Option<Announced> {
        let at = self.incoming.cell(self.emptied);
        let word = |offset: usize| segment.word(at + offset).load(Ordering::Relaxed);
        let bit = word(0) & IS_ELSEWHERE;
        if bit == 0 {
            return None;
        }
        let area = IN_AREA.iter().position(|&in_area| bit == in_area);
        let place = area.map_or(Place::Ring, |area| Place::Area { area, bytes: word(BYTES_OFFSET) });
        Some(Announced { at: word(DATA_AT_OFFSET), first_bytes: word(FIRST_BYTES_OFFSET), place })
    }

    /// Copies the data of the message that [`Self::next`] returned, and empties its cell. The length of `into` is that of
    /// the data in the cell, at most [`CELL_BYTES`].
    #[inline]
    pub(super) fn take(&mut self, segment: &Segment, into: &mut [u8]) -> io::Result<()> {
        let at = self.incoming.cell(self.emptied);
        segment.view(at + data_offset(into.len()), into.len()).read(into);
        self.update_peer_emptied(segment.word(at + EMPTIED_OFFSET).load(Ordering::Relaxed))?;
        self.emptied += 1;
        // If this rank sends no messages, it publishes the count elsewhere, which costs another cache line.
        if self.emptied - self.reported > self.incoming.count / 2 {
            self.reported = self.emptied;
            segment.word(self.incoming.emptied).store(self.emptied, Ordering::Release);
        }
        Ok(())
    }
}

/// The offset of a message's data in its cell. Processors fetch the second line together with the first one,
/// as a pair. Longer data begins behind the pair. So a receiver that polls the stamp does not fetch a line that
/// the sender is about to write.
#[inline(always)]
fn data_offset(bytes: usize) -> usize {
    if bytes <= INLINE_BYTES {
        INLINE_OFFSET
    } else if bytes <= LINE_BYTES {
        LINE_BYTES
    } else {
        CELL_DATA
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::layout::Layout;
    use super::super::segment::create;
    use super::*;

    const HEADER: CellHeader = *b"sixteen bytes ok";

    /// The ends of ranks 0 and 1, and the memory between them.
    fn pair() -> (Arc<Segment>, Cells, Cells) {
        let layout = Layout::dense(2);
        let segment = Arc::new(Segment::map(create(layout.bytes).unwrap(), layout.bytes).unwrap());
        let (a, b) = (layout.cells(0, 1), layout.cells(1, 0));
        (segment, Cells::new(a, b, true), Cells::new(b, a, true))
    }

    fn data(bytes: usize, seed: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at * 7 + seed * 31 + 1) as u8).collect()
    }

    fn receive(segment: &Segment, cells: &mut Cells, stamp: u64, bytes: usize) -> Vec<u8> {
        assert_eq!(
            cells.next(segment, stamp, Some(bytes)),
            Some(CellMessage { header: HEADER, data_at: None })
        );
        let mut into = vec![0; bytes];
        cells.take(segment, &mut into).unwrap();
        into
    }

    #[test]
    fn cells_carry_messages_of_all_lengths_both_ways() {
        let (segment, mut a, mut b) = pair();
        for (index, bytes) in [0, 1, 31, 32, 33, 64, 65, 1000, CELL_BYTES].repeat(5).into_iter().enumerate() {
            let (stamp, sent) = (index as u64 + 1, data(bytes, index));
            for forward in [true, false] {
                let (from, to) = if forward { (&mut a, &mut b) } else { (&mut b, &mut a) };
                assert_eq!(to.next(&segment, stamp, Some(bytes)), None);
                assert!(from.send(&segment, stamp, HEADER, &sent).unwrap());
                from.prepare_next(&segment, bytes);
                assert_eq!(receive(&segment, to, stamp, bytes), sent);
            }
        }
    }

    #[test]
    fn full_queue_and_long_message_are_refused_until_cells_are_empty() {
        let (segment, mut a, mut b) = pair();
        let count = a.outgoing.count;
        assert!(!a.send(&segment, 1, HEADER, &data(CELL_BYTES + 1, 0)).unwrap());
        // Stamps need not be consecutive: other messages went through the ring.
        let stamp = |index: u64| 3 * index + 1;
        for index in 0..count {
            assert!(a.send(&segment, stamp(index), HEADER, &data(9, index as usize)).unwrap());
        }
        assert!(!a.send(&segment, stamp(count), HEADER, &[]).unwrap());
        for index in 0..count {
            assert_eq!(b.next(&segment, stamp(index) + 1, Some(9)), None, "another message is in the cell");
            assert_eq!(receive(&segment, &mut b, stamp(index), 9), data(9, index as usize));
        }
        assert!(a.send(&segment, stamp(count), HEADER, &[]).unwrap(), "the receiver sends nothing");
        assert!(receive(&segment, &mut b, stamp(count), 0).is_empty());
    }

    #[test]
    fn cells_announce_data_in_the_ring_and_in_areas() {
        let (segment, mut a, mut b) = pair();
        for stamp in 1..=100 {
            let places = [Place::Ring, Place::Area { area: 0, bytes: 9 }, Place::Area { area: 1, bytes: 7 }];
            let data = Announced { at: 1000 * stamp, first_bytes: stamp, place: places[stamp as usize % 3] };
            assert!(a.has_room(&segment).unwrap());
            a.announce(&segment, stamp, HEADER, data);
            let message = CellMessage { header: HEADER, data_at: Some(1000 * stamp) };
            assert_eq!(b.next(&segment, stamp, Some(50_000)), Some(message));
            assert_eq!(b.announced(&segment), Some(data));
            b.take(&segment, &mut []).unwrap();
            assert_eq!(b.next(&segment, stamp + 1, None), None);
        }
    }

    #[test]
    fn reply_tells_the_emptied_cells() {
        let (segment, mut a, mut b) = pair();
        for stamp in 1..=100 {
            assert!(a.send(&segment, stamp, HEADER, &[1]).unwrap());
            receive(&segment, &mut b, stamp, 1);
            assert!(b.send(&segment, stamp, HEADER, &[2]).unwrap());
            receive(&segment, &mut a, stamp, 1);
            assert_eq!(a.peer_emptied, stamp);
        }
        assert_eq!(
            segment.word(a.outgoing.emptied).load(Ordering::Relaxed),
            0,
            "no other cache line was written"
        );
    }

    #[test]
    fn impossible_counts_of_emptied_cells_are_errors() {
        let (segment, mut a, mut b) = pair();
        let kind = |result: io::Result<bool>| result.unwrap_err().kind();
        for stamp in 1..=a.outgoing.count {
            assert!(a.send(&segment, stamp, HEADER, &[]).unwrap());
        }
        segment.word(a.outgoing.emptied).store(u64::MAX, Ordering::Relaxed);
        assert_eq!(kind(a.send(&segment, 99, HEADER, &[])), io::ErrorKind::InvalidData);
        assert!(b.send(&segment, 1, HEADER, &[]).unwrap());
        segment.word(b.outgoing.cell(0) + EMPTIED_OFFSET).store(u64::MAX, Ordering::Relaxed);
        assert_eq!(kind(a.take(&segment, &mut []).map(|()| true)), io::ErrorKind::InvalidData);
    }
}
