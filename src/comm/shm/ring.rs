//! A byte stream between two ranks of a host: a ring of bytes in shared memory for each direction.
//!
//! Writer and reader each count their bytes without wrapping; the difference is the fill level. The writer
//! publishes its count in steps, so that the reader copies out while the writer still copies in.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::bells::Bells;
use super::layout::RingPlace;
use super::pace::Pace;
use super::segment::Segment;
use crate::links::Link;

/// Most bytes that are copied before the count is published.
const STEP_BYTES: usize = 16 << 10;
/// The reader publishes its count when it has read this fraction of the ring, and when it finds nothing more
/// to read. Publishing costs as much as reading a short message.
const TOLD_PARTS: usize = 4;

/// One end of the two rings between two ranks. Doorbells wake a waiting rank; there is no descriptor to poll.
#[derive(Debug)]
pub(crate) struct Ring {
    segment: Arc<Segment>,
    bells: Arc<Bells>,
    /// The other rank, by its place on the host.
    peer: usize,
    out: RingPlace,
    into: RingPlace,
    /// Bytes written and read here, and the other end's counts when last read.
    written: u64,
    taken: u64,
    read: u64,
    come: u64,
    /// The count of bytes read that the other end knows.
    told: u64,
    pace: Pace,
}

impl Ring {
    /// The end that writes to `out` and reads from `into`.
    pub(crate) fn new(
        segment: Arc<Segment>,
        bells: Arc<Bells>,
        peer: usize,
        out: RingPlace,
        into: RingPlace,
    ) -> Self {
        Self {
            segment,
            bells,
            peer,
            out,
            into,
            written: 0,
            taken: 0,
            read: 0,
            come: 0,
            told: 0,
            pace: Pace::default(),
        }
    }

    /// The number of contiguous bytes that can be written now, and the offset of the first.
    fn room(&mut self) -> io::Result<(usize, usize)> {
        let RingPlace { bytes, data, .. } = self.out;
        if self.written - self.taken == bytes as u64 {
            let taken = self.segment.word(self.out.read).load(Ordering::Acquire);
            self.taken = within(taken, self.taken, self.written)?;
        }
        let at = self.written as usize & (bytes - 1);
        let free = bytes - (self.written - self.taken) as usize;
        Ok((free.min(bytes - at), data + at))
    }

    /// The number of contiguous bytes that can be read now, and the offset of the first.
    fn ready(&mut self) -> io::Result<(usize, usize)> {
        let RingPlace { bytes, data, .. } = self.into;
        if self.come == self.read {
            let come = self.segment.word(self.into.written).load(Ordering::Acquire);
            self.come = within(come, self.read, self.read + bytes as u64)?;
        }
        let at = self.read as usize & (bytes - 1);
        Ok(((self.come - self.read) as usize).min(bytes - at)).map(|ready| (ready, data + at))
    }

    fn tell_written(&self) {
        self.segment.word(self.out.written).store(self.written, Ordering::Release);
        self.bells.ring(self.peer);
    }

    fn tell_read(&mut self) {
        self.told = self.read;
        self.segment.word(self.into.read).store(self.read, Ordering::Release);
        self.bells.ring(self.peer);
    }
}

/// Returns `count`, which another process wrote, if it is valid.
fn within(count: u64, least: u64, most: u64) -> io::Result<u64> {
    if (least..=most).contains(&count) {
        return Ok(count);
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "shared memory holds what no rank has written there"))
}

impl Link for Ring {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let (mut sent, mut told) = (0, 0);
        'parts: for part in parts {
            let mut part: &[u8] = part;
            while !part.is_empty() {
                let (room, at) = self.room()?;
                if room == 0 {
                    break 'parts;
                }
                let (now, rest) = part.split_at(room.min(part.len()).min(STEP_BYTES));
                self.segment.view(at, now.len()).put_at(&self.pace, now);
                self.written += now.len() as u64;
                sent += now.len();
                part = rest;
                if sent - told >= STEP_BYTES {
                    self.tell_written();
                    told = sent;
                }
            }
        }
        if sent > told {
            self.tell_written();
        }
        let empty = parts.iter().all(|part| part.is_empty());
        if sent > 0 || empty { Ok(sent) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut got = 0;
        while got < into.len() {
            let (ready, at) = self.ready()?;
            if ready == 0 {
                break;
            }
            let now = ready.min(into.len() - got).min(STEP_BYTES);
            self.segment.view(at, now).take(&mut into[got..got + now]);
            self.read += now as u64;
            got += now;
            if self.read - self.told >= (self.into.bytes / TOLD_PARTS) as u64 {
                self.tell_read();
            }
        }
        if got > 0 {
            return Ok(got);
        }
        if self.told < self.read {
            self.tell_read();
        }
        if self.segment.word(self.into.closed).load(Ordering::Acquire) == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // The other end may have written before it closed.
        match self.ready()? {
            (0, _) => Ok(0),
            _ => Err(io::ErrorKind::Interrupted.into()),
        }
    }

    fn close_write(&mut self) {
        self.segment.word(self.out.closed).store(1, Ordering::Release);
        self.bells.ring(self.peer);
    }

    /// Always true: bytes in memory stay there as long as the reader has the mapping.
    fn is_flushed(&self) -> bool {
        true
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.close_write();
    }
}
