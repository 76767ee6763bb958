//! Telling thousands of connections at once that their wait is over.
//!
//! Sending one byte costs the kernel some microseconds, so ten thousand take a single thread tens of
//! milliseconds. Threads that live for the moment share the work where there are cores for them.

use std::io::Write;
use std::net::TcpStream;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::state::Caller;
use crate::wire::encode::byte;

/// From so many on it is worth starting threads.
pub(super) const MANY: usize = 1024;
/// Most threads beside the event loop's own.
const MAX_HELPERS: usize = 3;
/// How many a thread takes at a time.
const PORTION: usize = 64;

/// Sends their byte to all of `streams`; returns those who could not be told: their socket is full or
/// broken.
pub(super) fn tell(streams: &[(Caller, &TcpStream)]) -> Vec<Caller> {
    let next = AtomicUsize::new(0);
    let not_told = Mutex::new(Vec::new());
    let work = || {
        loop {
            let start = next.fetch_add(PORTION, Ordering::Relaxed).min(streams.len());
            let end = (start + PORTION).min(streams.len());
            if start == end {
                return;
            }
            for &(caller, mut stream) in &streams[start..end] {
                if !matches!(stream.write(&[byte::READY]), Ok(1)) {
                    not_told.lock().unwrap_or_else(PoisonError::into_inner).push(caller);
                }
            }
        }
    };
    let helpers = thread::available_parallelism().map_or(0, |cores| NonZero::get(cores) - 1).min(MAX_HELPERS);
    thread::scope(|scope| {
        for _ in 0..helpers {
            // Without it the others have more to do.
            let _ = thread::Builder::new().name("convoke-store-w".into()).spawn_scoped(scope, work);
        }
        work();
    });
    not_told.into_inner().unwrap_or_else(PoisonError::into_inner)
}
