//! Other jobs that meet at the endpoint that this launcher serves: they would lose their rendezvous with it.

use std::sync::{Arc, Mutex, PoisonError};

use super::thread::Thread;
use crate::membership::Departure;

/// See the module's head. Of a launcher that serves no endpoint there are none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guests {
    endpoint: String,
    thread: Arc<Mutex<Option<Arc<Thread>>>>,
}

impl Guests {
    pub(super) fn at(endpoint: String) -> Self {
        Self { endpoint, thread: Arc::default() }
    }

    /// They meet through this thread.
    pub(super) fn meet_through(&self, thread: Arc<Thread>) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }

    fn thread(&self) -> Option<Arc<Thread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many jobs there are, once this launcher's own has ended; and where they meet.
    pub(crate) fn count(&self) -> (usize, &str) {
        let count = self.thread().map_or(0, |thread| thread.board.lock().guests);
        (count, &self.endpoint)
    }

    /// Blocks until there are none.
    pub(crate) fn wait(&self) {
        if let Some(thread) = self.thread() {
            thread.board.wait_until_closed();
        }
    }

    /// A signal stops this launcher: all who meet here are told. Blocks until they have heard it, for about a second at most.
    pub(crate) fn desert(&self, signal: i32) {
        if let Some(thread) = self.thread() {
            thread.leave(Departure::Stopped { signal });
            thread.board.wait_until_closed();
        }
    }
}
