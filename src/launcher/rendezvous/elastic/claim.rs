//! A coordinator's claim to be the one of its job, where another one may take over: an entry in a [`Directory`].
//! What follows from that is in [`mandate`].

use std::cell::{Cell, RefCell};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::backoff::Backoff;
use super::directory::{Directory, Entry, Lease, Seen, Trouble};
use crate::membership::{Record, mandate};
use crate::say::say;

/// Between two attempts to reach the place, at first and at most.
const RETRY: Duration = Duration::from_millis(100);
const SLOWEST_RETRY: Duration = Duration::from_secs(1);
/// See the module's head.
#[derive(Debug)]
pub(super) struct Claim {
    directory: Directory,
    seen: RefCell<Seen>,
    /// What was last to be written down.
    record: RefCell<Option<Record>>,
    lease: Cell<Lease>,
    /// When the place was last asked that has said that the lease lives.
    confirmed: Cell<Instant>,
    is_lost: Cell<bool>,
    loses: Notify,
    /// People have been told that the place cannot be reached.
    told: Cell<bool>,
}

impl Claim {
    /// Claims the place that says what was `seen`; `Err` is what it says if somebody else was faster.
    ///
    /// # Errors
    /// The place cannot be reached.
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

    /// Writes a record down, however long that takes; false if another coordinator has taken over.
    pub(super) async fn write(&self, record: &Record) -> bool {
        let mut retry = Backoff::new(RETRY, SLOWEST_RETRY);
        self.record.replace(Some(record.clone()));
        while !self.is_lost.get() {
            let seen = self.seen.borrow().clone();
            let Some(entry) = seen.entry.as_ref().map(|entry| entry.after(record)) else { return false };
            match self.replace(&seen, &entry).await {
                Ok(true) => return !self.is_lost.get(),
                Ok(false) => continue,
                // Its lease has ended while it was not needed.
                Err(_) if matches!(self.renew().await, Ok(true)) => continue,
                Err(trouble) => self.tell(&trouble),
            }
            sleep(retry.next()).await;
        }
        false
    }

    /// Replaces what was `seen`; false if it is to be tried again with what was written in between.
    async fn replace(&self, seen: &Seen, entry: &Entry) -> Result<bool, Trouble> {
        let record = self.record.borrow().clone();
        let now = self.directory.replace(seen, entry, record.as_ref(), &self.lease.get()).await?;
        // What was written in vain, as it seemed, may be there all the same.
        if now.entry.as_ref() == Some(entry) {
            self.seen.replace(now);
            self.is_well();
            return Ok(true);
        }
        Ok(!self.still_stands(now))
    }

    /// Takes in what the place says now; whether that is no other coordinator's entry.
    fn still_stands(&self, now: Seen) -> bool {
        let mut seen = self.seen.borrow_mut();
        match (now.term(), seen.term()) {
            // Somebody has emptied it.
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

    /// Keeps the claim alive until it is lost, but while it `rests`: then others may take over.
    pub(super) async fn keep(&self, rests: impl Fn() -> bool) {
        tokio::select! {
            () = self.again(async || self.watch().await) => {}
            () = self.again(async || self.keep_lease(&rests).await) => {}
        }
    }

    /// Does it again and again until the claim is lost.
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

    /// Waits until the place says something else, and looks whether the claim still stands.
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
            // If nobody has taken over yet, the claim still stands.
            let seen = self.seen.borrow().clone();
            if let Some(entry) = &seen.entry {
                self.replace(&seen, entry).await?;
            }
        }
        self.confirmed.set(asked);
        self.is_well();
        Ok(())
    }

    /// Keeps the lease alive, or gets another one if it has ended; whether it had.
    async fn renew(&self) -> Result<bool, Trouble> {
        if self.directory.keep(&self.lease.get()).await? {
            return Ok(false);
        }
        self.lease.set(self.directory.lease().await?);
        Ok(true)
    }

    /// Whether it is certain that nobody else can have taken over for want of a lease.
    pub(super) fn is_certain(&self) -> bool {
        mandate::is_certain(self.confirmed.get().elapsed(), self.ttl())
    }

    /// How long it stands without a word from this process, at best.
    pub(super) fn ttl(&self) -> Duration {
        self.lease.get().ttl
    }

    /// Ends when another coordinator has taken over.
    pub(super) async fn lost(&self) {
        while !self.is_lost.get() {
            self.loses.notified().await;
        }
    }

    /// What the place says.
    pub(super) fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    /// Gives it up, so that nobody waits until its lease ends.
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
