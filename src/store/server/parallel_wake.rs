//! Sending READY, the reply that ends a wait, to thousands of connections at once.
//!
//! Sending one byte costs some microseconds of kernel time, so ten thousand connections would take one
//! thread tens of milliseconds. Short-lived helper threads share the work if there are cores for them.

use std::io::Write;
use std::net::TcpStream;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::state::ClientId;
use crate::wire::encode::byte;

/// Number of connections from which helper threads send faster than one thread.
pub(super) const PARALLEL_THRESHOLD: usize = 1024;
/// Most helper threads in addition to the event loop.
const MAX_HELPERS: usize = 3;
/// Number of connections that a thread claims at a time.
const BATCH: usize = 64;

/// Sends READY to all of `streams`; returns the clients whose socket was full or broken.
pub(super) fn send_ready(streams: &[(ClientId, &TcpStream)]) -> Vec<ClientId> {
    let next = AtomicUsize::new(0);
    let unsent = Mutex::new(Vec::new());
    let work = || {
        loop {
            let start = next.fetch_add(BATCH, Ordering::Relaxed).min(streams.len());
            let end = (start + BATCH).min(streams.len());
            if start == end {
                return;
            }
            for &(client, mut stream) in &streams[start..end] {
                if !matches!(stream.write(&[byte::READY]), Ok(1)) {
                    unsent.lock().unwrap_or_else(PoisonError::into_inner).push(client);
                }
            }
        }
    };
    let helpers = thread::available_parallelism().map_or(0, |cores| NonZero::get(cores) - 1).min(MAX_HELPERS);
    thread::scope(|scope| {
        for _ in 0..helpers {
            // If a thread cannot be started, the other threads do its work.
            let _ = thread::Builder::new().name("convoke-store-w".into()).spawn_scoped(scope, work);
        }
        work();
    });
    unsent.into_inner().unwrap_or_else(PoisonError::into_inner)
}
