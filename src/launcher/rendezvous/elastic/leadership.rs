//! Leadership of a replaceable coordinator: it leads while the entry in the [`Registry`] is its own, and
//! writes its records there, from which a coordinator on another node can continue the job. [`leader_lease`]
//! defines when such a coordinator may answer members.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::registry::{Entry, EntrySnapshot, Registry, RegistryError};
use crate::membership::{AgentId, Record, leader_lease};
use crate::messages::print_message;

/// First delay between two attempts to reach the registry. [`MAX_RETRY_DELAY`] is the longest.
const RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Leadership of one coordinator, with its lease and the registry's entry.
pub(super) struct Leadership {
    registry: Registry,
    /// Agent of this process.
    pub(super) agent: Cell<AgentId>,
    /// Longest time that writing the outcome of the job may take.
    close_timeout: Duration,
    seen: RefCell<EntrySnapshot>,
    /// Latest record that waits to be written. It replaces a record that waits already.
    queued: RefCell<Option<Record>>,
    queue_notify: Notify,
    is_writing: Cell<bool>,
    /// Record that is being written, or was written last.
    record: RefCell<Option<Record>>,
    /// The longest time that leadership lasts without a renewal of the lease by this process.
    pub(super) ttl: Cell<Duration>,
    /// Send time of the last request by which the registry confirmed the lease.
    confirmed: Cell<Instant>,
    /// True if another coordinator has taken over.
    pub(super) is_lost: Cell<bool>,
    loss_notify: Notify,
    /// True if the user has been warned that the registry cannot be reached.
    is_warned: Cell<bool>,
}

impl Leadership {
    /// Tries to make this node the leader by replacing the registry's entry `seen` by `entry`. The inner
    /// `Err` is the entry that another node wrote first.
    pub(super) async fn acquire(
        registry: &Registry,
        seen: &EntrySnapshot,
        entry: &Entry,
        record: Option<&Record>,
        close_timeout: Duration,
    ) -> Result<Result<Self, EntrySnapshot>, RegistryError> {
        let requested_at = Instant::now();
        let ttl = registry.lease().await?;
        let now = registry.replace(seen, entry, record).await?;
        if now.entry.as_ref() != Some(entry) {
            return Ok(Err(now));
        }
        Ok(Ok(Self {
            registry: registry.clone(),
            agent: Cell::new(entry.agent),
            close_timeout,
            seen: RefCell::new(now),
            queued: RefCell::default(),
            queue_notify: Notify::new(),
            is_writing: Cell::default(),
            record: RefCell::new(record.cloned()),
            ttl: Cell::new(ttl),
            confirmed: Cell::new(requested_at),
            is_lost: Cell::new(false),
            loss_notify: Notify::new(),
            is_warned: Cell::new(false),
        }))
    }

    /// Queues a record for writing. It replaces a queued record that has not been written yet.
    pub(super) fn enqueue(&self, record: Record) {
        self.queued.replace(Some(record));
        self.queue_notify.notify_one();
    }

    /// Returns true if no record is queued or being written.
    pub(super) fn has_written_all(&self) -> bool {
        self.queued.borrow().is_none() && !self.is_writing.get()
    }

    /// Waits for a queued record and writes it. Returns `Some(true)` if it is the latest, `Some(false)` if a
    /// later record is queued, and `None` if another coordinator has taken over. A record with the outcome of
    /// the job counts as written after `close_timeout`.
    pub(super) async fn write_next(&self) -> Option<bool> {
        let record = loop {
            if let Some(record) = self.queued.take() {
                break record;
            }
            self.queue_notify.notified().await;
        };
        self.is_writing.set(true);
        let limit = if record.result.is_some() { self.close_timeout } else { Duration::MAX };
        let leads = timeout(limit, self.write(&record)).await.unwrap_or_else(|_| {
            print_message(&format!(
                "warning: the end of the job could not be recorded within {} s (close_timeout); a node that \
                 joins later may start the job again",
                limit.as_secs()
            ));
            true
        });
        self.is_writing.set(false);
        leads.then(|| self.queued.borrow().is_none())
    }

    /// Writes a record to the registry, and tries again until that succeeds. Returns false if another
    /// coordinator has taken over.
    async fn write(&self, record: &Record) -> bool {
        let mut delay = RETRY_DELAY;
        self.record.replace(Some(record.clone()));
        while !self.is_lost.get() {
            let seen = self.seen.borrow().clone();
            let Some(entry) = seen.entry.as_ref().map(|entry| entry.after(record)) else { return false };
            match self.replace(&seen, &entry).await {
                Ok(true) => return !self.is_lost.get(),
                Ok(false) => continue,
                // The lease had expired because the coordinator did not need it. With a new lease, the write
                // is tried again.
                Err(_) if matches!(self.renew().await, Ok(true)) => continue,
                Err(error) => self.warn_once(&error),
            }
            sleep(delay).await;
            delay = (delay * 2).min(MAX_RETRY_DELAY);
        }
        false
    }

    /// Replaces the registry's entry `seen` by `entry`. Returns false if the caller must try again because
    /// the entry has changed.
    async fn replace(&self, seen: &EntrySnapshot, entry: &Entry) -> Result<bool, RegistryError> {
        let record = self.record.borrow().clone();
        let now = self.registry.replace(seen, entry, record.as_ref()).await?;
        // The registry may hold this entry from an earlier write that succeeded but whose answer was lost.
        if now.entry.as_ref() == Some(entry) {
            self.seen.replace(now);
            self.note_recovery();
            return Ok(true);
        }
        Ok(!self.observe(now))
    }

    /// Processes the entry that the registry now holds. Returns true unless that entry belongs to another
    /// coordinator.
    fn observe(&self, now: EntrySnapshot) -> bool {
        let mut seen = self.seen.borrow_mut();
        match (now.term(), seen.term()) {
            // The registry has been emptied. This coordinator remembers its entry, to write it again.
            (0, _) => {
                let mine = seen.entry.take();
                *seen = now;
                seen.entry = mine;
            }
            (theirs, mine) if theirs == mine => *seen = now,
            _ => {
                self.is_lost.set(true);
                self.loss_notify.notify_waiters();
                return false;
            }
        }
        true
    }

    /// Watches the registry's entry and renews the lease until leadership is lost. While `is_idle` returns
    /// true, it does not renew the lease, so that other nodes may take over.
    pub(super) async fn keep(&self, is_idle: impl Fn() -> bool) {
        tokio::select! {
            () = self.repeat(async || self.watch().await) => {}
            () = self.repeat(async || self.keep_lease(&is_idle).await) => {}
        }
    }

    /// Repeats `what` until leadership is lost, with a growing delay after each error.
    async fn repeat(&self, what: impl AsyncFn() -> Result<(), RegistryError>) {
        let mut delay = RETRY_DELAY;
        while !self.is_lost.get() {
            match what().await {
                Ok(()) => delay = RETRY_DELAY,
                Err(error) => {
                    self.warn_once(&error);
                    sleep(delay).await;
                    delay = (delay * 2).min(MAX_RETRY_DELAY);
                }
            }
        }
    }

    /// Waits until the registry's entry changes, and checks whether this coordinator is still the leader. If
    /// the registry was emptied, it writes its entry again.
    async fn watch(&self) -> Result<(), RegistryError> {
        let seen = self.seen.borrow().clone();
        self.registry.changed(&seen).await?;
        let now = self.registry.read().await?;
        let is_empty = now.entry.is_none();
        if self.observe(now) && is_empty { self.write_entry_again().await } else { Ok(()) }
    }

    async fn write_entry_again(&self) -> Result<(), RegistryError> {
        let seen = self.seen();
        if let Some(entry) = &seen.entry {
            self.replace(&seen, entry).await?;
        }
        Ok(())
    }

    async fn keep_lease(&self, is_idle: impl Fn() -> bool) -> Result<(), RegistryError> {
        sleep(self.ttl.get() / leader_lease::RENEWALS_PER_TTL).await;
        if is_idle() {
            return Ok(());
        }
        let sent_at = Instant::now();
        if self.renew().await? {
            // The old lease had expired. If no other node has taken over yet, this write makes this
            // coordinator the leader again.
            self.write_entry_again().await?;
        }
        self.confirmed.set(sent_at);
        self.note_recovery();
        Ok(())
    }

    /// Renews the lease, or gets a new lease if the old one has expired. Returns true if the old lease had
    /// expired.
    async fn renew(&self) -> Result<bool, RegistryError> {
        if self.registry.keep().await? {
            return Ok(false);
        }
        self.ttl.set(self.registry.lease().await?);
        Ok(true)
    }

    /// Returns true if the lease cannot have expired, so that no other coordinator can have taken over for
    /// that reason.
    pub(super) fn is_confirmed(&self) -> bool {
        leader_lease::is_confirmed(self.confirmed.get().elapsed(), self.ttl.get())
    }

    /// Completes when another coordinator has taken over.
    pub(super) async fn lost(&self) {
        while !self.is_lost.get() {
            self.loss_notify.notified().await;
        }
    }

    /// Returns the registry's entry as last read.
    pub(super) fn seen(&self) -> EntrySnapshot {
        self.seen.borrow().clone()
    }

    /// Gives up the lease, so that no other node must wait until it expires.
    pub(super) async fn release(&self) {
        self.registry.release().await;
    }

    fn warn_once(&self, error: &RegistryError) {
        if !self.is_warned.replace(true) {
            print_message(&format!("warning: {error}; workers keep running, and membership changes wait"));
        }
    }

    fn note_recovery(&self) {
        if self.is_warned.replace(false) {
            print_message("the registry of the rounds (etcd or the shared file) can be reached again");
        }
    }
}
