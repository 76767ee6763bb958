//! A byte stream between two ranks of a host: a ring of bytes in shared memory for each direction.
//!
//! Writer and reader each count the bytes that they copied, without wrapping; the difference is the fill
//! level. The writer publishes its count in steps, so that the reader copies out while the writer still
//! copies in.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::cells::Cells;
use super::doorbells::Doorbells;
use super::layout::RingOffsets;
use super::segment::Segment;
use super::store_policy::StorePolicy;
use crate::transport::frame::HEADER_BYTES;
use crate::transport::links::{CellHeader, Link};

/// The writer publishes its count each time that it has copied an eighth of a write, within the last two bounds. The
/// reader begins the earlier, the shorter a chunk is. But it then fetches lines that the writer is about to write. On two
/// cores of an EPYC (Zen 5), 4 MiB take 155 µs in chunks of 16 KiB, and 125 µs in chunks of 64 KiB. So only the first
/// chunk is shorter, and each of the next has twice its bytes.
const FIRST_CHUNK_BYTES: usize = 8 << 10;
const MIN_CHUNK_BYTES: usize = 16 << 10;
const MAX_CHUNK_BYTES: usize = 64 << 10;
/// Most bytes that one read takes, so that other peers get their turn.
const MAX_READ_BYTES: usize = 512 << 10;
/// The reader publishes its count of bytes read this many times per size of the ring. Publishing costs as much as
/// reading a short message.
const READ_REPORTS_PER_RING: usize = 4;

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
    peer_written: u64,
    /// The count of bytes read that this end last published to the peer.
    reported_read: u64,
    policy: StorePolicy,
    /// The queues of short messages, if the rings carry messages.
    cells: Option<Cells>,
}

impl Ring {
    /// Makes the end that writes to `outgoing` and reads from `incoming`. Of the outgoing data, the pages of
    /// the first `allocated` bytes are allocated.
    pub(super) fn new(
        segment: Arc<Segment>,
        doorbells: Arc<Doorbells>,
        peer: usize,
        (outgoing, allocated): (RingOffsets, usize),
        incoming: RingOffsets,
        cells: Option<Cells>,
    ) -> Self {
        Self {
            segment,
            doorbells,
            peer,
            outgoing,
            allocated,
            incoming,
            written: 0,
            peer_read: 0,
            read: 0,
            peer_written: 0,
            reported_read: 0,
            policy: StorePolicy::default(),
            cells,
        }
    }

    /// Returns the number of contiguous bytes that can be written now, and the offset of the first in shared
    /// memory.
    fn writable(&mut self) -> io::Result<(usize, usize)> {
        let RingOffsets { bytes, data, .. } = self.outgoing;
        if self.written - self.peer_read == bytes as u64 {
            let peer_read = self.segment.word(self.outgoing.read).load(Ordering::Acquire);
            self.peer_read = validated(peer_read, self.peer_read, self.written)?;
        }
        let at = self.written as usize & (bytes - 1);
        let free = (bytes - (self.written - self.peer_read) as usize).min(bytes - at);
        if at + free > self.allocated {
            self.allocate(at)?;
        }
        Ok((free.min(self.allocated - at), data + at))
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
            let peer_written = self.segment.word(self.incoming.written).load(Ordering::Acquire);
            self.peer_written = validated(peer_written, self.read, self.read + bytes as u64)?;
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

impl Link for Ring {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let (mut sent, mut reported) = (0, 0);
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let longest = (total / 8).clamp(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES);
        let mut chunk = FIRST_CHUNK_BYTES;
        'parts: for part in parts {
            let mut part: &[u8] = part;
            while !part.is_empty() {
                let (writable, at) = self.writable()?;
                if writable == 0 {
                    break 'parts;
                }
                let (now, rest) = part.split_at(writable.min(part.len()).min(chunk));
                self.segment.view(at, now.len()).write_with(&self.policy, now);
                self.written += now.len() as u64;
                sent += now.len();
                part = rest;
                if sent - reported >= chunk {
                    // The fence of the last count wakes a reader that goes to sleep now.
                    self.segment.word(self.outgoing.written).store(self.written, Ordering::Release);
                    self.doorbells.wake_marked(self.peer);
                    reported = sent;
                    chunk = (2 * chunk).min(longest);
                }
            }
        }
        if sent > 0 {
            self.publish(self.outgoing.written, self.written);
        }
        self.prefetch_next(sent);
        let empty = parts.iter().all(|part| part.is_empty());
        if sent > 0 || empty { Ok(sent) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // `total` is what is missing of the message: its last bytes, below the limit, go to the caches.
        let (mut got, total) = (0, into.len());
        let most = total.min(MAX_READ_BYTES);
        while got < most {
            let (readable, at) = self.readable()?;
            if readable == 0 {
                break;
            }
            let now = readable.min(most - got).min(MAX_CHUNK_BYTES);
            if total <= HEADER_BYTES {
                // This read of a header takes as long as a line takes to come from the peer's core. The elements behind
                // it come at the same time.
                self.segment.view(at, readable.min(PREFETCH_WITH_HEADER)).prefetch_for_read();
            }
            let (view, target) = (self.segment.view(at, now), &mut into[got..got + now]);
            if total > MIN_CHUNK_BYTES {
                view.read_part(target, total)
            } else {
                view.read(target)
            }
            self.read += now as u64;
            got += now;
            if self.read - self.reported_read >= (self.incoming.bytes / READ_REPORTS_PER_RING) as u64 {
                self.publish_read();
            }
        }
        if got > 0 {
            return Ok(got);
        }
        if self.segment.word(self.incoming.closed).load(Ordering::Acquire) == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // The peer may have written more bytes between the first check and its end-of-stream flag.
        match self.readable()? {
            (0, _) => Ok(0),
            _ => Err(io::ErrorKind::Interrupted.into()),
        }
    }

    fn reads_by_system_calls(&self) -> bool {
        false
    }

    fn close_write(&mut self) {
        self.publish(self.outgoing.closed, 1);
    }

    fn try_send_cell(&mut self, stamp: u64, header: CellHeader, data: &[u8]) -> io::Result<bool> {
        let Some(cells) = &mut self.cells else { return Ok(false) };
        let sent = cells.send(&self.segment, stamp, header, data)?;
        if sent {
            // First, because the wake-up waits until the message is visible to the peer.
            cells.prepare_next(&self.segment, data.len());
            self.doorbells.wake(self.peer);
        }
        Ok(sent)
    }

    fn cell(&mut self, stamp: u64, awaited: Option<usize>) -> Option<CellHeader> {
        self.cells.as_mut()?.header(&self.segment, stamp, awaited)
    }

    fn take_cell(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.cells.as_mut().map_or(Ok(()), |cells| cells.take(&self.segment, into))
    }

    /// Always true: bytes in shared memory stay readable as long as the reader has mapped the memory.
    fn is_flushed(&self) -> bool {
        true
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.close_write();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use nix::sys::eventfd::EventFd;

    use super::super::doorbells::HostProcesses;
    use super::super::layout::{Layout, RingChannel};
    use super::super::segment::create;
    use super::*;

    /// Returns both ends of the rings and cells for messages between two ranks.
    pub(crate) fn pair() -> [Ring; 2] {
        let layout = Layout::dense(2);
        let segment = Arc::new(Segment::map(create(layout.bytes).unwrap(), layout.bytes).unwrap());
        let doorbells = (0..2).map(|_| EventFd::new().unwrap().into()).collect();
        let host = HostProcesses { doorbells, of_rank: Arc::new([0, 1]) };
        [(0, 1), (1, 0)].map(|(me, peer)| {
            let (segment, host) = (Arc::clone(&segment), host.clone());
            let doorbells = Arc::new(Doorbells { segment: Arc::clone(&segment), layout, me, host });
            let rings = |from, to| layout.ring(RingChannel::Messages, from, to);
            let cells = Cells::new(layout.cells(me, peer), layout.cells(peer, me), true);
            let out = rings(me, peer);
            Ring::new(segment, doorbells, peer, (out, out.bytes), rings(peer, me), Some(cells))
        })
    }
}
