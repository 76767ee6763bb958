//! Fault injection for real connections: reads and writes move only a few bytes, are refused or are
//! interrupted. Readiness is reported in any order, or late.
//!
//! It applies to all connections that a thread makes after [`set_seed`], until [`set_seed`] is called
//! with `None`.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::sync::Mutex;

use super::Link;
use super::wrapper::{Wrapped, Wrapper};
use crate::transport::frame::{Frame, Kind};
use convoke_testkit::Random;

thread_local! {
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Turns on fault injection with `seed` for later connections of this thread, or turns it off.
pub(crate) fn set_seed(seed: Option<u64>) {
    SEED.set(seed);
}

/// Returns the random numbers that decide the next fault; `None` if no faults are injected.
fn next_faults() -> Option<Random> {
    SEED.with(|seed| next(seed.get()).map(|(random, later)| (seed.set(Some(later)), random).1))
}

/// A source of [`next_faults`] for objects that outlive a call or move to other threads.
#[derive(Debug)]
pub(crate) struct FaultSource(Mutex<Option<u64>>);

impl FaultSource {
    /// Makes a source from the setting of this thread.
    pub(crate) fn from_thread() -> Self {
        Self(Mutex::new(next_faults().map(|mut random| random.next())))
    }

    pub(crate) fn next(&self) -> Option<Random> {
        let mut seed = self.0.lock().unwrap();
        next(*seed).map(|(random, later)| (*seed = Some(later), random).1)
    }
}

/// Returns the random numbers of `seed`, and the next seed.
fn next(seed: Option<u64>) -> Option<(Random, u64)> {
    let seed = seed?;
    Some((Random::from_seed(seed), seed.wrapping_add(1)))
}

/// Wraps `link` in a [`FaultyLink`] if this thread has turned on fault injection.
pub(super) fn wrap(link: Box<dyn Link>) -> Box<dyn Link> {
    match next_faults() {
        Some(random) => Box::new(Wrapped { link, wrapper: FaultyLink::new(random) }),
        None => link,
    }
}

#[derive(Debug)]
struct FaultyLink {
    random: Random,
    /// Most bytes that one call moves.
    step: usize,
    /// One of so many calls is refused or interrupted.
    fault_interval: usize,
}

impl FaultyLink {
    fn new(mut random: Random) -> Self {
        let (step, fault_interval) = ([1, 7, 100, 5000][random.below(4)], 2 + random.below(6));
        Self { random, step, fault_interval }
    }

    fn max_bytes(&mut self, link: &dyn Link) -> io::Result<usize> {
        match self.random.below(2 * self.fault_interval) {
            // A refusal needs a descriptor that reports readiness again. Shared memory has none, and never
            // refuses.
            0 if link.pollable().is_some() => Err(io::ErrorKind::WouldBlock.into()),
            1 => Err(io::ErrorKind::Interrupted.into()),
            // Without these large steps, a program with many bytes takes half a minute on a busy machine.
            _ if self.random.below(5) == 0 => Ok(1 << 16),
            _ => Ok(1 + self.random.below(self.step)),
        }
    }
}

impl Wrapper for FaultyLink {
    fn try_send(&mut self, link: &mut dyn Link, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if is_handshake(parts) {
            return link.try_send(parts);
        }
        let most = self.max_bytes(link)?;
        let first = parts.iter().find(|part| !part.is_empty()).map_or(&[][..], |part| part);
        link.try_send(&[IoSlice::new(&first[..first.len().min(most)])])
    }

    fn try_recv(&mut self, link: &mut dyn Link, into: &mut [u8]) -> io::Result<usize> {
        let most = self.max_bytes(link)?.min(into.len());
        link.try_recv(&mut into[..most])
    }
}

/// Returns whether a rank sends a frame of the handshake. It relies on the room in the buffer of a new
/// connection, so the frame must be sent whole.
fn is_handshake(parts: &[IoSlice<'_>]) -> bool {
    let header = parts.first().and_then(|part| part[..].try_into().ok());
    header
        .and_then(|header| Frame::decode(header).ok())
        .is_some_and(|frame| matches!(frame.kind, Kind::Hello | Kind::Welcome | Kind::Proof | Kind::Refuse))
}

/// Returns the ready sources in random order, without some that are reported later.
pub(crate) fn shuffle_ready<T>(mut ready: Vec<T>, random: Option<Random>) -> Vec<T> {
    let Some(mut random) = random else { return ready };
    for index in (1..ready.len()).rev() {
        ready.swap(index, random.below(index + 1));
    }
    ready.retain(|_| random.below(4) > 0);
    ready
}
