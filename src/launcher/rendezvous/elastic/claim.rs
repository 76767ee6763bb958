//! Leadership of a coordinator that another one may replace: an entry in a [`Directory`].
//! [`mandate`] defines what a leader may do.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::backoff::Backoff;
use super::directory::{Directory, Entry, Lease, Seen, Trouble};
use crate::membership::{Record, mandate};
use crate::say::say;

/// First delay between two attempts to reach the registry. [`SLOWEST_RETRY`] is the longest.
const RETRY: Duration = Duration::from_millis(100);
const SLOWEST_RETRY: Duration = Duration::from_secs(1);
/// Leadership of one coordinator.
#[derive(Debug)]
pub(super) struct Claim {
    directory: Directory,
    seen: RefCell<Seen>,
    /// Latest record that was to be written.
    record: RefCell<Option<Record>>,
    lease: Cell<Lease>,
    /// Send time of the last request by which the registry confirmed the lease.
    confirmed: Cell<Instant>,
    is_lost: Cell<bool>,
    loses: Notify,
    /// True if the user has been warned that the registry cannot be reached.
    told: Cell<bool>,
}

impl Claim {
    /// Tries to become leader where the registry's entry is `seen`. The inner `Err` is the new entry, if
    /// another node was faster.
    ///
    /// # Errors
    /// The registry cannot be reached.
    pub(super) async fn stake(
        directory: &Directory,
        seen: &Seen,
        entry: &Entry,
        record: Option<&Record>,
    ) -> Result<Result<Self, Seen>, Trouble> {
        let lease = directory.lease().await?;
        let now = directory.replace(seen, entry, record, &lease).await?;
        if now.entry.as_ref() != Some(entry) {
            return Ok(Err(now));
        }
        Ok(Ok(Self {
            directory: directory.clone(),
            seen: RefCell::new(now),
            record: RefCell::new(record.cloned()),
            lease: Cell::new(lease),
            confirmed: Cell::new(lease.granted),
            is_lost: Cell::new(false),
            loses: Notify::new(),
            told: Cell::new(false),
        }))
    }

    /// Writes a record, however long that takes. Returns false if another coordinator has taken over.
    pub(super) async fn write(&self, record: &Record) -> bool {
        let mut retry = Backoff::new(RETRY, SLOWEST_RETRY);
        self.record.replace(Some(record.clone()));
        while !self.is_lost.get() {
            let seen = self.seen.borrow().clone();
            let Some(entry) = seen.entry.as_ref().map(|entry| entry.after(record)) else { return false };
            match self.replace(&seen, &entry).await {
                Ok(true) => return !self.is_lost.get(),
                Ok(false) => continue,
                // The lease expired while it was not needed.
                Err(_) if matches!(self.renew().await, Ok(true)) => continue,
                Err(trouble) => self.tell(&trouble),
            }
            sleep(retry.next()).await;
        }
        false
    }

    /// Replaces the entry `seen`. Returns false if the caller must try again because the entry has changed.
    async fn replace(&self, seen: &Seen, entry: &Entry) -> Result<bool, Trouble> {
        let record = self.record.borrow().clone();
        let now = self.directory.replace(seen, entry, record.as_ref(), &self.lease.get()).await?;
        // A write that seemed to fail may have succeeded.
        if now.entry.as_ref() == Some(entry) {
            self.seen.replace(now);
            self.is_well();
            return Ok(true);
        }
        Ok(!self.still_stands(now))
    }

    /// Processes the entry that the registry now holds. Returns true unless it belongs to another
    /// coordinator.
    fn still_stands(&self, now: Seen) -> bool {
        let mut seen = self.seen.borrow_mut();
        match (now.term(), seen.term()) {
            // The registry has been emptied.
            (0, _) => {
                let mine = seen.entry.take();
                *seen = now;
                seen.entry = mine;
            }
            (theirs, mine) if theirs == mine => *seen = now,
            _ => {
                self.is_lost.set(true);
                self.loses.notify_waiters();
                return false;
            }
        }
        true
    }

    /// Keeps leadership until it is lost. While `rests` returns true, it does not renew the lease: other
    /// nodes may take over.
    pub(super) async fn keep(&self, rests: impl Fn() -> bool) {
        tokio::select! {
            () = self.again(async || self.watch().await) => {}
            () = self.again(async || self.keep_lease(&rests).await) => {}
        }
    }

    /// Repeats `what` until leadership is lost.
    async fn again(&self, what: impl AsyncFn() -> Result<(), Trouble>) {
        let mut retry = Backoff::new(RETRY, SLOWEST_RETRY);
        while !self.is_lost.get() {
            match what().await {
                Ok(()) => retry.reset(),
                Err(trouble) => {
                    self.tell(&trouble);
                    sleep(retry.next()).await;
                }
            }
        }
    }

    /// Waits until the registry's entry changes, and checks whether this coordinator is still the leader.
    async fn watch(&self) -> Result<(), Trouble> {
        let seen = self.seen.borrow().clone();
        self.directory.changed(&seen).await?;
        let now = self.directory.read().await?;
        let is_empty = now.entry.is_none();
        if self.still_stands(now) && is_empty {
            let seen = self.seen.borrow().clone();
            if let Some(entry) = &seen.entry {
                self.replace(&seen, entry).await?;
            }
        }
        Ok(())
    }

    async fn keep_lease(&self, rests: impl Fn() -> bool) -> Result<(), Trouble> {
        let lease = self.lease.get();
        sleep(lease.ttl / mandate::BEATS).await;
        if rests() {
            return Ok(());
        }
        let asked = Instant::now();
        if self.renew().await? {
            // If no other node has taken over yet, this coordinator is still the leader.
            let seen = self.seen.borrow().clone();
            if let Some(entry) = &seen.entry {
                self.replace(&seen, entry).await?;
            }
        }
        self.confirmed.set(asked);
        self.is_well();
        Ok(())
    }

    /// Renews the lease, or gets another one if it has expired. Returns true if it had expired.
    async fn renew(&self) -> Result<bool, Trouble> {
        if self.directory.keep(&self.lease.get()).await? {
            return Ok(false);
        }
        self.lease.set(self.directory.lease().await?);
        Ok(true)
    }

    /// Returns true if no other coordinator can have taken over because our lease expired.
    pub(super) fn is_certain(&self) -> bool {
        mandate::is_certain(self.confirmed.get().elapsed(), self.ttl())
    }

    /// Returns the longest time that leadership lasts without a renewal by this process.
    pub(super) fn ttl(&self) -> Duration {
        self.lease.get().ttl
    }

    /// Completes when another coordinator has taken over.
    pub(super) async fn lost(&self) {
        while !self.is_lost.get() {
            self.loses.notified().await;
        }
    }

    /// Returns the registry's entry as last read.
    pub(super) fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    /// Releases leadership, so that no node waits until the lease expires.
    pub(super) async fn release(&self) {
        self.directory.release(&self.lease.get()).await;
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.get()
    }

    fn tell(&self, trouble: &Trouble) {
        if !self.told.replace(true) {
            say(&format!("warning: {trouble}; workers run on, and changes of membership wait"));
        }
    }

    fn is_well(&self) {
        if self.told.replace(false) {
            say("what rounds are written down in can be reached again");
        }
    }
}
