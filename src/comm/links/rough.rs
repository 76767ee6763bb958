//! Fault injection for real connections: reads and writes move only a few bytes, are refused or are
//! interrupted. Readiness is reported in any order, or late.
//!
//! It applies to all connections that a thread makes after [`on`], until [`on`] is called with `None`.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::conn::Conn;
use super::{Closed, Link};
use convoke_testkit::Random;

thread_local! {
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Turns on fault injection with `seed` for later connections of this thread, or turns it off.
pub(crate) fn on(seed: Option<u64>) {
    SEED.set(seed);
}

/// Returns the random numbers that decide the next fault; `None` if no faults are injected.
fn chance() -> Option<Random> {
    SEED.with(next)
}

/// A source of [`chance`] for objects that outlive a call or move to other threads.
#[derive(Debug)]
pub(crate) struct Chance(Cell<Option<u64>>);

impl Chance {
    /// Makes a source from the setting of this thread.
    pub(crate) fn here() -> Self {
        Self(Cell::new(chance().map(|mut random| random.next())))
    }

    pub(crate) fn next(&self) -> Option<Random> {
        next(&self.0)
    }
}

fn next(seed: &Cell<Option<u64>>) -> Option<Random> {
    let current = seed.get()?;
    seed.set(Some(current.wrapping_add(1)));
    Some(Random::from_seed(current))
}

/// Returns `conn`, with fault injection if this thread has turned it on.
pub(crate) fn roughened(mut conn: Conn) -> Conn {
    if let Some(random) = chance() {
        let link = conn.replace(Box::new(Closed));
        conn.replace(Box::new(Rough::new(link, random)));
    }
    conn
}

#[derive(Debug)]
struct Rough {
    link: Box<dyn Link>,
    random: Random,
    /// Most bytes that one call moves.
    step: usize,
    /// One of so many calls is refused or interrupted.
    trouble: usize,
}

impl Rough {
    fn new(link: Box<dyn Link>, mut random: Random) -> Self {
        let (step, trouble) = ([1, 7, 100, 5000][random.below(4)], 2 + random.below(6));
        Self { link, random, step, trouble }
    }

    fn most(&mut self) -> io::Result<usize> {
        match self.random.below(2 * self.trouble) {
            // A refusal needs a descriptor that reports readiness again. Shared memory has none, and never
            // refuses.
            0 if self.link.pollable().is_some() => Err(io::ErrorKind::WouldBlock.into()),
            1 => Err(io::ErrorKind::Interrupted.into()),
            // Without these large steps, a program with many bytes takes half a minute on a busy machine.
            _ if self.random.below(5) == 0 => Ok(1 << 16),
            _ => Ok(1 + self.random.below(self.step)),
        }
    }
}

impl Link for Rough {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let most = self.most()?;
        let first = parts.iter().find(|part| !part.is_empty()).map_or(&[][..], |part| part);
        self.link.try_send(&[IoSlice::new(&first[..first.len().min(most)])])
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = self.most()?.min(into.len());
        self.link.try_recv(&mut into[..most])
    }

    fn close_write(&mut self) {
        self.link.close_write();
    }

    fn give_up_port(&self) {
        self.link.give_up_port();
    }

    fn is_flushed(&self) -> bool {
        self.link.is_flushed()
    }

    fn watch_path(&self, bound: Duration) -> io::Result<()> {
        self.link.watch_path(bound)
    }

    fn unheard(&self) -> Option<Duration> {
        self.link.unheard()
    }

    fn pollable(&self) -> Option<BorrowedFd<'_>> {
        self.link.pollable()
    }
}

/// Returns the ready sources in random order, without some that are reported later.
pub(crate) fn shuffled<T>(mut ready: Vec<T>, random: Option<Random>) -> Vec<T> {
    let Some(mut random) = random else { return ready };
    for index in (1..ready.len()).rev() {
        ready.swap(index, random.below(index + 1));
    }
    ready.retain(|_| random.below(4) > 0);
    ready
}
