//! Links inside one process, with faults that a test injects.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex};

use super::Link;
use convoke_testkit::Random;

/// The behaviour of a pair of links, for both directions.
#[derive(Debug, Clone)]
pub(crate) struct FaultScript {
    /// Most bytes that one call moves.
    pub(crate) step: usize,
    /// Most bytes under way.
    pub(crate) capacity: usize,
    /// One of so many calls is refused although it could move something; 0: none.
    pub(crate) refuse: usize,
    /// One of so many calls is interrupted; 0: none.
    pub(crate) interrupt: usize,
    /// Bytes after which the link ends, as if the peer died.
    pub(crate) end_after: usize,
    pub(crate) seed: u64,
}

impl Default for FaultScript {
    fn default() -> Self {
        Self { step: usize::MAX, capacity: 64 << 10, refuse: 0, interrupt: 0, end_after: usize::MAX, seed: 1 }
    }
}

#[derive(Debug, Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    moved: usize,
    closed: bool,
}

#[derive(Debug)]
pub(crate) struct FakeLink {
    out: Arc<Mutex<Pipe>>,
    into: Arc<Mutex<Pipe>>,
    script: FaultScript,
    calls: u64,
}

/// Returns the two ends of a link.
pub(crate) fn pair(script: FaultScript) -> (FakeLink, FakeLink) {
    let pipes = [Arc::new(Mutex::new(Pipe::default())), Arc::new(Mutex::new(Pipe::default()))];
    let end = |out: usize, into: usize, seed| FakeLink {
        out: Arc::clone(&pipes[out]),
        into: Arc::clone(&pipes[into]),
        script: FaultScript { seed, ..script.clone() },
        calls: 0,
    };
    (end(0, 1, script.seed), end(1, 0, script.seed ^ 0xABCD))
}

impl FakeLink {
    /// Returns the script's decision for this call: `Err` if it is refused, else the most bytes to move.
    fn next(&mut self) -> io::Result<usize> {
        self.calls += 1;
        let mut random = Random::from_seed(self.script.seed.wrapping_mul(31).wrapping_add(self.calls));
        if self.script.refuse > 0 && random.below(self.script.refuse) == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if self.script.interrupt > 0 && random.below(self.script.interrupt) == 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(1 + random.below(self.script.step))
    }
}

impl Link for FakeLink {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let most = self.next()?;
        let mut pipe = self.out.lock().unwrap();
        if pipe.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = self.script.capacity.saturating_sub(pipe.bytes.len());
        let most = most.min(room).min(self.script.end_after - pipe.moved);
        let before = pipe.bytes.len();
        pipe.bytes.extend(parts.iter().flat_map(|part| part.iter()).take(most));
        let sent = pipe.bytes.len() - before;
        pipe.moved += sent;
        pipe.closed |= pipe.moved == self.script.end_after;
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.try_recv_vectored(&mut [IoSliceMut::new(into)])
    }

    fn try_recv_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let most = self.next()?.min(parts.iter().map(|part| part.len()).sum());
        let mut pipe = self.into.lock().unwrap();
        if pipe.bytes.is_empty() {
            return if pipe.closed { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let most = most.min(pipe.bytes.len());
        for (slot, byte) in parts.iter_mut().flat_map(|part| part.iter_mut()).zip(pipe.bytes.drain(..most)) {
            *slot = byte;
        }
        Ok(most)
    }

    fn close_write(&mut self) {
        self.out.lock().unwrap().closed = true;
    }

    fn is_flushed(&self) -> bool {
        self.out.lock().unwrap().bytes.is_empty()
    }
}
