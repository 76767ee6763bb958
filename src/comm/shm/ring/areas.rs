//! Messages in exchange areas: a rank that has read a message of the peer in an area writes its next message to the peer
//! there (see [`exchange`](crate::shm::exchange)).
//!
//! The sender writes the data from the beginning of an area on, publishes its count of bytes in steps, and passes the
//! area to the peer with the message. So only one rank writes to an area at a time. A rank that owns no area, since the peer sends
//! nothing, writes its messages into the ring.

use std::io;
use std::sync::atomic::Ordering;

use super::validated;
use crate::shm::exchange::OwnAreas;
use crate::shm::layout::AreaOffsets;
use crate::shm::segment::Segment;
use crate::shm::store_policy::StorePolicy;

/// Longer messages go into an area rather than into a cell. On two cores of an EPYC (Zen 5), 4 KiB take 0.30 µs in a cell
/// and 0.26 in an area, and 1 KiB take 0.18 and 0.20.
pub(super) const MIN_AREA_BYTES: usize = 2 << 10;

/// One rank's end of the two exchange areas between two ranks.
#[derive(Debug)]
pub(crate) struct MessageAreas {
    offsets: [AreaOffsets; 2],
    own: OwnAreas,
    /// The number of bytes that both ranks have written to each area, as far as this rank knows.
    counts: [u64; 2],
    /// The size of the start of each area whose pages are allocated, as far as this rank knows.
    allocated: [usize; 2],
    /// The message that this rank reads.
    reading: Option<Reading>,
    /// The bytes of all messages that this rank has written to areas, and read from areas.
    pub(super) written: u64,
    pub(super) read: u64,
    policy: StorePolicy,
}

/// A message in an area, `done` of whose `bytes` bytes were read. At least `known` bytes are there.
#[derive(Debug, Clone, Copy)]
struct Reading {
    area: usize,
    bytes: u64,
    done: u64,
    known: u64,
}

impl MessageAreas {
    /// Makes the end of the rank that first owns the area `mine`, 0 or 1. The pages of both are allocated if
    /// `are_allocated` is set.
    pub(in crate::shm) fn new(offsets: [AreaOffsets; 2], mine: usize, are_allocated: bool) -> Self {
        Self {
            offsets,
            own: OwnAreas::first(mine),
            counts: [0; 2],
            allocated: offsets.map(|area| if are_allocated { area.bytes } else { 0 }),
            reading: None,
            written: 0,
            read: 0,
            policy: StorePolicy::default(),
        }
    }

    /// Returns whether this rank owns an area.
    #[inline]
    pub(super) fn owns_any(&self) -> bool {
        self.own.next().is_some()
    }

    /// Returns the area for the next message, of `bytes` bytes, if this rank owns one. The pages for the message are
    /// allocated.
    pub(super) fn next(&mut self, segment: &Segment, bytes: usize) -> io::Result<Option<usize>> {
        let fits = |&area: &usize| bytes <= self.offsets[area].bytes;
        let Some(area) = self.own.next().filter(fits) else { return Ok(None) };
        let AreaOffsets { data, bytes: most, .. } = self.offsets[area];
        if bytes > self.allocated[area] {
            let end = bytes.next_power_of_two().min(most);
            segment.commit(data + self.allocated[area]..data + end)?;
            self.allocated[area] = end;
        }
        Ok(Some(area))
    }

    /// Copies bytes of a message, from offset `at` of it on, into an area that this rank owns.
    #[inline]
    pub(super) fn write(&self, segment: &Segment, area: usize, at: usize, bytes: &[u8]) {
        segment.view(self.offsets[area].data + at, bytes.len()).write_with(&self.policy, bytes);
    }

    /// Publishes that the first `bytes` bytes of a message are in the area. The caller must then wake the peer.
    #[inline]
    pub(super) fn publish(&self, segment: &Segment, area: usize, bytes: usize) {
        let count = self.counts[area] + bytes as u64;
        segment.word(self.offsets[area].count).store(count, Ordering::Release);
    }

    /// Passes the area to the peer, with all `bytes` bytes of a message.
    pub(super) fn sent(&mut self, area: usize, bytes: usize) {
        self.own.send(area);
        self.counts[area] += bytes as u64;
        self.written += bytes as u64;
    }

    /// Begins to read a message that the peer has announced, whose first `known` bytes are there.
    pub(super) fn begin(&mut self, area: usize, bytes: u64, known: u64) -> io::Result<()> {
        if self.own.owns(area) || self.reading.is_some() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "shared memory is corrupt: no rank owns an area",
            ));
        }
        validated(bytes, 1, self.offsets[area].bytes as u64)?;
        let known = validated(known, 0, bytes)?;
        self.reading = Some(Reading { area, bytes, done: 0, known });
        Ok(())
    }

    /// Returns whether a message is being read.
    #[inline]
    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Returns whether more of the message that is being read has arrived.
    pub(super) fn has_more(&self, segment: &Segment) -> bool {
        self.reading.is_some_and(|Reading { area, done, .. }| {
            let count = segment.word(self.offsets[area].count).load(Ordering::Acquire);
            count > self.counts[area] + done
        })
    }

    /// Copies what has arrived of the message that is being read into `into`. Returns the number of bytes.
    pub(super) fn read(&mut self, segment: &Segment, into: &mut [u8]) -> io::Result<usize> {
        let mut got = 0;
        while let Some(Reading { area, bytes, done, mut known }) = self.reading
            && got < into.len()
        {
            let (AreaOffsets { count, data, .. }, before) = (self.offsets[area], self.counts[area]);
            if known == done {
                let count = segment.word(count).load(Ordering::Acquire);
                known = known.max(validated(count, 0, before + bytes)?.saturating_sub(before));
            }
            let now = ((known - done) as usize).min(into.len() - got);
            if now == 0 {
                break;
            }
            segment.view(data + done as usize, now).read_part(&mut into[got..got + now], false);
            got += now;
            let done = done + now as u64;
            self.reading = Some(Reading { area, bytes, done, known });
            if done == bytes {
                self.reading = None;
                self.counts[area] += bytes;
                self.read += bytes;
                self.allocated[area] = self.allocated[area].max(bytes as usize);
                self.own.receive(area);
            }
        }
        Ok(got)
    }
}
