//! A byte stream between two ranks of a host: a ring of bytes in shared memory for each direction.
//!
//! Writer and reader each count the bytes that they copied, without wrapping; the difference is the fill
//! level. The writer publishes its count in steps, so that the reader copies out while the writer still
//! copies in.

#[cfg(test)]
mod area_tests;
mod areas;
mod link;
mod long_message;
#[cfg(test)]
pub(crate) mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::cells::{Announced, Cells, Place};
use super::doorbells::Doorbells;
use super::layout::{RingOffsets, small_chunks};
use super::segment::Segment;
use super::single_copy::PeerReader;
use super::store_policy::StorePolicy;
use crate::transport::links::{CellHeader, EAGER_BYTES, Link};
pub(crate) use areas::MessageAreas;
use long_message::LongMessage;

/// The writer publishes its count each time that it has copied an eighth of a write, within the last two bounds. The
/// reader begins the earlier, the shorter a chunk is. But it then fetches lines that the writer is about to write. On two
/// cores of an EPYC (Zen 5), 4 MiB take 155 µs in chunks of 16 KiB, and 125 µs in chunks of 64 KiB. So only the first
/// chunk is shorter, and each of the next has twice its bytes.
const FIRST_CHUNK_BYTES: usize = 8 << 10;
const MIN_CHUNK_BYTES: usize = 16 << 10;
const MAX_CHUNK_BYTES: usize = 64 << 10;
/// The writer of a message in the ring that a cell announces publishes its count after each quarter, within these bounds. Each count
/// costs two ways between the cores: without a common cache, 256 KiB in chunks of 16 KiB take a tenth longer.
const MIN_ANNOUNCED_CHUNK_BYTES: usize = 8 << 10;
const MAX_ANNOUNCED_CHUNK_BYTES: usize = 32 << 10;
/// Most bytes that one read takes, so that other peers get their turn.
const MAX_READ_BYTES: usize = 512 << 10;
/// Most unread bytes in a ring, unless they are of a message that the reader stores past the caches. More would displace other
/// data. Between two pairs of ranks on two cores (EPYC, Zen 4), a message of 2 MiB takes 193 µs if 2 MiB may be unread. It
/// takes 104 µs with 1 MiB.
const MOST_CACHED_BYTES: usize = 1 << 20;
/// The reader publishes its count of bytes read this many times for the size of the ring, or for [`MOST_CACHED_BYTES`] in a
/// larger ring. Publishing costs as much as reading a short message.
const READ_REPORTS: usize = 4;

/// The ring has space for this many of the longest messages that cells announce. Such a message is written as a whole,
/// so it needs free space.
const MESSAGES_IN_RING: usize = 4;

/// The least and the largest number of bytes in a write after which the lines for the next write are fetched.
const PREFETCH_FROM: usize = 512;
const PREFETCH_MOST: usize = 20 << 10;

/// Most bytes behind a header that are fetched while the header is read. More lines cannot be on their way at a time.
const PREFETCH_WITH_HEADER: usize = 2 << 10;

/// The size of the part of a ring that is allocated when the first bytes are written, in a group that
/// allocates its memory before its first use.
const FIRST_BYTES: usize = 8 << 10;

/// One rank's end of the two rings between two ranks. A doorbell (eventfd) wakes a waiting rank; the rings
/// have no descriptor of their own to poll.
#[derive(Debug)]
pub(crate) struct Ring {
    segment: Arc<Segment>,
    doorbells: Arc<Doorbells>,
    peer_reader: Arc<PeerReader>,
    /// The local rank of the peer at the other end.
    peer: usize,
    outgoing: RingOffsets,
    /// The size of the start of the outgoing data whose pages are allocated.
    allocated: usize,
    incoming: RingOffsets,
    /// This end's counts of bytes written and read, and the peer's counts when this end last looked them up.
    written: u64,
    peer_read: u64,
    read: u64,
    peer_count: u64,
    /// The number of bytes that the peer has written, as far as this end knows from its count and its cells.
    peer_written: u64,
    /// The count of bytes read that this end last published to the peer.
    reported_read: u64,
    /// The messages that are being written and read.
    writing: LongMessage,
    reading: LongMessage,
    policy: StorePolicy,
    /// The queues of short messages, and the areas of longer ones, if the rings carry messages.
    messages: Option<(Cells, MessageAreas)>,
}

impl Ring {
    /// Makes the end that writes to `outgoing` and reads from `incoming`, on a host of `ranks` ranks. Of the outgoing data, the
    /// pages of the first `allocated` bytes are allocated.
    pub(super) fn new(
        segment: Arc<Segment>,
        (doorbells, peer_reader): (Arc<Doorbells>, Arc<PeerReader>),
        (peer, ranks): (usize, usize),
        (outgoing, allocated): (RingOffsets, usize),
        incoming: RingOffsets,
        messages: Option<(Cells, MessageAreas)>,
    ) -> Self {
        Self {
            segment,
            doorbells,
            peer_reader,
            peer,
            outgoing,
            allocated,
            incoming,
            written: 0,
            peer_read: 0,
            read: 0,
            peer_count: 0,
            peer_written: 0,
            reported_read: 0,
            writing: LongMessage::of_host(ranks),
            reading: LongMessage::of_host(ranks),
            policy: StorePolicy::default(),
            messages,
        }
    }

    /// Returns the number of contiguous bytes that can be written now, and the offset of the first in shared
    /// memory.
    fn writable(&mut self) -> io::Result<(usize, usize)> {
        let RingOffsets { bytes, data, .. } = self.outgoing;
        let most = self.most_unread_bytes();
        if self.written - self.peer_read >= most as u64 {
            self.update_peer_read()?;
        }
        let at = self.written as usize & (bytes - 1);
        let free = most.saturating_sub((self.written - self.peer_read) as usize).min(bytes - at);
        if at + free > self.allocated {
            self.allocate(at)?;
        }
        Ok((free.min(self.allocated - at), data + at))
    }

    /// Returns the number of bytes by which this end may be ahead of the reader.
    fn most_unread_bytes(&self) -> usize {
        let bytes = self.outgoing.bytes;
        if self.writing.is_long() { bytes } else { bytes.min(MOST_CACHED_BYTES) }
    }

    fn update_peer_read(&mut self) -> io::Result<()> {
        let peer_read = self.segment.word(self.outgoing.read).load(Ordering::Acquire);
        self.peer_read = validated(peer_read, self.peer_read, self.written)?;
        Ok(())
    }

    /// Returns whether `len` bytes can be written now.
    fn has_space(&mut self, len: usize) -> io::Result<bool> {
        let must_be_read = (self.written + len as u64).saturating_sub(self.most_unread_bytes() as u64);
        if must_be_read > self.peer_read {
            self.update_peer_read()?;
        }
        Ok(must_be_read <= self.peer_read)
    }

    /// Allocates the pages for the next `len` bytes. A message that is announced cannot fail when a part of it is written.
    fn allocate_for(&mut self, len: usize) -> io::Result<()> {
        let bytes = self.outgoing.bytes;
        let end = (self.written as usize & (bytes - 1)).saturating_add(len).min(bytes);
        while self.allocated < end {
            self.allocate(self.allocated)?;
        }
        Ok(())
    }

    /// Allocates more pages of the outgoing data if those from `at` on are not allocated.
    #[cold]
    fn allocate(&mut self, at: usize) -> io::Result<()> {
        let RingOffsets { bytes, data, .. } = self.outgoing;
        if at == self.allocated {
            let more = (2 * self.allocated).clamp(FIRST_BYTES, bytes);
            self.segment.commit(data + self.allocated..data + more)?;
            self.allocated = more;
        }
        Ok(())
    }

    /// Returns the number of contiguous bytes that can be read now, and the offset of the first in shared
    /// memory.
    fn readable(&mut self) -> io::Result<(usize, usize)> {
        let RingOffsets { bytes, data, .. } = self.incoming;
        if self.peer_written == self.read {
            let count = self.segment.word(self.incoming.written).load(Ordering::Acquire);
            self.peer_count = validated(count, self.peer_count, self.read + bytes as u64)?;
            // A cell may have told of bytes that are not in the count yet.
            self.peer_written = self.peer_written.max(count);
        }
        let at = self.read as usize & (bytes - 1);
        Ok(((self.peer_written - self.read) as usize).min(bytes - at)).map(|readable| (readable, data + at))
    }

    /// Fetches the lines for the next message while the peer reads this one, which has `bytes` bytes. Only
    /// lines that are allocated, and free as far as this end knows, are fetched.
    fn prefetch_next(&self, bytes: usize) {
        if (PREFETCH_FROM..=PREFETCH_MOST).contains(&bytes) {
            let size = self.outgoing.bytes;
            let at = self.written as usize & (size - 1);
            let free = size - (self.written - self.peer_read) as usize;
            let known = bytes.min(free).min(self.allocated.saturating_sub(at));
            self.segment.view(self.outgoing.data + at, known).prefetch_for_write();
        }
    }

    /// Copies the beginning of `bytes`, at most `most`, into the ring. Returns the number of bytes; 0 if the ring is full.
    #[inline]
    fn write(&mut self, bytes: &[u8], most: usize) -> io::Result<usize> {
        let (writable, at) = self.writable()?;
        let now = &bytes[..writable.min(bytes.len()).min(most)];
        self.segment.view(at, now.len()).write_with(&self.policy, now);
        self.written += now.len() as u64;
        Ok(now.len())
    }

    /// Copies `bytes`, for which the ring has space, into the ring.
    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let now = self.write(bytes, bytes.len())?;
            assert!(now > 0, "the ring has space for all bytes");
            bytes = &bytes[now..];
        }
        Ok(())
    }

    /// Publishes the count of bytes written, before more bytes follow. The fence of the last count wakes a reader that
    /// goes to sleep now.
    fn publish_part(&self) {
        self.segment.word(self.outgoing.written).store(self.written, Ordering::Release);
        self.doorbells.wake_marked(self.peer);
    }

    /// Returns the most bytes of a message that a cell announces: the ring has space for several of them.
    fn most_announced_bytes(&self) -> usize {
        EAGER_BYTES.min(self.most_unread_bytes() / MESSAGES_IN_RING)
    }

    /// Writes a message into an area that this rank owns, or else into the ring, and announces it by a cell as soon as its
    /// first bytes are there. The cell comes before the ring's count of these bytes. So a reader that sees the count finds
    /// the cell, and does not take the data for a header. Returns false if the message is too long, if no cell is free, or
    /// if the ring has no space for all of it.
    #[inline(never)]
    fn send_announced(&mut self, stamp: u64, header: CellHeader, data: &[u8]) -> io::Result<bool> {
        let Some((cells, areas)) = &mut self.messages else { return Ok(false) };
        if !cells.has_room(&self.segment)? {
            return Ok(false);
        }
        if let Some(area) = areas.next(&self.segment, data.len())? {
            self.send_in_area(area, (stamp, header), data);
            return Ok(true);
        }
        if data.len() > self.most_announced_bytes() || !self.has_space(data.len())? {
            return Ok(false);
        }
        self.allocate_for(data.len())?;
        let chunk = (data.len() / 4).clamp(MIN_ANNOUNCED_CHUNK_BYTES, MAX_ANNOUNCED_CHUNK_BYTES);
        let (first, rest) = data.split_at(chunk.min(data.len()));
        let (bytes, at) = (data.len(), self.written);
        self.write_all(first)?;
        let Some((cells, areas)) = &mut self.messages else { unreachable!("see above") };
        let (at, first_bytes) = (at + areas.written, first.len() as u64);
        cells.announce(&self.segment, stamp, header, Announced { at, first_bytes, place: Place::Ring });
        for next in rest.chunks(chunk) {
            self.publish_part();
            self.write_all(next)?;
        }
        self.publish(self.outgoing.written, self.written);
        self.prefetch_next(bytes);
        Ok(true)
    }

    /// Sends a message in an area that this rank owns.
    fn send_in_area(&mut self, area: usize, (stamp, header): (u64, CellHeader), data: &[u8]) {
        let Some((cells, areas)) = &mut self.messages else { unreachable!("areas are for messages") };
        let bytes = data.len();
        let [first, chunk] = small_chunks(bytes);
        let (first, rest) = data.split_at(first.min(bytes));
        areas.write(&self.segment, area, 0, first);
        let (at, place) = (self.written + areas.written, Place::Area { area, bytes: bytes as u64 });
        let announced = Announced { at, first_bytes: first.len() as u64, place };
        cells.announce(&self.segment, stamp, header, announced);
        let mut done = first.len();
        for next in rest.chunks(chunk) {
            self.doorbells.wake_marked(self.peer);
            areas.write(&self.segment, area, done, next);
            done += next.len();
            areas.publish(&self.segment, area, done);
        }
        areas.sent(area, bytes);
        self.doorbells.wake(self.peer);
    }

    fn publish(&self, at: usize, value: u64) {
        self.segment.word(at).store(value, Ordering::Release);
        self.doorbells.wake(self.peer);
    }

    fn publish_read(&mut self) {
        self.reported_read = self.read;
        self.publish(self.incoming.read, self.read);
    }
}

/// Returns `count`, which the peer's process wrote, if it is between `least` and `most`.
pub(super) fn validated(count: u64, least: u64, most: u64) -> io::Result<u64> {
    if (least..=most).contains(&count) {
        return Ok(count);
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        "shared memory is corrupt: it holds values that no rank writes",
    ))
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.close_write();
    }
}
