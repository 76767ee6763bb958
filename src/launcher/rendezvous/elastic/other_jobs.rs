//! Other jobs that use the rendezvous server of this launcher. If this launcher exits, they lose their
//! coordinators.

use std::sync::{Arc, Mutex, PoisonError};

use super::thread::RendezvousThread;
use crate::membership::Departure;

/// The jobs, except the launcher's own, whose coordinators this launcher serves. Without a rendezvous server
/// there are none.
#[derive(Debug, Clone, Default)]
pub(crate) struct OtherJobs {
    endpoint: String,
    thread: Arc<Mutex<Option<Arc<RendezvousThread>>>>,
}

impl OtherJobs {
    pub(super) fn new(endpoint: String) -> Self {
        Self { endpoint, thread: Arc::default() }
    }

    /// Sets the thread that serves the other jobs.
    pub(super) fn set_thread(&self, thread: Arc<RendezvousThread>) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }

    fn thread(&self) -> Option<Arc<RendezvousThread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the number of other jobs (0 until this launcher's own job has ended), and the endpoint that
    /// they use.
    pub(crate) fn count(&self) -> (usize, &str) {
        let count = self.thread().map_or(0, |thread| thread.view.lock().other_jobs);
        (count, &self.endpoint)
    }

    /// Blocks until no other job uses the rendezvous server.
    pub(crate) fn wait(&self) {
        if let Some(thread) = self.thread() {
            thread.view.wait_until_closed();
        }
    }

    /// Tells all members of the other jobs that a signal stops this launcher. Blocks until they have received
    /// this, for about a second at most.
    pub(crate) fn notify_shutdown(&self, signal: i32) {
        if let Some(thread) = self.thread() {
            thread.leave(Departure::Stopped { signal });
            thread.view.wait_until_closed();
        }
    }
}
