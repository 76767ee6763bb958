//! A ring as a link between two ranks.

use std::io::{self, IoSlice};
use std::sync::atomic::Ordering;

use super::areas::MIN_AREA_BYTES;
use super::{
    FIRST_CHUNK_BYTES, MAX_CHUNK_BYTES, MAX_READ_BYTES, MIN_CHUNK_BYTES, MOST_CACHED_BYTES,
    PREFETCH_WITH_HEADER, READ_REPORTS, Ring, validated,
};
use crate::collectives::call::CallKind;
use crate::collectives::kernels::store_fence;
use crate::shm::cells::{Announced, Place};
use crate::transport::frame::HEADER_BYTES;
use crate::transport::links::{CELL_BYTES, CellHeader, CellMessage, Link};

impl Link for Ring {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let (mut sent, mut reported) = (0, 0);
        let total: usize = parts.iter().map(|part| part.len()).sum();
        self.writing.begin_part(total);
        let longest = (total / 8).clamp(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES);
        let mut chunk = FIRST_CHUNK_BYTES;
        'parts: for part in parts {
            let mut part: &[u8] = part;
            while !part.is_empty() {
                let now = self.write(part, chunk)?;
                if now == 0 {
                    break 'parts;
                }
                sent += now;
                part = &part[now..];
                if sent - reported >= chunk {
                    self.publish_part();
                    reported = sent;
                    chunk = (2 * chunk).min(longest);
                }
            }
        }
        if sent > 0 {
            self.publish(self.outgoing.written, self.written);
        }
        self.writing.end_part(sent);
        self.prefetch_next(sent);
        let empty = parts.iter().all(|part| part.is_empty());
        if sent > 0 || empty { Ok(sent) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some((_, areas)) = &mut self.messages
            && areas.is_reading()
        {
            let got = areas.read(&self.segment, into)?;
            return if got > 0 { Ok(got) } else { self.nothing_received() };
        }
        let (mut got, total) = (0, into.len());
        self.reading.begin_part(total);
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
            let uncached = self.reading.is_long();
            if uncached || total > MIN_CHUNK_BYTES {
                view.read_part(target, uncached)
            } else {
                view.read(target)
            }
            self.read += now as u64;
            got += now;
            if self.read - self.reported_read
                >= (self.incoming.bytes.min(MOST_CACHED_BYTES) / READ_REPORTS) as u64
            {
                self.publish_read();
            }
        }
        if got > 0 && self.reading.is_long() {
            store_fence();
        }
        self.reading.end_part(got);
        if got > 0 { Ok(got) } else { self.nothing_received() }
    }

    fn reads_by_system_calls(&self) -> bool {
        false
    }

    fn exposes(&self, bytes: usize) -> bool {
        self.peer_reader.exposes(CallKind::PointToPoint, bytes)
    }

    fn is_readable(&self, bytes: &[u8]) -> bool {
        self.peer_reader.is_readable(bytes.as_ptr() as usize, bytes.len())
    }

    fn read_exposed(&self, address: u64, into: &mut [u8]) -> io::Result<bool> {
        self.peer_reader.read(self.peer, address, into)
    }

    fn close_write(&mut self) {
        self.publish(self.outgoing.closed, 1);
    }

    fn try_send_cell(&mut self, stamp: u64, header: CellHeader, data: &[u8]) -> io::Result<bool> {
        let Some((cells, areas)) = &mut self.messages else { return Ok(false) };
        if data.len() > CELL_BYTES || data.len() > MIN_AREA_BYTES && areas.owns_any() {
            return self.send_announced(stamp, header, data);
        }
        let sent = cells.send(&self.segment, stamp, header, data)?;
        if sent {
            // First, because the wake-up waits until the message is visible to the peer.
            cells.prepare_next(&self.segment, data.len());
            self.doorbells.wake(self.peer);
        }
        Ok(sent)
    }

    fn cell(&mut self, stamp: u64, awaited: Option<usize>) -> Option<CellMessage> {
        self.messages.as_mut()?.0.next(&self.segment, stamp, awaited)
    }

    fn take_cell(&mut self, into: &mut [u8]) -> io::Result<()> {
        let Some((cells, areas)) = &mut self.messages else { return Ok(()) };
        match cells.announced(&self.segment) {
            None => {}
            Some(Announced { at, first_bytes, place: Place::Ring }) => {
                let most = self.read + self.incoming.bytes as u64;
                // These bytes may have been read already, behind an earlier message.
                let end = validated(at.saturating_add(first_bytes).saturating_sub(areas.read), 0, most)?;
                self.peer_written = self.peer_written.max(end);
            }
            Some(Announced { first_bytes, place: Place::Area { area, bytes }, .. }) => {
                areas.begin(area, bytes, first_bytes)?;
            }
        }
        cells.take(&self.segment, into)
    }

    fn received(&self) -> u64 {
        self.read + self.messages.as_ref().map_or(0, |(_, areas)| areas.read)
    }

    fn reads_elsewhere(&self) -> bool {
        self.messages.as_ref().is_some_and(|(_, areas)| areas.is_reading())
    }

    /// Always true: bytes in shared memory stay readable as long as the reader has mapped the memory.
    fn is_flushed(&self) -> bool {
        true
    }
}

impl Ring {
    /// Returns why nothing was received: the peer has written nothing, or has closed its end.
    fn nothing_received(&mut self) -> io::Result<usize> {
        if self.segment.word(self.incoming.closed).load(Ordering::Acquire) == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // The peer may have written more bytes between the first check and its end-of-stream flag.
        let has_more = match &self.messages {
            Some((_, areas)) if areas.is_reading() => areas.has_more(&self.segment),
            _ => self.readable()?.0 > 0,
        };
        if has_more { Err(io::ErrorKind::Interrupted.into()) } else { Ok(0) }
    }
}
