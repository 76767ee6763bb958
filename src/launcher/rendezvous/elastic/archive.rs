//! Where the records of a coordinator are written that another one may replace.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::claim::Claim;
use crate::membership::{AgentId, Record};
use crate::say::say;

/// Where a coordinator's records are written.
pub(super) struct Archive {
    /// The agent of this process.
    pub(super) agent: Cell<AgentId>,
    pub(super) claim: Rc<Claim>,
    /// How long the end of the job may take to be written down.
    close: Duration,
    /// The latest that is not written yet.
    next: RefCell<Option<Record>>,
    ready: Notify,
    is_writing: Cell<bool>,
}

impl Archive {
    pub(super) fn new(agent: AgentId, claim: Rc<Claim>, close: Duration) -> Self {
        let (agent, next, ready, is_writing) =
            (Cell::new(agent), RefCell::default(), Notify::new(), Cell::new(false));
        Self { agent, claim, close, next, ready, is_writing }
    }

    /// To be written down soon, if no later one comes before.
    pub(super) fn put(&self, record: Record) {
        self.next.replace(Some(record));
        self.ready.notify_one();
    }

    /// Writes what was put down; `Some(true)` if that is the latest, `None` if another coordinator has taken over.
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

    /// Whether all is written down.
    pub(super) fn is_complete(&self) -> bool {
        self.next.borrow().is_none() && !self.is_writing.get()
    }

    /// Writes a record down; false if another coordinator has taken over. The end of a job does not wait for ever.
    async fn write(&self, record: &Record) -> bool {
        if record.ending.is_none() {
            return self.claim.write(record).await;
        }
        timeout(self.close, self.claim.write(record)).await.unwrap_or_else(|_| {
            say(&format!(
                "warning: that the job has ended could not be written down within {} s (close_timeout); a node that comes \
                 later may begin it again",
                self.close.as_secs()
            ));
            true
        })
    }
}
