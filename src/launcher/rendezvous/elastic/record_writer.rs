//! Writes records of the coordinator's state to the registry (etcd or a shared file). If the coordinator is
//! lost, a coordinator on another node continues the job from the latest record.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::leadership::Leadership;
use crate::membership::{AgentId, Record};
use crate::messages::print_message;

/// Writes a coordinator's records to the registry one after the other, and skips records that a later one
/// replaces.
pub(super) struct RecordWriter {
    /// Agent of this process.
    pub(super) agent: Cell<AgentId>,
    pub(super) leadership: Rc<Leadership>,
    /// Longest time that writing the outcome of the job may take.
    close_timeout: Duration,
    /// Latest record that is not written yet.
    next: RefCell<Option<Record>>,
    ready: Notify,
    is_writing: Cell<bool>,
}

impl RecordWriter {
    pub(super) fn new(agent: AgentId, leadership: Rc<Leadership>, close_timeout: Duration) -> Self {
        let (agent, next, ready, is_writing) =
            (Cell::new(agent), RefCell::default(), Notify::new(), Cell::new(false));
        Self { agent, leadership, close_timeout, next, ready, is_writing }
    }

    /// Queues a record for writing. It replaces a queued record that has not been written yet.
    pub(super) fn enqueue(&self, record: Record) {
        self.next.replace(Some(record));
        self.ready.notify_one();
    }

    /// Waits for a queued record and writes it. Returns `Some(true)` if it is the latest, `Some(false)` if a
    /// later record is queued, and `None` if another coordinator has taken over.
    pub(super) async fn write_next(&self) -> Option<bool> {
        let record = loop {
            if let Some(record) = self.next.take() {
                break record;
            }
            self.ready.notified().await;
        };
        self.is_writing.set(true);
        let holds = self.write(&record).await;
        self.is_writing.set(false);
        holds.then(|| self.next.borrow().is_none())
    }

    /// Returns true if no record is queued or being written.
    pub(super) fn is_complete(&self) -> bool {
        self.next.borrow().is_none() && !self.is_writing.get()
    }

    /// Writes a record to the registry. Returns false if another coordinator has taken over. A record with
    /// the outcome of the job counts as written after `close_timeout`.
    async fn write(&self, record: &Record) -> bool {
        if record.result.is_none() {
            return self.leadership.write(record).await;
        }
        timeout(self.close_timeout, self.leadership.write(record)).await.unwrap_or_else(|_| {
            print_message(&format!(
                "warning: the end of the job could not be recorded within {} s (close_timeout); a node that \
                 joins later may start the job again",
                self.close_timeout.as_secs()
            ));
            true
        })
    }
}
